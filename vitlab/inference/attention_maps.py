"""What the attention of each layer looks at: its weights, and maps of them over the image.

The weights come from the very queries and keys that a layer computes for an image. A hook reads them on the way, so
that no network knows of it, and no more than a map of each layer is kept.

Legend: `h` heads; `V` windows of an image, 1 where there are none; `n` tokens of a window; `H W` a layer's grid of
tokens; `N` tokens of a layer, of a ViT 1 + H W with the class token at the front.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from einops import rearrange, reduce
from torch import Tensor, nn

from vitlab.layers.attention import attention_weights
from vitlab.layers.window_attention import WindowAttention
from vitlab.layers.windows import pad_to_multiple, partition, reverse
from vitlab.models.davit import ChannelAttention, SpatialAttention, channel_attention
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import BlockNetwork, Network, device_of
from vitlab.models.vit import VisionTransformer

Kind: TypeAlias = Literal["full", "causal", "window", "shifted", "channel"]


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one block."""

    number: int
    """The block's, from 1 on."""
    kind: Kind
    grid: tuple[int, int]
    """(H, W) of its tokens."""
    num_prefix: int
    """Tokens at the front that stand for no place: a ViT's class token."""
    module: Any
    """With `num_heads`, and a linear layer `qkv` of queries, keys and values."""

    @property
    def name(self) -> str:
        """A name for arrays and captions: `layer_03_shifted`."""
        return f"layer_{self.number:02d}_{self.kind}"


def attention_layers(network: Network) -> list[AttentionLayer]:
    """Give the attention layers, first block first; of a network of timm, none are known."""
    if not isinstance(network, BlockNetwork):
        return []
    attentions: list[Any] = [block.attn for block in network.repeated_blocks()]
    prefix = int(isinstance(network, VisionTransformer))
    return [
        AttentionLayer(number, _kind(module), grid, prefix, module)
        for number, (module, grid) in enumerate(zip(attentions, _grids(network, attentions), strict=True), start=1)
    ]


