"""`vitlab probe`: how well the features of each layer of a network tell the classes of a data set apart.

The network stays as it is. On the features of training images (see `features.py`), each number standardised, a
classifier is fitted for each layer and each value of its one setting. Validation chooses layer and setting; where
there is a test split, that one classifier is scored on it, and nothing else ever is.

- `linear`: multinomial logistic regression; C, one over the weight of the squared norm, is chosen. A fit that has not
  converged after 1,000 iterations counts as it stands.
- `knn`: a vote of the k nearest training images by the cosine of the angle between their features; k is chosen.

The classes are those of the data set, whatever the network was trained for.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.config import DataConfig
from vitlab.data.datasets import Dataset, Split, load_dataset
from vitlab.data.images import ImageError
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.engine.evaluator import percent
from vitlab.engine.probe_figure import plot_probe
from vitlab.engine.statistics import Interval, wilson_interval
from vitlab.errors import InputError
from vitlab.inference.features import Features, count_layers, read_features
from vitlab.inference.scoring import known_past
from vitlab.models.files import ModelFile
from vitlab.options import ProbeMethod, ProbeOptions
from vitlab.seeds import derive_seed

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table
    from sklearn.pipeline import Pipeline

# Of each method the name of its setting and the values that are tried. Each list starts with the smoothest classifier,
# which wins a tie.
_GRIDS: dict[ProbeMethod, tuple[str, tuple[float, ...]]] = {
    "linear": ("C", (0.001, 0.01, 0.1, 1.0)),
    "knn": ("k", (50, 20, 10, 5, 1)),
}
_MAX_ITERATIONS = 1000
_Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A classifier on the features of one layer, and how many validation images it gets right."""

    layer: int
    value: float
    """Its C or k."""
    num_correct: int


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What `probe_layers` found."""

    checkpoint: str
    data: str
    method: ProbeMethod
    seed: int
    classes: tuple[str, ...]
    widths: dict[int, int]
    """Numbers in the features of each layer."""
    counts: dict[str, int]
    """Images of each split that could be read."""
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    test_correct: int | None
    """Test images that the chosen classifier gets right; None where there is no test split."""
    notes: tuple[str, ...]
    """What the network may have seen of the images."""
    errors: tuple[ImageError, ...]

    def best_of(self, layer: int) -> Candidate:
        """Give the best of a layer."""
        return _best(candidate for candidate in self.candidates if candidate.layer == layer)

    def val_top1(self, candidate: Candidate) -> tuple[float, Interval]:
        """Give the share of validation images that are right, and its interval over the choice of the images."""
        count = self.counts["val"]
        return candidate.num_correct / count, wilson_interval(candidate.num_correct, count)

    def score(self) -> tuple[str, float, Interval]:
        """Give the split that the chosen classifier is scored on, top-1 and its interval; of `val` it is optimistic."""
        if self.test_correct is None:
            return ("val", *self.val_top1(self.chosen))
        count = self.counts["test"]
        return "test", self.test_correct / count, wilson_interval(self.test_correct, count)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain JSON values; fractions, not percent."""
        setting, values = _GRIDS[self.method]
        split, top1, interval = self.score()
        rows = []
        for layer, width in self.widths.items():
            best = self.best_of(layer)
            val_top1, val_interval = self.val_top1(best)
            grid = [
                {setting: candidate.value, "val_top1": self.val_top1(candidate)[0]}
                for candidate in self.candidates
                if candidate.layer == layer
            ]
            rows.append(
                {
                    "layer": layer,
                    "features": width,
                    setting: best.value,
                    "val_top1": val_top1,
                    "val_interval": list(val_interval),
                    "grid": grid,
                }
            )
        return {
            "checkpoint": self.checkpoint,
            "data": self.data,
            "method": self.method,
            "seed": self.seed,
            "classes": list(self.classes),
            "counts": self.counts,
            "layers": rows,
            "chosen": {"layer": self.chosen.layer, setting: self.chosen.value},
            "split": split,
            "top1": top1,
            "interval": list(interval),
            "optimistic": split == "val",
            "notes": list(self.notes),
            "unreadable": [{"path": error.path, "reason": error.reason} for error in self.errors],
        }

    def table(self) -> "Table":
        """Give a row for each layer: its best classifier on validation, and the chosen one's test score."""
        from rich.table import Table

        setting, _ = _GRIDS[self.method]
        split, top1, interval = self.score()
        table = Table("layer", "features", setting, "validation top-1", *(["test top-1"] if split == "test" else []))
        for column in table.columns:
            column.justify = "right"
        for layer, width in self.widths.items():
            best = self.best_of(layer)
            is_chosen = layer == self.chosen.layer
            test = [percent(top1, interval) if is_chosen else ""] if split == "test" else []
            style = "bold" if is_chosen else None
            table.add_row(str(layer), str(width), f"{best.value:g}", percent(*self.val_top1(best)), *test, style=style)
        return table

    def verdict(self) -> str:
        """Say in a line what was chosen, how good it is, and how far to trust the figure."""
        setting, _ = _GRIDS[self.method]
        split, top1, interval = self.score()
        what = f"layer {self.chosen.layer} with {setting} {self.chosen.value:g}, chosen on {self.counts['val']:,} val images"
        if split == "test":
            return f"{what}: top-1 {percent(top1, interval)} of {self.counts['test']:,} test images"
        return f"{what}: top-1 {percent(top1, interval)} of the same images, so optimistic: there is no test split"

    def plot(self, out_png: Path) -> None:
        """Draw validation top-1 over the layers."""
        _, top1, _ = self.score()
        shares = [self.val_top1(self.best_of(layer)) for layer in self.widths]
        plot_probe(
            list(self.widths),
            [share for share, _ in shares],
            [interval for _, interval in shares],
            chosen=self.chosen.layer,
            test_top1=None if self.test_correct is None else top1,
            title=f"{self.method} probe of {self.checkpoint} on {self.data}",
            out_png=out_png,
        )


