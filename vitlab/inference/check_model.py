"""What a trained model says of its data: labels that are likely wrong, and images unlike all others.

A label is doubted as in confident learning: of each class the mean probability that the model gives to it over the
images so labelled is a threshold, and an image that passes the threshold of other classes, the likeliest of all it
passes among them, likely has a wrong label. That holds for images that the model was not trained on. An image is an
outlier where the distance of its features from its nearest neighbours is far beyond what is usual.

Source: Northcutt, Jiang, Chuang, Confident Learning, JAIR 2021, arXiv:1911.00068, sec. 3.1.
"""

import os
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlab.config import DataConfig
from vitlab.data.datasets import Dataset, Split
from vitlab.data.images import ImageError
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.data.splits import match_classes, split_validation
from vitlab.engine.statistics import wilson_interval
from vitlab.errors import InputError
from vitlab.inference.check_report import Case, Finding, Picture
from vitlab.inference.features import count_layers, read_features
from vitlab.inference.predictor import Predictor
from vitlab.inference.scoring import TRAINED_ON, known_past
from vitlab.models.files import ModelFile, load_model

if TYPE_CHECKING:
    from rich.progress import Progress

_BATCH = 64
_NEIGHBORS = 10
_FAR = 6.0  # robust standard deviations beyond the median distance


@dataclass(frozen=True)
class Judge:
    """A model beside the images that it is to judge."""

    predictor: Predictor
    splits: list[Split]
    """All that hold images, labels in the model's class order."""
    judged: list[Split]
    """Those whose labels are judged, each named as the split that it is, or is a part of."""
    untold: frozenset[str]
    """Names of those that the model may have been trained on."""
    notes: tuple[str, ...]
    """Which labels are judged, where the model's file tells it."""

    def findings(self, *, workers: int, progress: "Progress | None") -> tuple[list[Finding], list[str]]:
        """Look for label errors and outliers.

        Returns:
            The findings, and lines for the labels that are not judged, or of images that the model may have seen.
        """
        classes, doubts, lines, untold = self.predictor.classes, [], list(self.notes), []
        for split in self.judged:
            rows, probabilities = _probabilities(self.predictor, split, workers, progress)
            weakness = too_weak(probabilities, split.labels[rows])
            if weakness is None:
                doubts += label_errors(split, rows, probabilities, classes)
                untold += [split.name] if len(rows) and split.name in self.untold else []
            else:
                lines.append(f"labels of {split.name} are not judged: {weakness}")
        if untold:
            lines.append(
                f"labels of {', '.join(untold)}: which of these images the model was trained on cannot be told; those "
                "are judged in sample, where wrong labels stay unseen: there may be more than are listed"
            )
        doubts.sort(key=lambda doubt: -doubt[0])
        outliers = _outliers(self.predictor, self.splits, workers, progress)
        return [
            Finding("label_error", "labels that are likely wrong", tuple(case for _, case in doubts)),
            Finding("outlier", "images unlike all others", outliers, is_problem=False),
        ], lines


def open_judge(checkpoint: str | Path, dataset: Dataset, data: str, *, device: str) -> Judge:
    """Put a model before a data set; no image is opened.

    Labels of images that the model was trained on are not judged where its file tells which they are.

    Args:
        checkpoint: model file or run folder.
        dataset: as it lies, no validation cut.
        data: what it is called in messages.
        device: where the model computes.

    Raises:
        InputError: the file is no model of classes, or the data set has classes that it does not know.
    """
    predictor = Predictor(checkpoint, device=device, batch_size=_BATCH)
    model = load_model(checkpoint)
    splits, judged, notes, untold = [], [], [], []
    for name, own in dataset.splits.items():
        split, _ = match_classes(own, dataset.classes, predictor.classes, f"{name} of {data}")
        if not len(split):
            continue
        splits.append(split)
        is_own, note = known_past(model, split)
        kept = None if "val" in dataset.splits else _kept_for_validation(model, split)
        if note == TRAINED_ON:
            notes.append(f"labels of {name} are not judged: {TRAINED_ON}")
        elif kept is not None:
            judged.append(kept)
            notes.append(
                f"labels of {name}: judged are the {len(kept):,} images that the model's run kept for validation; "
                f"it was trained on the other {len(split) - len(kept):,}"
            )
        else:
            judged.append(split)
            untold += [] if is_own else [name]
    return Judge(predictor, splits, judged, frozenset(untold), tuple(notes))


def _kept_for_validation(model: ModelFile, split: Split) -> Split | None:
    """Give the images that the model's run cut from a split for validation; None where it did not cut this one."""
    if split.name not in ("train", "all"):
        return None
    fraction, seed = (
        model.data.get("val_fraction", DataConfig.val_fraction),
        model.data.get("seed", DataConfig.val_seed),
    )
    try:
        parts, _ = split_validation(split, model.classes, fraction=fraction, seed=seed)
    except InputError:  # no class has two images
        return None
    return replace(parts["val"], name=split.name) if known_past(model, parts["train"])[1] == TRAINED_ON else None


