"""What a network costs: its parameters, the multiply-adds of one image, and an ImageGPT's memory in training."""

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitlab.layers.patch import to_pair
from vitlab.models.imagegpt import ImageGPT, ImageGPTConfig
from vitlab.models.network import Network
from vitlab.models.timm_network import TimmNetwork


def count_parameters(module: nn.Module) -> int:
    """Count the trainable and frozen numbers of a module, shared ones once; buffers are none."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_macs(network: Network) -> int:
    """Count the multiply-adds of a forward pass of one image of the network's own size.

    Matrix products, convolutions and the two products of attention count; norms, activations and sums do not. Papers
    often call this number FLOPs. A copy without data does the counting, so that the size of the network does not
    matter, and so that attention is the plain products that torch can count. An ImageGPT's pass is the one that it is
    made for, from tokens to the colour logits of all pixels, with the whole square of causal attention. Others' is that
    of all tokens through all blocks, as published, though a ViT's last block and a DaViT's last layer may do less.

    Args:
        network: on any device; a network without data, on the device `meta`, is quickest.
    """
    network = copy.deepcopy(network).to("meta").eval()
    images = torch.empty(1, network.in_channels, *network.image_size, device="meta")
    blocks = [] if isinstance(network, TimmNetwork) else network.repeated_blocks()  # what timm's take is not known
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        repeats = _Repeats(blocks, counter)
        if isinstance(network, ImageGPT):
            network.pixel_logits(torch.empty(1, math.prod(network.image_size), dtype=torch.int64, device="meta"))
        else:
            network.forward_head(network.forward_features(images))
    flops: int = counter.get_total_flops() + repeats.flops
    return flops // 2


def training_memory(
    config: ImageGPTConfig, *, batch_size: int, bytes_per_value: int = 4, fused_attention: bool = True
) -> int:
    """Estimate the bytes that a training step of an ImageGPT's colour logits needs at its height.

    That is weights, gradients and two moments of an optimizer in float32; what the forward pass keeps for the backward
    pass; and the logits, their logarithms and a gradient. Neither dropout nor the recomputing of blocks is counted.

    Args:
        config: shape of the network and size of the images.
        batch_size: images at a time, each of H x W tokens.
        bytes_per_value: of what linear layers and attention take: 4 in float32, 2 under autocast to bf16 or fp16. The
            tokens between the branches and the norms stay in float32.
        fused_attention: False where attention keeps the square of the pixels (see `attention.is_fused`).
    """
    with torch.device("meta"):
        parameters = count_parameters(ImageGPT(config))
    D, L, V = config.embed_dim, config.depth, config.num_colors
    N = math.prod(to_pair(config.image_size))
    between = 4 * 4 * D  # both norms' input, and the same without the gain
    # Both norms' output; queries, keys, values and what attention makes of them; the hidden layer, twice.
    within = bytes_per_value * (6 * D + 2 * int(D * config.mlp_ratio))
    squares = 0 if fused_attention else bytes_per_value * config.num_heads * N
    logits = 4 * 3 * V
    return 16 * parameters + batch_size * N * (L * (between + within + squares) + 4 * 3 * D + logits)


class _Repeats:
    """Runs one block of each kind, and for the others of its kind takes its result, which has no data, and its count.

    Counting is slow, and a network has up to 32 equal blocks: this makes it three times as fast.
    """

    def __init__(self, blocks: Iterable[nn.Module], counter: FlopCounterMode) -> None:
        self.flops = 0
        self.counter = counter
        self.known: dict[tuple[str, torch.Size], tuple[int, Tensor]] = {}
        for block in blocks:
            block.forward = partial(self._run, block.forward, repr(block))

    def _run(self, forward: Callable[..., Tensor], kind: str, tokens: Tensor, **arguments: Any) -> Tensor:
        key = (kind, tokens.shape)
        if key in self.known:
            flops, result = self.known[key]
            self.flops += flops
            return result
        before = self.counter.get_total_flops()
        result = forward(tokens, **arguments)
        self.known[key] = (self.counter.get_total_flops() - before, result)
        return result
