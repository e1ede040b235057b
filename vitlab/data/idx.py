"""IDX files, as MNIST, Fashion-MNIST and their kin are packed: big-endian sizes and then bytes, plain or gzipped."""

import gzip
import math
import os
import struct
import zlib
from itertools import product
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from einops import repeat
from numpy.typing import NDArray

from vitlab.data.decoders import PIXEL_LIMIT
from vitlab.data.splits import ArrayData, ArraySplit
from vitlab.errors import InputError

# Source: the table "Labels" in the authors' README, github.com/zalandoresearch/fashion-mnist.
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_BYTES = 0x08  # the code of unsigned bytes, the one type that images and their labels have
_AXES = {"images": (3, 4), "labels": (1,)}
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_RATIO = 1032  # deflate packs no more bytes than that into one

IdxFiles = dict[tuple[str, str], Path]
"""File of each part (train, t10k) and kind (images, labels)."""


def find_idx(root: Path) -> IdxFiles | None:
    """Find IDX files in a folder, a plain one before its gzipped twin; None where there are none."""
    files: IdxFiles = {}
    for part, kind in product(("train", "t10k"), _AXES):
        for axes, separator, suffix in product(_AXES[kind], "-.", ("", ".gz")):
            path = root / f"{part}-{kind}{separator}idx{axes}-ubyte{suffix}"
            if os.path.isfile(path):
                files.setdefault((part, kind), path)
    return files or None


def load_idx(root: Path, files: IdxFiles) -> ArrayData:
    """Read the four files that `find_idx` found; t10k is the test split.

    Classes are the labels that training holds, in numerical order, and need not start at 0. Where the folder's name
    says fashion they are Fashion-MNIST's ten names.

    Raises:
        InputError: a file is missing, damaged or no IDX file of bytes, or the files do not belong together.
    """
    if missing := [f"{part}-{kind}" for part, kind in product(("train", "t10k"), _AXES) if (part, kind) not in files]:
        raise InputError(
            f"{root} lacks {', '.join(missing)}: it needs train-images-idx3-ubyte, train-labels-idx1-ubyte, "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, plain or .gz"
        )
    (train, train_labels), (test, test_labels) = _read_part(files, "train"), _read_part(files, "t10k")
    if test.shape[1:3] != train.shape[1:3]:
        raise InputError(
            f"{root} has training images of {_times(train.shape[1:3])} pixels and test images of "
            f"{_times(test.shape[1:3])}: give files of one data set"
        )
    numbers = np.unique(train_labels)
    if len(unseen := np.setdiff1d(test_labels, numbers)):
        raise InputError(
            f"{files['t10k', 'labels']} holds the label {unseen[0]}, which {files['train', 'labels']} lacks "
            f"({len(unseen)} such): give files of one data set"
        )
    classes = tuple(map(str, numbers.tolist()))
    if _is_fashion(root) and numbers[-1] < len(FASHION_CLASSES):
        classes, numbers = FASHION_CLASSES, np.arange(len(FASHION_CLASSES), dtype=np.uint8)

    def split(name: str, path: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> ArraySplit:
        return ArraySplit(
            name=name,
            images=images if images.ndim == 4 else repeat(images, "n h w -> n h w three", three=3),
            labels=np.searchsorted(numbers, labels).astype(np.int64),
            paths=[f"{path}#{row}" for row in range(len(images))],
        )

    _, height, width = train.shape[:3]
    return ArrayData(
        classes=classes,
        train=split("train", files["train", "images"], train, train_labels),
        test=split("test", files["t10k", "images"], test, test_labels),
        native_size=(height, width),
    )


def _is_fashion(root: Path) -> bool:
    """Tell Fashion-MNIST by the folder's name, or by that of the folder around torchvision's `raw`."""
    names = []
    for path in (root.absolute(), root.resolve()):
        names.append(path.parent.name if path.name == "raw" else path.name)
    return any("fashion" in name.lower() for name in names)


def _read_part(files: IdxFiles, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read images, (N, H, W) or RGB (N, H, W, 3), and their labels, (N,)."""
    labels = _read(files[part, "labels"], "labels")
    return _read(files[part, "images"], "images", num_labels=len(labels)), labels


def _read(path: Path, kind: str, *, num_labels: int | None = None) -> NDArray[np.uint8]:
    """Read an array of bytes, plain or gzipped, which its first bytes tell; images must be as many as the labels."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_packed else file
            shape = _read_shape(stream, path, kind)
            if num_labels not in (None, shape[0]):
                raise InputError(f"{path} holds {shape[0]} images for {num_labels} labels: give files of one data set")
            size = math.prod(shape)
            # Before any memory is taken: a header may claim anything.
            if size > path.stat().st_size * (_GZIP_RATIO if is_packed else 1):
                raise InputError(f"{path} ends before the {_times(shape)} bytes that it claims: fetch it again")
            content = stream.read(size)
            rest = stream.read(1)  # at the end gzip compares its checksum, too
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "not enough memory"
        raise InputError(f"{path} cannot be read ({reason}): check its permissions, or fetch it again") from error
    if len(content) < size or rest:
        ends = "goes on after" if rest else "ends before"
        raise InputError(f"{path} {ends} the {_times(shape)} bytes that it claims: fetch it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_shape(stream: BinaryIO, path: Path, kind: str) -> tuple[int, ...]:
    """Read the header: two zeros, the type, the number of axes, and the length of each."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != _BYTES or magic[3] not in _AXES[kind]:
        wanted = " or ".join(f"0000{_BYTES:02x}{axes:02x}" for axes in _AXES[kind])
        raise InputError(
            f"{path} begins with {magic.hex() or 'nothing'}: IDX {kind} begin with {wanted}; fetch it again"
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise InputError(f"{path} ends within its header: fetch it again")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if 0 in shape or math.prod(shape[1:3]) > PIXEL_LIMIT or shape[3:] not in ((), (3,)):
        raise InputError(f"{path} claims {_times(shape)} {kind}: one or more are needed, images in grey or RGB")
    return shape


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
