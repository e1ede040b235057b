"""Which images an epoch shows and in which order: a function of seed and epoch, and of nothing else."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from vitlab.seeds import derive_seed

Key = tuple[int, int, int]
"""(epoch, index, repeat); repeat tells apart several views of one image in an epoch."""


class KeySampler(Sampler[list[Key]]):
    """Batches of keys for the epoch that is set; it lives in the main process alone.

    An epoch has as many views as there are images. Of `repeats` views to an image, fewer images come in an epoch, and
    the views of one come together; only where a batch or the epoch ends are they cut apart. Within a batch all first
    views go before all second ones, since mixup and cutmix mix neighbours, which should not be the same image.

    Of several processes each takes its part of every batch, in order; a part may be empty.
    """

    def __init__(
        self,
        labels: NDArray[np.int64],
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        repeats: int = 1,
        balanced: bool = False,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.labels, self.batch_size, self.seed = labels, batch_size, seed
        self.part, self.num_parts = part
        self.shuffle, self.repeats, self.balanced = shuffle, repeats, balanced
        self.epoch = 0
        self.start_batch = 0

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, num_views = self.epoch, len(self.labels)
        indices, draws = self._images(epoch)
        for start in range(self.start_batch * self.batch_size, num_views, self.batch_size):
            views = np.arange(start, min(start + self.batch_size, num_views))
            views = views[np.argsort(views % self.repeats, kind="stable")]
            views = views[len(views) * self.part // self.num_parts : len(views) * (self.part + 1) // self.num_parts]
            images = views // self.repeats
            repeats = draws[images] * self.repeats + views % self.repeats
            yield [(epoch, index, r) for index, r in zip(indices[images].tolist(), repeats.tolist(), strict=True)]

    def _images(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give an epoch's images in order, and how often each was drawn in it before; both (ceil(N / repeats),)."""
        N = len(self.labels)
        count = -(-N // self.repeats)
        if not self.shuffle:
            return np.arange(count), np.zeros(count, np.int64)
        generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "order", epoch)))
        if not self.balanced:
            return generator.permutation(N)[:count], np.zeros(count, np.int64)
        order = generator.permutation(count)
        indices, draws = draw_balanced(self.labels, self.seed, first=epoch * count, count=count)
        return indices[order], draws[order]


def draw_balanced(
    labels: NDArray[np.int64], seed: int, *, first: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give a stretch of an endless sequence of images in which every class comes equally often.

    The sequence takes one image of each class that has any, then the next of each, and so on; each class goes round
    its images in an order of its own. So the classes of a stretch differ by one image at most, and so do the counts of
    two images of a class.

    Args:
        labels: class of each image, (N,).
        seed: decides the order within the classes.
        first: where the stretch starts.
        count: its length.

    Returns:
        Indices of the images, and how often each came in this stretch before; both int64 (count,).
    """
    rows = np.random.Generator(np.random.PCG64(derive_seed(seed, "balanced"))).permutation(len(labels))
    rows = rows[np.argsort(labels[rows], kind="stable")]  # the classes one after the other, each in random order
    _, starts, sizes = np.unique(labels[rows], return_index=True, return_counts=True)
    draw = np.arange(first, first + count)
    place, turn = draw % len(sizes), draw // len(sizes)
    first_turn = -(-(first - place) // len(sizes))  # the class's first in this stretch
    return rows[starts[place] + turn % sizes[place]], (turn - first_turn) // sizes[place]
