"""Scores: sums and counts, whatever the batch size."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score

from vitlab.data.images import ImageError
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.evaluator import Scores, evaluate, headline
from vitlab.engine.objectives import Classification, Step
from vitlab.engine.statistics import wilson_interval
from vitlab.models.catalog import create_model


def batch_of(logits, labels, errors=()):
    labels = torch.tensor(labels)
    logits = torch.tensor(logits, dtype=torch.float32).reshape(len(labels), -1)
    loss = F.cross_entropy(logits, labels) if len(labels) else torch.tensor(0.0)
    batch = Batch(images=torch.empty(len(labels), 0), labels=labels, indices=torch.arange(len(labels)), errors=errors)
    return batch, Step(loss=loss, outputs=logits)


def test_scores_weigh_batches_by_their_images():
    scores = Scores(classes=("a", "b"))
    for size, accuracy in ((256, 0.7), (256, 0.8), (10, 0.9)):
        right = round(size * accuracy)
        labels = torch.zeros(size, dtype=torch.int64)
        logits = torch.tensor([[1.0, 0.0]] * right + [[0.0, 1.0]] * (size - right))
        scores.add(Batch(images=logits, labels=labels, indices=labels), Step(F.cross_entropy(logits, labels), logits))
    assert scores.top1 == (179 + 205 + 9) / 522
    assert scores.count == 522


def test_scores_count_confusion_and_ratios_by_hand():
    scores = Scores(classes=("a", "b", "c"))
    logits = [[3, 2, 1], [3, 1, 2], [1, 3, 2], [1, 2, 3], [2, 3, 1]]
    scores.add(*batch_of(logits, [0, 1, 1, 1, 0]))
    result = scores.to_dict()
    assert result["confusion"] == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert result["top1"] == 2 / 5
    assert result["error"] == 3 / 5
    assert result["top2"] == 4 / 5
    assert "top5" not in result
    assert result["per_class"] == [
        row("a", 2, 1 / 2, 1 / 2, [*wilson_interval(1, 2)], 1 / 2),
        row("b", 3, 1 / 2, 1 / 3, [*wilson_interval(1, 3)], 2 / 5),
        row("c", 0, 0.0, None, None, 0.0),
    ]
    assert result["macro_recall"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert result["macro_f1"] == pytest.approx((1 / 2 + 2 / 5 + 0) / 3)
    expected = F.cross_entropy(torch.tensor(logits, dtype=torch.float64), torch.tensor([0, 1, 1, 1, 0])).item()
    assert result["loss"] == pytest.approx(expected, rel=1e-6)


def row(name, count, precision, recall, recall_interval, f1):
    return {
        "class": name,
        "count": count,
        "precision": precision,
        "recall": recall,
        "recall_interval": recall_interval,
        "f1": f1,
    }


def random_batch(count, num_classes, *, sharpness=1.0, seed=0):
    """Draw logits and labels that follow their softmax; the logits then times `sharpness`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, num_classes, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
    return batch_of((logits * sharpness).tolist(), labels.tolist())


def test_scores_keep_each_image_with_its_place_in_the_split():
    scores = Scores(classes=("a", "b"))
    for start in (0, 3):
        batch, step = random_batch(3, 2, seed=start)
        scores.add(replace(batch, indices=torch.arange(3) + start), step)
    assert scores.images.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert scores.images.correct.sum() == scores.num_correct
    assert scores.images.nll.mean() == pytest.approx(scores.loss, rel=1e-6)


def test_scores_macro_means_equal_scikit_learn():
    scores = Scores(classes=tuple("abcdef"))
    batch, step = random_batch(80, 5)
    step = Step(step.loss, F.pad(step.outputs, (0, 1), value=-50.0))  # nobody is f, and nobody is taken for it
    scores.add(batch, step)
    result, images = scores.to_dict(), scores.images
    assert result["macro_recall"] == pytest.approx(balanced_accuracy_score(images.label, images.predicted))
    assert result["macro_f1"] == pytest.approx(f1_score(images.label, images.predicted, average="macro"))


def test_scores_give_an_interval_around_every_share_and_mean():
    scores = Scores(classes=tuple("abcdef"))
    scores.add(*random_batch(200, 6))
    result = scores.to_dict()
    intervals = result["intervals"]
    assert intervals["top1"] == [*wilson_interval(scores.num_correct, 200)]
    assert intervals["error"] == [1 - intervals["top1"][1], 1 - intervals["top1"][0]]
    assert intervals["top5"] == [*wilson_interval(scores.top_k_correct, 200)]
    assert intervals.keys() == {"top1", "error", "top5", "loss", "ece", "brier", "macro_recall", "macro_f1"}
    for name in ("loss", "brier"):
        values = scores.images.nll if name == "loss" else scores.images.brier
        half = 1.96 * values.std() / math.sqrt(200)
        assert intervals[name] == pytest.approx([values.mean() - half, values.mean() + half], abs=0.25 * half)
    for name in ("macro_recall", "macro_f1"):
        low, high = intervals[name]
        assert 0.08 < high - low < 0.2
        assert low < result[name] < high
    assert intervals["ece"][1] > result["ece"]
    assert scores.to_dict() == result


