"""Pictures of maps: a map laid over its image, rows of them, the positions' likeness, who reaches whom.

Maps are drawn in inferno, whose lightness grows evenly with the value, from 0 (dark) to a map's own maximum (bright).
"""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlab.engine.figures import DPI, Picture, pixels

_COLORS = "inferno"
_COLOR_SHARE = 0.6
"""Of a map in an overlay; the rest is the image in grey. The same everywhere, so that brighter still means more."""
_LEAST_SIDE = 224
_MAX_TILES = 8
"""Positions along an axis whose likeness to all others is drawn."""


def enlarge(image: Picture) -> Picture:
    """Give an image `(H, W, 1 or 3)` as RGB, its longer side 224 pixels or more, by a whole factor."""
    H, W, C = image.shape
    zoom = max(1, math.ceil(_LEAST_SIDE / max(H, W)))
    return repeat(image, "h w c -> (h zh) (w zw) (c rgb)", zh=zoom, zw=zoom, rgb=3 // C)


def overlay(image: Picture, values: NDArray[np.float32]) -> Picture:
    """Lay a map over an image.

    Args:
        image: uint8 `(H, W, C)`, grey or RGB.
        values: `(h, w)`, on the whole image; below 0 counts as 0. The largest is drawn brightest.

    Returns:
        RGB uint8 of the enlarged image's size.
    """
    background = enlarge(image)
    H, W, _ = background.shape
    grid = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp_min(0)[None, None]
    smooth = F.interpolate(grid, (H, W), mode="bilinear", align_corners=False)[0, 0].numpy()
    shares = smooth / max(float(smooth.max()), 1e-12)
    colors = matplotlib.colormaps[_COLORS](shares)[..., :3]
    grey = background.mean(axis=-1, keepdims=True) / 255
    blended: Picture = np.rint(255 * (_COLOR_SHARE * colors + (1 - _COLOR_SHARE) * grey)).astype(np.uint8)
    return blended


def tiles(image: Picture, maps: Sequence[NDArray[np.float32]]) -> Picture:
    """Give an image and each of its maps over it as tiles of one size, `(1 + maps, 3, H', W')`, for `image_grid`."""
    stack = np.stack([enlarge(image), *(overlay(image, values) for values in maps)])
    return np.ascontiguousarray(rearrange(stack, "n h w c -> n c h w"))


def positions_picture(similarity: NDArray[np.float32], grid: tuple[int, int]) -> Picture:
    """Draw how alike each position is to all others: at its place in the image, a small map of the image.

    Args:
        similarity: `(H W, H W)`, -1 to 1.
        grid: (H, W); of more than 8 rows or columns, 8 are drawn.
    """
    H, W = grid
    rows, columns = (np.unique(np.linspace(0, side - 1, min(side, _MAX_TILES)).round().astype(int)) for side in grid)
    maps = rearrange(similarity, "(a b) (h w) -> a b h w", a=H, h=H)
    figure = Figure(figsize=(1 + len(columns) * 0.9, 0.6 + len(rows) * 0.9 * H / W), dpi=DPI, layout="compressed")
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    others = maps[rows][:, columns][maps[rows][:, columns] < 0.9999]
    low, high = (float(others.min()), float(others.max())) if others.size else (0.0, 1.0)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            shown = panels[i, j].imshow(maps[row, column], cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
            panels[i, j].set(xticks=[], yticks=[])
    for panel, row in zip(panels[:, 0], rows, strict=True):
        panel.set_ylabel(str(row + 1), rotation=0, ha="right", va="center", fontsize=8)
    for panel, column in zip(panels[-1], columns, strict=True):
        panel.set_xlabel(str(column + 1), fontsize=8)
    bar = figure.colorbar(shown, ax=panels, shrink=0.8, aspect=30)
    bar.set_label("cosine similarity")
    bar.outline.set_visible(False)
    figure.suptitle("positions: the likeness of row and column to every other place", fontsize=10)
    return pixels(figure)


def reach_picture(matrices: Mapping[str, NDArray[np.bool_]]) -> Picture:
    """Draw who can reach whom in one layer: a panel for each matrix `(N, N)`, queries downward, keys to the right."""
    columns = min(3, len(matrices))
    rows = math.ceil(len(matrices) / columns)
    figure = Figure(figsize=(3.4 * columns, 3.6 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels:
        panel.set_axis_off()
    for panel, (name, matrix) in zip(panels, matrices.items(), strict=False):
        panel.set_axis_on()
        panel.imshow(matrix, cmap=ListedColormap(["#f2f2f2", "#1f3b73"]), vmin=0, vmax=1, interpolation="nearest")
        panel.set_title(name.replace("_", " "), fontsize=10)
        panel.set_xlabel("can be seen", fontsize=8)
        panel.set_ylabel("token that sees", fontsize=8)
        panel.tick_params(labelsize=7, length=2)
    return pixels(figure)
