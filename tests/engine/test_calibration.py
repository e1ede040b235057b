"""Calibration: equal to torchmetrics and scikit-learn on the same arrays, and temperatures that are known."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import brier_score_loss, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from vitlab.engine.calibration import (
    LogitSample,
    expected_calibration_error,
    fit_temperature,
    join,
    reliability_bins,
    risk_coverage,
    score_images,
)


def draw(count, num_classes, *, sharpness=1.0, seed=0):
    """Draw labels from the softmax of random logits (N, K), and give the logits times `sharpness`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
    return (sharpness * logits).float(), labels


def scored(logits, labels, *, k=1):
    return score_images(logits, labels, torch.arange(len(labels)), k=k)


@pytest.mark.parametrize(("count", "num_classes"), [(1000, 3), (997, 10), (60, 100)])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 8.0])
def test_score_images_equals_torchmetrics_and_scikit_learn(count, num_classes, sharpness):
    logits, labels = draw(count, num_classes, sharpness=sharpness)
    shares, classes = logits.double().softmax(dim=1), np.arange(num_classes)
    images = scored(logits, labels)
    expected = multiclass_calibration_error(shares, labels, num_classes, n_bins=15, norm="l1")
    assert images.ece == pytest.approx(expected.item(), abs=1e-6)
    seen = images.nll < 30  # scikit-learn clips smaller shares
    peer = log_loss(labels[seen], shares[seen], labels=classes)
    assert images.nll[seen].mean() == pytest.approx(peer, rel=1e-9)
    np.testing.assert_allclose(images.nll, F.cross_entropy(logits.double(), labels, reduction="none"), rtol=1e-9)
    by_definition = np.square(shares.numpy() - np.eye(num_classes)[labels]).sum(axis=1)
    np.testing.assert_allclose(images.brier, by_definition, atol=1e-12)
    peer = brier_score_loss(labels, shares.numpy(), labels=classes, scale_by_half=False)
    assert images.brier.mean() == pytest.approx(peer, rel=1e-9)
    assert images.correct.mean() == (logits.argmax(dim=1) == labels).double().mean().item()


def test_score_images_gives_the_values_worked_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    images = score_images(logits, torch.tensor([1, 2]), torch.tensor([7, 4]), k=2)
    assert images.index.tolist() == [7, 4]
    assert images.label.tolist() == [1, 2]
    assert images.predicted.tolist() == [0, 2]
    assert images.correct.tolist() == [False, True]
    assert images.in_top_k.tolist() == [True, True]
    np.testing.assert_allclose(images.confidence, [0.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(images.nll, [-math.log(0.3), -math.log(0.8)], rtol=1e-6)
    np.testing.assert_allclose(images.brier, [0.25 + 0.49 + 0.04, 0.01 + 0.01 + 0.04], rtol=1e-6)
    assert images.ece == pytest.approx((0.5 + 0.2) / 2, rel=1e-6)


def test_score_images_lets_a_row_that_is_not_finite_predict_nothing():
    logits = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [2.0, 1.0]])
    images = scored(logits, torch.tensor([0, 0, 0]), k=2)
    assert images.predicted.tolist() == [-1, -1, 0]
    assert images.in_top_k.tolist() == [False, False, True]


def test_join_keeps_every_image_in_order():
    logits, labels = draw(10, 4)
    indices = torch.arange(10) + 3
    parts = [score_images(logits[rows], labels[rows], indices[rows], k=2) for rows in (slice(0, 7), slice(7, 10))]
    whole, joined = score_images(logits, labels, indices, k=2), join(parts)
    for name in vars(whole):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))


def test_expected_calibration_error_gives_the_value_worked_by_hand():
    confidence, correct = np.array([0.62, 0.65, 0.97, 0.98, 0.3]), np.array([True, False, True, True, False])
    expected = abs(1 - 1.27) / 5 + abs(2 - 1.95) / 5 + 0.3 / 5
    assert expected_calibration_error(confidence, correct) == pytest.approx(expected)


def test_expected_calibration_error_counts_certainty_in_a_bin_of_its_own():
    shares = torch.tensor([[1.0, 0.0, 0.0], [0.95, 0.05, 0.0]], dtype=torch.float64)
    expected = multiclass_calibration_error(shares, torch.tensor([1, 0]), 3, n_bins=15, norm="l1").item()
    found = expected_calibration_error(np.array([1.0, 0.95]), np.array([False, True]))
    assert found == pytest.approx((1 + 0.05) / 2)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("nudge", [-1, 0, 1])
def test_expected_calibration_error_puts_an_edge_where_torchmetrics_does(nudge):
    """Confidences at, just below and just above the edges of the bins, 1.0 among them; each bin holds both verdicts."""
    edges = torch.linspace(0, 1, 16)
    towards = edges + nudge
    confidence = torch.nextafter(edges, towards)[6:].clamp(max=1).repeat(3)  # 0.4 and more: the likeliest of three
    middles = (edges[6:-1] + edges[7:]) / 2
    confidence = torch.cat([confidence, middles])
    rest = (1 - confidence.double()) / 2
    shares = torch.stack([confidence.double(), rest, rest], dim=1)
    labels = (torch.rand(len(shares), generator=torch.Generator().manual_seed(0)) > 0.6).long()
    expected = multiclass_calibration_error(shares, labels, 3, n_bins=15, norm="l1").item()
    correct = (labels == 0).numpy()
    assert expected_calibration_error(confidence.double().numpy(), correct) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.7, 5.0])
