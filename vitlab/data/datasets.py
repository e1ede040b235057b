"""Data sets by name or folder: which images train, which validate, which are kept for the test, and what they show."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vitlab.data.cifar import IMAGE_SIZE, download_cifar, find_cifar, load_cifar
from vitlab.data.folders import LAYOUT, load_folder_split, load_folders
from vitlab.data.images import list_images
from vitlab.data.splits import ArraySplit, Dataset, FileSplit, Split, cut_validation, fingerprint, match_classes
from vitlab.errors import InputError

__all__ = ["Dataset", "Split", "SplitName", "files_split", "fingerprint", "load_dataset", "load_split"]

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
            folders alone, a CIFAR batch folder (Python or binary), or the folder around one.
        val_fraction: share of the training images that validates where there is no validation split.
        seed: the run's seed, which the cut depends on.
        allow_empty_classes: keep a class folder without images as a class.
        download: fetch CIFAR where root is missing or empty; root's own name says which, cifar10 or cifar100.

    Returns:
        `train`, `val` and perhaps `test`, and lines for the log.

    Raises:
        InputError: there is no such data set, or its layout is not one of those above.
    """
    if root == "digits":
        return _array_dataset(*_load_digits(), native_size=(8, 8), val_fraction=val_fraction, seed=seed)
    folder = Path(root)
    if download and not (folder.is_dir() and any(folder.iterdir())):
        download_cifar(folder)
    _check_folder(folder)
    if cifar := find_cifar(folder):
        data = load_cifar(*cifar)
        return _array_dataset(
            data.train, data.test, data.classes, native_size=IMAGE_SIZE, val_fraction=val_fraction, seed=seed
        )
    return load_folders(folder, val_fraction=val_fraction, seed=seed, allow_empty_classes=allow_empty_classes)


def load_split(
    root: str | Path, split: SplitName, *, classes: Sequence[str], val_fraction: float, seed: int
) -> tuple[Split, tuple[str, ...]]:
    """Read one split for evaluation, its labels in a model's class order.

    Args:
        root: as for `load_dataset`; a folder may hold fewer classes, a single one too, or this split alone.
        split: `train`, `val`, `test`, or `all` images of class folders that are not split. Where there is no
            validation split, `train` and `val` are the same cut as in training.
        classes: the model's class names.
        val_fraction: training's.
        seed: training's.

    Returns:
        The split, and lines for the log, which name the classes it lacks.

    Raises:
        InputError: there is no such split, or it holds a class that the model does not know.
    """
    folder = Path(root)
    if root == "digits":
        train, test, own = _load_digits()
    else:
        _check_folder(folder)
        cifar = find_cifar(folder)
        if cifar is None:
            found, notes = load_folder_split(folder, split, classes=classes, val_fraction=val_fraction, seed=seed)
            return found, tuple(notes)
        data = load_cifar(*cifar)
        train, test, own = data.train, data.test, data.classes
    parts = _array_dataset(train, test, own, native_size=(0, 0), val_fraction=val_fraction, seed=seed)
    if split not in parts.splits:
        raise InputError(f"{root} has {', '.join(parts.splits)} but no {split} split: evaluate one of those")
    found, notes = match_classes(parts.splits[split], own, classes, str(root))
    return found, (*parts.notes, *notes) if split != "test" else tuple(notes)


def files_split(paths: Iterable[str | Path]) -> Split:
    """Give the images that files and folders stand for, without labels, sorted by path.

    Raises:
        InputError: a path does not exist, or there is no image.
    """
    images, _ = list_images(paths)
    return FileSplit(name="files", labels=np.full(len(images), -1, dtype=np.int64), paths=list(map(str, images)))


def _check_folder(root: Path) -> None:
    if root.is_file():
        raise InputError(f"data.root {root} is a file: give the folder that holds it; {LAYOUT}")
    if not root.is_dir():
        raise InputError(f"data.root {root} does not exist: give a folder of images or the built-in `digits`; {LAYOUT}")


def _array_dataset(
    train: ArraySplit,
    test: ArraySplit,
    classes: tuple[str, ...],
    *,
    native_size: tuple[int, int],
    val_fraction: float,
    seed: int,
) -> Dataset:
    train_rows, val_rows, note = cut_validation(train, classes, fraction=val_fraction, seed=seed)
    splits: dict[str, Split] = {
        "train": train.subset("train", train_rows),
        "val": train.subset("val", val_rows),
        "test": test,
    }
    return Dataset(classes=classes, splits=splits, notes=(note,), native_size=native_size)


def _load_digits() -> tuple[ArraySplit, ArraySplit, tuple[str, ...]]:
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
    return digits.subset("train", rest), digits.subset("test", test), classes
