"""Which places of an image speak for a class, and which pixels surprise an ImageGPT: a map for every network.

The gradient-weighted map says what speaks for a class. How depends on the network.

Features times gradients, for all but ViT: at one site, what the features of a position have beyond their mean over the
image, times the gradient that the class's logit has there, added up. Positive sums speak for the class, negative ones
against it. (Without the mean taken off, a norm that follows would make each position's sum 0: it passes no gradient
along a vector.) The site:

- Swin and DaViT: the last map of 7 positions a side or more, as the last one of the published sizes has at 224; of
  images of 32 pixels that is a map of an earlier stage, which still knows places. The very last one is taken behind
  the final norm.
- ImageGPT: the colour and position embeddings. A causal network sees a pixel one position later, so that the map is
  moved back by one, and the last pixel, which it never sees, has 0.
- timm/NAME: the last map, or the input of the last block where that is a row of tokens.

Source: arXiv:1610.02391 (Grad-CAM), sec. 3. Differs: gradients are not averaged over positions first, as in
arXiv:2011.08891 (HiResCAM), for the positions of a transformer do not play the same part; and the mean, see above.

Attention times gradients, for ViT, whose patches speak to the class token through attention: in each layer the weights
times the gradient that the logit has at them, what is below 0 cut off, the mean of the heads, A; from the first layer
on, R becomes R + A R, at first the identity, which is taken off at the end. The map is R's row of the class token, or
the mean of the patches' rows with `pool='mean'`.

Source: arXiv:2103.15679 (Chefer, Gur and Wolf), eq. 5 and 6.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlab.errors import InputError
from vitlab.inference.attention_maps import AttentionLayer, attention_layers, of_what_is_classified, weights_of
from vitlab.layers.patch import to_pair
from vitlab.models.davit import DaViT
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import BlockNetwork, Network
from vitlab.models.swin import SwinTransformer
from vitlab.models.timm_network import TimmNetwork
from vitlab.models.vit import VisionTransformer

_LEAST_SIDE = 7
"""Positions along the shorter side of the map that gradients are taken at, where there is one so large."""

_ToGrid: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Site:
    """Where features are taken."""

    module: nn.Module | None = None
    """None for the network's `forward_features`, behind its final norm."""
    takes_input: bool = False
    """The module's input instead of its output."""
    to_grid: _ToGrid = lambda sums: sums
    """Turns sums of the features' shape, less the width, into a map `(B, h, w)`."""
    width_axis: int = -1


