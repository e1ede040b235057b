"""Folders of images: ROOT/train/CLASS/** with val and test beside it, or class folders alone."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitlab.data import cifar, idx, manifest
from vitlab.data.images import is_junk, scan_folder
from vitlab.data.splits import SPLIT_NAMES, Dataset, FileSplit, Split, locate_split, match_classes, split_validation
from vitlab.errors import InputError
from vitlab.text import counted

LAYOUT = (
    "the layout is ROOT/train/CLASS/IMAGE with ROOT/val/CLASS/IMAGE beside it, or ROOT/CLASS/IMAGE; "
    "CIFAR batches, IDX files and a .csv or .jsonl manifest are read too"
)


@dataclass(frozen=True)
class ClassFolders:
    """What a folder of class folders holds."""

    folder: Path
    images: dict[str, list[str]]
    """Paths of each class, in the classes' order: by code point, as torchvision sorts them."""
    ignored: list[str]
    """Files that are no images, and what is hidden."""
    loose: int
    """Images that lie beside the class folders, in no class."""

    @property
    def count(self) -> int:
        """Number of images with a class."""
        return sum(map(len, self.images.values()))

    def split(self, name: str) -> FileSplit:
        """Give the images as a split whose labels follow the folder's own class order."""
        return FileSplit.of_classes(name, self.images)

    def notes(self) -> list[str]:
        """Say what was left out."""
        notes = []
        if self.ignored:
            others = counted(len(self.ignored), "other file")
            notes.append(f"{self.folder}: {others} ignored, such as {self.ignored[0]}")
        if self.loose:
            notes.append(f"{self.folder}: {counted(self.loose, 'image')} in no class folder ignored")
        return notes


def load_folders(root: Path, *, val_fraction: float, seed: int, allow_empty_classes: bool) -> Dataset:
    """Read a data set for training; see `datasets.load_dataset`."""
    parts = _split_folders(root)
    if parts and "train" not in parts:
        raise InputError(f"{root} has {', '.join(parts)} but no train folder: {LAYOUT}")
    scan = _scan_classes(parts.get("train", root))
    _check_training(scan, root, allow_empty_classes=allow_empty_classes)
    classes = tuple(scan.images)
    train: Split = scan.split("train")
    notes = _unused(root, parts) + scan.notes()
    splits: dict[str, Split]
    if "val" in parts:
        val, lines = _matching(parts["val"], "val", scan)
        splits = {"train": train, "val": val}
        notes += lines
    else:
        splits, note = split_validation(train, classes, fraction=val_fraction, seed=seed)
        notes.append(note)
    if "test" in parts:
        try:  # training does not touch the test split, so that one without labels is no reason to stop
            splits["test"], lines = _matching(parts["test"], "test", scan)
            notes += lines
        except InputError as error:
            notes.append(f"test split left out: {error}")
    return Dataset(classes=classes, splits=splits, notes=tuple(notes))


def load_folder_parts(root: Path) -> Dataset:
    """Read all parts of a data set as they lie; see `datasets.load_parts`."""
    parts = _split_folders(root)
    scans = {name: _scan_classes(folder) for name, folder in (parts or {"all": root}).items()}
    if not any(scan.count for scan in scans.values()):
        loose = sum(scan.loose for scan in scans.values())
        held = f"{counted(loose, 'image')} but no class folders with images"
        raise InputError(f"{root} holds {held}: {LAYOUT}{_hint(root)}")
    classes = sorted({name for scan in scans.values() for name in scan.images})
    notes = _unused(root, parts) + [line for scan in scans.values() for line in scan.notes()]
    splits = {
        name: match_classes(scan.split(name), list(scan.images), classes, str(scan.folder))[0]
        for name, scan in scans.items()
    }
    return Dataset(classes=tuple(classes), splits=splits, notes=tuple(notes))


def load_folder_split(
    root: Path, split: str, *, classes: Sequence[str], val_fraction: float, seed: int
) -> tuple[Split, list[str]]:
    """Read one split for evaluation; see `datasets.load_split`."""
    parts = _split_folders(root)
    part, is_cut = locate_split(split, parts, str(root))
    scan = _scan_classes(parts.get(part, root))
    if not scan.count:
        raise InputError(f"{scan.folder} holds no class folders with images: {LAYOUT}{_hint(root)}")
    try:
        found, lines = match_classes(scan.split(split), list(scan.images), classes, str(scan.folder))
    except InputError as error:
        raise InputError(f"{error}; {LAYOUT}") from None
    notes = scan.notes() + lines
    if is_cut:
        cut, note = split_validation(found, classes, fraction=val_fraction, seed=seed)
        found = cut[split]
        notes.append(note)
    return found, notes


