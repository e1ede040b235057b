"""Images of several sizes in one buffer, in memory or in a file.

A file holds a header, the pixels of one image after the other, and an index with the size and CRC-32 of each. Its own
name goes into the header's hash, since the name says what the pixels are.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitlab.disk import replacing

FORMAT = "vitlab images 1"
"""Another number where the layout of the file changes."""

_HEADER = struct.Struct("<16sQQ32s")  # format, number of images, bytes of pixels, SHA-256 of name and index
_MAGIC = FORMAT.encode().ljust(16)
_RECORD = np.dtype([("height", "<u4"), ("width", "<u4"), ("channels", "<u4"), ("crc", "<u4")])
_GROWTH = 64 * 2**20  # bytes


class DamagedStoreError(Exception):
    """A file is not what was written."""


class PixelStore:
    """Images, uint8 (h, w, C), that worker processes share. One without pixels stands for an image that is not kept."""

    def __init__(self, pixels: NDArray[np.uint8], index: NDArray[np.void], path: Path | None = None) -> None:
        """Set up a store.

        Args:
            pixels: of one image after the other, one axis.
            index: a record for each image.
            path: the file that the pixels are mapped from, if there is one.
        """
        self.pixels, self.index, self.path = pixels, index, path
        self._ends = np.cumsum(index["height"].astype(np.int64) * index["width"] * index["channels"])
        self._shared: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    def read(self, row: int) -> NDArray[np.uint8] | None:
        """Copy an image out; None where it is not kept."""
        kept = self._view(row)
        return kept.reshape(self.index[row].tolist()[:3]).copy() if len(kept) else None

    def is_whole(self, start: int, stop: int) -> bool:
        """Say whether the pixels of images from `start` to before `stop` are those that were written."""
        crcs = self.index["crc"][start:stop].tolist()
        return all(zlib.crc32(self._view(row).data) == crc for row, crc in enumerate(crcs, start))

    def _view(self, row: int) -> NDArray[np.uint8]:
        start = int(self._ends[row - 1]) if row else 0
        return self.pixels[start : int(self._ends[row])]

    def __reduce__(self) -> tuple[Any, ...]:
        """Let processes that do not inherit the pixels by a fork share them, instead of sending each a copy."""
        if self.path is not None:
            return open_store, (self.path,)
        if self._shared is None:
            self._shared = torch.from_numpy(self.pixels).share_memory_()  # type: ignore[no-untyped-call]
            self.pixels = self._shared.numpy()
        return _from_shared, (self._shared, self.index)


def _from_shared(pixels: torch.Tensor, index: NDArray[np.void]) -> PixelStore:
    return PixelStore(pixels.numpy(), index)


def _record(image: NDArray[np.uint8]) -> tuple[int, ...]:
    return *image.shape, zlib.crc32(image.data)


def fill_store(images: Iterable[NDArray[np.uint8]], *, expected: int, limit: int) -> PixelStore:
    """Keep images in memory.

    Args:
        images: uint8 (h, w, C), contiguous.
        expected: bytes that they will probably take.
        limit: bytes that they may take.

    Raises:
        MemoryError: they take more.
    """
    pixels = np.empty(expected, dtype=np.uint8)
    records: list[tuple[int, ...]] = []
    end = 0
    for image in images:
        start, end = end, end + image.size
        if end > limit:
            raise MemoryError
        if end > len(pixels):
            pixels.resize(end + _GROWTH, refcheck=False)  # in place, where the system can
        pixels[start:end] = image.reshape(-1)
        records.append(_record(image))
    pixels.resize(end, refcheck=False)
    return PixelStore(pixels, np.array(records, dtype=_RECORD))


def write_store(path: Path, images: Iterable[NDArray[np.uint8]]) -> PixelStore:
    """Write images to a file, which is there once it is whole, and map it.

    Args:
        path: the file.
        images: uint8 (h, w, C), contiguous.

    Raises:
        OSError: the disk is full or failed; nothing is left.
    """
    records: list[tuple[int, ...]] = []
    with replacing(path) as aside, aside.open("wb") as file:
        file.write(bytes(_HEADER.size))
        for image in images:
            file.write(image.data)
            records.append(_record(image))
        num_bytes = file.tell() - _HEADER.size
        index = np.array(records, dtype=_RECORD).tobytes()
        file.write(index)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, len(records), num_bytes, _digest(path, index)))
    return open_store(path)


def open_store(path: Path) -> PixelStore:
    """Map a file of `write_store`. Header, size and index must agree; the pixels are `is_whole`'s to check.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        DamagedStoreError: it is not what was written.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER.size:
            raise DamagedStoreError("it is cut off")
        magic, count, num_bytes, digest = _HEADER.unpack(file.read(_HEADER.size))
        if magic != _MAGIC or size != _HEADER.size + num_bytes + count * _RECORD.itemsize:
            raise DamagedStoreError("its size is not what its header says")
        file.seek(_HEADER.size + num_bytes)
        index = file.read()
        if _digest(path, index) != digest:
            raise DamagedStoreError("its index was changed")
        pixels = np.empty(0, dtype=np.uint8)
        if num_bytes:  # nothing cannot be mapped
            pixels = np.asarray(np.memmap(file, np.uint8, "r", offset=_HEADER.size, shape=(num_bytes,)))
    return PixelStore(pixels, np.frombuffer(index, dtype=_RECORD), path)


def _digest(path: Path, index: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + index).digest()
