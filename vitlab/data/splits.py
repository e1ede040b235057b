"""Splits and data sets as values: images with labels, cut by class and seed, and told apart by a fingerprint."""

import abc
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.data.decoders import Shrink
from vitlab.data.images import hash_file, read_image, read_shrunk
from vitlab.errors import InputError
from vitlab.seeds import derive_seed

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""What people call the three splits, in lower case."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Split(abc.ABC):
    """Images with labels, in a fixed order."""

    name: str
    """`train`, `val`, `test`, `all` or `files`."""
    labels: NDArray[np.int64]
    """Class index of each image, shape (N,); -1 where unknown."""
    paths: Sequence[str]
    """What each image is called in messages and predictions, N names."""
    is_cut: bool = False
    """Whether `split_validation` made it out of the training images."""

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def read(self, index: int) -> NDArray[np.uint8]:
        """Give one image as upright RGB, uint8 (H, W, 3), the caller's to change.

        Raises:
            ImageError: it cannot be read.
        """

    def read_shrunk(self, index: int, shrink: Shrink) -> tuple[NDArray[np.uint8], tuple[int, int]]:
        """Give one image as `read` does, or as much smaller as `shrink` allows, and its height and width in full.

        Raises:
            ImageError: it cannot be read.
        """
        image = self.read(index)
        H, W, _ = image.shape
        return image, (H, W)

    @abc.abstractmethod
    def subset(self, name: str, rows: NDArray[np.int64]) -> "Split":
        """Give the images at `rows`, in that order, as a split of another name."""

    @abc.abstractmethod
    def identity(self) -> Iterator[bytes]:
        """Give, image by image, bytes that change when the image does."""

    def contents(self) -> Iterator[bytes]:
        """Give, image by image, bytes that change with any pixel."""
        return self.identity()

    def stamps(self) -> Iterator[bytes]:
        """Give, image by image, bytes that change when what a cache kept of it is out of date."""
        return self.identity()

    def blank(self) -> NDArray[np.uint8]:
        """Give an image as `read` does, for a loader that has none to tell the size of its batch."""
        return np.zeros((1, 1, 3), dtype=np.uint8)


@dataclass(frozen=True, eq=False, kw_only=True)
class FileSplit(Split):
    """Images in files, which `paths` names."""

    @classmethod
    def of_classes(cls, name: str, images: Mapping[str, Sequence[str]]) -> "FileSplit":
        """Give the paths of each class, class after class, with labels in the mapping's order."""
        sizes = [len(paths) for paths in images.values()]
        return cls(
            name=name,
            labels=np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
            paths=[path for paths in images.values() for path in paths],
        )

    def read(self, index: int) -> NDArray[np.uint8]:
        """Read and decode the file."""
        return read_image(self.paths[index])

    def read_shrunk(self, index: int, shrink: Shrink) -> tuple[NDArray[np.uint8], tuple[int, int]]:
        """Read the file and decode it as small as allowed."""
        return read_shrunk(self.paths[index], shrink)

    def subset(self, name: str, rows: NDArray[np.int64]) -> "FileSplit":
        """Give the files at `rows`."""
        return replace(self, name=name, labels=self.labels[rows], paths=[self.paths[row] for row in rows])

    def identity(self) -> Iterator[bytes]:
        """Give name and size in bytes, in a folder or a manifest alike; opening every file would cost an epoch."""
        for path in self.paths:
            try:
                size = os.path.getsize(path)
            except OSError:  # a broken link is listed, and reported when it is read
                size = -1
            yield f"{os.path.basename(path)}\0{size}".encode("utf-8", "surrogateescape")

    def contents(self) -> Iterator[bytes]:
        """Give the hash of each file, which is read for it."""
        return (hash_file(path) or b"unreadable" for path in self.paths)

    def stamps(self) -> Iterator[bytes]:
        """Give absolute path, size in bytes and time of the last change; two data sets may have names alike."""
        for path in self.paths:
            try:
                status = os.stat(path)
                stamp = f"{status.st_size}\0{status.st_mtime_ns}"
            except OSError:
                stamp = "unreadable"
            yield f"{os.path.abspath(path)}\0{stamp}".encode("utf-8", "surrogateescape")


