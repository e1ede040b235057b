"""Whether probabilities mean what they say: scores image by image, the calibration error, and the temperature.

The temperature divides the logits before the softmax. It changes no order of the classes, so no top-k; it makes a
network that is too sure (or too unsure) of itself as sure as its validation images warrant.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ECE_BINS = 15
TEMPERATURE_LIMITS = (0.05, 20.0)
_CHUNK_VALUES = 2**20


@dataclass(frozen=True)
class ImageScores:
    """What is known of N scored images, each field an array (N,)."""

    index: NDArray[np.int64]
    """Place in the split."""
    label: NDArray[np.int64]
    predicted: NDArray[np.int64]
    """Likeliest class; -1 where a logit is not finite."""
    confidence: NDArray[np.float64]
    """Probability of the likeliest class."""
    nll: NDArray[np.float64]
    """Negative logarithm of the true class's probability, in nats."""
    brier: NDArray[np.float64]
    """Sum over the classes of (probability - truth) squared, 0 to 2: Brier's own definition, not half of it."""
    in_top_k: NDArray[np.bool_]
    """Whether the true class is among the k likeliest."""

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether the likeliest class is the true one."""
        correct: NDArray[np.bool_] = self.predicted == self.label
        return correct

    @property
    def ece(self) -> float:
        """Expected calibration error."""
        return expected_calibration_error(self.confidence, self.correct)

    def at(self, rows: NDArray[np.int64]) -> "ImageScores":
        """Give the images at `rows`, in that order."""
        return ImageScores(**{field.name: getattr(self, field.name)[rows] for field in fields(ImageScores)})

    def worst_mistakes(self, most: int) -> NDArray[np.int64]:
        """Give the rows of the mistakes that gave the true class the least probability, the worst first."""
        rows = np.flatnonzero(~self.correct & (self.predicted >= 0))
        return rows[np.argsort(-self.nll[rows], kind="stable")][:most]


def score_images(logits: Tensor, labels: Tensor, indices: Tensor, *, k: int) -> ImageScores:
    """Score images one by one, in float64.

    Args:
        logits: (B, K) on the CPU, divided by the temperature where there is one.
        labels: int64 (B,).
        indices: place of each image in the split, int64 (B,).
        k: classes that count for `in_top_k`, at most K.
    """
    finite = logits.isfinite().all(dim=1)
    top = logits.topk(k, dim=1).indices
    log_shares = logits.double().log_softmax(dim=1)
    shares = log_shares.exp()
    true = log_shares.gather(1, labels[:, None])[:, 0]
    return ImageScores(
        index=indices.numpy(),
        label=labels.numpy(),
        # A non-finite row predicts nothing: argmax would call NaN the first class.
        predicted=torch.where(finite, logits.argmax(dim=1), -1).numpy(),
        confidence=shares.amax(dim=1).numpy(),
        nll=-true.numpy(),
        brier=(shares.square().sum(dim=1) - 2 * true.exp() + 1).clamp(min=0).numpy(),
        in_top_k=((top == labels[:, None]).any(dim=1) & finite).numpy(),
    )


def join(parts: Sequence[ImageScores]) -> ImageScores:
    """Put the images of several batches, one or more, into one record."""
    return ImageScores(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(ImageScores)}
    )


def in_order(parts: Sequence[ImageScores]) -> list[ImageScores]:
    """Put the parts of several processes into one record in the split's order; without a part there is none."""
    if not parts:
        return []
    images = join(parts)
    return [images.at(np.argsort(images.index, kind="stable"))]


def expected_calibration_error(confidence: NDArray[np.float64], correct: NDArray[np.bool_]) -> float:
    """Give the mean gap between how sure the model is and how often it is right, over bins of equal width.

    Args:
        confidence: probability of the likeliest class, float (N,) in [0, 1].
        correct: whether that class is the true one, bool (N,).

    Returns:
        The sum over the bins of their share of the images times |accuracy - mean confidence|, 0 to 1. It is biased
        upwards: of a perfectly calibrated model too it is above 0, the more so the fewer images there are.

    Source: arXiv:1706.04599, eq. 3, with 15 bins. A confidence at an edge, in float32, counts in the bin above it, and
    1.0 in one of its own, as in torchmetrics.
    """
    return calibration_gap(calibration_bins(confidence), correct - confidence)


def calibration_bins(confidence: NDArray[np.float64]) -> NDArray[np.int64]:
    """Give the bin of each confidence, int64 (N,) from 0 to 15."""
    edges = torch.linspace(0, 1, ECE_BINS + 1)
    bins: NDArray[np.int64] = torch.bucketize(torch.from_numpy(confidence).float(), edges, right=True).numpy() - 1
    return bins


def calibration_gap(bins: NDArray[np.int64], gaps: NDArray[np.float64]) -> float:
    """Give the calibration error from each image's bin (N,) and its truth minus its confidence (N,).

    A bin's share of the images times its mean gap is the sum of its gaps over N.
    """
    return float(np.abs(np.bincount(bins, weights=gaps, minlength=ECE_BINS + 1)).sum()) / len(bins)


@dataclass(frozen=True)
class ReliabilityBin:
    """Images of about the same confidence."""

    count: int
    correct: int
    confidence: float
    """Mean confidence."""

    @property
    def accuracy(self) -> float:
        """Share that is right."""
        return self.correct / self.count


