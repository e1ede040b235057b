"""What training minimises: modules around a network that turn a batch into a loss.

The trainer, the evaluator and the files do not know which objective runs. An objective wraps one network, so that
what distributes or compiles a model wraps one module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.checks import require
from vitlab.config import ObjectiveConfig
from vitlab.data.loader import Batch
from vitlab.errors import InputError
from vitlab.models.network import Network, PixelNetwork, device_of
from vitlab.seeds import derive_seed

NATS = "nats_per_pixel"
"""The part of a loss that is a mean over pixels."""


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
        return Step(loss=self.class_loss(logits, batch.labels), outputs=logits)

    def class_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Give the mean cross-entropy of float32 logits `(B, K)` in nats."""
        smoothing, weights = (self.label_smoothing, self.class_weights) if self.training else (0.0, None)
        with torch.autocast(logits.device.type, enabled=False):
            losses = F.cross_entropy(
                logits,
                labels,
                weight=weights,
                label_smoothing=smoothing,
                reduction="sum" if weights is not None else "mean",
            )
            return losses if weights is None else losses / len(logits)


class NextPixel(Objective):
    """Cross-entropy of each pixel's colour given the pixels before it, the first one's included, in nats a pixel.

    Source: Chen et al., Generative Pretraining from Pixels (ICML 2020), sec. 2.1.
    """

    metric = "loss"
    higher_is_better = False

    def forward(self, batch: Batch) -> Step:
        """Give the mean over all pixels of all images."""
        network = as_pixel_network(self.network)
        loss, _ = next_pixel_loss(network, network.encode(batch.images))
        return Step(loss=loss, outputs=None, parts={NATS: loss.detach()})


class MaskedPixel(Objective):
    """Cross-entropy of hidden pixels' colours given all the others, in nats a hidden pixel.

    Source: Chen et al., sec. 2.1; openai/image-gpt.
    """

    metric = "loss"
    higher_is_better = False

    def __init__(self, network: Network, masking: "Masking") -> None:
        super().__init__(network)
        self.masking = masking

    def forward(self, batch: Batch) -> Step:
        """Give the mean over the images of each one's mean over its hidden pixels."""
        network = as_pixel_network(self.network)
        loss = self.masking.loss(network, network.encode(batch.images), None if self.training else batch.indices)
        return Step(loss=loss, outputs=None, parts={NATS: loss.detach()})


class Joint(Classification):
    """Classification plus `generative_weight` times the loss of the pixels.

    One pass of a causal network gives both. Of the other kind the class logits come from a second pass, which sees the
    images whole.

    Source: Chen et al., sec. 2.2.
    """

    def __init__(
        self, network: Network, *, generative_weight: float, masking: "Masking | None", **classification: Any
    ) -> None:
        super().__init__(network, **classification)
        self.generative_weight, self.masking = generative_weight, masking

    def forward(self, batch: Batch) -> Step:
        """Give the weighted sum, the class logits, and both terms."""
        network = as_pixel_network(self.network)
        tokens = network.encode(batch.images)
        if self.masking is None:
            pixel_loss, features = next_pixel_loss(network, tokens)
            logits = self.network.forward_head(features).float()
        else:
            pixel_loss = self.masking.loss(network, tokens, None if self.training else batch.indices)
            logits = self.network(batch.images).float()
        class_loss = self.class_loss(logits, batch.labels)
        parts = {"class_loss": class_loss.detach(), NATS: pixel_loss.detach()}
        return Step(loss=class_loss + self.generative_weight * pixel_loss, outputs=logits, parts=parts)


