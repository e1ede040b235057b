"""The one evaluation: sums, counts and images over a loader, never means of batch means."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.config import WeightsKind
from vitlab.data.images import ImageError
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.calibration import (
    ImageScores,
    LogitSample,
    calibration_bins,
    calibration_gap,
    fit_temperature,
    in_order,
    join,
    score_images,
)
from vitlab.engine.distributed import ALONE, Processes
from vitlab.engine.objectives import NATS, Objective, Step
from vitlab.engine.packing import packed
from vitlab.engine.statistics import Interval, bootstrap_intervals, wilson_interval
from vitlab.models.network import device_of


@dataclass
class Scores:
    """Sums and single images of an evaluation, and the ratios that follow from them.

    The confusion matrix (K, K) int64 has a row for each true class and a column for each predicted one. An objective
    that does not classify has a loss and nothing else.
    """

    classes: tuple[str, ...]
    weights: WeightsKind = "raw"
    """Which weights were scored."""
    temperature: float = 1.0
    """What the logits are divided by for the calibrated scores, and for these alone."""
    count: int = 0
    loss_sum: float = 0.0
    part_sums: dict[str, float] = field(default_factory=dict)
    """Of each of the loss's terms, as `loss_sum`."""
    top_k_correct: int = 0
    confusion: Tensor = field(init=False)
    errors: list[ImageError] = field(default_factory=list)
    """Images that could not be read; they are in no count."""
    logits: LogitSample = field(default_factory=LogitSample)
    """What a temperature is fitted to."""
    _raw: list[ImageScores] = field(default_factory=list)
    _calibrated: list[ImageScores] = field(default_factory=list)

    def __post_init__(self) -> None:
        K = len(self.classes)
        self.confusion = torch.zeros(K, K, dtype=torch.int64)

    @property
    def k(self) -> int | None:
        """The k of the second score: 5, or one less than there are classes; None where that would be top-1 again."""
        K = len(self.classes)
        return 5 if K >= 5 else K - 1 if K > 2 else None

    def add(self, batch: Batch, step: Step) -> None:
        """Count a batch whose labels are indices (B,)."""
        self.errors.extend(batch.errors)
        B = len(batch.labels)
        if not B:
            return
        self.count += B
        self.loss_sum += step.loss.double().item() * B
        for name, part in step.parts.items():
            self.part_sums[name] = self.part_sums.get(name, 0.0) + part.double().item() * B
        if step.outputs is None:
            return
        logits, labels, indices, k = step.outputs.cpu(), batch.labels.cpu(), batch.indices.cpu(), self.k or 1
        images = score_images(logits, labels, indices, k=k)
        self._raw.append(images)
        if self.temperature != 1.0:
            self._calibrated.append(score_images(logits / self.temperature, labels, indices, k=k))
        self.logits.add(logits, labels, indices)
        K = len(self.classes)
        finite = images.predicted >= 0
        pairs = torch.from_numpy((images.label * K + images.predicted)[finite])
        self.confusion += torch.bincount(pairs, minlength=K * K).view(K, K)
        self.top_k_correct += 0 if self.k is None else int(images.in_top_k.sum())

    def absorb(self, other: "Scores") -> None:
        """Count the images of another process, none of which are among these, and keep all in the split's order."""
        self.errors.extend(other.errors)
        self.count += other.count
        self.loss_sum += other.loss_sum
        for name, total in other.part_sums.items():
            self.part_sums[name] = self.part_sums.get(name, 0.0) + total
        self.top_k_correct += other.top_k_correct
        self.confusion += other.confusion
        self._raw = in_order(self._raw + other._raw)
        self._calibrated = in_order(self._calibrated + other._calibrated)
        self.logits.absorb(other.logits)

    @property
    def classifies(self) -> bool:
        """Whether the objective gave class logits."""
        return bool(self._raw)

    @property
    def images(self) -> ImageScores:
        """What is known of each image, in the loader's order."""
        self._raw = [join(self._raw)]
        return self._raw[0]

    @property
    def calibrated_images(self) -> ImageScores:
        """The same with the logits divided by `temperature`."""
        if self.temperature == 1.0:
            return self.images
        self._calibrated = [join(self._calibrated)]
        return self._calibrated[0]

    @property
    def loss(self) -> float:
        """Mean loss over the images, in nats; of a classifier the negative log-likelihood of the true class."""
        return self.loss_sum / self.count

    @property
    def parts(self) -> dict[str, float]:
        """Mean of each of the loss's terms over the images; of pixels in bits, too."""
        parts = {name: total / self.count for name, total in self.part_sums.items()}
        return parts | ({"bits_per_pixel": parts[NATS] / math.log(2)} if NATS in parts else {})

    @property
    def num_correct(self) -> int:
        """Images whose likeliest class is the true one."""
        return int(self.confusion.diagonal().sum())

    @property
    def top1(self) -> float:
        """Share of images whose likeliest class is the true one."""
        return self.num_correct / self.count

    def fit_temperature(self) -> float:
        """Find the temperature that these images warrant (see `calibration.fit_temperature`); 1.0 without logits."""
        return fit_temperature(*self.logits.tensors()) if self.classifies else 1.0

    def per_class(self) -> list[dict[str, Any]]:
        """Give count, precision, recall with its interval and F1 of each class; None where a ratio has no images."""
        correct = self.confusion.diagonal().tolist()
        true, predicted = self.confusion.sum(dim=1).tolist(), self.confusion.sum(dim=0).tolist()
        return [
            {
                "class": name,
                "count": true[i],
                "precision": correct[i] / predicted[i] if predicted[i] else None,
                "recall": correct[i] / true[i] if true[i] else None,
                "recall_interval": list(wilson_interval(correct[i], true[i])) if true[i] else None,
                "f1": 2 * correct[i] / (true[i] + predicted[i]) if true[i] + predicted[i] else None,
            }
            for i, name in enumerate(self.classes)
        ]

    def summary(self) -> dict[str, Any]:
        """Give the headline numbers: top1, error, top5 (or top-k of fewer classes), loss, ece, brier, count, weights.

        Cheap enough for every evaluation of a run. An objective that does not classify has loss, count and weights; one
        of pixels has nats_per_pixel and bits_per_pixel besides.
        """
        what = {**self.parts, "count": self.count, "weights": self.weights}
        if not self.classifies:
            return {"loss": self.loss, **what}
        top_k = {} if self.k is None else {f"top{self.k}": self.top_k_correct / self.count}
        calibration = {"ece": self.images.ece, "brier": float(self.images.brier.mean())}
        return {"top1": self.top1, "error": 1.0 - self.top1, **top_k, "loss": self.loss, **calibration, **what}

    def intervals(self) -> dict[str, Interval]:
        """Give 95 % intervals over the choice of the images, which say nothing of another training seed.

        Wilson's for shares of images; for loss, ece, brier, macro_recall and macro_f1 the bootstrap's, 1,000 draws. A
        loss of several terms has none.
        """
        images = self.images
        bins, gaps = calibration_bins(images.confidence), images.correct - images.confidence

        def draw(rows: NDArray[np.int64]) -> Sequence[float]:
            return (
                float(images.nll[rows].mean()),
                calibration_gap(bins[rows], gaps[rows]),
                float(images.brier[rows].mean()),
                *macro_scores(images.label[rows], images.predicted[rows], len(self.classes)),
            )

        low, high = wilson_interval(self.num_correct, self.count)
        top_k = {} if self.k is None else {f"top{self.k}": wilson_interval(self.top_k_correct, self.count)}
        names = ("loss", "ece", "brier", "macro_recall", "macro_f1")
        drawn = zip(names, bootstrap_intervals(draw, self.count), strict=True)
        intervals = {"top1": (low, high), "error": (1 - high, 1 - low), **top_k, **dict(drawn)}
        if self.part_sums:  # what was drawn is the loss of the classes alone
            del intervals["loss"]
        return intervals

    def calibrated(self) -> dict[str, float]:
        """Give loss, ece and brier of softmax(logits / temperature): what the probabilities of `predict` are worth."""
        images = self.calibrated_images
        return {"loss": float(images.nll.mean()), "ece": images.ece, "brier": float(images.brier.mean())}

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain JSON values; fractions, not percent."""
        result = {
            **self.summary(),
            "unreadable": [{"path": error.path, "reason": error.reason} for error in self.errors],
            "classes": list(self.classes),
        }
        if self.classifies:
            recall, f1 = macro_scores(self.images.label, self.images.predicted, len(self.classes))
            result |= {
                "macro_recall": recall,
                "macro_f1": f1,
                "intervals": {name: list(interval) for name, interval in self.intervals().items()},
                "temperature": self.temperature,
                "calibrated": self.calibrated(),
                "per_class": self.per_class(),
                "confusion": self.confusion.tolist(),
            }
        return result


def macro_scores(labels: NDArray[np.int64], predicted: NDArray[np.int64], num_classes: int) -> tuple[float, float]:
    """Give mean recall and mean F1 over the classes, which weigh alike however many images each has.

    Args:
        labels: true classes (N,).
        predicted: predicted classes (N,), -1 for none.
        num_classes: K.

    Returns:
        The mean recall of the classes that have images, and the mean F1 of those that are true or predicted anywhere.
    """
    true = np.bincount(labels, minlength=num_classes)
    guessed = np.bincount(predicted[predicted >= 0], minlength=num_classes)
    hits = np.bincount(labels[labels == predicted], minlength=num_classes)
    there, seen = true > 0, true + guessed > 0
    return float((hits[there] / true[there]).mean()), float((2 * hits[seen] / (true + guessed)[seen]).mean())


def headline(summary: Mapping[str, Any], intervals: Mapping[str, Sequence[float]] | None = None) -> str:
    """Write a summary's scores for people: `top-1 61.02% top-5 98.87% loss 1.1164`.

    With intervals each score has its own behind it: `top-1 97.50% (95.4-98.7) loss 0.0612 (0.0391-0.0854)`.
    """
    known = intervals or {}
    names = [name for name in summary if name.startswith("top")]
    tops = "".join(f"top-{name[3:]} {percent(summary[name], known.get(name))} " for name in names)
    loss = f"{summary['loss']:.4f}" + ("" if "loss" not in known else " ({:.4f}-{:.4f})".format(*known["loss"]))
    bits = f" pixels {summary['bits_per_pixel']:.4f} bits" if "bits_per_pixel" in summary else ""
    return f"{tops}loss {loss}{bits}"


def percent(share: float, interval: Sequence[float] | None = None, *, digits: int = 2) -> str:
    """Write a share in percent, with the ends of its interval where there is one: `97.50% (95.4-98.7)`."""
    ends = "" if interval is None else f" ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})"
    return f"{share:.{digits}%}{ends}"


@torch.inference_mode()
def evaluate(
    objective: Objective,
    batches: Iterable[Batch],
    *,
    classes: tuple[str, ...],
    preprocess: Preprocess,
    weights: WeightsKind = "raw",
    temperature: float = 1.0,
    processes: Processes = ALONE,
    on_batch: Callable[[int], None] | None = None,
) -> Scores:
    """Score an objective's network in float32 over batches of uint8 images.

    Float32 whatever the training's precision, so that the score in a run's log is the one that `vitlab evaluate`
    gives for its file.

    Args:
        objective: evaluated in evaluation mode, and put back into the mode it had.
        batches: uint8 images (B, C, H, W), labels as indices (B,).
        classes: names in the order of the labels.
        preprocess: the model's own.
        weights: which weights the network holds, for the record.
        temperature: the model file's, for the calibrated scores beside the network's own.
        processes: those that share the images; each has a part of every batch, and gets the scores of all images.
        on_batch: told the number of images after each batch.

    Raises:
        InputError: no image could be read.
        PeerLost: another process has ended.
    """
    device = device_of(objective)
    was_training = objective.training
    objective.eval()
    scores = Scores(classes=classes, weights=weights, temperature=temperature)
    with ExitStack() as stack:
        stack.callback(objective.train, was_training)
        stack.enter_context(packed(objective))
        for batch in batches:
            images = preprocess.normalize(batch.images.to(device, non_blocking=True))
            batch = replace(batch, images=images, labels=batch.labels.to(device, non_blocking=True))
            if len(batch.labels):
                scores.add(batch, objective(batch))
            else:
                scores.errors.extend(batch.errors)
                if processes.count > 1:  # the others may wait in it for this one's share of the parameters
                    objective(batch.blank())
            if on_batch is not None:
                on_batch((len(batch.labels) + len(batch.errors)) * processes.count)
    own, *others = processes.gather(scores)
    if others:
        scores = own  # of process 0 on all of them
        for other in others:
            scores.absorb(other)
    if not scores.count:
        raise scores.errors[0] if scores.errors else AssertionError("a loader without images")
    return scores
