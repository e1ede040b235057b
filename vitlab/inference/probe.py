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
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlab.config import DataConfig
from vitlab.data.datasets import Dataset, Split, load_dataset
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.errors import InputError
from vitlab.inference.features import Features, count_layers, read_features
from vitlab.inference.probe_report import Candidate, ProbeReport, best_candidate
from vitlab.inference.scoring import known_past
from vitlab.models.files import ModelFile
from vitlab.options import ProbeMethod, ProbeOptions
from vitlab.seeds import derive_seed

if TYPE_CHECKING:
    from rich.progress import Progress
    from sklearn.pipeline import Pipeline

# Values of each method's setting. Each list starts with the smoothest classifier, which wins a tie.
_GRIDS: dict[ProbeMethod, tuple[float, ...]] = {"linear": (0.001, 0.01, 0.1, 1.0, 10.0), "knn": (50, 20, 10, 5, 1)}
_MAX_ITERATIONS = 1000
_Say = Callable[[str], None]


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
    task = None if progress is None else progress.add_task("fitting", total=len(layers) * len(_GRIDS[options.method]))
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
        for value in _GRIDS[method]:
            if method == "linear" or value <= len(train.labels):
                probe = _fit(method, value, features, train.labels)
                candidates.append(Candidate(layer, value, _count_correct(probe, val, layer)))
                best = best_candidate(candidates)
                probes = {best: probes.get(best, probe)}
            if on_fit is not None:
                on_fit()
    return candidates, best, probes[best]


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
    if count >= N:
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
