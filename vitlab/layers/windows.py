"""Windows of a grid of tokens: cut it, put it together again, and tell within a window who may see whom, and how far.

Legend: a grid is `(B, H, W, D)`; a window is (height, width) in tokens; `N` tokens of one window, row by row;
`V` windows of one grid, row by row.

Masks and indices come on the CPU, whatever torch's default device: for a network without memory (`meta`) torch would
import its compiler to compute them.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

# Added to the score of a pair that must not meet. exp(-100) is nothing beside 1 in every float type, and published
# implementations use this very number.
_APART = -100.0


def pad_to_multiple(grid: Tensor, window: tuple[int, int]) -> Tensor:
    """Append zeros at the bottom and on the right, up to whole windows.

    Returns:
        `(B, H', W', D)`; the grid itself where it already is whole windows.
    """
    _, H, W, _ = grid.shape
    below, right = -H % window[0], -W % window[1]
    return F.pad(grid, (0, 0, 0, right, 0, below)) if below or right else grid


def partition(grid: Tensor, window: tuple[int, int]) -> Tensor:
    """Cut a grid of whole windows into them: `(B, H, W, D)` to `(B * V, N, D)`, image by image."""
    height, width = window
    return rearrange(grid, "b (rows h) (columns w) d -> (b rows columns) (h w) d", h=height, w=width)


def reverse(windows: Tensor, window: tuple[int, int], grid_size: tuple[int, int]) -> Tensor:
    """Put windows together again, `(B * V, N, D)` to `(B, H, W, D)`: the inverse of `partition`.

    Args:
        windows: what `partition` gave, or what became of it.
        window: (height, width) of a window.
        grid_size: (H, W) of the grid that was cut.
    """
    return join_heads(windows[:, None], window, grid_size)


def partition_heads(qkv: Tensor, window: tuple[int, int], num_heads: int) -> Tensor:
    """Cut the queries, keys and values of a grid of whole windows into windows and heads, in one copy.

    Args:
        qkv: `(B, H, W, 3 D)`, of each position its query, key and value, each head by head.
        window: (height, width) of a window.
        num_heads: heads `h`, each of width `d`.

    Returns:
        `(3, B * V, h, N, d)`.
    """
    height, width = window
    return rearrange(
        qkv,
        "b (rows y) (columns x) (three h d) -> three (b rows columns) h (y x) d",
        y=height,
        x=width,
        three=3,
        h=num_heads,
    )


def join_heads(heads: Tensor, window: tuple[int, int], grid_size: tuple[int, int]) -> Tensor:
    """Put what the heads of all windows found together again, `(B * V, h, N, d)` to `(B, H, W, D)`, in one copy."""
    (height, width), (H, W) = window, grid_size
    return rearrange(
        heads,
        "(b rows columns) h (y x) d -> b (rows y) (columns x) (h d)",
        rows=H // height,
        columns=W // width,
        y=height,
        x=width,
    )


def shift_mask(grid_size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> Tensor | None:
    """Keep apart, in the windows of a grid that was rolled up and left, tokens that only the roll made neighbours.

    Args:
        grid_size: (H, W), whole windows.
        window: (height, width) of a window.
        shift: rows and columns by which the grid was rolled, each less than the window's.

    Returns:
        float32 `(V, N, N)` to add to attention scores: 0 where two tokens may meet, -100 where not; None for no shift.

    Source: arXiv:2103.14030, sec. 3.2 and figure 4.
    """
    if not any(shift):
        return None
    # What the roll carried to the end of each axis, and the rest. (The original numbers 3 x 3 regions; the other two
    # borders are those of the last windows, which nothing crosses.)
    rows, columns = (torch.arange(side, device="cpu") >= side - by for side, by in zip(grid_size, shift, strict=True))
    regions = partition((2 * rows[:, None] + columns.long())[None, :, :, None], window)  # (V, N, 1)
    apart = regions != regions.transpose(1, 2)
    return torch.zeros(apart.shape, device="cpu").masked_fill(apart, _APART)


def relative_index(window: tuple[int, int]) -> Tensor:
    """Number the offsets from key to query, row by row, from the key at the far bottom right to the far top left.

    Returns:
        int64 `(N, N)`, query then key, from 0 to (2 height - 1)(2 width - 1) - 1: rows of a table of relative biases.

    Source: arXiv:2103.14030, sec. 3.2.
    """
    height, width = window
    position = torch.arange(height * width, device="cpu")
    row, column = position // width, position % width
    down = row[:, None] - row + height - 1
    right = column[:, None] - column + width - 1
    return down * (2 * width - 1) + right
