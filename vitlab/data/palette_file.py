"""Palettes as `.npy` files, ours and other people's."""

import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.palette import MAX_COLORS
from vitlab.disk import replacing
from vitlab.errors import InputError

_MAX_BYTES = 2**24  # MAX_COLORS of three float64, and a header, take a tenth
_ROUNDING = 1e-5  # how far beyond its range a centre may be computed
_NEED = "give a .npy file of shape (colours, 3), or (colours, 1) for grey, with values in [-1, 1], [0, 1] or 0..255"


def write_palette(path: Path, palette: Tensor) -> None:
    """Write a palette as float32 (K, C) in [-1, 1].

    One whose values are all 0 or more would be taken for one in [0, 1]; it is written in 0..255, which nothing else is.

    Raises:
        OSError: the file cannot be written.
    """
    colors = palette.detach().cpu().float().numpy()
    buffer = io.BytesIO()
    np.save(buffer, 127.5 * (colors + 1) if colors.min() >= -_ROUNDING else colors)
    with replacing(path) as aside:
        aside.write_bytes(buffer.getvalue())


def read_palette(path: Path) -> tuple[Tensor, str | None]:
    """Read a palette. Nothing in the file is executed.

    Whole numbers from 0 on are taken for 0..255. Other values are taken as they are where one is below 0, for [0, 1]
    where none is above 1, else for 0..255.

    Args:
        path: a .npy file of real numbers, (K, C), C 3 or 1.

    Returns:
        float32 (K, C) in [-1, 1], and a line for the log where the values were converted.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    values = _read_array(path)
    if values.ndim != 2 or values.shape[1] not in (1, 3) or not 1 <= len(values) <= MAX_COLORS:
        raise InputError(f"palette {path} has the shape {values.shape}: {_NEED}")
    if values.dtype.kind not in "fiu":
        raise InputError(f"palette {path} holds {values.dtype}, no real numbers: {_NEED}")
    colors = values.astype(np.float64)
    if not np.isfinite(colors).all():
        raise InputError(f"palette {path} has values that are infinite or no numbers: {_NEED}")
    low, high = float(colors.min()), float(colors.max())
    is_signed = low < -_ROUNDING
    if low < -1 - _ROUNDING or high > (1 if is_signed else 255) + _ROUNDING:
        raise InputError(f"palette {path} has values from {low:g} to {high:g}: {_NEED}")
    if is_signed:
        return _as_palette(colors), None
    is_unit = high <= 1 + _ROUNDING and values.dtype.kind == "f"
    found, scaled = ("[0, 1]", 2 * colors - 1) if is_unit else ("0..255", colors / 127.5 - 1)
    return _as_palette(scaled), f"palette {path}: values in {found}, converted to [-1, 1]"


def _as_palette(colors: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(colors.clip(-1, 1).astype(np.float32))


def _read_array(path: Path) -> NDArray[np.generic]:
    if not path.exists():
        raise InputError(f"palette {path} does not exist: `vitlab palette` writes one")
    if not path.is_file():
        raise InputError(f"palette {path} is no regular file: {_NEED}")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"palette {path} is larger than any palette of {MAX_COLORS:,} colours: {_NEED}")
        # Mapped: that unpickles nothing, and a header that claims more than the file holds takes no memory.
        return np.array(np.lib.format.open_memmap(path, mode="r"))
    except InputError:
        raise
    except Exception as error:  # a damaged header can make the reader raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"palette {path} cannot be read ({reason}): {_NEED}") from None