def test_fit_temperature_recovers_the_factor_and_lowers_the_loss_elsewhere(factor):
    logits, labels = draw(40_000, 10, sharpness=factor)
    held_out, held_out_labels = draw(5_000, 10, sharpness=factor, seed=1)
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(factor, rel=0.02)
    raw, calibrated = (F.cross_entropy(held_out / t, held_out_labels).item() for t in (1.0, temperature))
    assert calibrated < raw or factor == 1.0
    assert calibrated == pytest.approx(F.cross_entropy(held_out / factor, held_out_labels).item(), abs=1e-3)


def test_fit_temperature_finds_the_minimum_of_the_loss(monkeypatch):
    logits, labels = draw(300, 7, sharpness=2.0)
    logits += 1000  # a shift of a row's logits changes nothing
    temperature = fit_temperature(logits, labels)

    def loss(t):
        return F.cross_entropy(logits.double() / t, labels).item()

    assert all(loss(temperature) < loss(temperature * factor) for factor in (0.99, 1.01))
    monkeypatch.setattr("vitlab.engine.calibration._CHUNK_VALUES", 50)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=1e-7)


def test_fit_temperature_leaves_out_rows_that_are_not_finite():
    logits, labels = draw(300, 7, sharpness=2.0)
    broken = torch.cat([logits, torch.full((5, 7), math.nan), torch.full((5, 7), -math.inf)])
    assert fit_temperature(broken, torch.cat([labels, torch.zeros(10, dtype=torch.int64)])) == pytest.approx(
        fit_temperature(logits, labels), rel=1e-9
    )


def test_fit_temperature_stays_in_its_range():
    logits, labels = draw(4000, 5)
    assert fit_temperature(logits * 1000, labels) == 20.0
    assert fit_temperature(logits / 1000, labels) == 0.05
    assert fit_temperature(-logits, labels) == 20.0  # worse than chance: the flatter, the better


def test_fit_temperature_is_one_where_nothing_can_be_fitted():
    logits, labels = draw(50, 5)
    assert fit_temperature(logits, logits.argmax(dim=1)) == 1.0
    assert fit_temperature(logits[:0], labels[:0]) == 1.0
    assert fit_temperature(torch.full((50, 5), 0.3), labels) == 1.0
    assert fit_temperature(torch.full((50, 5), math.nan), labels) == 1.0


@pytest.mark.parametrize(("max_values", "every"), [(10_000, 1), (250, 1), (249, 2), (60, 8)])
@pytest.mark.parametrize("size", [1, 7, 50])
def test_logit_sample_keeps_every_mth_image_whatever_the_batches(max_values, every, size):
    logits, labels = draw(50, 5)
    sample = LogitSample(max_values)
    for start in range(0, 50, size):
        sample.add(logits[start : start + size], labels[start : start + size], torch.arange(50)[start : start + size])
    kept, kept_labels = sample.tensors()
    assert sample.every == every
    assert torch.equal(kept, logits[::every])
    assert torch.equal(kept_labels, labels[::every])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_logit_sample_does_not_depend_on_the_number_of_processes(count):
    """Each process has every count-th image, and stops to keep all at another moment."""
    logits, labels = draw(50, 5)
    whole, *others = (LogitSample(100) for _ in range(count))
    for place, sample in enumerate((whole, *others)):
        rows = torch.arange(place, 50, count)
        for part in rows.split(4):
            sample.add(logits[part], labels[part], part)
    for other in others:
        whole.absorb(other)
    kept, kept_labels = whole.tensors()
    assert whole.every == 4
    assert torch.equal(kept, logits[::4])
    assert torch.equal(kept_labels, labels[::4])


CONFIDENCE = np.array([0.9, 0.6, 0.8, 0.6, 0.95, 0.3])
CORRECT = np.array([True, False, False, True, True, False])


def test_risk_coverage_equals_hand_counted_values():
    curve = risk_coverage(CONFIDENCE, CORRECT)
    assert curve.threshold.tolist() == [0.95, 0.9, 0.8, 0.6, 0.3]  # the two of .6 are answered together
    np.testing.assert_allclose(curve.coverage, [1 / 6, 2 / 6, 3 / 6, 5 / 6, 1])
    np.testing.assert_allclose(curve.risk, [0, 0, 1 / 3, 2 / 5, 3 / 6])
    assert curve.most_within(0.0) == 1
    assert curve.most_within(0.34) == 2
    assert curve.most_within(0.5) == 4
    assert risk_coverage(CONFIDENCE, ~CORRECT).most_within(0.2) is None
    assert [curve.least_covering(share) for share in (0.1, 0.5, 0.6, 1.0)] == [0, 2, 3, 4]


def test_reliability_bins_equal_hand_counted_values_and_add_up_to_the_calibration_error():
    bins = reliability_bins(CONFIDENCE, CORRECT)  # edges at multiples of 1/15
    assert [(bin.count, bin.correct) for bin in bins] == [(1, 0), (2, 1), (1, 0), (1, 1), (1, 1)]
    np.testing.assert_allclose([bin.confidence for bin in bins], [0.3, 0.6, 0.8, 0.9, 0.95])
    assert [bin.accuracy for bin in bins] == [0, 0.5, 0, 1, 1]
    gap = sum(bin.count * abs(bin.accuracy - bin.confidence) for bin in bins) / len(CORRECT)
    assert gap == pytest.approx(expected_calibration_error(CONFIDENCE, CORRECT))


def test_worst_mistakes_are_the_wrong_ones_in_order_of_surprise():
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [5.0, 0.0], [1.0, 0.0], [float("nan"), 0.0]])
    images = score_images(logits, torch.tensor([1, 1, 1, 1, 1]), torch.tensor([4, 7, 9, 2, 3]), k=1)
    assert images.worst_mistakes(10).tolist() == [2, 0, 3]
    assert images.worst_mistakes(2).tolist() == [2, 0]
    assert images.at(images.worst_mistakes(2)).index.tolist() == [9, 4]