def reliability_bins(confidence: NDArray[np.float64], correct: NDArray[np.bool_]) -> list[ReliabilityBin]:
    """Give the bins of the calibration error that hold images, the least sure first.

    Args:
        confidence: probability of the likeliest class, (N,).
        correct: whether that class is the true one, (N,).
    """
    bins = calibration_bins(confidence)
    counts, right = np.bincount(bins), np.bincount(bins, weights=correct)
    sums = np.bincount(bins, weights=confidence)
    return [
        ReliabilityBin(int(counts[bin]), int(right[bin]), float(sums[bin] / counts[bin]))
        for bin in np.flatnonzero(counts)
    ]


@dataclass(frozen=True)
class RiskCoverage:
    """How often a model errs where it answers only if it is sure enough, at M thresholds from the strictest down."""

    threshold: NDArray[np.float64]
    """Least confidence that is answered, (M,): each confidence that occurs."""
    coverage: NDArray[np.float64]
    """Share of the images that are answered, (M,), ascending to 1."""
    risk: NDArray[np.float64]
    """Share of mistakes among those, (M,)."""

    def most_within(self, risk: float) -> int | None:
        """Give the row that answers most images with no more than this share of mistakes; None where none does."""
        rows = np.flatnonzero(self.risk <= risk)
        return int(rows[-1]) if len(rows) else None

    def least_covering(self, coverage: float) -> int:
        """Give the row of the strictest threshold that answers at least this share of the images."""
        return int(np.argmax(self.coverage >= coverage))


def risk_coverage(confidence: NDArray[np.float64], correct: NDArray[np.bool_]) -> RiskCoverage:
    """Find what a threshold on the confidence does.

    Args:
        confidence: probability of the likeliest class, (N,), N of 1 or more.
        correct: whether that class is the true one, (N,).

    Source: El-Yaniv and Wiener, JMLR 11 (2010), 1605-1641, sec. 2. Images of equal confidence are answered together.
    """
    order = np.argsort(-confidence, kind="stable")
    confidence, wrong = confidence[order], np.cumsum(~correct[order])
    last = np.flatnonzero(np.append(np.diff(confidence) != 0, True))
    return RiskCoverage(confidence[last], (last + 1) / len(confidence), wrong[last] / (last + 1))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Find the temperature that makes the images' true classes likeliest: the least mean NLL of softmax(logits / T).

    The NLL is convex in 1 / T, so that its slope has one root.

    Args:
        logits: float (N, K); rows that are not finite are left out.
        labels: int64 (N,). Images that the network was not trained on.

    Returns:
        T from 0.05 to 20; 1.0 where nothing can be fitted: no image, no mistake (the best T were 0), or in every row
        the same logit for all classes.

    Source: arXiv:1706.04599, sec. 4.2.
    """
    from scipy.optimize import brentq

    finite = logits.isfinite().all(dim=1)
    logits, labels = logits[finite], labels[finite]
    if bool((logits.argmax(dim=1) == labels).all()) or bool((logits == logits[:, :1]).all()):
        return 1.0
    rows_at_once = max(_CHUNK_VALUES // logits.shape[1], 1)

    def slope(inverse: float) -> float:
        """Give the derivative of the summed NLL by 1 / T: expected minus true logit."""
        total = 0.0
        for start in range(0, len(labels), rows_at_once):
            rows, true = logits[start : start + rows_at_once].double(), labels[start : start + rows_at_once]
            expected = ((rows * inverse).softmax(dim=1) * rows).sum(dim=1)
            total += float((expected - rows.gather(1, true[:, None])[:, 0]).sum())
        return total

    lowest, highest = TEMPERATURE_LIMITS
    if slope(1 / highest) >= 0:
        return highest
    if slope(1 / lowest) <= 0:
        return lowest
    return 1 / float(brentq(slope, 1 / highest, 1 / lowest, xtol=1e-9, rtol=1e-9))


class LogitSample:
    """The logits of all images of an evaluation, or of every m-th in the split's order, for fitting a temperature.

    Which are kept is a matter of their places in the split alone, not of batches or processes.

    Args:
        max_values: numbers of float32 to keep; beyond it every second image goes and m doubles. The images lie in the
            split by class, so that each class keeps its share.
    """

    def __init__(self, max_values: int = 2**26) -> None:
        self.max_values, self.every = max_values, 1
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Keep what is due of a batch: logits (B, K), labels (B,) and places in the split (B,), on the CPU."""
        self._parts.append(self._due(logits.to(torch.float32), labels, indices))
        self._thin_out()

    def absorb(self, other: "LogitSample") -> None:
        """Keep those of another process, too."""
        self.every = max(self.every, other.every)
        self._parts = [self._due(*part) for part in self._parts + other._parts]
        self._thin_out()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Give the logits (N, K) and labels (N,) that are kept, in the split's order."""
        logits, labels, indices = (torch.cat(tensors) for tensors in zip(*self._parts, strict=True))
        order = indices.argsort()
        return logits[order], labels[order]

    def _due(self, logits: Tensor, labels: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = indices % self.every == 0
        return logits[rows], labels[rows], indices[rows]  # copies, which hold no more than these rows

    def _thin_out(self) -> None:
        while sum(logits.numel() for logits, _, _ in self._parts) > self.max_values:
            self.every *= 2
            self._parts = [self._due(*part) for part in self._parts]
