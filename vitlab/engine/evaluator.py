"""The one evaluation: sums and counts over a loader, never means of batch means."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitlab.config import WeightsKind
from vitlab.data.images import ImageError
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.objectives import Objective, Step
from vitlab.models.network import device_of


@dataclass
class Scores:
    """Sums over the images seen, and the ratios that follow from them.

    The confusion matrix (K, K) int64 has a row for each true class and a column for each predicted one.
    """

    classes: tuple[str, ...]
    weights: WeightsKind = "raw"
    """Which weights were scored."""
    count: int = 0
    loss_sum: float = 0.0
    top_k_correct: int = 0
    confusion: Tensor = field(init=False)
    errors: list[ImageError] = field(default_factory=list)
    """Images that could not be read; they are in no count."""

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
        if step.outputs is None:
            return
        logits, labels = step.outputs.cpu(), batch.labels.cpu()
        K = len(self.classes)
        # A non-finite row predicts nothing: argmax would call NaN the first class.
        finite = logits.isfinite().all(dim=1)
        predicted = logits.argmax(dim=1)
        pairs = (labels * K + predicted)[finite]
        self.confusion += torch.bincount(pairs, minlength=K * K).view(K, K)
        if self.k is not None:
            hit = (logits.topk(self.k, dim=1).indices == labels[:, None]).any(dim=1)
            self.top_k_correct += int((hit & finite).sum())

    @property
    def loss(self) -> float:
        """Mean loss over the images, in nats."""
        return self.loss_sum / self.count

    @property
    def top1(self) -> float:
        """Share of images whose likeliest class is the true one."""
        return int(self.confusion.diagonal().sum()) / self.count

    def per_class(self) -> list[dict[str, Any]]:
        """Give count, precision, recall and F1 of each class; None where a ratio has nothing below its line."""
        correct = self.confusion.diagonal().tolist()
        true, predicted = self.confusion.sum(dim=1).tolist(), self.confusion.sum(dim=0).tolist()
        return [
            {
                "class": name,
                "count": true[i],
                "precision": correct[i] / predicted[i] if predicted[i] else None,
                "recall": correct[i] / true[i] if true[i] else None,
                "f1": 2 * correct[i] / (true[i] + predicted[i]) if true[i] + predicted[i] else None,
            }
            for i, name in enumerate(self.classes)
        ]

    def summary(self) -> dict[str, Any]:
        """Give the headline numbers: top1, error, top5 (or top-k of fewer classes), loss, count, weights."""
        top_k = {} if self.k is None else {f"top{self.k}": self.top_k_correct / self.count}
        return {
            "top1": self.top1,
            "error": 1.0 - self.top1,
            **top_k,
            "loss": self.loss,
            "count": self.count,
            "weights": self.weights,
        }

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain JSON values; fractions, not percent."""
        return {
            **self.summary(),
            "unreadable": [{"path": error.path, "reason": error.reason} for error in self.errors],
            "per_class": self.per_class(),
            "confusion": self.confusion.tolist(),
            "classes": list(self.classes),
        }


def headline(summary: dict[str, Any]) -> str:
    """Write a summary's scores for people: `top-1 61.02% top-5 98.87% loss 1.1164`."""
    tops = "".join(f"top-{key[3:]} {summary[key]:.2%} " for key in summary if key.startswith("top"))
    return f"{tops}loss {summary['loss']:.4f}"


@torch.inference_mode()
def evaluate(
    objective: Objective,
    batches: Iterable[Batch],
    *,
    classes: tuple[str, ...],
    preprocess: Preprocess,
    weights: WeightsKind = "raw",
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
        on_batch: told the number of images after each batch.

    Raises:
        InputError: no image could be read.
    """
    device = device_of(objective)
    was_training = objective.training
    objective.eval()
    scores = Scores(classes=classes, weights=weights)
    try:
        for batch in batches:
            images = preprocess.normalize(batch.images.to(device, non_blocking=True))
            batch = replace(batch, images=images, labels=batch.labels.to(device, non_blocking=True))
            if len(batch.labels):
                scores.add(batch, objective(batch))
            else:
                scores.errors.extend(batch.errors)
            if on_batch is not None:
                on_batch(len(batch.labels) + len(batch.errors))
    finally:
        objective.train(was_training)
    if not scores.count:
        raise scores.errors[0] if scores.errors else AssertionError("a loader without images")
    return scores
