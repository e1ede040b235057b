"""Copies of images in a folder for each class that a network found in them."""

import filecmp
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from vitlab.checks import require
from vitlab.disk import replacing
from vitlab.errors import RunError
from vitlab.inference.tables import Prediction
from vitlab.text import file_name


class ClassFolders:
    """Copies images into `ROOT/CLASS`; no file there is ever overwritten, and no link followed.

    A class folder has the class's name, a copy the image's, as far as they are harmless as names of files. Names that
    would be one are told apart by `-2`, `-3`, .... What lies there already with the same name and content stays and
    counts as copied, so that a second run adds nothing.

    Args:
        root: the folder; it is made where it is missing.
        classes: names of the classes.
        images: paths of all images that may be copied, in an order that is always the same.
        searched: the files and folders that the images were found in.

    Raises:
        InputError: a class folder is a link or a file, or copies would lie where images are searched.
    """

    def __init__(self, root: Path, classes: Sequence[str], images: Sequence[str], searched: Iterable[Path]) -> None:
        here = root.resolve()
        for path in searched:
            apart = not here.is_relative_to(path.resolve()) and not path.resolve().is_relative_to(here)
            require(apart, f"--by_class {root} and {path} lie in one another: give a folder elsewhere for the copies")
        self.folders = dict(zip(classes, (root / name for name in _apart(classes)), strict=True))
        self.names = dict(zip(images, _apart([Path(image).name for image in images]), strict=True))
        for folder in self.folders.values():
            require(not folder.is_symlink(), f"{folder} is a link: put a folder in its place, or remove it")
            require(folder.is_dir() or not folder.exists(), f"{folder} is a file: remove it, or give another folder")

    def copy(self, rows: Iterable[Prediction]) -> int:
        """Copy the images that have a label, and give their number.

        Raises:
            RunError: an image cannot be copied.
        """
        labelled = [row for row in rows if row.labels]
        for row in labelled:
            folder = self.folders[row.labels[0]]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _copy(Path(row.path), folder / self.names[row.path])
            except OSError as error:
                raise RunError(f"cannot copy {row.path} into {folder}: {error.strerror or error}") from error
        return len(labelled)


def _copy(source: Path, target: Path) -> None:
    for number in count(1):
        path = target if number == 1 else target.with_name(f"{target.stem}-{number}{target.suffix}")
        if path.is_symlink() or path.exists():
            if path.is_file() and not path.is_symlink() and filecmp.cmp(source, path, shallow=False):
                return
            continue
        with replacing(path) as aside:
            shutil.copyfile(source, aside)
        return


def _apart(names: Iterable[str]) -> list[str]:
    """Make names of files, each another one, also where letter case or the form of an accent counts for nothing."""
    taken: set[str] = set()
    last = Counter[str]()
    apart = []
    for name in map(file_name, names):
        stem, suffix = Path(name).stem, Path(name).suffix
        for number in count(last[name] + 1):
            free = name if number == 1 else f"{stem}-{number}{suffix}"
            key = unicodedata.normalize("NFKC", free).casefold()
            if key not in taken:
                break
        last[name] = number
        taken.add(key)
        apart.append(free)
    return apart
