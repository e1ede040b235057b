"""What `vitlab palette` does: read images, fit colours to them, measure them on others too, draw both."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from vitlab.config import DataConfig
from vitlab.data.datasets import Split, load_dataset
from vitlab.data.images import ImageError
from vitlab.data.palette import PaletteQuality, decode, encode, fit_palette, palette_quality, to_unit
from vitlab.data.palette_file import write_palette
from vitlab.data.preprocess import Preprocess
from vitlab.data.sample import read_sample, spread
from vitlab.engine.figures import TILE_GAP, Picture, image_grid, save_image
from vitlab.errors import InputError
from vitlab.pixel_options import PaletteOptions

if TYPE_CHECKING:
    from rich.progress import Progress

_DEFAULT_SIZE = (32, 32)
_LINE = 208  # grey level
_NUM_FITTED, _NUM_MEASURED, _NUM_SHOWN = 10_000, 1_000, 8  # images, at most


@dataclass(frozen=True, kw_only=True)
class PaletteReport:
    """What `make_palette` found."""

    fitted: PaletteQuality
    """On images that the palette was fitted on."""
    held_out: PaletteQuality
    """On images of another split."""
    held_out_split: str
    picture: Path
    errors: tuple[ImageError, ...]
    """Images that could not be read."""


def make_palette(
    options: PaletteOptions, *, say: Callable[[str], None], progress: "Progress | None" = None
) -> PaletteReport:
    """Fit a palette to a split, measure it there and on another, and write it with a picture beside it.

    Args:
        options: the images and their size, the number of colours, and where the palette goes.
        say: told in a line what is read and fitted.
        progress: a bar to add tasks to.

    Raises:
        InputError: there is no such data set or split, or none of its images can be read.
    """
    dataset = load_dataset(options.data, val_fraction=DataConfig.val_fraction, seed=DataConfig.val_seed)
    for note in dataset.notes:
        say(note)
    if options.split not in dataset.splits:
        raise InputError(f"{options.data} has no {options.split} split: give one of {', '.join(dataset.splits)}")
    held_out_split = "train" if options.split == "val" else "val"
    preprocess = Preprocess(
        image_size=options.size() or dataset.native_size or _DEFAULT_SIZE,
        resize_mode=options.resize_mode,
        crop_fraction=1.0,
        channels=options.channels,
        mean=(0.5,) * options.channels,
        std=(0.5,) * options.channels,
    )
    images, errors = _read(options, dataset.splits[options.split], preprocess, _NUM_FITTED, progress)
    others, other_errors = _read(options, dataset.splits[held_out_split], preprocess, _NUM_MEASURED, progress)
    height, width = preprocess.image_size
    say(f"fitting {options.num_colors:,} colours to {len(images):,} {options.split} images of {height}x{width} pixels")
    palette = fit_palette(images, options.num_colors, seed=options.seed)
    held_out = palette_quality(others, palette)
    report = PaletteReport(
        fitted=palette_quality(spread(images, _NUM_MEASURED), palette),
        held_out=held_out,
        held_out_split=held_out_split,
        picture=Path(options.out).with_suffix(".png"),
        errors=errors + other_errors,
    )
    write_palette(Path(options.out), palette)
    measured = f"{held_out.describe_psnr()} on {held_out.num_images:,} {held_out_split} images"
    title = f"{len(palette):,} colours from dark to light; {measured}"
    save_image(report.picture, palette_picture(palette, spread(others, _NUM_SHOWN), title))
    return report


def palette_picture(palette: Tensor, images: NDArray[np.uint8], title: str) -> Picture:
    """Draw the colours as a grid, row by row in their order, and below it images before and after.

    Args:
        palette: float32 (K, C).
        images: uint8 (N, H, W, C), N 1 or more.
        title: stands below the colours.

    Returns:
        RGB uint8 (H', W', 3).
    """
    N = len(images)
    tokens = encode(to_unit(images), palette)
    pairs = np.concatenate([images, decode(tokens, palette).numpy()])
    captions = ["before"] * N + [palette_quality(image[None], palette).describe_psnr() for image in images]
    below = image_grid(rearrange(pairs, "b h w c -> b c h w"), captions, columns=N)
    above = image_grid(_color_grid(palette, width=below.shape[1] - 2 * TILE_GAP), [title])
    return np.concatenate([above, below])


def _color_grid(palette: Tensor, width: int) -> NDArray[np.uint8]:
    """Draw each colour as a square, row by row, with lines between them; uint8 (1, 3, height, width)."""
    K = len(palette)
    columns = min(K, min(range(40, 15, -1), key=lambda number: -K % number))  # the last row as full as may be
    rows = math.ceil(K / columns)
    row, column = (np.arange(length) * columns // width for length in (rows * width // columns, width))
    index = row[:, None] * columns + column  # of the colour at each pixel
    picture = np.full((*index.shape, 3), 255, dtype=np.uint8)
    is_color = index < K
    picture[is_color] = decode(torch.from_numpy(index[is_color]), palette).numpy()
    is_line = (np.diff(row, prepend=0) > 0)[:, None] | (np.diff(column, prepend=0) > 0)
    picture[is_color & is_line] = _LINE
    return rearrange(picture, "h w c -> 1 c h w")


def _read(
    options: PaletteOptions, split: Split, preprocess: Preprocess, max_images: int, progress: "Progress | None"
) -> tuple[NDArray[np.uint8], tuple[ImageError, ...]]:
    task = None if progress is None else progress.add_task(f"reading {split.name}", total=None)

    def show(done: int, total: int) -> None:
        if progress is not None and task is not None:
            progress.update(task, completed=done, total=total)

    return read_sample(
        split,
        preprocess,
        max_images=max_images,
        seed=options.seed,
        workers=options.workers,
        on_error=options.on_error,
        on_images=show,
    )
