"""Image files: found in folders, and read to upright RGB or refused with a reason."""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitlab.data.decoders import MEMORY_LIMIT, Shrink, UnreadableError, decode
from vitlab.errors import InputError
from vitlab.text import counted

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

VISIT_LIMIT = 1000
"""Paths by which links may lead to one folder."""

_FolderId = tuple[int, int]  # device and inode

_JUNK = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir"))


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
        ImageError: the file is missing, damaged, cut off, no image, or larger than the limits of decoders.py.
    """
    return decode_image(_read_file(path), path)


def read_shrunk(path: str | os.PathLike[str], shrink: Shrink) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Read an image file, smaller where that is cheaper and wanted.

    Args:
        path: the file.
        shrink: tells from the size how much smaller the picture may be.

    Returns:
        Upright RGB, uint8 (H / s, W / s, 3) rounded up, with s what `shrink` gave or 1; and (H, W).

    Raises:
        ImageError: as `read_image`.
    """
    return _decode(_read_file(path), path, shrink)


def decode_image(data: bytes, path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Decode the bytes of an image file; `path` only names it in errors.

    Returns:
        Upright RGB, uint8 (H, W, 3), contiguous and writable.

    Raises:
        ImageError: as `read_image`.
    """
    return _decode(data, path, lambda height, width: 1)[0]


def _read_file(path: str | os.PathLike[str]) -> bytes:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait, a device never end
            raise ImageError(path, "is no regular file")
        if status.st_size > MEMORY_LIMIT:
            raise ImageError(path, f"is a file of {status.st_size / 1e6:,.0f} MB: scale the picture down")
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise ImageError(path, f"cannot be opened: {error.strerror or error}") from None


def hash_file(path: str | os.PathLike[str]) -> bytes | None:
    """Give the SHA-256 of a file's bytes; None where it cannot be read, which reading the image reports."""
    try:
        if not os.path.isfile(path):  # a pipe would wait, a device never end
            return None
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return None


def _decode(data: bytes, path: str | os.PathLike[str], shrink: Shrink) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    try:
        return decode(data, shrink)
    except UnreadableError as error:
        raise ImageError(path, str(error)) from error.__cause__


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
        others = counted(len(ignored), "other file")
        raise InputError(f"no images in {where} ({others}): give files such as .jpg, .png or .webp")
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
            elif _is_folder(entry):
                pending.append((entry.path, above | {identity}))
            elif _is_image_name(entry.name) and (entry.is_symlink() or entry.is_file()):
                images.append(entry.path)  # a broken link too: reading reports it, leaving it out would not
            else:
                ignored.append(entry.path)
    return sorted(images), sorted(ignored)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def is_junk(name: str) -> bool:
    """Say whether a file or folder is hidden or left behind by a system, so that no search looks at it."""
    return name.startswith(".") or name.lower() in _JUNK


def _is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
