"""Scores: sums and counts, whatever the batch size."""

import math

import pytest
import torch
import torch.nn.functional as F

from vitlab.data.images import ImageError
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.evaluator import Scores, evaluate
from vitlab.engine.objectives import Classification, Step
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
        {"class": "a", "count": 2, "precision": 1 / 2, "recall": 1 / 2, "f1": 1 / 2},
        {"class": "b", "count": 3, "precision": 1 / 2, "recall": 1 / 3, "f1": 2 / 5},
        {"class": "c", "count": 0, "precision": 0.0, "recall": None, "f1": 0.0},
    ]
    expected = F.cross_entropy(torch.tensor(logits, dtype=torch.float64), torch.tensor([0, 1, 1, 1, 0])).item()
    assert result["loss"] == pytest.approx(expected, rel=1e-6)


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