def probe_layers(
    model: ModelFile, options: ProbeOptions, *, say: _Say, progress: "Progress | None" = None
) -> ProbeReport:
    """Fit classifiers on the layers of a model, choose one on validation, and score it on the test split.

    Args:
        model: the network and its preprocessing.
        options: the images, the method and the layers.
        say: told in a line how the images were read and what the model may have seen of them.
        progress: a bar to add tasks to.

    Raises:
        InputError: there is no such layer or data set, the training images are of one class, or an image cannot be
            read and `options.on_error` is `stop`.
        RunError: a loader process died.
    """
    model.network.float().eval()
    layers = _existing_layers(options, count_layers(model.network))
    dataset = load_dataset(
        options.data,
        val_fraction=model.data.get("val_fraction", DataConfig.val_fraction),  # as the model's own run cut it
        seed=model.data.get("seed", DataConfig.val_seed),
    )
    for line in dataset.notes:
        say(line)
    notes = _notes(model, dataset)
    for note in notes:
        say(f"note: {note}")
    train_split = _sample(dataset.splits["train"], options)
    _require_two_classes(train_split.labels, dataset, options)
    train = _read(model, train_split, layers, options, progress)
    _require_two_classes(train.labels, dataset, options)
    val = _read(model, dataset.splits["val"], layers, options, progress)
    setting, values = _GRIDS[options.method]
    task = None if progress is None else progress.add_task("fitting", total=len(layers) * len(values))
    advance = None if progress is None or task is None else partial(progress.advance, task)
    candidates, chosen, probe = fit_probes(train, val, options.method, on_fit=advance)
    counts, errors, test_correct = {"train": len(train.labels), "val": len(val.labels)}, train.errors + val.errors, None
    if "test" in dataset.splits:
        test = _read(model, dataset.splits["test"], [chosen.layer], options, progress)
        counts["test"], errors = len(test.labels), errors + test.errors
        test_correct = _count_correct(probe, test, chosen.layer)
    return ProbeReport(
        checkpoint=options.checkpoint,
        data=options.data,
        method=options.method,
        seed=options.seed,
        classes=dataset.classes,
        widths={layer: train.layers[layer].shape[1] for layer in layers},
        counts=counts,
        candidates=tuple(candidates),
        chosen=chosen,
        test_correct=test_correct,
        notes=tuple(notes),
        errors=errors,
    )


