"""Where a token stands: fixed sine and cosine positions, and learned tables resampled to another grid."""

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