def too_weak(probabilities: NDArray[np.float32], labels: NDArray[np.int64]) -> str | None:
    """Say why a network cannot judge labels; None where it can.

    It must agree with them clearly more often than its answers, dealt out by chance, would; by that a network that
    always gives the largest class is as weak as one that guesses. And it must not contradict most of them: then its
    errors outnumber theirs.

    Args:
        probabilities: (N, K).
        labels: (N,).
    """
    N, K = probabilities.shape
    if not N:
        return None
    answers = probabilities.argmax(axis=1)
    right = int((answers == labels).sum())
    chance = float(np.bincount(answers, minlength=K) @ np.bincount(labels, minlength=K)) / N**2
    if wilson_interval(right, N)[0] <= chance:
        return f"the network gives {right:,} of {N:,} and chance would give {chance * N:,.0f}, so that it is too weak"
    doubts = int((doubtful(probabilities, labels) >= 0).sum())
    if doubts > N / 2:
        return f"the network contradicts {doubts:,} of {N:,}, so that it is too weak"
    return None


def label_errors(
    split: Split, rows: NDArray[np.int64], probabilities: NDArray[np.float32], classes: tuple[str, ...]
) -> list[tuple[float, Case]]:
    """Doubt labels by confident learning.

    Args:
        split: its labels index `classes`.
        rows: images that were scored, (N,).
        probabilities: of each, (N, K).
        classes: names, K of them.

    Returns:
        Of each doubted image by how much the other class is likelier, and the case.
    """
    labels = split.labels[rows]
    doubted = doubtful(probabilities, labels)
    cases = []
    for index in np.flatnonzero(doubted >= 0).tolist():
        own, other = int(labels[index]), int(doubted[index])
        p_own, p_other = float(probabilities[index, own]), float(probabilities[index, other])
        picture = Picture(split.paths[int(rows[index])], split.name, classes[own])
        note = f"looks like {classes[other]} ({p_other:.1%}), labelled {classes[own]} ({p_own:.1%})"
        cases.append((p_other - p_own, Case((picture,), note)))
    return cases


def doubtful(probabilities: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give the class that each image likely has in place of its label, -1 where the label stands; (N,).

    Args:
        probabilities: (N, K).
        labels: (N,).
    """
    K = probabilities.shape[1]
    thresholds = np.array(
        [probabilities[labels == k, k].mean() if (labels == k).any() else np.inf for k in range(K)], np.float32
    )
    passed = np.where(probabilities >= thresholds, probabilities, -1.0)
    likeliest = passed.argmax(axis=1)
    stands = (passed.max(axis=1) < 0) | (likeliest == labels)
    return np.where(stands, -1, likeliest)


def far_out(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Give how far each image is from its nearest neighbours, in robust standard deviations above the median; (N,).

    Args:
        features: (N, D), standardised here; distances are angles.
    """
    from sklearn.neighbors import NearestNeighbors

    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-6)
    count = min(_NEIGHBORS, len(scaled) - 1)
    if count < 1:
        return np.zeros(len(scaled))
    neighbors = NearestNeighbors(n_neighbors=count, metric="cosine").fit(scaled)
    distances = neighbors.kneighbors()[0].mean(axis=1).astype(np.float64)
    median = np.median(distances)
    deviation = 1.4826 * np.median(np.abs(distances - median))
    deviations: NDArray[np.float64] = (distances - median) / max(float(deviation), 1e-9)
    return deviations


def _probabilities(
    predictor: Predictor, split: Split, workers: int, progress: "Progress | None"
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Score a split; images that cannot be read are left out."""
    rows, parts = [np.zeros(0, np.int64)], [np.zeros((0, len(predictor.classes)), np.float32)]
    task = None if progress is None else progress.add_task(f"scoring {split.name}", total=len(split))
    with closing(_loader(predictor, split, workers)) as loader:
        for batch, probabilities in predictor.predict_batches(loader.epoch(0)):
            rows.append(batch.indices.numpy())
            parts.append(probabilities)
            if progress is not None and task is not None:
                progress.advance(task, len(probabilities) + len(batch.errors))
    return np.concatenate(rows), np.concatenate(parts)


def _outliers(predictor: Predictor, splits: list[Split], workers: int, progress: "Progress | None") -> tuple[Case, ...]:
    """Find images whose features of the last layer lie far from all others, the farthest first."""
    layer = count_layers(predictor.network)
    features: list[NDArray[np.float32]] = []
    pictures: list[Picture] = []
    for split in splits:
        task = None if progress is None else progress.add_task(f"features of {split.name}", total=len(split))
        advance = None if progress is None or task is None else partial(progress.advance, task)
        try:
            with closing(_loader(predictor, split, workers)) as loader:
                read = read_features(
                    predictor.network, predictor.preprocess, loader.epoch(0), [layer], on_batch=advance
                )
        except ImageError:  # not one of them can be read, which is a finding of its own
            continue
        features.append(read.layers[layer])
        lost = {error.path for error in read.errors}
        pictures += [
            Picture(path, split.name, predictor.classes[label])
            for path, label in zip(split.paths, split.labels.tolist(), strict=True)
            if os.fspath(path) not in lost
        ]
    if not features:
        return ()
    deviations = far_out(np.concatenate(features))
    return tuple(
        Case((pictures[row],), f"{deviations[row]:.1f} deviations from its nearest neighbours")
        for row in np.argsort(-deviations).tolist()
        if deviations[row] > _FAR
    )


def _loader(predictor: Predictor, split: Split, workers: int) -> Loader:
    return Loader(split, EvalTransform(predictor.preprocess), batch_size=_BATCH, workers=workers, on_error="skip")
