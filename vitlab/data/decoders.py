"""Bytes of an image file to upright RGB: JPEG by simplejpeg, everything else by Pillow.

What a file holds decides how it is read. Whatever is transparent shows white, colour profiles are not applied, the
first frame or page stands for the file, and 16-bit samples are scaled to 8 bits (grey rounds sample / 257; of colour
Pillow keeps the high byte, at most one level away). Orientation that EXIF, XMP or the container tells is applied; a
malformed EXIF block is no reason to refuse whole pixels. A picture of more than FULL_SCALE pixels is read at half its
size or less, wherever it is read.
"""

import io
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitlab.data import jpeg

PIXEL_LIMIT = 178_956_970
"""Largest width x height of any picture: where Pillow by itself refuses it as a bomb. JPEG alone may come so far, since
it decodes at a smaller scale row by row."""

WHOLE_LIMIT = 50_000_000
"""Largest width x height where the decoder holds the whole picture: all but JPEG of a single scan."""

SCAN_LIMIT = 2_500_000_000
"""Largest width x height x scans of a JPEG: about a second of work, where a scan changes nothing."""

MEMORY_LIMIT = 256_000_000
"""Bytes that reading a file may take, its own among them. What would take more is refused before it is decoded."""

FULL_SCALE = 25_000_000
"""Largest width x height that is read at full scale: 75 MB of RGB."""

RULES = 2
"""Another number where the same bytes give other pixels, so that caches of the old ones are not found again."""

Shrink = Callable[[int, int], int]
"""(height, width) upright -> 1, 2, 4 or 8, by which a picture may be smaller than it is where that saves decoding."""

# Pillow tries every plug-in it has otherwise, down to one that runs Ghostscript.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "WEBP", "AVIF", "TIFF", "PPM", "ICO", "JPEG2000", "TGA")
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs", b"mif1", b"msf1"))
_ORIENTATION_TAG = 0x0112
_PHOTOMETRIC_TAG = 262
_GROUND = (255, 255, 255)  # what shows through: paper, and the ground that most cut-out pictures are made for
_STRIP = 2**20  # pixels that are converted at a time
_STRIP_BYTES = 14  # for each of them
_DECODER_BYTES = {"WEBP": 10, "AVIF": 4, "HEIF": 12, "JPEG2000": 13}  # for each pixel, beside Pillow's own; measured


class UnreadableError(Exception):
    """The reason why bytes cannot be read as an image."""


def decode(data: bytes, shrink: Shrink) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Decode the bytes of an image file.

    Args:
        data: the file.
        shrink: tells from the size by how much the picture may be smaller.

    Returns:
        Upright RGB, uint8 (H / s, W / s, 3) rounded up, contiguous and writable, with s what `shrink` gave or 1; and
        (H, W).

    Raises:
        UnreadableError: the file is damaged, cut off, no image, or larger than the limits.
    """
    try:
        header = jpeg.read_header(data)
        return (header and _decode_jpeg(data, header, shrink)) or _decode_whole(data, header)
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError(_unidentified(data)) from None
    except Image.DecompressionBombError:
        raise UnreadableError(f"it claims more than {WHOLE_LIMIT:,} pixels: scale the picture down") from None
    except Exception as error:  # a damaged file can make a decoder raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnreadableError(f"damaged or not supported: {reason}") from error


def _decode_jpeg(
    data: bytes, header: jpeg.JpegHeader, shrink: Shrink
) -> tuple[NDArray[np.uint8], tuple[int, int]] | None:
    """Decode by simplejpeg; None where the file is another's to decode, or to refuse with a reason."""
    H, W = header.height, header.width
    if header.scans * H * W > SCAN_LIMIT:
        raise UnreadableError(f"{W}x{H} in {header.scans:,} scans takes too long to read: save it with fewer")
    _require_size(H, W, WHOLE_LIMIT if header.held_bytes else PIXEL_LIMIT)
    orientation = _read_orientation(data) if header.has_metadata else 1
    if orientation >= 5:
        H, W = W, H
    scale = shrink(H, W)
    while FULL_SCALE * scale**2 < H * W:
        scale *= 2
    _require_memory(H, W, scale, len(data), header.held_bytes)
    image = jpeg.decode(data, header, scale)
    if image is None:
        return None
    _require_end(data, header, image)
    return _turn(image, orientation), (H, W)


