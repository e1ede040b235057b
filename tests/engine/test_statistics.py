"""Intervals and paired tests: equal to scipy and to published examples, and right as often as they say."""

import numpy as np
import pytest
from scipy.stats import binomtest, norm, t

from vitlab.engine.statistics import (
    bootstrap_intervals,
    mcnemar,
    mean_difference_interval,
    paired_difference_interval,
    wilson_interval,
)

PAIRED = ((0.95, 0.02, 0.01), (0.9, 0.05, 0.01), (0.6, 0.15, 0.10), (0.3, 0.3, 0.2))
"""Probabilities that both, only A and only B are right."""


def contains(intervals, truth):
    """Give the share of intervals that hold the truth."""
    return np.mean([low <= truth <= high for low, high in intervals])


@pytest.mark.parametrize(
    ("correct", "count"), [(0, 1), (1, 1), (0, 30), (30, 30), (7, 30), (335, 359), (49_999, 50_000)]
)
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_wilson_interval_equals_scipy(correct, count, confidence):
    expected = binomtest(correct, count).proportion_ci(confidence, method="wilson")
    assert wilson_interval(correct, count, confidence=confidence) == pytest.approx(tuple(expected), abs=1e-12)


@pytest.mark.parametrize(("share", "count"), [(0.5, 60), (0.9, 177), (0.98, 359)])
def test_wilson_interval_holds_the_truth_in_95_of_100_trials(share, count):
    draws = np.random.default_rng(0).binomial(count, share, size=4000)
    intervals = {correct: wilson_interval(correct, count) for correct in np.unique(draws).tolist()}
    assert 0.93 < contains([intervals[correct] for correct in draws.tolist()], share) < 0.975


def test_bootstrap_intervals_follow_the_seed_and_the_statistic():
    values = np.random.default_rng(0).normal(size=50)

    def draw(rows):
        assert rows.shape == (50,)
        return float(values[rows].mean()), float(-values[rows].mean()), 3.0

    first, again, other = (bootstrap_intervals(draw, 50, seed=seed, resamples=200) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    (low, high), mirrored, constant = first
    assert mirrored == pytest.approx((-high, -low), abs=1e-12)
    assert constant == (3.0, 3.0)


def test_bootstrap_interval_of_a_mean_is_near_that_of_theory():
    values = np.random.default_rng(0).normal(2, 3, size=400)
    ((low, high),) = bootstrap_intervals(lambda rows: (float(values[rows].mean()),), 400, resamples=4000)
    error = values.std() / 20
    expected = norm.interval(0.95, values.mean(), error)
    assert (low, high) == pytest.approx(expected, abs=0.15 * error)


def test_bootstrap_interval_holds_the_truth_in_95_of_100_trials():
    """Losses as a classifier has them, many near 0 and few large; such skew costs it a little."""
    generator = np.random.default_rng(0)
    trials = generator.exponential(size=(300, 150)) ** 1.5
    truth = 1.3293403881791370  # the gamma function at 2.5
    intervals = [
        bootstrap_intervals(lambda rows, losses=losses: (float(losses[rows].mean()),), 150, seed=seed, resamples=300)[0]
        for seed, losses in enumerate(trials)
    ]
    assert 0.90 < contains(intervals, truth) < 0.975


@pytest.mark.parametrize(
    ("only_a", "only_b", "expected"), [(0, 0, 1.0), (3, 3, 1.0), (2, 8, 112 / 1024), (0, 6, 2 / 64), (10, 1, 24 / 2048)]
)
def test_mcnemar_gives_the_values_worked_by_hand(only_a, only_b, expected):
    assert mcnemar(only_a, only_b) == pytest.approx(expected, rel=1e-12)
    assert mcnemar(only_b, only_a) == pytest.approx(expected, rel=1e-12)


def test_mcnemar_of_many_images_nears_the_chi_squared_test():
    chi = (5200 - 5000) / np.sqrt(10_200)
    assert mcnemar(5200, 5000) == pytest.approx(2 * norm.sf(chi), abs=2e-3)


@pytest.mark.parametrize(
    ("table", "expected", "digits"),
    [
        # Altman and others, Statistics with Confidence (2nd edition, 2000), page 52.
        ((14, 5, 0, 22), (0.011, 0.226), 3),
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017), chapter 8.
        ((59, 6, 16, 80), (-0.1186, -0.0046), 4),
    ],
)
def test_paired_difference_interval_gives_published_values(table, expected, digits):
    low, high = paired_difference_interval(*table)
    assert (round(low, digits), round(high, digits)) == expected
    both, only_a, only_b, neither = table
    assert paired_difference_interval(both, only_b, only_a, neither) == pytest.approx((-high, -low))


