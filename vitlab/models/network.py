"""What every network answers to, so that the engine, the predictor and the model file need to know no architecture.

The names are timm's, which the whole field knows.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """Base of all networks: images in, class logits out.

    Images are float `(B, C, H, W)`, normalised as the model's Preprocess says. A network sets the four attributes below
    when it is built, and overrides every method that raises NotImplementedError here.
    """

    name: str
    """The name under which `create_model` builds it."""
    num_classes: int
    """Number K of logits."""
    in_channels: int
    """Channels C of the images."""
    image_size: tuple[int, int]
    """(height, width) in pixels."""

    def config_dict(self) -> dict[str, Any]:
        """Give the resolved keyword arguments: `create_model(net.name, **net.config_dict())` builds the same network.

        Plain JSON values (tuples as lists); holds num_classes, image_size and in_channels too.
        """
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Give class logits `(B, K)`.

        Raises:
            InputError: the images have another size or another number of channels than the network was built for.
        """
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """Give the features before pooling, whose shape is the architecture's own: `(B, N, D)` or `(B, H, W, D)`."""
        raise NotImplementedError

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Pool and classify what `forward_features` gave: logits `(B, K)`, or with `pre_logits` the pooled `(B, D)`."""
        raise NotImplementedError

    def forward_intermediates(self, images: Tensor) -> list[Tensor]:
        """Give each block's output, first block first, in the shape it has inside the network."""
        raise NotImplementedError

    def reset_classifier(self, num_classes: int) -> None:
        """Put a fresh head for another number of classes, where the old one is and of its type."""
        raise NotImplementedError

    def get_classifier(self) -> nn.Module:
        """Give the head's last layer, the one whose parameters depend on the number of classes."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Name the parameters of two or more axes that must not decay (tokens, position and bias tables)."""
        raise NotImplementedError

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Give timm's patterns from stem through blocks to head, for layer decay."""
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass: less memory, more time, the same gradients to the last bit."""
        raise NotImplementedError

    def repeated_blocks(self) -> list[nn.Module]:
        """Give what compiles and shards as a unit."""
        raise NotImplementedError


def device_of(module: nn.Module) -> torch.device:
    """Give the device of a module's first parameter."""
    return next(module.parameters()).device
