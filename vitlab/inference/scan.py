"""One look at every image of a data set: decoded whole, and kept as a few facts and a thumbnail, 1.1 kB an image."""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.cache import unchanged
from vitlab.data.images import ImageError
from vitlab.data.loader import Loader
from vitlab.data.splits import FileSplit, Split
from vitlab.inference.duplicates import SIDE, thumbnail

FACTS = np.dtype(
    [
        ("height", "<i4"),  # upright, in pixels
        ("width", "<i4"),
        ("digest", "V16"),  # of the file, or where there is none of the pixels
        ("format", "S10"),  # what the file holds, whatever its name says
        ("mode", "S8"),  # Pillow's name of its colours
        ("orientation", "u1"),  # EXIF, 1 to 8
        ("spread", "u1"),  # largest difference within a colour channel, exact where it is small
        ("thumbnail", "u1", (SIDE, SIDE)),  # grey, squashed
    ]
)
"""What is kept of an image."""

_BATCH = 64
_ORIENTATION_TAG = 0x0112
_FLAT = 16  # spread of a thumbnail up to which the picture itself is measured


@dataclass(frozen=True)
class Scan:
    """The images of a split that could be read, and those that could not."""

    rows: NDArray[np.int64]
    """Place of each readable image in the split, ascending, (N,)."""
    facts: NDArray[np.void]
    """Of each readable image, FACTS (N,)."""
    errors: tuple[ImageError, ...]
    """In the split's order."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Facts(Split):
    """A split whose images are their facts, as bytes: workers hand on what they hold, not what they read."""

    source: Split

    def read(self, index: int) -> NDArray[np.uint8]:
        """Look at an image; uint8 (1, bytes of FACTS, 1)."""
        return look(self.source, index).view(np.uint8).reshape(1, -1, 1)

    def subset(self, name: str, rows: NDArray[np.int64]) -> "Split":
        """Give the facts of some images."""
        raise NotImplementedError

    def identity(self) -> Iterator[bytes]:
        """Give that of the images themselves."""
        return self.source.identity()

    def blank(self) -> NDArray[np.uint8]:
        """Give the facts of no image."""
        return np.zeros((1, FACTS.itemsize, 1), dtype=np.uint8)


def scan(split: Split, *, workers: int, on_images: Callable[[int], None]) -> Scan:
    """Look at every image of a split.

    Args:
        split: the images.
        workers: processes that read, each with one thread; 0 reads in this one.
        on_images: told the number of images after each batch.

    Raises:
        RunError: a process died.
    """
    kept = np.zeros(len(split), dtype=FACTS)
    rows: list[NDArray[np.int64]] = []
    errors: list[ImageError] = []
    facts = _Facts(name=split.name, labels=split.labels, paths=split.paths, source=split)
    with closing(Loader(facts, unchanged, batch_size=_BATCH, workers=workers, on_error="skip")) as loader:
        for batch in loader.epoch(0):
            indices = batch.indices.numpy()
            packed = np.ascontiguousarray(rearrange(batch.images, "b 1 1 bytes -> b bytes").numpy())
            if len(indices):
                kept[indices] = packed.view(FACTS)[:, 0]
            rows.append(indices)
            errors += batch.errors
            on_images(len(indices) + len(batch.errors))
    read = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    return Scan(read, kept[read], tuple(errors))


def look(split: Split, index: int) -> NDArray[np.void]:
    """Decode one image and give its facts, (1,).

    Raises:
        ImageError: it cannot be read.
    """
    image = split.read(index)
    facts = np.zeros(1, dtype=FACTS)
    facts["height"], facts["width"] = image.shape[:2]
    facts["thumbnail"] = thumbnail(image)
    facts["spread"] = _spread(image, facts["thumbnail"][0])
    digest = hashlib.blake2b(image.tobytes(), digest_size=16)
    facts["orientation"] = 1
    if isinstance(split, FileSplit):
        path = Path(split.paths[index])
        facts["format"], facts["mode"], facts["orientation"] = _header(path)
        try:
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16)
        except OSError as error:  # it has vanished meanwhile
            raise ImageError(path, f"cannot be opened: {error.strerror or error}") from None
    facts["digest"] = np.void(digest.digest())
    return facts


def _spread(image: NDArray[np.uint8], small: NDArray[np.uint8]) -> int:
    """Give the largest difference within a colour channel; where the thumbnail already shows more, that of it."""
    rough = int(small.max()) - int(small.min())
    if rough > _FLAT:
        return rough
    ranges = (cv2.minMaxLoc(np.ascontiguousarray(image[:, :, channel])) for channel in range(3))
    return int(max(high - low for low, high, _, _ in ranges))


def _header(path: Path) -> tuple[str, str, int]:
    """Read format, mode and orientation; of a file that only other decoders open, nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(path) as picture:
                orientation = picture.getexif().get(_ORIENTATION_TAG, 1)
                is_valid = isinstance(orientation, int) and 1 <= orientation <= 8
                return picture.format or "", picture.mode, orientation if is_valid else 1
        except Exception:  # headers are as odd as they like, and the pixels have been read
            return "", "", 1