def fit_probes(
    train: Features, val: Features, method: ProbeMethod, *, on_fit: Callable[[], None] | None = None
) -> tuple[list[Candidate], Candidate, "Pipeline"]:
    """Fit a classifier for each layer and each value of the setting.

    Args:
        train: what they are fitted on.
        val: what chooses.
        method: which classifier.
        on_fit: called after each of them.

    Returns:
        All in order, the one with most validation images right, of equals the lowest layer's and smoothest, and that
        classifier itself, which takes features (N, D).
    """
    candidates: list[Candidate] = []
    probes: dict[Candidate, Pipeline] = {}
    for layer, features in train.layers.items():
        for value in _GRIDS[method][1]:
            if method == "linear" or value <= len(train.labels):
                probe = _fit(method, value, features, train.labels)
                candidates.append(Candidate(layer, value, _count_correct(probe, val, layer)))
                best = _best(candidates)
                probes = {best: probes.get(best, probe)}
            if on_fit is not None:
                on_fit()
    return candidates, best, probes[best]


def _best(candidates: "Sequence[Candidate] | Iterator[Candidate]") -> Candidate:
    return max(candidates, key=lambda candidate: candidate.num_correct)  # the first of equals


def _fit(method: ProbeMethod, value: float, features: NDArray[np.float32], labels: NDArray[np.int64]) -> "Pipeline":
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if method == "linear":
        classifier = LogisticRegression(C=value, max_iter=_MAX_ITERATIONS)
    else:
        classifier = KNeighborsClassifier(int(value), metric="cosine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return make_pipeline(StandardScaler(), classifier).fit(features.astype(np.float64), labels)


def _count_correct(probe: "Pipeline", features: Features, layer: int) -> int:
    return int((probe.predict(features.layers[layer].astype(np.float64)) == features.labels).sum())


def _existing_layers(options: ProbeOptions, count: int) -> list[int]:
    """Give the numbers of the layers that are asked for.

    Raises:
        InputError: the network has no such layer.
    """
    layers = options.layer_numbers() or list(range(1, count + 1))
    if layers[-1] > count:
        raise InputError(f"--layers has {layers[-1]}, and {options.checkpoint} has layers 1 to {count}: give those")
    return layers


def _notes(model: ModelFile, dataset: Dataset) -> list[str]:
    """Say what the network may have seen of the images; of classes that it never knew, nothing."""
    if set(dataset.classes).isdisjoint(model.classes):
        return []
    pasts = {name: known_past(model, split) for name, split in dataset.splits.items()}
    return [f"{name}: {note}" for name, (is_own, note) in pasts.items() if note and (is_own or name != "train")]


def _sample(split: Split, options: ProbeOptions) -> Split:
    """Draw `max_images` images, of each class its share, in the split's order; all where there are fewer."""
    N, count = len(split), options.max_images
    if N <= count:
        return split
    rows = np.random.default_rng(derive_seed(options.seed, "probe")).permutation(N)
    by_class = rows[np.argsort(split.labels[rows], kind="stable")]
    evenly = (2 * np.arange(count) + 1) * N // (2 * count)
    return split.subset(split.name, np.sort(by_class[evenly]))


def _require_two_classes(labels: NDArray[np.int64], dataset: Dataset, options: ProbeOptions) -> None:
    held = np.unique(labels)
    if len(held) < 2:
        names = ", ".join(dataset.classes[label] for label in held)
        raise InputError(
            f"the {len(labels)} training images of {options.data} that are used are all of the class {names}: "
            "give two classes or more, and enough --max_images to have some of each"
        )


def _read(
    model: ModelFile, split: Split, layers: list[int], options: ProbeOptions, progress: "Progress | None"
) -> Features:
    task = None if progress is None else progress.add_task(f"features of {split.name}", total=len(split))
    loader = Loader(
        split,
        EvalTransform(model.preprocess),
        batch_size=options.batch_size,
        workers=options.workers,
        on_error=options.on_error,
    )
    advance = None if progress is None or task is None else partial(progress.advance, task)
    with closing(loader):
        return read_features(model.network, model.preprocess, loader.epoch(0), layers, on_batch=advance)
