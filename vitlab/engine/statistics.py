"""How sure a score is: intervals for one model, and for the difference of two on the same images.

Pure functions on counts and numpy arrays; nothing here knows a model. All intervals are two-sided, at 95 % where
nothing else is asked for. `N` counts images, `S` seeds.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlab.seeds import derive_seed

Interval: TypeAlias = tuple[float, float]
"""Lower and upper end."""


def wilson_interval(correct: int, count: int, *, confidence: float = 0.95) -> Interval:
    """Give the interval of a share, such as top-1 or a class's recall.

    It stays within 0 and 1 and has a width even where all or none are right.

    Args:
        correct: images that are right, at most `count`.
        count: images, 1 or more.
        confidence: how often such an interval holds the true share, over new draws of images.

    Source: Wilson, JASA 22 (1927), 209-212; without continuity correction.
    """
    z = _normal_quantile(confidence)
    share, shrink = correct / count, 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / shrink
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / shrink
    return (0.0 if correct == 0 else centre - half, 1.0 if correct == count else centre + half)


def bootstrap_intervals(
    statistic: Callable[[NDArray[np.int64]], Sequence[float]],
    count: int,
    *,
    seed: int = 0,
    resamples: int = 1000,
    confidence: float = 0.95,
) -> list[Interval]:
    """Give percentile intervals of one or several statistics, by drawing the images anew with replacement.

    It covers the choice of the images, not the training's seed. A statistic that is biased in small samples, as the
    calibration error is, has an interval with that bias.

    Args:
        statistic: row numbers (N,), some of them repeated, to the statistics of those images.
        count: images, N.
        seed: the same seed gives the same interval.
        resamples: draws; 1,000 place an end within about a tenth of a standard error.
        confidence: share of the draws between the ends.

    Returns:
        An interval for each statistic.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), sec. 13.3.
    """
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "bootstrap")))
    draws = np.array([statistic(generator.integers(count, size=count)) for _ in range(resamples)])  # (R, M)
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def mcnemar(only_a: int, only_b: int) -> float:
    """Give the exact two-sided p-value of two models being equally often right.

    Images that both or neither got right say nothing; of the others each model should win half.

    Args:
        only_a: images that only the first model got right.
        only_b: images that only the second got right.

    Source: McNemar, Psychometrika 12 (1947), 153-157, with the binomial distribution in place of chi-squared.
    """
    from scipy.stats import binomtest

    wins = only_a + only_b
    return float(binomtest(only_a, wins, 0.5).pvalue) if wins else 1.0


def paired_difference_interval(
    both: int, only_a: int, only_b: int, neither: int, *, confidence: float = 0.95
) -> Interval:
    """Give the interval of top-1 of A minus top-1 of B, scored on the same images.

    It covers the choice of the images alone. Near certainty it is too wide rather than too narrow.

    Args:
        both: images that both got right.
        only_a: images that only A got right.
        only_b: images that only B got right.
        neither: images that neither got right.
        confidence: how often such an interval holds the true difference, over new draws of images.

    Source: Newcombe, Statistics in Medicine 17 (1998), 2635-2650, method 10.
    """
    count = both + only_a + only_b + neither
    right_a, right_b = both + only_a, both + only_b
    share_a, share_b = right_a / count, right_b / count
    low_a, high_a = wilson_interval(right_a, count, confidence=confidence)
    low_b, high_b = wilson_interval(right_b, count, confidence=confidence)
    phi = _corrected_phi(both, only_a, only_b, neither)

    def half(one: float, other: float) -> float:
        return math.sqrt(max(one**2 - 2 * phi * one * other + other**2, 0.0))

    difference = share_a - share_b
    below, above = half(share_a - low_a, high_b - share_b), half(high_a - share_a, share_b - low_b)
    return difference - below, difference + above


def mean_difference_interval(differences: NDArray[np.float64], *, confidence: float = 0.95) -> Interval:
    """Give the interval of A minus B over pairs of runs of several seeds, all scored on the same images.

    It covers both choices, of the images and of the seeds: how much better recipe A is than recipe B over all of
    them. Its variance is that of the mean over images plus that of the mean over seeds, with the degrees of freedom of
    Welch and Satterthwaite, so that few seeds that disagree make it wide. What image and seed do together counts twice:
    where seeds have no effect of their own, it is too wide. In simulations of 2 to 5 seeds (the test's) it held the
    truth in 87 to 99 % of the trials, least where images are many and two seeds disagree; there a percentile bootstrap
    over images and seeds held it in 65 %.

    Args:
        differences: A's score minus B's of each seed and image, (S, N); S 2 or more. Of top-1: -1, 0 or 1.
        confidence: how often such an interval holds the true difference.

    Source: Satterthwaite, Biometrics Bulletin 2 (1946), 110-114. Differs: Agresti and Min's half an image more on
    either side (Statistics in Medicine 24 (2005), 729-740), so that runs that never differ still get a width.
    """
    from scipy.stats import t

    S, N = differences.shape
    assert S > 1, "one seed says nothing of the spread over seeds"
    mean = float(differences.mean())
    of_images = (float(np.square(differences.mean(axis=0) - mean).sum()) + 1.0) / N**2
    of_seeds = float(differences.mean(axis=1).var(ddof=1)) / S
    variance = of_images + of_seeds
    freedom = variance**2 / (of_images**2 / max(N - 1, 1) + of_seeds**2 / (S - 1))
    half = float(t.ppf((1 + confidence) / 2, freedom)) * math.sqrt(variance)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def _corrected_phi(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Give the correlation of being right, with Newcombe's correction towards 0 where it is positive."""
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if not margins:
        return 0.0
    determinant = both * neither - only_a * only_b
    half = (both + only_a + only_b + neither) / 2
    corrected = max(determinant - half, 0.0) if determinant > 0 else determinant
    return corrected / math.sqrt(margins)


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