def gradient_map(network: Network, images: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Make the gradient-weighted map of a class for each image.

    Args:
        network: in evaluation mode; its parameters and their gradients stay as they are.
        images: float `(B, C, H, W)`, normalised.
        targets: the class of each image, int64 `(B,)`; None takes the likeliest.

    Returns:
        Logits `(B, K)`, and the map `(B, h, w)` on the grid of the site: positive where the image speaks for the class.

    Raises:
        InputError: a network of timm's gives features in which no places can be told.
    """
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        # Tensors that were made in inference mode can have no gradient; their copies can.
        images, targets = images.clone(), None if targets is None else targets.to(images.device, copy=True)
        if isinstance(network, VisionTransformer):
            return _attention_gradient(network, images, targets)
        return _feature_gradient(network, images, targets)


def _feature_gradient(network: Network, images: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiply what the features of a site have beyond their mean by their gradient."""
    site = _site_of(network)
    if site.module is None:
        features = network.forward_features(images).detach().requires_grad_()
        logits = network.forward_head(features)
    else:
        with _capture(network, site.module, takes_input=site.takes_input) as captured:
            logits = network(images)
        (features,) = captured
    (gradient,) = torch.autograd.grad(_chosen(logits, targets), features)
    positions = tuple(axis for axis in range(1, features.ndim) if axis != site.width_axis % features.ndim)
    beyond = features.detach() - features.detach().mean(dim=positions, keepdim=True)
    return logits.detach(), site.to_grid((gradient * beyond).sum(dim=site.width_axis))


def _attention_gradient(network: VisionTransformer, images: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiply the attention of every layer by its gradient, and add up the ways from the patches to the class.

    The gradient at the weights is that at the heads' outputs, each a sum of values by these weights, times the values.
    """
    layers = attention_layers(network)
    maps: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []

    def read(layer: AttentionLayer, module: nn.Module, inputs: Any, qkv: Tensor) -> None:
        maps.append(weights_of(layer, qkv.detach())[:, 0])
        _, _, value = rearrange(qkv.detach(), "b n (three h d) -> three b h n d", three=3, h=layer.module.num_heads)
        values.append(value)

    # The input of the first block is cut off, so that there is a graph where no parameter asks for one.
    with _capture(network, network.blocks[0], takes_input=True), ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.module.qkv.register_forward_hook(partial(read, layer)).remove)
            keep = layer.module.proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
            hooks.callback(keep.remove)
        logits = network(images)
    gradients = torch.autograd.grad(_chosen(logits, targets), outputs)
    N = outputs[0].shape[1]
    joint = torch.eye(N, device=images.device).expand(len(images), N, N)
    for weights, value, gradient in zip(maps, values, gradients, strict=True):
        _, h, _, _ = value.shape
        at_weights = rearrange(gradient, "b n (h d) -> b h n d", h=h) @ value.mT
        joint = joint + (weights * at_weights).clamp_min(0).mean(dim=1) @ joint
    joint = joint - torch.eye(N, device=images.device)  # what a patch says of itself, the same for all of them
    return logits.detach(), of_what_is_classified(layers[-1], joint, network.config.pool)


def _chosen(logits: Tensor, targets: Tensor | None) -> Tensor:
    """Add up the logits `(B, K)` of each image's class, the likeliest where none is named."""
    targets = logits.argmax(dim=1) if targets is None else targets
    return logits.gather(1, targets[:, None]).sum()


@contextmanager
def _capture(network: Network, module: nn.Module, *, takes_input: bool) -> Iterator[list[Tensor]]:
    """Put a module's output, or input, in a list, cut off from what is below it: only the way above is kept."""
    captured: list[Tensor] = []

    def keep(features: Tensor) -> Tensor:
        captured.append(features.detach().requires_grad_())
        return captured[-1]

    recomputes = isinstance(network, BlockNetwork) and network.checkpoint_blocks
    if recomputes:  # a block that runs twice would give its features twice
        network.set_grad_checkpointing(enable=False)
    if takes_input:
        hook = module.register_forward_pre_hook(lambda _, inputs: (keep(inputs[0]), *inputs[1:]))
    else:
        hook = module.register_forward_hook(lambda _, inputs, output: keep(output))
    try:
        yield captured
    finally:
        hook.remove()
        if recomputes:
            network.set_grad_checkpointing(enable=True)


def _site_of(network: Network) -> _Site:
    """Choose where a network's features are taken; the module's text says why."""
    blocks: list[Any] = network.repeated_blocks()
    if isinstance(network, ImageGPT):
        return _Site(blocks[0], True, _pixels(network))
    if isinstance(network, SwinTransformer | DaViT):
        layers = attention_layers(network)
        wide = [layer.number for layer in layers if min(layer.grid) >= min(_LEAST_SIDE, *layers[0].grid)]
        return _Site(blocks[wide[-1] - 1] if wide[-1] < len(layers) else None)
    assert isinstance(network, TimmNetwork), network.name
    return _timm_site(network, blocks[-1])


def _pixels(network: ImageGPT) -> _ToGrid:
    shift = 1 if network.causal else 0
    return lambda sums: rearrange(F.pad(sums[:, shift:], (0, shift)), "b (h w) -> b h w", h=network.image_size[0])


def _timm_site(network: TimmNetwork, block: nn.Module) -> _Site:
    """Read from timm's own words where the places of a network's features are."""
    parameter = next(network.parameters())
    with torch.inference_mode():
        blank = torch.zeros(1, network.in_channels, *network.image_size, device=parameter.device)
        shape = network.forward_features(blank).shape
    net: Any = network.net
    if len(shape) == 4:
        return _Site(width_axis=-1 if getattr(net, "output_fmt", "NCHW") == "NHWC" else 1)
    grid = getattr(getattr(net, "patch_embed", None), "grid_size", None)
    prefix = getattr(net, "num_prefix_tokens", 0)
    if grid is None or len(shape) != 3 or shape[1] != prefix + math.prod(grid):
        raise InputError(f"{network.name} gives no features with places: a gradient-weighted map needs another network")
    return _Site(block, True, lambda sums: rearrange(sums[:, prefix:], "b (h w) -> b h w", h=grid[0]))


@torch.inference_mode()
def surprisal(network: ImageGPT, images: Tensor) -> Tensor:
    """Give the surprise of each pixel's colour after the pixels before it, `-ln p`, in nats.

    Args:
        network: causal, trained on next pixels, in evaluation mode.
        images: float `(B, C, H, W)`, normalised.

    Returns:
        float32 `(B, H, W)`; the mean over all pixels of all images is the loss that evaluation reports, and the sum
        over an image what it takes to write it down.

    Source: Chen et al., Generative Pretraining from Pixels, ICML 2020, eq. 1.
    """
    assert network.causal, "a pixel of this network sees the pixels after it"
    with torch.autocast(images.device.type, enabled=False):
        tokens = network.encode(images)
        nats = F.cross_entropy(network.pixel_logits(tokens).float().mT, tokens, reduction="none")
    return rearrange(nats, "b (h w) -> b h w", h=network.image_size[0])


def to_pixels(network: Network, maps: Tensor) -> Tensor:
    """Stretch maps `(..., h, w)` over the image, `(..., H, W)`, linearly between the centres of positions.

    What a map says beyond the border of the image, where that was continued by zeros, is cut off.
    """
    *others, h, w = maps.shape
    (H, W), (down, right) = network.image_size, _stride(network, (h, w))
    stretched = F.interpolate(
        maps.reshape(-1, 1, h, w).float(), (h * down, w * right), mode="bilinear", align_corners=False
    )
    return stretched[:, 0, :H, :W].reshape(*others, H, W)


def _stride(network: Network, grid: tuple[int, int]) -> tuple[int, int]:
    """Give the pixels from one position of a map to the next; what stages halve is a patch's side times powers of 2."""
    if not isinstance(network, SwinTransformer | DaViT):
        H, W = network.image_size
        return math.ceil(H / grid[0]), math.ceil(W / grid[1])
    stride = network.config.stem_stride if isinstance(network, DaViT) else network.config.patch_size
    down, right = to_pair(stride)
    while math.ceil(network.image_size[0] / down) > grid[0] or math.ceil(network.image_size[1] / right) > grid[1]:
        down, right = 2 * down, 2 * right
    return down, right


def explain_map(network: Network, images: Tensor, targets: Tensor | None = None) -> Tensor:
    """Give one map for every kind of network: which places speak for a class.

    Args:
        network: in evaluation mode, with trained class logits.
        images: float `(B, C, H, W)`, normalised.
        targets: the class of each image, int64 `(B,)`; None takes the likeliest.

    Returns:
        float32 `(B, H, W)`, a value for each pixel, 0 where a place speaks against the class.

    Raises:
        InputError: a network of timm's gives features in which no places can be told.
    """
    _, coarse = gradient_map(network, images, targets)
    return to_pixels(network, coarse).clamp_min(0)
