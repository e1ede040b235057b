"""What a trained model says of its data: labels that are likely wrong, and images unlike all others.

A label is doubted as in confident learning: of each class the mean probability that the model gives to it over the
images so labelled is a threshold, and an image that passes the threshold of other classes, the likeliest of all it
passes among them, likely has a wrong label. That holds for images that the model was not trained on. An image is an
outlier where the distance of its features from its nearest neighbours is far beyond what is usual.

Source: Northcutt, Jiang, Chuang, Confident Learning, JAIR 2021, arXiv:1911.00068, sec. 3.1.
"""

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlab.config import DataConfig
from vitlab.data.datasets import Split, load_dataset
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.data.splits import match_classes
from vitlab.inference.check_report import Case, Finding, Picture
from vitlab.inference.features import count_layers, read_features
from vitlab.inference.predictor import Predictor
from vitlab.inference.scoring import TRAINED_ON, known_past
from vitlab.models.files import load_model

if TYPE_CHECKING:
    from rich.progress import Progress

_BATCH = 64
_NEIGHBORS = 10
_FAR = 6.0  # robust standard deviations beyond the median distance


def model_findings(
    checkpoint: str | Path, data: str, *, workers: int, device: str, progress: "Progress | None"
) -> tuple[list[Finding], list[str]]:
    """Look for label errors and outliers with a model.

    Only images that the model was not trained on are scored where its file tells which they are.

    Returns:
        The findings, and lines that say what was scored.

    Raises:
        InputError: the file is no model of classes, or the data set has classes that it does not know.
    """
    predictor = Predictor(checkpoint, device=device, batch_size=_BATCH)
    model = load_model(checkpoint)
    dataset = load_dataset(
        data,
        val_fraction=model.data.get("val_fraction", DataConfig.val_fraction),
        seed=model.data.get("seed", DataConfig.val_seed),
        allow_empty_classes=True,
    )
    splits, lines, doubts = [], [], []
    for name, own in dataset.splits.items():
        split, _ = match_classes(own, dataset.classes, predictor.classes, f"{name} of {data}")
        is_own, note = known_past(model, split)
        splits.append(split)
        if note == TRAINED_ON:
            lines.append(f"labels of {name} not doubted: {note}")
            continue
        if note is not None or not is_own:
            lines.append(f"labels of {name}: {note or 'the model may have seen these images, which hides errors'}")
        doubts += label_errors(split, *_probabilities(predictor, split, workers, progress), predictor.classes)
    doubts.sort(key=lambda doubt: -doubt[0])
    return [
        Finding("label_error", "labels that are likely wrong", tuple(case for _, case in doubts)),
        Finding(
            "outlier", "images unlike all others", _outliers(predictor, splits, workers, progress), is_problem=False
        ),
    ], lines


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
        with closing(_loader(predictor, split, workers)) as loader:
            read = read_features(predictor.network, predictor.preprocess, loader.epoch(0), [layer], on_batch=advance)
        features.append(read.layers[layer])
        lost = {error.path for error in read.errors}
        pictures += [
            Picture(path, split.name, predictor.classes[label])
            for path, label in zip(split.paths, split.labels.tolist(), strict=True)
            if os.fspath(path) not in lost
        ]
    deviations = far_out(np.concatenate(features))
    return tuple(
        Case((pictures[row],), f"{deviations[row]:.1f} deviations from its nearest neighbours")
        for row in np.argsort(-deviations).tolist()
        if deviations[row] > _FAR
    )


def _loader(predictor: Predictor, split: Split, workers: int) -> Loader:
    return Loader(split, EvalTransform(predictor.preprocess), batch_size=_BATCH, workers=workers, on_error="skip")
