"""Copies of images in a folder for each class that a network found in them."""

import filecmp
import os
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import TypeAlias

from vitlab.checks import require
from vitlab.disk import replacing
from vitlab.errors import RunError
from vitlab.inference.tables import Prediction
from vitlab.text import file_name

_Held: TypeAlias = dict[tuple[int, str], list[str]]
_NUMBER = re.compile(r"-\d+(?=(\.[^.]*)?$)")


class ClassFolders:
    """Copies images into `ROOT/CLASS`; no file there is ever overwritten, and no link followed.

    A class folder has the class's name, a copy the image's, as far as they are harmless as names of files. Names that
    would be one are told apart by `-2`, `-3`, .... A file that lies there already under the image's name, with or
    without a number, and holds the same is its copy: another call with these images, or with some of them, adds
    nothing, and of two images with one name and one content a single copy lies there.

    Args:
        root: the folder; it is made where it is missing.
        classes: names of the classes.
        searched: the files and folders that the images were found in.

    Raises:
        InputError: a class folder is a link or a file, or copies would lie where images are searched.
    """

    def __init__(self, root: Path, classes: Sequence[str], searched: Iterable[Path]) -> None:
        here = root.resolve()
        for path in searched:
            apart = not here.is_relative_to(path.resolve()) and not path.resolve().is_relative_to(here)
            require(apart, f"--by_class {root} and {path} lie in one another: give a folder elsewhere for the copies")
        self.folders = {
            name: _ClassFolder(root / folder) for name, folder in zip(classes, _apart(classes), strict=True)
        }
        require(root.is_dir() or not root.exists(), f"--by_class {root} is a file: give a folder for the copies")

    def copy(self, rows: Iterable[Prediction]) -> int:
        """Copy the images that have a label, and give their number.

        Raises:
            RunError: an image cannot be copied.
        """
        number = 0
        for row in rows:
            label = row.labels[0] if row.labels else None
            if label is None:
                continue
            folder, number = self.folders[label], number + 1
            try:
                folder.take(Path(row.path))
            except OSError as error:
                raise RunError(f"cannot copy {row.path} into {folder.path}: {error.strerror or error}") from error
        return number


class _ClassFolder:
    """One class's folder, and what lies in it by size and name: of many images of one name few are compared."""

    def __init__(self, path: Path) -> None:
        require(not path.is_symlink(), f"{path} is a link: put a folder in its place, or remove it")
        require(path.is_dir() or not path.exists(), f"{path} is a file: remove it, or give another folder")
        self.path = path
        self.held: _Held | None = None
        """Names of files; made when the first image comes."""
        self.last = Counter[str]()
        """Numbers of the names that are taken, at the least."""

    def take(self, source: Path) -> None:
        """Copy an image, unless its copy is there."""
        held = self._held()
        name, size = file_name(source.name), source.stat().st_size
        if any(filecmp.cmp(source, self.path / other, shallow=False) for other in held.get((size, name), ())):
            return
        for number in count(self.last[name] + 1):
            free = _numbered(name, number)
            path = self.path / free
            if not path.is_symlink() and not path.exists():
                break
        with replacing(path) as aside:
            shutil.copyfile(source, aside)
        self.last[name] = number
        _note(held, size, free)

    def _held(self) -> _Held:
        if self.held is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self.held = {}
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        _note(self.held, entry.stat(follow_symlinks=False).st_size, entry.name)
        return self.held


def _note(held: _Held, size: int, name: str) -> None:
    """Note a file under its name, and under the name that it may be a numbered one of."""
    held.setdefault((size, name), []).append(name)
    if (plain := _NUMBER.sub("", name)) != name:
        held.setdefault((size, plain), []).append(name)


def _numbered(name: str, number: int) -> str:
    stem, suffix = Path(name).stem, Path(name).suffix
    return name if number == 1 else f"{stem}-{number}{suffix}"


def _apart(names: Iterable[str]) -> list[str]:
    """Make names of folders, each another one, also where letter case or the form of an accent counts for nothing."""
    taken: set[str] = set()
    last = Counter[str]()
    apart = []
    for name in map(file_name, names):
        for number in count(last[name] + 1):
            free = _numbered(name, number)
            key = unicodedata.normalize("NFKC", free).casefold()
            if key not in taken:
                break
        last[name] = number
        taken.add(key)
        apart.append(free)
    return apart
