"""JPEG through simplejpeg: the pixels that Pillow gives, in half the time, and at 1/2, 1/4 or 1/8 in less.

Both call libjpeg-turbo, as OpenCV does, which takes 1.2 times as long. Only what both decode alike comes here:
Huffman-coded grey or colour of 8 bits a sample, whole from its first marker to its last. CMYK, arithmetic coding,
12 bits, rare subsamplings and whatever libjpeg would have to repair are left to Pillow, which also says what is wrong
with a damaged file.
"""

import io
import re
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

_START, _END, _SCAN, _METADATA = 0xD8, 0xD9, 0xDA, 0xE1
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_PROGRESSIVE = 0xC2
_SEGMENTS = frozenset((0xC4, _SCAN, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))  # tables, scans, comments, applications
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")  # within a scan a zero follows a byte 255, and restarts are no end
_BLOCK = 8  # pixels a side
_GREY = 128  # of each channel, where a decoder lacks the data
_FILLER = bytes(range(0xFE)) * 16  # any bits that no marker begins with


@dataclass(frozen=True)
class JpegHeader:
    """What stands around the pixels."""

    height: int
    """Rows as stored."""
    width: int
    """Columns as stored."""
    held_bytes: int
    """Memory for the coefficients of the whole picture, which several scans take at every scale; 0 for one scan."""
    scans: int
    """Passes over the picture."""
    has_metadata: bool
    """An EXIF or XMP block may tell an orientation."""
    end: int
    """Place of the last marker."""


def read_header(data: bytes) -> JpegHeader | None:
    """Follow the segments from the first marker to the last; None for anything that simplejpeg is not to decode."""
    if data[:2] != bytes((0xFF, _START)):
        return None
    frame: _Frame | None = None
    has_metadata = in_scans = False
    scans = 0
    at = 2
    while at + 2 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _END:
            if frame is None or not scans:
                return None
            held_bytes = frame.coefficient_bytes if in_scans else 0
            return JpegHeader(frame.height, frame.width, held_bytes, scans, has_metadata, at)
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES and frame is None:
            frame = _read_frame(data[at + 4 : at + 2 + length])
            in_scans = marker == _PROGRESSIVE
            if frame is None:
                return None
        elif marker not in _SEGMENTS or length < 2:
            return None
        has_metadata |= marker == _METADATA
        at += 2 + length
        if marker == _SCAN:
            start = at - length + 2
            in_scans |= frame is None or data[start : start + 1] != bytes((frame.components,))
            scans += 1
            following = _MARKER.search(data, at)
            at = following.start() if following else len(data)
    return None


@dataclass(frozen=True)
class _Frame:
    height: int
    width: int
    components: int
    coefficient_bytes: int


def _read_frame(fields: bytes) -> _Frame | None:
    """Read a frame's precision, sizes and components."""
    height, width = int.from_bytes(fields[1:3], "big"), int.from_bytes(fields[3:5], "big")
    if len(fields) < 6 or fields[0] != 8 or fields[5] not in (1, 3) or 0 in (height, width):
        return None
    factors = [(factor >> 4) * (factor & 15) for factor in fields[7 : 6 + 3 * fields[5] : 3]]
    if len(factors) != fields[5] or 0 in factors:
        return None
    return _Frame(height, width, fields[5], 2 * height * width * sum(factors) // max(factors))


def decode(data: bytes, header: JpegHeader, scale: int) -> NDArray[np.uint8] | None:
    """Decode a file that `read_header` accepts.

    Args:
        data: the file.
        header: of it.
        scale: 1; or 2, 4 or 8, at which the decoder leaves out the finer cosines, which is nearly a mean over so many
            pixels a side.

    Returns:
        RGB as stored, uint8 (ceil(H / scale), ceil(W / scale), 3); None where simplejpeg refuses, or libjpeg
        warns: after a warning, simplejpeg takes an error for one too, and gives what happens to lie in memory.
    """
    least = (-(-side // scale) for side in (header.height, header.width))
    height, width = least if scale > 1 else (0, 0)
    try:
        image: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, min_height=height, min_width=width, min_factor=scale, strict=True
        )
    except (ValueError, MemoryError):
        return None
    return image


def ends_early(data: bytes, header: JpegHeader, image: NDArray[np.uint8]) -> bool:
    """Say whether the pixels stop before the picture does, though the file has its end marker.

    Decoders then go on in mid-grey without an error. Only where the last block is such a grey need anything be done:
    if other bits behind the pixels make another picture, those that were needed are missing.

    Args:
        data: the file.
        header: of it.
        image: what became of it, uint8 (h, w, 3), at any scale, as stored.
    """
    side = max(1, _BLOCK * len(image) // header.height)  # of the last block
    corner = image[-side:, -side:].tobytes()
    if corner.count(_GREY) < len(corner):
        return False
    with_more = data[: header.end] + _FILLER + data[header.end :]
    return not np.array_equal(_thumbnail(data), _thumbnail(with_more))


def _thumbnail(data: bytes) -> NDArray[np.uint8]:
    """Decode at an eighth."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            picture.draft(None, (1, 1))
            return np.array(picture)
