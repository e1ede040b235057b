"""Where a token stands: fixed sine and cosine positions, biases by offset, learned tables resampled to another grid."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vitlab.errors import InputError


def sine_cosine_positions(length: int, dim: int) -> Tensor:
    """Give fixed positions: sines in the even columns, cosines in the odd ones, ever slower to the right.

    The pair of columns 2i and 2i + 1 divides the position by 10000^(2i / dim): by 1, 10, 100 and 1000 at width 8.

    Args:
        length: number of positions N, counted from 0.
        dim: width D, even.

    Returns:
        float32 `(N, D)`.

    Raises:
        InputError: the width is odd.

    Source: arXiv:1706.03762, sec. 3.5.
    """
    if dim % 2:
        raise InputError(f"sine and cosine positions come in pairs, and width {dim} is odd: use {dim - 1} or {dim + 1}")
    divisors = 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / divisors  # (N, D / 2)
    return rearrange([angles.sin(), angles.cos()], "two n pairs -> n (pairs two)").float()


def resample_positions(
    table: Tensor, *, old_grid: tuple[int, int], new_grid: tuple[int, int], num_prefix: int = 1
) -> Tensor:
    """Stretch a learned position table from one grid of patches to another; the rows before the grid stay as they are.

    Libraries disagree on the rule; this is timm's: bicubic, antialiased, corners not aligned, computed in float32. (The
    others: torchvision aligns corners, transformers does not antialias, the original JAX code is bilinear with aligned
    corners.) timm's, because most published checkpoints are timm's, and because it alone does not skip rows when the
    grid shrinks.

    Args:
        table: `(1, num_prefix + H * W, D)`.
        old_grid: (H, W) of the table, in patches.
        new_grid: (h, w) wanted, in patches.
        num_prefix: rows that belong to no patch, such as the class token's, at the front.

    Returns:
        `(1, num_prefix + h * w, D)` in the table's dtype; the table itself where the grids are equal.
    """
    if old_grid == new_grid:
        return table
    H, W = old_grid
    prefix, grid = table[:, :num_prefix], table[:, num_prefix:]
    grid = rearrange(grid, "one (h w) d -> one d h w", h=H, w=W)
    grid = F.interpolate(grid.float(), new_grid, mode="bicubic", antialias=True, align_corners=False).to(table.dtype)
    return torch.cat([prefix, rearrange(grid, "one d h w -> one (h w) d")], dim=1)


def relative_bias(table: Tensor, index: Tensor) -> Tensor:
    """Look up what attention adds to its scores: a learned number for each head and each offset of two tokens.

    Args:
        table: `(R, h)`, a row for each of the R offsets.
        index: int64 `(N, N)`, query then key: the pair's row of the table (see `windows.relative_index`).

    Returns:
        `(h, N, N)`, contiguous as fused attention wants it.

    Source: arXiv:2103.14030, eq. 4.
    """
    N, _ = index.shape
    # Not `table[index]`: its backward adds in parallel, and from 16 heads on gives other last bits in every run.
    return rearrange(table.t().index_select(1, index.flatten()), "h (n m) -> h n m", n=N)


def resample_relative_bias(table: Tensor, *, old_window: tuple[int, int], new_window: tuple[int, int]) -> Tensor:
    """Stretch a table of relative biases from one window to another, as a picture of all offsets.

    The rule is that of the original code: bicubic, corners not aligned, not antialiased; in float32. (timm's loader has
    another, linear between offsets that lie ever farther apart.) Offset 0 stays in the middle.

    Args:
        table: `((2H - 1)(2W - 1), h)` for windows of (H, W) tokens.
        old_window: (H, W) of the table.
        new_window: (H, W) wanted.

    Returns:
        The table for the new window in the table's dtype; the table itself where the windows are equal.
    """
    if old_window == new_window:
        return table
    old_offsets, new_offsets = (tuple(2 * side - 1 for side in window) for window in (old_window, new_window))
    picture = rearrange(table, "(down right) h -> 1 h down right", down=old_offsets[0], right=old_offsets[1])
    picture = F.interpolate(picture.float(), new_offsets, mode="bicubic", align_corners=False).to(table.dtype)
    return rearrange(picture, "1 h down right -> (down right) h")
