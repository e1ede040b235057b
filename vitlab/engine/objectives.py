"""What training minimises: modules around a network that turn a batch into a loss.

The trainer, the evaluator and the files do not know which objective runs. An objective wraps one network, so that
what distributes or compiles a model wraps one module.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.config import ObjectiveConfig
from vitlab.data.loader import Batch
from vitlab.models.network import Network


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

    def rank(self, scores: dict[str, Any]) -> tuple[float, float]:
        """Give a key that orders scores, the better the larger; equal metrics are told apart by the loss."""
        value = scores[self.metric]
        return (value if self.higher_is_better else -value, -scores["loss"])


class Classification(Objective):
    """Cross-entropy of class logits; labels are indices (B,), or probabilities (B, K) as mixup makes them.

    Label smoothing is for training: evaluation reports the plain cross-entropy.
    """

    metric = "top1"
    higher_is_better = True

    def __init__(self, network: Network, *, label_smoothing: float = 0.0) -> None:
        super().__init__(network)
        self.label_smoothing = label_smoothing

    def forward(self, batch: Batch) -> Step:
        """Give the mean cross-entropy in nats, computed in float32 under any autocast, and the logits."""
        logits = self.network(batch.images).float()  # (B, K)
        smoothing = self.label_smoothing if self.training else 0.0
        with torch.autocast(logits.device.type, enabled=False):
            loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
        return Step(loss=loss, outputs=logits)


def build_objective(config: ObjectiveConfig, network: Network) -> Objective:
    """Put the objective that the configuration names around a network."""
    match config.name:
        case "classification":
            return Classification(network, label_smoothing=config.label_smoothing)
