"""What a network's layers fix beforehand: which token can reach which in one layer, and which positions are alike."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.inference.attention_maps import AttentionLayer, windows_of
from vitlab.layers.attention import attention_weights
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import Network
from vitlab.models.vit import VisionTransformer

MAX_TOKENS = 4096
"""Layers of more tokens have a matrix of gigabytes, which none of us could look at."""

# What the mask of shifted windows, -100, leaves of a weight is 4e-44 or nothing.
_NOTHING = 1e-30


def reach(layer: AttentionLayer) -> Tensor:
    """Tell which token can reach which through the attention of one layer.

    Read off the layer's own windows and masks: queries and keys of zeros give equal weights to all that may meet.
    Through attention between channels every position reaches every other, since a channel holds them all.

    Args:
        layer: of any kind.

    Returns:
        bool `(N, N)`, query, then key: True where what stands at the key can change the output at the query. The tokens
        are those of the grid row by row, a class token before them.
    """
    height, width = layer.grid
    N = layer.num_prefix + height * width
    if layer.kind == "channel":
        return torch.ones(N, N, dtype=torch.bool)
    if layer.kind in ("full", "causal"):
        nothing = torch.zeros(N, 1)
        return attention_weights(nothing, nothing, causal=layer.kind == "causal") > 0
    numbers = torch.arange(1, N + 1, dtype=torch.float64).reshape(1, height, width, 1)  # 0 is what continues the grid
    tokens = windows_of(layer, numbers).long()  # (V, n)
    mask = getattr(layer.module, "mask", None)
    nothing = torch.zeros(*tokens.shape, 1)
    may_meet = attention_weights(nothing, nothing, bias=None if mask is None else mask.cpu()) > _NOTHING  # (V, n, n)
    matrix = torch.zeros(N + 1, N + 1, dtype=torch.bool)
    matrix[tokens[:, :, None], tokens[:, None, :]] = may_meet
    return matrix[1:, 1:]


def kinds_of_reach(layers: Sequence[AttentionLayer]) -> dict[str, Tensor]:
    """Give the matrix of the first layer of each kind and size of grid, up to 4,096 tokens, by the layer's name."""
    first = {(layer.kind, layer.grid): layer for layer in reversed(layers)}
    chosen = sorted(first.values(), key=lambda layer: layer.number)
    return {
        layer.name: reach(layer)
        for layer in chosen
        if layer.num_prefix + layer.grid[0] * layer.grid[1] <= MAX_TOKENS and layer.kind != "channel"
    }


def position_similarity(network: Network) -> Tensor | None:
    """Give the cosine similarity of the position table's rows, patch with patch or pixel with pixel.

    Returns:
        float32 `(H W, H W)`, the class token left out; None for a network without such a table, and for one of more
        than 4,096 positions.

    Source: arXiv:2010.11929, figure 7, centre.
    """
    if not isinstance(network, VisionTransformer | ImageGPT):
        return None
    first = 1 if isinstance(network, VisionTransformer) else 0
    table = F.normalize(network.pos_embed.detach()[0, first:].float(), dim=-1)
    return None if len(table) > MAX_TOKENS else (table @ table.T).cpu()