def test_scores_summary_draws_no_bootstrap(monkeypatch):
    monkeypatch.setattr("vitlab.engine.evaluator.bootstrap_intervals", None)
    scores = Scores(classes=("a", "b", "c"))
    scores.add(*random_batch(20, 3))
    summary = scores.summary()
    assert list(summary) == ["top1", "error", "top2", "loss", "ece", "brier", "count", "weights"]
    assert summary["ece"] == scores.images.ece
    assert summary["brier"] == scores.images.brier.mean()


def test_scores_calibrated_are_those_of_divided_logits():
    plain, warm, divided = (Scores(classes=tuple("abcde"), temperature=t) for t in (1.0, 3.0, 1.0))
    for seed in range(2):
        batch, step = random_batch(400, 5, sharpness=3.0, seed=seed)
        for scores in (plain, warm):
            scores.add(batch, step)
        logits = step.outputs / 3
        divided.add(batch, Step(F.cross_entropy(logits, batch.labels), logits))
    assert warm.summary() == plain.summary()
    assert warm.intervals() == plain.intervals()
    expected = {name: divided.summary()[name] for name in ("loss", "ece", "brier")}
    assert warm.to_dict()["calibrated"] == pytest.approx(expected, abs=1e-6)
    assert warm.to_dict()["temperature"] == 3.0
    assert all(warm.calibrated()[name] < plain.summary()[name] for name in expected)
    assert plain.calibrated() == pytest.approx({name: plain.summary()[name] for name in expected}, abs=1e-6)
    assert plain.fit_temperature() == warm.fit_temperature() == pytest.approx(3.0, rel=0.15)


def test_scores_of_an_objective_that_does_not_classify_are_its_loss_alone():
    scores = Scores(classes=("a", "b"))
    for size, loss in ((3, 1.0), (1, 5.0)):
        batch, _ = random_batch(size, 2)
        scores.add(batch, Step(loss=torch.tensor(loss), outputs=None))
    assert scores.summary() == {"loss": 2.0, "count": 4, "weights": "raw"}
    assert scores.to_dict() == scores.summary() | {"unreadable": [], "classes": ["a", "b"]}
    assert scores.fit_temperature() == 1.0
    assert headline(scores.summary()) == "loss 2.0000"


def test_headline_puts_each_interval_behind_its_score():
    summary = {"top1": 0.975, "error": 0.025, "top5": 1.0, "loss": 0.0612, "ece": 0.01, "count": 359}
    assert headline(summary) == "top-1 97.50% top-5 100.00% loss 0.0612"
    intervals = {"top1": (0.9537, 0.9869), "loss": (0.0391, 0.0854)}
    assert headline(summary, intervals) == "top-1 97.50% (95.4-98.7) top-5 100.00% loss 0.0612 (0.0391-0.0854)"


@pytest.mark.parametrize(("num_classes", "k"), [(2, None), (3, 2), (4, 3), (5, 5), (1000, 5)])
def test_scores_report_a_top_k_that_means_something(num_classes, k):
    assert Scores(classes=tuple(map(str, range(num_classes)))).k == k


def test_scores_leave_unreadable_images_out_of_the_counts():
    scores = Scores(classes=("a", "b"))
    error = ImageError("x.jpg", "empty file")
    scores.add(*batch_of([[1, 0], [1, 0]], [0, 1], errors=(error,)))
    result = scores.to_dict()
    assert result["count"] == 2
    assert result["top1"] == 0.5
    assert result["unreadable"] == [{"path": "x.jpg", "reason": "empty file"}]


def test_scores_do_not_take_nan_for_the_first_class():
    scores = Scores(classes=("a", "b"))
    scores.add(*batch_of([[math.nan, math.nan], [2, 1]], [0, 0]))
    assert scores.top1 == 0.5


def test_evaluate_is_independent_of_the_batch_size():
    torch.manual_seed(0)
    preprocess = Preprocess(image_size=(8, 12))
    model = create_model(
        "vit_tiny", num_classes=5, image_size=(8, 12), patch_size=4, embed_dim=24, depth=2, num_heads=3, drop_rate=0.5
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    images = torch.randint(0, 256, (11, 3, 8, 12), dtype=torch.uint8)
    labels = torch.randint(0, 5, (11,))
    objective = Classification(model, label_smoothing=0.3).train()

    def scored(size):
        batches = [
            Batch(images=images[i : i + size], labels=labels[i : i + size], indices=torch.arange(i, min(i + size, 11)))
            for i in range(0, 11, size)
        ]
        return evaluate(objective, batches, classes=tuple("abcde"), preprocess=preprocess)

    whole = scored(11)
    with torch.inference_mode():
        logits = model.eval()(preprocess.normalize(images))
        model.train()
    assert whole.loss == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-6)
    assert whole.top1 == (logits.argmax(1) == labels).double().mean().item()
    for size in (1, 7):
        other = scored(size)
        assert other.loss == pytest.approx(whole.loss, abs=1e-6)
        assert torch.equal(other.confusion, whole.confusion)
        assert other.top_k_correct == whole.top_k_correct
    assert objective.training
