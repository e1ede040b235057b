"""What every network answers to, so that the engine, the predictor and the model file need to know no architecture.

The names are timm's, which the whole field knows.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
    pixel_statistics: tuple[float, float] | None = None
    """Mean and standard deviation that the Preprocess of its images must have; None where any do."""
    skips_unused: bool = True
    """Whether `forward` may leave out what the head does not look at. The logits are the same but for rounding, which
    then depends on how many images come at a time."""

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
        return self.forward_head(self.head_features(images))

    def head_features(self, images: Tensor) -> Tensor:
        """Give what `forward_head` needs of `forward_features`: all of it, or what it pools, in the same axes."""
        return self.forward_features(images)

    def forward_features(self, images: Tensor) -> Tensor:
        """Give the features before pooling, whose shape is the architecture's own: `(B, N, D)` or `(B, H, W, D)`."""
        raise NotImplementedError

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Pool and classify what `head_features` or `forward_features` gave.

        Returns:
            Logits `(B, K)`, or with `pre_logits` the pooled `(B, D)`.
        """
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
        """Give the blocks, first block first: units of freezing, layer decay and sharding."""
        raise NotImplementedError

    def compiled_blocks(self) -> list[nn.Module]:
        """Give the repeated blocks that compile as a unit."""
        return self.repeated_blocks()


class BlockNetwork(Network):
    """Base of our own networks: blocks one after another, and a linear head that starts at zero."""

    config: Any
    """The architecture's config, a frozen dataclass."""
    checkpoint_blocks = False

    def block_outputs(self, images: Tensor) -> Iterator[Tensor]:
        """Give each block's output in turn; each block is called through `run_block`."""
        raise NotImplementedError

    def run_block(self, block: nn.Module, features: Tensor, **arguments: Any) -> Tensor:
        """Call a block, or have the backward pass call it once more."""
        if self.checkpoint_blocks and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(block, features, use_reentrant=False, **arguments)
            return recomputed
        output: Tensor = block(features, **arguments)
        return output

    def last_output(self, images: Tensor, **arguments: Any) -> Tensor:
        """Give the last block's output; those before it do not stay in memory. Arguments are `block_outputs`'."""
        (output,) = deque(self.block_outputs(images, **arguments), maxlen=1)
        return output

    def forward_intermediates(self, images: Tensor) -> list[Tensor]:
        """Give each block's output, first block first, in the shape it has inside the network, without a final norm."""
        return list(self.block_outputs(images))

    def get_classifier(self) -> nn.Linear:
        """Give the linear layer of the head."""
        raise NotImplementedError

    def reset_classifier(self, num_classes: int) -> None:
        """Make the head one of zeros for another number of classes, where the old one is and of its type."""
        self.config = dataclasses.replace(self.config, num_classes=num_classes)
        self.num_classes = num_classes
        head = self.get_classifier()
        head.out_features = num_classes
        head.weight = nn.Parameter(head.weight.new_zeros(num_classes, head.in_features))
        if head.bias is not None:
            head.bias = nn.Parameter(head.weight.new_zeros(num_classes))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass, or stop doing so."""
        self.checkpoint_blocks = enable


@runtime_checkable
class PixelNetwork(Protocol):
    """What a network answers to, beside `Network`, that gives the colours of pixels: see `ImageGPT`."""

    palette: Tensor
    color_head: nn.Module
    """The last layer of the colour logits."""

    @property
    def causal(self) -> bool:
        """Whether a pixel's output knows the pixels before it alone."""

    def set_palette(self, palette: Tensor) -> None:
        """Take other colours, `(V, C)` in [-1, 1]."""

    def encode(self, images: Tensor) -> Tensor:
        """Give images `(B, C, H, W)` as tokens `(B, N)`."""

    def pixel_features(self, tokens: Tensor, *, hidden: Tensor | None = None, mask_embedding: bool = False) -> Tensor:
        """Give features `(B, N, D)` of tokens."""

    def color_logits(self, features: Tensor) -> Tensor:
        """Give logits `(B, N, V)` of features."""


def has_hooks(*modules: nn.Module) -> bool:
    """Tell whether these modules, or parts of them, have a hook of their own; torch's for all modules are none."""
    parts = (part for module in modules for part in module.modules())
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in parts
    )


def device_of(module: nn.Module) -> torch.device:
    """Give the device of a module's first parameter."""
    return next(module.parameters()).device
