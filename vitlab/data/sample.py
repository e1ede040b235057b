"""Some images of a split at once, for what needs no more than some."""

from collections.abc import Callable
from contextlib import closing
from typing import Literal

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from vitlab.data.images import ImageError
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.data.splits import Split
from vitlab.seeds import derive_seed

_BATCH = 64
_MAX_BYTES = 2**28


def read_sample(
    split: Split,
    preprocess: Preprocess,
    *,
    max_images: int,
    seed: int,
    workers: int | None,
    on_error: Literal["stop", "skip"],
    on_images: Callable[[int, int], None],
) -> tuple[NDArray[np.uint8], tuple[ImageError, ...]]:
    """Read images that a seed draws, as evaluation sees them.

    Args:
        split: the images to draw from.
        preprocess: brings them to their size and channels.
        max_images: how many; all where there are fewer, and fewer where so many would take 256 MiB.
        seed: what the draw depends on.
        workers: processes that read; 0 reads in this one, None takes `default_workers`.
        on_error: at an image that cannot be read, `stop` raises its ImageError, `skip` leaves it out.
        on_images: called with the images done and in all.

    Returns:
        uint8 (N, h, w, C) in the split's order, and what could not be read.

    Raises:
        ImageError: an image cannot be read, and `on_error` is `stop`.
    """
    height, width = preprocess.image_size
    size = height * width * preprocess.channels
    count = max(1, min(len(split), max_images, _MAX_BYTES // size))
    generator = np.random.default_rng(derive_seed(seed, "sample", split.name))
    rows = np.sort(generator.choice(len(split), count, replace=False))
    loader = Loader(
        split.subset(split.name, rows), EvalTransform(preprocess), batch_size=_BATCH, workers=workers, on_error=on_error
    )
    images = np.empty((count, height, width, preprocess.channels), dtype=np.uint8)
    read = 0
    errors: list[ImageError] = []
    with closing(loader):
        for batch in loader.epoch(0):
            B = len(batch.images)
            images[read : read + B] = rearrange(batch.images, "b c h w -> b h w c").numpy()
            read += B
            errors += batch.errors
            on_images(read + len(errors), count)
    return images[:read], tuple(errors)


def spread(images: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Choose so many images, or all, evenly from the first to the last."""
    return images[np.linspace(0, len(images) - 1, min(count, len(images))).astype(np.int64)]
