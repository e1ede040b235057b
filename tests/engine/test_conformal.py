"""Conformal sets: the threshold against values worked out by hand, and coverage on images held out."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from vitlab.engine.conformal import conformal_threshold, split_conformal

SHARES = np.array([0.31, 0.9, 0.62, 0.05, 0.77, 0.48, 0.99, 0.2, 0.83])  # n = 9


@pytest.mark.parametrize(
    ("level", "threshold"),
    [
        (0.5, 0.62),  # ceil(10 * .5) = 5th largest
        (0.51, 0.48),  # ceil(5.1) = 6th
        (0.8, 0.2),  # 8th
        (0.9, 0.05),  # 9th: the least of all
        (0.91, 0.0),  # 10th of 9: no threshold is low enough
        (0.05, 0.99),  # 1st
    ],
)
def test_threshold_is_the_rank_that_the_finite_sample_asks_for(level, threshold):
    assert conformal_threshold(SHARES, level) == threshold


def test_threshold_rank_survives_rounding():
    shares = np.arange(1, 100) / 100  # n = 99: 100 * .07 is 7.000000000000001 in floats
    assert conformal_threshold(shares, 0.07) == 0.93


def test_split_conformal_calibrates_on_one_half_and_counts_the_other():
    shares = np.array([[0.7, 0.2, 0.1]] * 6 + [[0.4, 0.35, 0.25]] * 5)
    labels = np.array([0] * 11)
    sets = split_conformal(shares, labels, level=0.5, seed=3)
    assert (sets.num_calibrated, len(sets.sizes)) == (5, 6)
    # Of 5 images the 3rd largest sets it: .7 where 3 or more of the sure ones are among them, else .4.
    assert sets.threshold in (0.7, 0.4)
    expected = (1, 0) if sets.threshold == 0.7 else (1, 1)
    assert set(sets.sizes.tolist()) <= set(expected)
    assert sets.coverage == (sets.sizes == 1).mean() == sets.mean_size
    assert sets.coverage_interval[0] < sets.coverage <= sets.coverage_interval[1]
    assert sum(count for _, count, _ in sets.by_size()) == 6
    assert all(held == (count if size else 0) for size, count, held in sets.by_size())
    assert not np.array_equal(sets.holds, split_conformal(shares, labels, level=0.5, seed=4).holds)


def test_few_images_put_every_class_into_the_set():
    sets = split_conformal(np.array([[0.9, 0.1]] * 4), np.array([0, 0, 0, 1]), level=0.9)
    assert (sets.threshold, sets.mean_size, sets.coverage) == (0.0, 2.0, 1.0)


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_sets_hold_the_level_on_held_out_digits_within_the_binomial_error(level):
    images, labels = load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    images = images + generator.normal(0, 9, images.shape)  # so that there is something to be unsure of
    model = LogisticRegression(max_iter=300).fit(images[:600] / 16, labels[:600])
    shares, held_out = model.predict_proba(images[600:] / 16), labels[600:]
    coverages = [split_conformal(shares, held_out, level=level, seed=seed).coverage for seed in range(40)]
    n = len(held_out) / 2
    error = np.sqrt(level * (1 - level) * (1 / n + 1 / n))  # of the half that sets and of the half that counts
    assert max(abs(coverage - level) for coverage in coverages) < 3.5 * error
    assert level - 3.5 * error / 40**0.5 < np.mean(coverages) < level + 1 / (n + 1) + 3.5 * error / 40**0.5
    assert split_conformal(shares, held_out, level=level).mean_size > 1.05
