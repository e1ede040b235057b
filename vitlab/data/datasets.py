"""Data sets by name, folder or manifest: what trains, what validates, what is kept for the test, and its classes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vitlab.data.cifar import download_cifar, find_cifar, load_cifar
from vitlab.data.folders import LAYOUT, load_folder_parts, load_folder_split, load_folders
from vitlab.data.idx import find_idx, load_idx
from vitlab.data.manifest import is_manifest, load_manifest, load_manifest_parts, load_manifest_split
from vitlab.data.splits import (
    ArrayData,
    ArraySplit,
    Dataset,
    FileSplit,
    Split,
    cut_validation,
    fingerprint,
    match_classes,
    may_be_same,
    split_validation,
)
from vitlab.errors import InputError

__all__ = [
    "Dataset",
    "Split",
    "SplitName",
    "files_split",
    "fingerprint",
    "load_dataset",
    "load_parts",
    "load_split",
    "may_be_same",
]

SplitName = Literal["train", "val", "test", "all"]


def load_dataset(
    root: str | Path, *, val_fraction: float, seed: int, allow_empty_classes: bool = False, download: bool = False
) -> Dataset:
    """Read a data set for training.

    Training fits, validation chooses, the test split is scored when asked and chooses nothing. Where there is no
    validation split it is cut from training by `splits.cut_validation`. Classes are the folders' names in code-point
    order, as torchvision sorts them, and are matched by name between splits.

    Args:
        root: `digits`; or a folder: ROOT/train/CLASS/** with val (valid, validation) and test beside it, class
            folders alone, a CIFAR batch folder (Python or binary) or the folder around one, or the IDX files of MNIST
            and its kin; or a .csv or .jsonl file that lists path, label and perhaps split.
        val_fraction: share of the training images that validates where there is no validation split.
        seed: what the cut depends on besides.
        allow_empty_classes: keep a class folder without images as a class.
        download: fetch CIFAR where root is missing or empty; root's own name says which, cifar10 or cifar100.

    Returns:
        `train`, `val` and perhaps `test`, and lines for the log.

    Raises:
        InputError: there is no such data set, or its layout is not one of those above.
    """
    if download and root != "digits" and not _holds_anything(Path(root)):
        download_cifar(Path(root))
    if is_manifest(Path(root)):
        return load_manifest(Path(root), val_fraction=val_fraction, seed=seed)
    if data := _load_arrays(root):
        return _cut_arrays(data, val_fraction=val_fraction, seed=seed)
    return load_folders(Path(root), val_fraction=val_fraction, seed=seed, allow_empty_classes=allow_empty_classes)


def load_parts(root: str | Path) -> Dataset:
    """Read a data set as it lies, also one that training would refuse.

    No validation is cut, and splits may hold different classes, or none of a class.

    Args:
        root: as for `load_dataset`.

    Returns:
        The splits that the data set is divided into, or `all`; their labels index the classes of all of them.

    Raises:
        InputError: there is no such data set, or no image with a class.
    """
    if is_manifest(Path(root)):
        return load_manifest_parts(Path(root))
    if data := _load_arrays(root):
        splits: dict[str, Split] = {"train": data.train, "test": data.test}
        return Dataset(classes=data.classes, splits=splits, native_size=data.native_size)
    return load_folder_parts(Path(root))


def load_split(
    root: str | Path, split: SplitName, *, classes: Sequence[str], val_fraction: float, seed: int
) -> tuple[Split, tuple[str, ...]]:
    """Read one split for evaluation, its labels in a model's class order.

    Args:
        root: as for `load_dataset`; a folder may hold fewer classes, a single one too, or this split alone.
        split: `train`, `val`, `test`, or `all` images of class folders or a manifest without splits. Where there is
            no validation split, `train` and `val` are the same cut as in training.
        classes: the model's class names.
        val_fraction: training's.
        seed: training's.

    Returns:
        The split, and lines for the log, which name the classes it lacks.

    Raises:
        InputError: there is no such split, or it holds a class that the model does not know.
    """
    if is_manifest(Path(root)):
        found, lines = load_manifest_split(Path(root), split, classes=classes, val_fraction=val_fraction, seed=seed)
    elif (data := _load_arrays(root)) is None:
        found, lines = load_folder_split(Path(root), split, classes=classes, val_fraction=val_fraction, seed=seed)
    else:
        parts = _cut_arrays(data, val_fraction=val_fraction, seed=seed)
        if split not in parts.splits:
            raise InputError(f"{root} has {', '.join(parts.splits)} but no {split} split: evaluate one of those")
        found, lines = match_classes(parts.splits[split], data.classes, classes, str(root))
        lines = [*(parts.notes if split != "test" else ()), *lines]
    return found, tuple(lines)


def files_split(files: Sequence[str | Path]) -> Split:
    """Give image files, as `list_images` finds them, as a split without labels, in their order."""
    return FileSplit(name="files", labels=np.full(len(files), -1, dtype=np.int64), paths=list(map(str, files)))


def _load_arrays(root: str | Path) -> ArrayData | None:
    """Read the built-in digits, CIFAR or IDX files; None where root is a folder of image files."""
    if root == "digits":
        return _load_digits()
    root = Path(root)
    if root.is_file():
        raise InputError(f"{root} is a file: give the folder that holds the data set; {LAYOUT}")
    if not root.is_dir():
        offer = "; data.download fetches CIFAR" if "cifar" in root.name.lower() else ""
        raise InputError(f"{root} does not exist: give a folder or the built-in `digits`; {LAYOUT}{offer}")
    if not os.access(root, os.R_OK | os.X_OK):
        raise InputError(f"{root} cannot be opened: check its permissions")
    if cifar := find_cifar(root):
        return load_cifar(*cifar)
    idx = find_idx(root)
    return load_idx(root, idx) if idx else None


def _holds_anything(root: Path) -> bool:
    return root.is_file() or (root.is_dir() and any(root.iterdir()))


def _cut_arrays(data: ArrayData, *, val_fraction: float, seed: int) -> Dataset:
    splits, note = split_validation(data.train, data.classes, fraction=val_fraction, seed=seed)
    splits["test"] = data.test
    return Dataset(classes=data.classes, splits=splits, notes=(note,), native_size=data.native_size)


def _load_digits() -> ArrayData:
    """Read scikit-learn's 1,797 digits of 8x8 pixels; a fixed fifth of each class is the test split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    digits = ArraySplit(
        name="train",
        images=np.repeat(grey[:, :, :, None], 3, axis=3),
        labels=bunch.target.astype(np.int64),
        paths=[f"digits#{index}" for index in range(len(grey))],
    )
    classes = tuple(map(str, range(10)))
    rest, test, _ = cut_validation(digits, classes, fraction=0.2, seed=0)  # the same whatever the run's seed
    return ArrayData(
        classes=classes,
        train=digits.subset("train", rest),
        test=digits.subset("test", test),
        native_size=(8, 8),
    )
