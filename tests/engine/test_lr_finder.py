"""The range test's reading of a curve."""

import numpy as np
import pytest

from vitlab.engine.lr_finder import LrCurve


def test_suggestion_is_where_the_loss_falls_steepest():
    rates = np.geomspace(1e-6, 1.0, 100)
    decades = np.log10(rates)
    losses = 2.0 - 1.5 / (1 + np.exp(-4 * (decades + 3))) + np.where(decades > -1.5, 3 * (decades + 1.5) ** 2, 0)
    noisy = losses + 0.02 * np.random.default_rng(0).standard_normal(100)
    for values in (losses, noisy):
        suggestion = LrCurve(rates.tolist(), values.tolist()).suggestion
        assert np.log10(suggestion) == pytest.approx(-3, abs=0.25)


@pytest.mark.parametrize("losses", [[1.0, 2.0, 3.0, 4.0], [], [1.0]])
def test_suggestion_is_none_where_the_loss_never_falls(losses):
    rates = [10.0**power for power in range(len(losses))]
    assert LrCurve(rates, losses).suggestion is None


def test_smoothed_loss_averages_four_steps_on_each_side():
    losses = [float(value) for value in (9, 1, 1, 1, 1, 1, 1, 1, 1, 10)]
    smoothed = LrCurve([1.0] * 10, losses).smoothed
    assert smoothed[0] == pytest.approx((9 + 4) / 5)
    assert smoothed[4] == pytest.approx((9 + 8) / 9)
    assert smoothed[9] == pytest.approx((10 + 4) / 5)