def next_pixel_loss(network: PixelNetwork, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Give the loss of tokens `(B, N)`, all N scored, in nats a pixel, and the features `(B, N, D)` of the pass."""
    features = network.pixel_features(tokens)
    return _color_losses(network, features, tokens).mean(), features


@dataclass(frozen=True)
class Masking:
    """Which pixels a masked objective hides, and how; in evaluation an image's depend on its index alone.

    Differs from openai/image-gpt: an image of which no pixel was drawn has no loss, where theirs divides 0 by 0.
    """

    fraction: float
    """Probability that a pixel is drawn."""
    corruption: Literal["zero", "bert"]
    """`zero` shows a drawn pixel as zeros; `bert` shows 80 % as a mask, 10 % in a random colour, 10 % as they are."""

    def loss(self, network: PixelNetwork, tokens: Tensor, indices: Tensor | None) -> Tensor:
        """Hide pixels of tokens `(B, N)` and give the loss of the colours that they had, in nats a pixel.

        Args:
            network: not causal.
            tokens: int64.
            indices: what the draws depend on, int64 `(B,)`; None draws from torch's global generator.
        """
        drawn, fate, color = (draw.to(tokens.device) for draw in self._draw(tokens.shape, indices))
        scored = drawn < self.fraction
        if self.corruption == "zero":
            features = network.pixel_features(tokens, hidden=scored)
        else:
            random = (color * len(network.palette)).long()
            seen = torch.where(scored & (fate >= 0.9), random, tokens)
            features = network.pixel_features(seen, hidden=scored & (fate < 0.8), mask_embedding=True)
        losses = _color_losses(network, features, tokens) * scored
        loss: Tensor = (losses.sum(dim=1) / scored.sum(dim=1).clamp(min=1)).mean()
        return loss

    def _draw(self, shape: torch.Size, indices: Tensor | None) -> Tensor:
        """Draw three uniform numbers for each pixel: `(3, B, N)`."""
        if indices is None:
            return torch.rand(3, *shape)
        seeds = [derive_seed(0, "hidden pixels", index) for index in indices.tolist()]
        rows = [torch.rand(3, shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows, dim=1)


def _color_losses(network: PixelNetwork, features: Tensor, tokens: Tensor) -> Tensor:
    """Give each pixel's cross-entropy `(B, N)` in nats, computed in float32 under any autocast."""
    logits = network.color_logits(features).float()  # (B, N, V)
    with torch.autocast(logits.device.type, enabled=False):
        losses: Tensor = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    return losses


def as_pixel_network(network: Network) -> PixelNetwork:
    """Give a network under the names that pixels need.

    Raises:
        InputError: it gives no colours of pixels.
    """
    if not isinstance(network, PixelNetwork):
        raise InputError(f"{network.name} does not give the colours of pixels: take an ImageGPT, as imagegpt_small")
    return network


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
        InputError: there are not as many class weights as classes, or the network cannot do what is asked.
    """
    weights = _class_weights(config, class_counts)
    if not config.generates:
        if isinstance(network, PixelNetwork):
            network.color_head.requires_grad_(False)  # it takes no part
        objective: Objective = Classification(network, label_smoothing=config.label_smoothing, class_weights=weights)
        return objective.to(device_of(network))
    causal = as_pixel_network(network).causal
    if not config.classifies:
        require(
            causal == (config.name == "next_pixel"),
            f"objective.name {config.name} needs a network that {'sees' if causal else 'does not see'} all pixels: "
            f"give --model.overrides.causal {str(not causal).lower()}",
        )
        network.get_classifier().requires_grad_(False)  # it takes no part
    masking = Masking(config.mask_fraction, config.corruption)
    match config.name:
        case "next_pixel":
            objective = NextPixel(network)
        case "masked_pixel":
            objective = MaskedPixel(network, masking)
        case _:
            objective = Joint(
                network,
                generative_weight=config.generative_weight,
                masking=None if causal else masking,
                label_smoothing=config.label_smoothing,
                class_weights=weights,
            )
    return objective.to(device_of(network))


def _class_weights(config: ObjectiveConfig, class_counts: Sequence[int]) -> Tensor | None:
    if config.class_weights == "none":
        return None
    if config.class_weights == "balanced":
        return balanced_weights(class_counts)
    K, given = len(class_counts), len(config.class_weights)
    require(given == K, f"objective.class_weights has {given} numbers for {K} classes: give one for each")
    return torch.tensor(config.class_weights, dtype=torch.float32)