def _decode_whole(data: bytes, header: jpeg.JpegHeader | None) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Decode by Pillow."""
    # Decoders warn of flaws that leave the pixels whole; under -W error a warning would cost the image.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels, orientation = _read_rgb(data)
    if header is not None:
        _require_end(data, header, pixels)
    image = _turn(pixels, orientation)  # a copy; Pillow's picture is gone by now
    H, W, _ = image.shape
    return image, (H, W)


def _require_end(data: bytes, header: jpeg.JpegHeader, pixels: NDArray[np.uint8]) -> None:
    if jpeg.ends_early(data, header, pixels):
        raise UnreadableError("cut off: its pixels end before the picture does")


def _open(data: bytes) -> Image.Image:
    """Read the header alone, and refuse a picture that is too large before its pixels take memory."""
    if _is_heif(data):
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            raise UnreadableError('HEIF needs a decoder: pip install "vitlab[heif]"') from None
        register_heif_opener()
        picture = Image.open(io.BytesIO(data), formats=("HEIF",))
    else:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
    H, W = picture.height, picture.width
    _require_size(H, W, WHOLE_LIMIT)
    sample_bytes = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}.get(picture.mode, 4)
    decoder_bytes = (sample_bytes + _DECODER_BYTES.get(picture.format or "", 0)) * H * W + _STRIP_BYTES * _STRIP
    _require_memory(H, W, 2 if H * W > FULL_SCALE else 1, len(data), decoder_bytes)
    return picture


def _require_size(height: int, width: int, limit: int) -> None:
    if height * width > limit:
        raise UnreadableError(f"{width}x{height} claims more than {limit:,} pixels: scale the picture down")


def _require_memory(height: int, width: int, scale: int, file_bytes: int, decoder_bytes: int) -> None:
    result = 3 * height * width // scale**2
    needed = file_bytes + max(decoder_bytes, result) + result  # turning the result takes it twice
    if needed > MEMORY_LIMIT:
        raise UnreadableError(
            f"{width}x{height} in this format takes {needed / 1e6:,.0f} MB to read, "
            f"more than {MEMORY_LIMIT / 1e6:,.0f}: scale the picture down"
        )


def _is_heif(data: bytes) -> bool:
    if data[4:8] != b"ftyp":
        return False
    box = data[8 : min(int.from_bytes(data[:4], "big"), 256)]
    brands = {box[start : start + 4] for start in range(0, len(box), 4)}
    return bool(brands & _HEIF_BRANDS) and not brands & {b"avif", b"avis"}


def _unidentified(data: bytes) -> str:
    if not data:
        return "the file is empty"
    if data.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the picture itself: run git lfs pull"
    if data[4:8] == b"ftyp":
        return "damaged, or larger than the AVIF decoder allows"
    return "not an image, or its header is damaged"


def _read_rgb(data: bytes) -> tuple[NDArray[np.uint8], int]:
    """Give the pixels as stored, and the orientation."""
    with _open(data) as picture:
        picture.load()
        orientation = _orientation(picture)  # now: PNG may carry EXIF behind the pixels, TIFF turns by itself
        if picture.mode == "F" or (picture.mode == "I" and picture.format != "PPM"):
            raise UnreadableError(
                f"32-bit samples (mode {picture.mode}) have no one right brightness: save 8 or 16 bits"
            )
        W, H = picture.size
        scale = 2 if H * W > FULL_SCALE else 1
        pixels = np.empty((-(-H // scale), -(-W // scale), 3), dtype=np.uint8)
        rows = max(2, _STRIP // W // 2 * 2)
        for top in range(0, H, rows):  # a copy of the whole would take its memory again
            strip = picture if rows >= H else picture.crop((0, top, W, min(top + rows, H)))
            colors = _to_rgb(strip, picture)
            pixels[top // scale : -(-(top + rows) // scale)] = np.asarray(colors.reduce(scale) if scale > 1 else colors)
    return pixels, orientation


def _to_rgb(strip: Image.Image, picture: Image.Image) -> Image.Image:
    """Bring a part of a picture, or the whole of it, to 8 bits of red, green and blue on a white ground."""
    if strip.mode.startswith("I"):
        samples = np.asarray(strip).astype(np.uint32)
        grey = (samples + 128) // 257
        if picture.format == "TIFF" and getattr(picture, "tag_v2", {}).get(_PHOTOMETRIC_TAG) == 0:
            grey = 255 - grey  # white is zero; Pillow turns that round for 8 bits only
        grey[samples == picture.info.get("transparency", -1)] = 255
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not strip.has_transparency_data:
        return strip if strip.mode == "RGB" else strip.convert("RGB")
    colors = strip.convert("RGBA")
    ground = Image.new("RGB", strip.size, _GROUND)
    ground.paste(colors, mask=colors)
    return ground


def _read_orientation(data: bytes) -> int:
    """Read a JPEG file's orientation alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
                return _orientation(picture)
        except Exception:  # blocks that Pillow cannot take; the pixels may be whole
            return 1


def _orientation(picture: Image.Image) -> int:
    try:
        value = picture.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # EXIF is as damaged as it likes
        return 1
    return value if value in range(1, 9) else 1


def _turn(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo an EXIF orientation: 2-4 mirror, 5-8 swap the axes first."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
