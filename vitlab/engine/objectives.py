"""What training minimises: modules around a network that turn a batch into a loss.

The trainer, the evaluator and the files do not know which objective runs. An objective wraps one network, so that
what distributes or compiles a model wraps one module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.checks import require
from vitlab.config import ObjectiveConfig
from vitlab.data.loader import Batch
from vitlab.models.network import Network, device_of


@dataclass(frozen=True)
class Step:
    """What an objective makes of a batch."""

    loss: Tensor
    """Scalar float32: mean over the batch's images."""
    outputs: Tensor | None
    """Class logits (B, K), or None where the objective does not classify."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """The loss's named terms, detached, where it has several."""


class Objective(nn.Module):
    """Base of all objectives: holds the network, and names the metric that chooses the best file."""

    metric: str
    """A key of the scores."""
    higher_is_better: bool

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.train(network.training)

    def forward(self, batch: Batch) -> Step:
        """Give the loss of a batch whose images are float (B, C, H, W), normalised, on the network's device."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> "Objective":
        """Set the mode; what is frozen stays in evaluation mode, with the dropout beside it, and so never varies."""
        super().train(mode)
        for module in self.network.modules():
            trained = [parameter.requires_grad for parameter in module.parameters()]
            if all(trained):
                continue
            for part in (module, *module.children()):
                if not any(parameter.requires_grad for parameter in part.parameters()):
                    part.eval()
        return self

    def rank(self, scores: dict[str, Any]) -> tuple[float, float]:
        """Give a key that orders scores, the better the larger; equal metrics are told apart by the loss."""
        value = scores[self.metric]
        return (value if self.higher_is_better else -value, -scores["loss"])


class Classification(Objective):
    """Cross-entropy of class logits; labels are indices (B,), or probabilities (B, K) as mixup makes them.

    Label smoothing and class weights are for training: evaluation reports the plain cross-entropy.

    Args:
        network: gives the logits.
        label_smoothing: share of the target that is spread over all classes.
        class_weights: float (K,), or None for equal ones. The loss of a batch is the sum of its images' weighted losses
            over their number, not over their weights: so it does not matter which images share a batch.
    """

    metric = "top1"
    higher_is_better = True

    class_weights: Tensor | None

    def __init__(self, network: Network, *, label_smoothing: float = 0.0, class_weights: Tensor | None = None) -> None:
        super().__init__(network)
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, batch: Batch) -> Step:
        """Give the mean cross-entropy in nats, computed in float32 under any autocast, and the logits."""
        logits = self.network(batch.images).float()  # (B, K)
        smoothing, weights = (self.label_smoothing, self.class_weights) if self.training else (0.0, None)
        with torch.autocast(logits.device.type, enabled=False):
            losses = F.cross_entropy(
                logits,
                batch.labels,
                weight=weights,
                label_smoothing=smoothing,
                reduction="sum" if weights is not None else "mean",
            )
            loss = losses if weights is None else losses / len(logits)
        return Step(loss=loss, outputs=logits)


def balanced_weights(class_counts: Sequence[int]) -> Tensor:
    """Weigh each class by one over its share, so that the mean weight of an image is 1; a class without images by 0."""
    counts = torch.tensor(class_counts, dtype=torch.float64)
    held = int((counts > 0).sum())
    return torch.where(counts > 0, counts.sum() / (held * counts), 0.0).float()


def build_objective(config: ObjectiveConfig, network: Network, *, class_counts: Sequence[int]) -> Objective:
    """Put the objective that the configuration names around a network, on the network's device.

    Args:
        config: the run's `objective` section.
        network: what is trained.
        class_counts: training images of each class.

    Raises:
        InputError: there are not as many class weights as classes.
    """
    weights = None
    if config.class_weights == "balanced":
        weights = balanced_weights(class_counts)
    elif config.class_weights != "none":
        K = len(class_counts)
        given = len(config.class_weights)
        require(given == K, f"objective.class_weights has {given} numbers for {K} classes: give one for each")
        weights = torch.tensor(config.class_weights, dtype=torch.float32)
    match config.name:
        case "classification":
            objective = Classification(network, label_smoothing=config.label_smoothing, class_weights=weights)
    return objective.to(device_of(network))
