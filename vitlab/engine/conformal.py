"""Sets of classes that hold the true one as often as was asked for: split conformal prediction."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitlab.engine.statistics import Interval, wilson_interval
from vitlab.seeds import derive_seed


@dataclass(frozen=True)
class ConformalSets:
    """Sets whose threshold one half of the images set, on the M images of the other half."""

    level: float
    """Share of the images whose true class is to be in its set."""
    threshold: float
    """Least probability of a class that is in a set."""
    num_calibrated: int
    """Images that set the threshold."""
    sizes: NDArray[np.int64]
    """Classes in the set of each image, (M,); 0 is an image unlike those that set the threshold."""
    holds: NDArray[np.bool_]
    """Whether the set has the true class, (M,)."""

    @property
    def coverage(self) -> float:
        """Share of the sets that have the true class."""
        return float(self.holds.mean())

    @property
    def coverage_interval(self) -> Interval:
        """95 % interval of the coverage, over the choice of the M images."""
        return wilson_interval(int(self.holds.sum()), len(self.holds))

    @property
    def mean_size(self) -> float:
        """Mean number of classes in a set."""
        return float(self.sizes.mean())

    def by_size(self) -> list[tuple[int, int, int]]:
        """Give (size, sets of that size, those of them that have the true class), the smallest size first."""
        counts = np.bincount(self.sizes)
        held = np.bincount(self.sizes[self.holds], minlength=len(counts))
        return [(size, int(counts[size]), int(held[size])) for size in np.flatnonzero(counts).tolist()]


def conformal_threshold(true_shares: NDArray[np.float64], level: float) -> float:
    """Find the least probability that a class needs to be in a set.

    A new image from the same source has its true class in its set with a probability of at least `level`, and of no
    more than `level + 1 / (n + 1)` where no two probabilities are equal, however good or bad the model is. That is a
    mean over images: single classes may have less.

    Args:
        true_shares: probability of the true class of each calibration image, (n,).
        level: in (0, 1).

    Returns:
        The ceil((n + 1) level)-th largest of them; 0, so that every class is in, where n is too small for the level.

    Source: arXiv:2107.07511, sec. 1, with the score 1 - probability of the true class (arXiv:1609.00451).
    """
    n = len(true_shares)
    rank = math.ceil(round((n + 1) * level, 9))  # 100 * .07 is a hair above 7
    return float(np.sort(true_shares)[n - rank]) if rank <= n else 0.0


def split_conformal(
    shares: NDArray[np.float64], labels: NDArray[np.int64], *, level: float, seed: int = 0
) -> ConformalSets:
    """Let one half of the images set the threshold, and try it on the other half.

    Args:
        shares: probabilities (N, K), N of 2 or more. Images that the model was not trained on.
        labels: true classes (N,).
        level: share of the images whose true class is to be in its set, in (0, 1).
        seed: what the halves depend on.
    """
    order = np.random.default_rng(derive_seed(seed, "conformal")).permutation(len(labels))
    first, second = order[: len(labels) // 2], order[len(labels) // 2 :]
    threshold = conformal_threshold(shares[first, labels[first]], level)
    return ConformalSets(
        level=level,
        threshold=threshold,
        num_calibrated=len(first),
        sizes=(shares[second] >= threshold).sum(axis=1),
        holds=shares[second, labels[second]] >= threshold,
    )