@dataclass(frozen=True, eq=False, kw_only=True)
class ArraySplit(Split):
    """Images of one size, held in memory."""

    images: NDArray[np.uint8]
    """RGB, uint8 (N, H, W, 3)."""

    def read(self, index: int) -> NDArray[np.uint8]:
        """Copy the image out."""
        image: NDArray[np.uint8] = self.images[index].copy()
        return image

    def subset(self, name: str, rows: NDArray[np.int64]) -> "ArraySplit":
        """Copy the images at `rows`."""
        return replace(
            self,
            name=name,
            labels=self.labels[rows],
            paths=[self.paths[row] for row in rows],
            images=self.images[rows],
        )

    def identity(self) -> Iterator[bytes]:
        """Give the pixels."""
        return (image.tobytes() for image in self.images)


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """What a run trains on."""

    classes: tuple[str, ...]
    """Class names; a label is an index into them."""
    splits: dict[str, Split]
    """`train` and `val`, and `test` where the data set has one."""
    notes: tuple[str, ...] = ()
    """What a log should say: files left out, classes missing, how validation was cut."""
    native_size: tuple[int, int] | None = None
    """(height, width) where all images have one size by definition, as in CIFAR."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayData:
    """A data set in memory that comes with a training and a test split."""

    classes: tuple[str, ...]
    train: ArraySplit
    test: ArraySplit
    native_size: tuple[int, int]
    """(height, width) of every image."""


def cut_validation(
    split: Split, classes: Sequence[str], *, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Cut a stratified, seeded validation part out of a split.

    Of a class with n images round(n * fraction) validate, but at least 1 where n is 2 or more, and at most n - 1; a
    class with one image stays in training whole. Which ones depends on the seed, the class's name and its images
    alone, so that a folder holding only some of the classes is cut alike.

    Args:
        split: images with labels.
        classes: class names in the labels' order.
        fraction: share that validates, in (0, 1).
        seed: the run's seed.

    Returns:
        Rows that train and rows that validate, each ascending, and a line that says so.

    Raises:
        InputError: nothing would validate, since no class has two images.
    """
    validating: list[NDArray[np.int64]] = []
    for label, name in enumerate(classes):
        rows = np.flatnonzero(split.labels == label)
        count = min(max(round(len(rows) * fraction), 1), len(rows) - 1)
        if count > 0:
            generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "validation", name)))
            validating.append(generator.permutation(rows)[:count])
    if not validating:
        raise InputError(
            f"{len(split)} images in {len(classes)} classes leave none for validation: "
            "give a val folder, or two images of a class"
        )
    val = np.sort(np.concatenate(validating))
    train = np.setdiff1d(np.arange(len(split)), val)
    note = f"validation: {len(val)} of {len(split)} training images, a share of {fraction:g} by class, seed {seed}"
    return train, val, note


def split_validation(
    split: Split, classes: Sequence[str], *, fraction: float, seed: int
) -> tuple[dict[str, Split], str]:
    """Cut a split by `cut_validation`: its `train` and `val`, and a line that says so."""
    train, val, note = cut_validation(split, classes, fraction=fraction, seed=seed)
    parts = {"train": split.subset("train", train), "val": split.subset("val", val)}
    return {name: replace(part, is_cut=True) for name, part in parts.items()}, note


def locate_split(split: str, parts: Collection[str], where: str) -> tuple[str, bool]:
    """Say in which part of a data set a split lies.

    Args:
        split: `train`, `val`, `test` or `all`.
        parts: the splits that the data set is divided into; none where it is not divided.
        where: what the data set is called in messages.

    Returns:
        The part, `all` where there are none, and whether the split is a cut of it as `split_validation` makes it.

    Raises:
        InputError: there is no such split.
    """
    is_cut = split in ("train", "val") and "val" not in parts and ("train" in parts or not parts)
    if not parts and split == "test":
        raise InputError(
            f"{where} is not divided into splits and has no test split: evaluate `val` (a cut of it) or `all` of it"
        )
    if parts and split not in parts and not is_cut:
        raise InputError(f"{where} has {', '.join(parts)} but no {split} split: evaluate one of those")
    return ("train" if parts else "all") if is_cut else split, is_cut


def match_classes(split: Split, own: Sequence[str], wanted: Sequence[str], where: str) -> tuple[Split, list[str]]:
    """Translate a split's labels from its own class order into another, by name.

    Args:
        split: labels index `own`.
        own: the split's class names.
        wanted: the class names of a model, in its order.
        where: what the split is called in messages.

    Returns:
        The split with labels that index `wanted`, and lines for the log.

    Raises:
        InputError: the split holds images of a class that is not wanted.
    """
    held = {own[label] for label in np.unique(split.labels)}
    if unknown := sorted(held - set(wanted)):
        absent = sorted(set(wanted) - held)
        raise InputError(
            f"{where} holds {len(held)} classes, the model knows {len(wanted)}: the model lacks {_some(unknown)}"
            + (f" and {where} lacks {_some(absent)}" if absent else "")
            + "; give data of the model's classes, named alike"
        )
    index = {name: label for label, name in enumerate(wanted)}
    table = np.array([index.get(name, -1) for name in own], dtype=np.int64)
    missing = [name for name in wanted if name not in held]
    notes = [f"{where} holds no image of {_some(missing)}; their places in the class order stay"] if missing else []
    return replace(split, labels=table[split.labels]), notes


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def fingerprint(source: Dataset | Split, *, contents: bool = False) -> dict[str, Any]:
    """Tell data sets apart, wherever they lie.

    Args:
        source: a data set or one split.
        contents: hash every file, too; otherwise none is opened.

    Returns:
        `counts` and `sha256` by split name, and for a data set `classes`. The hash covers labels and, of files, the
        name and size; of arrays, every pixel. With `contents` a hash of labels and files as `contents`.
    """
    splits = list(source.splits.values()) if isinstance(source, Dataset) else [source]
    record: dict[str, Any] = {"classes": list(source.classes)} if isinstance(source, Dataset) else {}
    record["counts"] = {split.name: len(split) for split in splits}
    record["sha256"] = {split.name: _sha256(split, split.identity()) for split in splits}
    if contents:
        record["contents"] = {split.name: _content_hash(split) for split in splits}
    return record


def may_be_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Compare two fingerprints, in contents where both have them."""
    told = first.keys() | second.keys()
    if not ("contents" in first and "contents" in second):
        told -= {"contents"}
    return all(first.get(key) == second.get(key) for key in told)


@lru_cache(maxsize=8)
def _content_hash(split: Split) -> str:
    """Hash a split's contents, once: a run asks when it begins and when it saves."""
    return _sha256(split, split.contents())


def _sha256(split: Split, contents: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for label, content in zip(split.labels.tolist(), contents, strict=True):
        digest.update(b"%d\0%d\0" % (label, len(content)))
        digest.update(content)
    return digest.hexdigest()