def _grids(network: Network, attentions: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Give each layer's grid; of a pyramid, a blank image shows them."""
    if isinstance(network, VisionTransformer | ImageGPT):
        grid = network.patch_embed.grid if isinstance(network, VisionTransformer) else network.image_size
        return [grid] * len(attentions)
    grids: list[tuple[int, int]] = []
    with ExitStack() as hooks, torch.inference_mode():
        for module in attentions:
            hooks.callback(
                module.register_forward_pre_hook(lambda _, inputs: grids.append(inputs[0].shape[1:3])).remove
            )
        network(torch.zeros(1, network.in_channels, *network.image_size, device=device_of(network)))
    return [(height, width) for height, width in grids]


def _kind(module: nn.Module) -> Kind:
    if isinstance(module, ChannelAttention):
        return "channel"
    if isinstance(module, SpatialAttention):
        return "window"
    if isinstance(module, WindowAttention):
        return "window" if module.mask is None else "shifted"
    return "causal" if getattr(module, "causal", False) else "full"


def last_of_each(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Choose the last layer of each kind and size of grid: of a ViT one, of a Swin one or two a stage."""
    chosen = {(layer.kind, layer.grid): layer for layer in layers}
    return sorted(chosen.values(), key=lambda layer: layer.number)


@torch.inference_mode()
def visit_attention(
    network: Network,
    images: Tensor,
    layers: Sequence[AttentionLayer],
    visit: Callable[[AttentionLayer, Tensor], None],
) -> None:
    """Send images through a network and show what each layer's `qkv` gives, one layer after the other.

    Args:
        network: in evaluation mode.
        images: float `(B, C, H, W)`, normalised.
        layers: those of the network to visit.
        visit: called with a layer and the output of its `qkv`; see `weights_of`.
    """
    with ExitStack() as hooks, torch.autocast(images.device.type, enabled=False):
        for layer in layers:
            hooks.callback(layer.module.qkv.register_forward_hook(partial(_show, layer, visit)).remove)
        network(images)


def _show(
    layer: AttentionLayer, visit: Callable[[AttentionLayer, Tensor], None], module: nn.Module, inputs: Any, qkv: Tensor
) -> None:
    visit(layer, qkv)


def weights_of(layer: AttentionLayer, qkv: Tensor) -> Tensor:
    """Give the weights of a layer, `(B, V, h, n, n)`: query, then key; each row sums to 1.

    Of channel attention, the n are the channels of a group, and groups stand for heads.
    """
    heads = layer.module.num_heads
    if layer.kind == "channel":
        _, query, key = rearrange(qkv, "b h w (three g e) -> three b g (h w) e", three=3, g=heads)
        # Values that are the identity come back as the transposed weights.
        identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device).expand(*query.shape[:2], -1, -1)
        return channel_attention(query, key, identity).mT[:, None]
    num_windows = len(windows_of(layer, _blank(layer, qkv)))
    windows = partition(qkv, layer.module.window) if layer.kind in ("window", "shifted") else qkv
    query, key, _ = rearrange(windows, "(b v) n (three h d) -> three b v h n d", three=3, v=num_windows, h=heads)
    bias = layer.module.score_bias() if isinstance(layer.module, WindowAttention) else None
    return attention_weights(query, key, bias=bias, causal=layer.kind == "causal")


def _blank(layer: AttentionLayer, like: Tensor) -> Tensor:
    """Give a grid of ones, `(1, H, W, 1)`."""
    return like.new_ones(1, *layer.grid, 1)


def windows_of(layer: AttentionLayer, grid: Tensor) -> Tensor:
    """Cut a grid `(1, H, W, 1)` as the layer does, rolled and continued by zeros: `(V, n)`; no windows are one."""
    if layer.kind not in ("window", "shifted"):
        return grid.flatten()[None]
    down, right = getattr(layer.module, "shift", (0, 0))
    window: tuple[int, int] = layer.module.window
    padded = pad_to_multiple(grid.roll((-down, -right), (1, 2)), window)
    return partition(padded, window).squeeze(-1)


def received(layer: AttentionLayer, weights: Tensor) -> Tensor:
    """Add up, for each token of a layer of windows, the weights that the tokens of its window give it.

    Windows are stitched to the grid, shifted ones where they lie in the image. What continued the grid takes no part.

    Args:
        layer: of windows.
        weights: `(B, V, h, n, n)`, as `weights_of` gives.

    Returns:
        `(B, h, H, W)`; where attention is even, 1 everywhere, whatever the size of a window.
    """
    (H, W), window = layer.grid, layer.module.window
    real = windows_of(layer, _blank(layer, weights))  # (V, n)
    sums = torch.einsum("bvhqk,vq->bvhk", weights, real)
    padded_size = (H + -H % window[0], W + -W % window[1])
    stitched = reverse(rearrange(sums, "b v h n -> (b v) n h"), window, padded_size)[:, :H, :W]
    down, right = getattr(layer.module, "shift", (0, 0))
    return rearrange(stitched.roll((down, right), (1, 2)), "b h w heads -> b heads h w")


def class_token_map(layer: AttentionLayer, weights: Tensor, *, pool: Literal["cls", "mean"]) -> Tensor:
    """Give what the class token of a ViT attends to, `(B, h, H, W)`; with `pool='mean'`, the mean over the patches.

    Args:
        layer: of a ViT.
        weights: `(B, 1, h, N, N)`.
        pool: what the network classifies.
    """
    return of_what_is_classified(layer, weights[:, 0], pool)


def of_what_is_classified(layer: AttentionLayer, joint: Tensor, pool: Literal["cls", "mean"]) -> Tensor:
    """Give the rows that end in the classified token, or the mean of the patches' rows, on the grid of patches."""
    first = layer.num_prefix
    row = joint[..., 0, first:] if pool == "cls" else joint[..., first:, first:].mean(dim=-2)
    return rearrange(row, "... (h w) -> ... h w", h=layer.grid[0])


def group_map(layer: AttentionLayer, qkv: Tensor, weights: Tensor) -> Tensor:
    """Give where in the image lies what each group of channels attends to, `(B, g, H, W)`.

    Channel attention averages channels, each a picture of the whole image. A channel counts by the weight that it gets
    from the channels of its group on average, and a position by the root mean square of the channels' values there:
    `sqrt(sum over c of r_c v_c(position)^2)`, where the r of a group sum to 1.

    Args:
        layer: of channels.
        qkv: values, queries, keys: `(B, H, W, 3 D)`.
        weights: `(B, 1, g, e, e)`, query, then key.
    """
    value = rearrange(qkv, "b h w (three g e) -> three b g e h w", three=3, g=layer.module.num_heads)[0]
    shares = reduce(weights[:, 0], "b g query key -> b g key", "mean")
    return torch.einsum("bge,bgehw->bghw", shares, value.square()).sqrt()


def roll_out(joint: Tensor | None, weights: Tensor) -> Tensor:
    """Carry attention rollout one layer on: which of the network's inputs a layer's output is made of.

    Half of a token is itself, by the residual connection, and half what its mean head attends to:
    `(I + A) / 2`, each row over its sum, times the rollout of the layers below.

    Args:
        joint: of the layers below, `(B, N, N)`; None at the first.
        weights: `(B, 1, h, N, N)`.

    Returns:
        `(B, N, N)`, whose rows sum to 1.

    Source: arXiv:2005.00928, sec. 3.
    """
    mean = reduce(weights, "b 1 h query key -> b query key", "mean")
    step = 0.5 * mean + 0.5 * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    step = step / step.sum(dim=-1, keepdim=True)
    return step if joint is None else step @ joint


@dataclass(frozen=True)
class AttentionMaps:
    """What the attention layers look at; B counts images."""

    heads: dict[str, Tensor]
    """Of each chosen layer, by name, a map for each head or group: `(B, h, H, W)`."""
    rollout: Tensor | None
    """Of a ViT `(B, N, N)`: output, then input."""
    rollout_map: Tensor | None
    """The rollout's row of what is classified, on the grid of patches: `(B, H, W)`."""
    channels: dict[str, Tensor]
    """Of each chosen layer of channels its weights, `(B, g, e, e)`."""


def attention_maps(network: Network, images: Tensor, chosen: Sequence[AttentionLayer]) -> AttentionMaps:
    """Make the maps of chosen layers, and a ViT's rollout over all.

    A ViT's maps are of its class token (`class_token_map`), those of windows of what is attended to (`received`), those
    of channels of where the attended channels are large (`group_map`). An ImageGPT's layers, which see thousands of
    pixels at once, have none.

    Args:
        network: in evaluation mode.
        images: float `(B, C, H, W)`, normalised.
        chosen: layers of the network.
    """
    numbers = {layer.number for layer in chosen}
    heads: dict[str, Tensor] = {}
    channels: dict[str, Tensor] = {}
    joint: Tensor | None = None

    def visit(layer: AttentionLayer, qkv: Tensor) -> None:
        nonlocal joint
        weights = weights_of(layer, qkv)
        if isinstance(network, VisionTransformer):
            joint = roll_out(joint, weights)
        if layer.number not in numbers:
            return
        if isinstance(network, VisionTransformer):
            heads[layer.name] = class_token_map(layer, weights, pool=network.config.pool)
        elif layer.kind == "channel":
            heads[layer.name], channels[layer.name] = group_map(layer, qkv, weights), weights[:, 0]
        else:
            heads[layer.name] = received(layer, weights)

    visited = list(_visited(network, chosen))
    if visited:
        visit_attention(network, images, visited, visit)
    row = None
    if joint is not None and isinstance(network, VisionTransformer):
        row = of_what_is_classified(visited[-1], joint, network.config.pool)
    return AttentionMaps(heads, joint, row, channels)


def _visited(network: Network, chosen: Sequence[AttentionLayer]) -> Iterator[AttentionLayer]:
    """Give the layers whose weights are needed: rollout takes them all."""
    if isinstance(network, VisionTransformer):
        yield from attention_layers(network)
    elif not isinstance(network, ImageGPT):
        yield from chosen
