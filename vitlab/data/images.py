"""Image files: found in folders, and read to upright RGB or refused with a reason.

What a file holds decides how it is read, never its suffix. Alpha is dropped (the colours under it stay as stored),
colour profiles are not applied, the first frame or page stands for the file, and 16-bit samples are scaled to 8 bits
(grey rounds sample / 257; of colour Pillow keeps the high byte, at most one level away). EXIF orientation is applied;
a malformed EXIF block is no reason to refuse whole pixels.
"""

import io
import os
import stat
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitlab.errors import InputError

IMAGE_SUFFIXES = frozenset(
    (
        *(
            ".jpg",
            ".jpeg",
            ".jpe",
            ".jfif",
            ".mpo",
            ".png",
            ".apng",
            ".gif",
            ".webp",
            ".avif",
            ".heic",
            ".heif",
            ".hif",
        ),
        *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".ico", ".jp2", ".j2k"),
    )
)
"""What counts as an image in a folder, in any letter case; HEIF counts even where its decoder is not installed."""

PIXEL_LIMIT = 178_956_970
"""Largest width x height that is decoded: 512 MiB of RGB, and where Pillow by itself refuses a picture as a bomb."""

VISIT_LIMIT = 1000
"""Paths by which links may lead to one folder."""

_FolderId = tuple[int, int]  # device and inode

# Pillow tries every plug-in it has otherwise, down to one that runs Ghostscript.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "WEBP", "AVIF", "TIFF", "PPM", "ICO", "JPEG2000", "TGA")
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs", b"mif1", b"msf1"))
_JUNK = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir"))
_ORIENTATION_TAG = 0x0112
_PHOTOMETRIC_TAG = 262


class ImageError(InputError):
    """A file that cannot be read as an image: its path and the reason."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")

    def __reduce__(self) -> tuple[type["ImageError"], tuple[str, str]]:
        # Loader workers send errors to the main process, and pickle would rebuild one from its message alone.
        return ImageError, (self.path, self.reason)


def read_image(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Read an image file.

    Returns:
        Upright RGB, uint8 (H, W, 3), contiguous and writable.

    Raises:
        ImageError: the file is missing, damaged, cut off, no image, or larger than PIXEL_LIMIT.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait, a device never end
            raise ImageError(path, "is no regular file")
        data = Path(path).read_bytes()
    except OSError as error:
        raise ImageError(path, f"cannot be opened: {error.strerror or error}") from None
    return decode_image(data, path)


def decode_image(data: bytes, path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Decode the bytes of an image file; `path` only names it in errors.

    Returns:
        Upright RGB, uint8 (H, W, 3), contiguous and writable.

    Raises:
        ImageError: as `read_image`.
    """
    try:
        # Decoders warn of flaws that leave the pixels whole; under -W error a warning would cost the image.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(data, path) as picture:
                return _upright_rgb(picture, path)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(path, _unidentified(data)) from None
    except Image.DecompressionBombError:
        raise ImageError(path, _too_large("it")) from None
    except Exception as error:  # a damaged file can make a decoder raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ImageError(path, f"damaged or not supported: {reason}") from error


def _open(data: bytes, path: str | os.PathLike[str]) -> Image.Image:
    """Read the header alone, and refuse a picture that is too large before its pixels take memory."""
    if _is_heif(data):
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            raise ImageError(path, 'HEIF needs a decoder: pip install "vitlab[heif]"') from None
        register_heif_opener()
        picture = Image.open(io.BytesIO(data), formats=("HEIF",))
    else:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
    if picture.width * picture.height > PIXEL_LIMIT:
        raise ImageError(path, _too_large(f"{picture.width}x{picture.height}"))
    return picture


def _too_large(what: str) -> str:
    return f"{what} claims more than {PIXEL_LIMIT:,} pixels: scale the picture down"


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


def _upright_rgb(picture: Image.Image, path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    picture.load()
    orientation = _orientation(picture)  # after loading: PNG may carry EXIF behind the pixels, TIFF turns by itself
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PPM"):
        grey = (np.asarray(picture).astype(np.uint32) + 128) // 257
        if picture.format == "TIFF" and getattr(picture, "tag_v2", {}).get(_PHOTOMETRIC_TAG) == 0:
            grey = 255 - grey  # white is zero; Pillow turns that round for 8 bits only
        pixels = np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    elif picture.mode in ("I", "F"):
        raise ImageError(path, f"32-bit samples (mode {picture.mode}) have no one right brightness: save 8 or 16 bits")
    else:
        pixels = np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))
    return _turn(pixels, orientation)


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


def list_images(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Path], list[Path]]:
    """Find the image files that paths stand for.

    Args:
        paths: files, which are taken whatever their name, and folders, which are searched through; inside a folder
            the suffix counts, and hidden files, hidden folders and what systems leave behind (`._a.jpg`,
            `Thumbs.db`, `__MACOSX`) are left out.

    Returns:
        The images, each path once, and what was left out (a folder counts once); both sorted by path as text.

    Raises:
        InputError: a path does not exist, or there is no image at all.
    """
    given = [Path(path) for path in paths]
    images: set[str] = set()
    ignored: set[str] = set()
    for path in given:
        if path.is_dir():
            found, left_out = scan_folder(path)
            images.update(found)
            ignored.update(left_out)
        elif path.exists():
            images.add(str(path))
        else:
            raise InputError(f"{path} does not exist: give image files or folders of images")
    if not images:
        where = ", ".join(map(str, given)) or "the empty list of paths"
        raise InputError(f"no images in {where} ({len(ignored)} other files): give files such as .jpg, .png or .webp")
    return [Path(path) for path in sorted(images)], [Path(path) for path in sorted(ignored - images)]


def scan_folder(folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Search a folder and all below it: the image files, and what was left out, both sorted.

    Links are followed, so that an image which two ways lead to has two paths; only a link to a folder above itself
    leads nowhere.

    Raises:
        InputError: a folder cannot be opened, and going on without it would leave images out unseen; or links lead to
            it over and over.
    """
    images: list[str] = []
    ignored: list[str] = []
    visits: Counter[_FolderId] = Counter()
    pending: list[tuple[str, frozenset[_FolderId]]] = [(os.fspath(folder), frozenset())]
    while pending:
        here, above = pending.pop()
        try:
            status = os.stat(here)
            identity = status.st_dev, status.st_ino
            if identity in above:
                continue
            visits[identity] += 1
            if visits[identity] > VISIT_LIMIT:  # links beside links double the paths at each level
                raise InputError(f"links lead to folder {here} in more than {VISIT_LIMIT:,} ways: remove some of them")
            with os.scandir(here) as listing:
                entries = sorted(listing, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            raise InputError(f"folder {here} cannot be read ({error.strerror}): check its permissions") from None
        for entry in entries:
            if is_junk(entry.name):
                ignored.append(entry.path)
            elif entry.is_dir():
                pending.append((entry.path, above | {identity}))
            elif _is_image_name(entry.name) and (entry.is_file() or entry.is_symlink()):
                images.append(entry.path)  # a broken link too: reading reports it, leaving it out would not
            else:
                ignored.append(entry.path)
    return sorted(images), sorted(ignored)


def is_junk(name: str) -> bool:
    """Say whether a file or folder is hidden or left behind by a system, so that no search looks at it."""
    return name.startswith(".") or name.lower() in _JUNK


def _is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