def test_paired_difference_interval_has_a_width_where_the_models_never_differ():
    for table in ((0, 0, 0, 90), (90, 0, 0, 0), (60, 0, 0, 30)):
        low, high = paired_difference_interval(*table)
        assert low == -high
        assert 0 <= high < 0.06
    assert paired_difference_interval(90, 0, 0, 0)[1] > 0.02


@pytest.mark.parametrize("shares", PAIRED)
@pytest.mark.parametrize("count", [177, 2000])
def test_paired_difference_interval_holds_the_truth_in_95_of_100_trials(shares, count):
    _, only_a, only_b = shares
    tables = np.random.default_rng(0).multinomial(count, [*shares, 1 - sum(shares)], size=2000)
    intervals = [paired_difference_interval(*table) for table in tables.tolist()]
    assert 0.935 < contains(intervals, only_a - only_b) < 0.99


def seeds_world(generator, trials, num_seeds, count, spread):
    """Draw differences (trials, S, N) of two recipes whose log odds of being right vary over images and seeds."""
    shape = (trials, num_seeds, count)
    image, odd = generator.normal(3, 3, (trials, 1, count)), generator.normal(0, 0.5, (trials, 1, count))
    seeds = generator.normal(0, spread, (2, trials, num_seeds, 1))
    right = [
        generator.random(shape) < 1 / (1 + np.exp(-(image + sign * (0.15 + odd) + seed)))
        for sign, seed in zip((1, -1), seeds, strict=True)
    ]
    return right[0].astype(float) - right[1]


def seeds_truth(spread):
    """Integrate the difference over images and seeds: with all terms normal, it is that of one normal of their sum."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    width = np.sqrt(9 + 0.25 + spread**2)
    shares = [1 / (1 + np.exp(-(3 + sign * 0.15 + width * nodes))) for sign in (1, -1)]
    return float(weights @ (shares[0] - shares[1])) / np.sqrt(2 * np.pi)


@pytest.mark.parametrize(
    ("num_seeds", "count", "spread", "lowest"),
    [
        (2, 360, 0.0, 0.95),
        (2, 360, 0.3, 0.89),
        (2, 3000, 0.3, 0.83),
        (3, 360, 0.0, 0.95),
        (3, 360, 0.3, 0.92),
        (5, 360, 0.1, 0.95),
        (5, 360, 0.3, 0.93),
        (5, 3000, 0.3, 0.88),
    ],
)
def test_mean_difference_interval_holds_the_truth_over_images_and_seeds(num_seeds, count, spread, lowest):
    worlds = seeds_world(np.random.default_rng(0), 600 if count < 1000 else 150, num_seeds, count, spread)
    intervals = [mean_difference_interval(differences) for differences in worlds]
    assert lowest < contains(intervals, seeds_truth(spread)) <= 0.998


def test_mean_difference_interval_widens_with_seeds_that_disagree():
    calm = np.zeros((3, 200))
    calm[:, :10] = 1
    torn = calm.copy()
    torn[0, 10:30], torn[1, 10:30] = 1, -1
    assert calm.mean() == torn.mean()
    (low, high), (lower, higher) = mean_difference_interval(calm), mean_difference_interval(torn)
    assert (low + high) / 2 == pytest.approx(0.05)
    assert higher - lower > 4 * (high - low)


def test_mean_difference_interval_gives_the_value_worked_by_hand():
    differences = np.zeros((2, 40))
    differences[:, :4] = [[1, 0, 0, -1], [1, 1, 0, 1]]
    of_images = (1 + 0.25 - 40 * 0.0375**2 + 1) / 1600  # means over the seeds 1, 0.5 and 0; of all 0.0375
    of_seeds = 0.075**2 / 2 / 2  # means over the images 0 and 0.075
    freedom = (of_images + of_seeds) ** 2 / (of_images**2 / 39 + of_seeds**2)
    half = t.ppf(0.975, freedom) * np.sqrt(of_images + of_seeds)
    assert mean_difference_interval(differences) == pytest.approx((0.0375 - half, 0.0375 + half), rel=1e-12)


def test_mean_difference_interval_of_seeds_that_agree_is_agrestis_and_mins():
    """Without any spread over seeds what is left is one sample of images: 30 for A, 20 for B, of 500."""
    one = np.zeros(500)
    one[:30], one[30:50] = 1, -1
    low, high = mean_difference_interval(np.stack([one, one]))
    half = t.ppf(0.975, 499) * np.sqrt(51 - 100 / 500) / 500
    assert (low, high) == pytest.approx((0.02 - half, 0.02 + half), rel=1e-9)


def test_mean_difference_interval_has_a_width_where_runs_never_differ():
    low, high = mean_difference_interval(np.zeros((3, 359)))
    assert low == -high
    assert 0.005 < high < 0.006
