"""CIFAR-10 and CIFAR-100 as their authors pack them: batches for Python (pickles, never executed) and binary ones."""

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from vitlab.data.splits import ArrayData, ArraySplit
from vitlab.errors import InputError

IMAGE_SIZE = (32, 32)
_VALUES = 3 * 32 * 32


@dataclass(frozen=True)
class CifarLayout:
    """One of the four packings."""

    title: str
    folder: str
    """Name of the batch folder in the authors' archive."""
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    """File of the class names."""
    labels: str | int
    """Python: key of the labels. Binary: label bytes in front of an image, the last of which counts."""
    num_classes: int

    @property
    def files(self) -> tuple[str, ...]:
        """All that must be there."""
        return (*self.train, *self.test, self.meta)


LAYOUTS = (
    CifarLayout(
        "CIFAR-10",
        "cifar-10-batches-py",
        tuple(f"data_batch_{n}" for n in range(1, 6)),
        ("test_batch",),
        "batches.meta",
        "labels",
        10,
    ),
    CifarLayout(
        "CIFAR-10",
        "cifar-10-batches-bin",
        tuple(f"data_batch_{n}.bin" for n in range(1, 6)),
        ("test_batch.bin",),
        "batches.meta.txt",
        1,
        10,
    ),
    CifarLayout("CIFAR-100", "cifar-100-python", ("train",), ("test",), "meta", "fine_labels", 100),
    CifarLayout("CIFAR-100", "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 2, 100),
)
FOLDERS = frozenset(layout.folder for layout in LAYOUTS)
"""Names of the archives' batch folders."""


def find_cifar(root: Path) -> tuple[Path, CifarLayout] | None:
    """Find the batch folder: `root` itself or one inside it that bears an archive's name; None where there is none.

    Raises:
        InputError: several data sets lie there.
    """
    found = [
        (root, layout) for layout in LAYOUTS if any((root / name).is_file() for name in layout.train + layout.test)
    ]
    if not found:
        found = [(root / layout.folder, layout) for layout in LAYOUTS if (root / layout.folder).is_dir()]
    if len(found) > 1:
        raise InputError(f"{root} holds {' and '.join(str(folder) for folder, _ in found)}: give one of them")
    return found[0] if found else None


def load_cifar(folder: Path, layout: CifarLayout) -> ArrayData:
    """Read the batches of a folder.

    Raises:
        InputError: a file is missing, damaged, or a pickle that holds more than arrays and text.
    """
    if missing := [name for name in layout.files if not (folder / name).is_file()]:
        raise InputError(
            f"{folder} lacks {', '.join(missing)}: {layout.title} needs {', '.join(layout.files)}; unpack it again"
        )
    classes = _class_names(folder / layout.meta, layout)
    train, test = (_read_batches(folder, names, layout) for names in (layout.train, layout.test))
    return ArrayData(
        classes=classes,
        train=ArraySplit(name="train", images=train[0], labels=train[1], paths=train[2]),
        test=ArraySplit(name="test", images=test[0], labels=test[1], paths=test[2]),
        native_size=IMAGE_SIZE,
    )


def _class_names(path: Path, layout: CifarLayout) -> tuple[str, ...]:
    if isinstance(layout.labels, int):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read as a list of class names ({error}): unpack it again") from error
        names = [line.strip() for line in text.splitlines() if line.strip()]
    else:
        key = layout.labels.removesuffix("s") + "_names"
        listed = _unpickle(path).get(key)
        if not isinstance(listed, list | tuple) or not all(isinstance(name, str | bytes) for name in listed):
            raise InputError(f"{path} holds no list of texts `{key}`: it is damaged; unpack it again")
        names = [_text(name) for name in listed]
    if len(names) != layout.num_classes or len(set(names)) != len(names):
        raise InputError(f"{path} holds {len(names)} class names: {layout.title} has {layout.num_classes}, each once")
    return tuple(names)


def _read_batches(
    folder: Path, names: Sequence[str], layout: CifarLayout
) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    images, labels, paths = [], [], []
    for name in names:
        path = folder / name
        if isinstance(layout.labels, int):
            batch, classes = _read_binary(path, layout.labels)
        else:
            batch, classes = _read_python(path, layout.labels)
        if classes.size and not 0 <= classes.min() <= classes.max() < layout.num_classes:
            raise InputError(
                f"{path} has labels from {classes.min()} to {classes.max()}: "
                f"{layout.title} has 0 to {layout.num_classes - 1}; unpack it again"
            )
        images.append(rearrange(batch, "n (c h w) -> n h w c", c=3, h=IMAGE_SIZE[0]))  # red, green and blue planes
        labels.append(classes)
        paths += [f"{path}#{index}" for index in range(len(batch))]
    return np.concatenate(images), np.concatenate(labels), paths


def _read_binary(path: Path, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    if len(content) == 0 or len(content) % (label_bytes + _VALUES):
        raise InputError(
            f"{path} has {len(content)} bytes: records of {label_bytes + _VALUES} do not fill it; unpack it again"
        )
    records = content.reshape(-1, label_bytes + _VALUES)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _read_python(path: Path, key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _unpickle(path)
    data = content.get("data")
    try:
        labels = np.asarray(content.get(key))
    except ValueError:  # lists of several lengths
        labels = np.empty(0)
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == _VALUES):
        raise InputError(f"{path} holds no `data` of uint8 (N, {_VALUES}): it is no CIFAR batch, or damaged")
    if labels.shape != data.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"{path} holds no `{key}` for each of its {len(data)} images: it is no CIFAR batch, or damaged"
        )
    return data, labels.astype(np.int64)


def _unpickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary whose globals are numpy's array and nothing else."""
    try:
        content = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except InputError as error:
        raise InputError(f"{path} is refused: {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{path} cannot be read as a CIFAR batch ({error}): unpack its archive again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a dictionary: it is no CIFAR batch")
    return {_text(key): value for key, value in content.items()}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays, text and numbers. Any other global, and with it any code, is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # wherever this numpy keeps it
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return _array_from_buffer
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return _latin1_bytes
        raise InputError(f"its pickle asks for {module}.{name}, and no code of a data file is run")


def _dtype(spec: str | bytes, align: object, copy: object) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(_text(spec))  # Python 2 wrote bytes; how to align is for records alone
    if dtype.hasobject:
        raise InputError("its pickle holds an array of objects, and a CIFAR batch holds numbers")
    return dtype


def _array_from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _latin1_bytes(text: str, encoding: str) -> bytes:
    return text.encode("latin-1")


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def download_cifar(root: Path) -> None:
    """Fetch and unpack CIFAR with torchvision; the last name of `root` says which: it contains cifar10 or cifar100.

    Raises:
        InputError: the name says neither, or the archive cannot be fetched.
    """
    from torchvision.datasets import CIFAR10, CIFAR100
    from torchvision.datasets.utils import download_and_extract_archive

    name = root.name.lower().replace("-", "").replace("_", "")
    source = CIFAR100 if "cifar100" in name else CIFAR10 if "cifar10" in name else None
    if source is None:
        raise InputError(f"data.download cannot tell what to fetch into {root}: name the folder cifar10 or cifar100")
    try:
        # Not CIFAR10(root, download=True), which would go on to unpickle the batches.
        os.makedirs(root, exist_ok=True)
        download_and_extract_archive(source.url, str(root), filename=source.filename, md5=source.tgz_md5)
    except Exception as error:  # urllib, tarfile, sockets, the disk
        raise InputError(
            f"{source.url} could not be fetched into {root} ({error}): check the network, or unpack it there"
        ) from error