def _split_folders(root: Path) -> dict[str, Path]:
    """Find the folders of the splits; empty where ROOT holds class folders.

    A folder named `train` or `test` is a class like others (pictures of trains) when it holds no folders itself and
    stands beside folders that are no splits.
    """
    folders = _subfolders(root)
    named = [folder for folder in folders if folder.name.lower() in SPLIT_NAMES]
    if len(named) < len(folders) and not any(map(_subfolders, named)):
        return {}
    parts: dict[str, Path] = {}
    for folder in named:
        split = SPLIT_NAMES[folder.name.lower()]
        if split in parts:
            raise InputError(f"{parts[split]} and {folder} are both the {split} split: keep one of them")
        parts[split] = folder
    return parts


def _unused(root: Path, parts: dict[str, Path]) -> list[str]:
    others = sorted({folder.name for folder in _subfolders(root)} - {folder.name for folder in parts.values()})
    return [f"{root}: folders that are no split ignored: {', '.join(others)}"] if parts and others else []


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not is_junk(path.name))
    except OSError as error:
        raise InputError(f"folder {folder} cannot be read ({error.strerror}): check its permissions") from None


def _scan_classes(folder: Path) -> ClassFolders:
    images, ignored = scan_folder(folder)
    classes: dict[str, list[str]] = {name: [] for name in sorted(path.name for path in _subfolders(folder))}
    loose = 0
    start = len(os.path.join(folder, ""))
    for path in images:
        name, separator, _ = path[start:].partition(os.sep)
        if separator:
            classes[name].append(path)
        else:
            loose += 1
    return ClassFolders(folder, classes, ignored, loose)


def _check_training(scan: ClassFolders, root: Path, *, allow_empty_classes: bool) -> None:
    if not scan.count and scan.loose:
        held = f"{counted(scan.loose, 'image')} but no class folders"
        raise InputError(f"{scan.folder} holds {held}: {LAYOUT}{_hint(root)}")
    if not scan.count:
        raise InputError(f"{scan.folder} holds no images: {LAYOUT}{_hint(root)}")
    if len(scan.images) < 2:
        only = next(iter(scan.images))
        raise InputError(
            f"{scan.folder} holds only one class folder, {only}, and two are needed: {LAYOUT}{_hint(root)}"
        )
    empty = [name for name, paths in scan.images.items() if not paths]
    if empty and not allow_empty_classes:
        raise InputError(
            f"class folder {scan.folder / empty[0]} holds no images ({len(empty)} such): "
            "fill it, remove it, or set data.allow_empty_classes to keep its place"
        )


def _matching(folder: Path, name: str, train: ClassFolders) -> tuple[Split, list[str]]:
    """Read a split beside `train`, its labels in training's class order."""
    scan = _scan_classes(folder)
    if not scan.count:
        raise InputError(f"{folder} holds {counted(scan.loose, 'image')} but no class folders with images: {LAYOUT}")
    unseen = [name for name, paths in scan.images.items() if paths and name not in train.images]
    if unseen:
        raise InputError(
            f"{folder} holds the class {unseen[0]}, which {train.folder} lacks ({len(unseen)} such): "
            f"both need folders of the same names; {LAYOUT}"
        )
    split, notes = match_classes(scan.split(name), list(scan.images), list(train.images), str(folder))
    return split, scan.notes() + notes


def _hint(root: Path) -> str:
    """Point at a data set one folder further down, or at a manifest in the folder, where there is one."""
    found = [folder for folder in _subfolders(root) if _is_data_set(folder)]
    found += sorted(filter(manifest.is_manifest, root.iterdir()))
    return f"; perhaps {found[0]} was meant" if found else ""


def _is_data_set(folder: Path) -> bool:
    names = {path.name.lower() for path in _subfolders(folder)}
    return "train" in names or not names.isdisjoint(cifar.FOLDERS) or idx.find_idx(folder) is not None
