"""Safetensors files, ours and other people's: header, layout and, where there is one, our hash are checked on reading.

Nothing in a file is run. Its header is read first, and tensors that do not fill the rest of the file exactly, one after
another, are refused before any memory is taken for them.
"""

import hashlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from vitlab import __version__
from vitlab.errors import InputError
from vitlab.models.record import RECORD_KEY, check_record
from vitlab.parsing import parse_json

FORMAT = 1
HEADER_LIMIT_BYTES = 16 * 2**20
_NO_HEADER_BYTES = 2**40
NO_DIGITS = "0" * 64
"""What stands in the place of a hash where it is computed."""

_MAX_AXES = 16
_ITEM_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file read into memory; verified where it is a model file of vitlab."""

    path: Path
    content: bytes
    shapes: dict[str, tuple[int, ...]]
    record: dict[str, Any] | None
    """The vitlab record, its fields of the right kinds; None in a file from elsewhere."""

    def tensors(self) -> dict[str, Tensor]:
        """Give the tensors, on the CPU.

        Raises:
            InputError: the file is damaged.
        """
        try:
            tensors: dict[str, Tensor] = safetensors.torch.load(self.content)
        except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
            raise damaged(self.path, str(error)) from error
        return tensors


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read any safetensors file, once and whole; verify the hash where it is a model file of vitlab.

    Raises:
        InputError: the file cannot be read, is no safetensors file, is damaged, or a newer vitlab wrote it.
    """
    if path.exists() and not path.is_file():  # a pipe or a device would never end
        raise InputError(f"cannot read {path}: it is no regular file")
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
            shapes, record = _parse_header(path, header, os.fstat(file.fileno()).st_size - 8 - len(header))
            file.seek(0)
            content = file.read()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except MemoryError as error:
        raise InputError(f"{path} is larger than this machine's memory: take a machine with more") from error
    if record is not None:
        _verify(path, content, header, record["sha256"])
    return SafetensorsFile(path=path, content=content, shapes=shapes, record=record)


def damaged(path: Path, reason: str) -> InputError:
    """Make the error for a file that is not as it should be."""
    return InputError(f"{path} is damaged, or no safetensors file: {reason}; take another copy or train again")


def _read_header(path: Path, file: IO[bytes]) -> bytes:
    size = int.from_bytes(file.read(8), "little")
    if size > _NO_HEADER_BYTES:  # the letters of a text, as a number
        raise damaged(path, "it does not begin as such a file does")
    if size > HEADER_LIMIT_BYTES:
        raise damaged(path, f"a header of {size:,} bytes is above the limit of {HEADER_LIMIT_BYTES:,}")
    header = file.read(size)
    if len(header) < size:
        raise damaged(path, "it ends within its header")
    return header


def _parse_header(
    path: Path, header: bytes, data_bytes: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any] | None]:
    """Give the tensors' shapes and our record, checked against the number of bytes that follow the header."""
    try:
        entries = parse_json(header)
        metadata = entries.pop("__metadata__", {})
        record = parse_json(metadata[RECORD_KEY]) if RECORD_KEY in metadata else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, "its header cannot be read") from error
    try:
        if record is not None:
            _refuse_newer(path, record)
            check_record(record)
        return _check_layout(entries, data_bytes), record
    except InputError:
        raise
    except ValueError as error:
        raise damaged(path, str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path, "its header cannot be read") from error


def _refuse_newer(path: Path, record: dict[str, Any]) -> None:
    if type(record.get("format")) is int and record["format"] > FORMAT:
        raise InputError(
            f"{path} is in format {record['format']}, written by vitlab {record.get('version')}, and this vitlab "
            f"{__version__} reads up to format {FORMAT}: install a newer vitlab"
        )


def _check_layout(entries: dict[str, Any], data_bytes: int) -> dict[str, tuple[int, ...]]:
    """Give the shapes; raise ValueError unless the tensors lie one after another and fill the file."""
    spans = []
    for name, entry in entries.items():
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        if not isinstance(shape, list) or len(shape) > _MAX_AXES or not all(map(_is_size, numbers)):
            raise ValueError(f"the tensor {name} has no sizes that a tensor can have")
        bits = _ITEM_BITS.get(entry["dtype"])
        if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
            raise ValueError(f"the tensor {name} does not have the bytes that its shape takes")
        spans.append((begin, end))
    reached = 0
    for begin, end in sorted(spans):
        if begin != reached or end < begin:
            raise ValueError("its tensors leave gaps or overlap")
        reached = end
    if reached != data_bytes:
        raise ValueError(f"its tensors take {reached:,} bytes, and {data_bytes:,} follow its header")
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _verify(path: Path, content: bytes, header: bytes, digits: str) -> None:
    """Raise InputError unless the bytes give the hash that they claim, which stands once in the header."""
    position = header.find(digits.encode(errors="replace"))
    if not re.fullmatch("[0-9a-f]{64}", digits) or header.count(digits.encode()) != 1:
        raise damaged(path, "its SHA-256 is not written as it should be")
    view, start = memoryview(content), 8 + position
    digest = hashlib.sha256(view[:start])
    digest.update(NO_DIGITS.encode())
    digest.update(view[start + len(NO_DIGITS) :])
    if digest.hexdigest() != digits:
        raise damaged(path, "its bytes do not match their SHA-256")
