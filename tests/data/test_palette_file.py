"""Palette files: ours come back bit for bit, other conventions are recognised, anything else is refused in a line."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlab.data.palette import uniform_palette
from vitlab.data.palette_file import read_palette, write_palette
from vitlab.errors import InputError


def saved(path: Path, values: np.ndarray) -> Path:
    np.save(path, values, allow_pickle=True)
    return path


@pytest.mark.parametrize("channels", [3, 1])
def test_write_palette_is_read_back_to_the_bit(tmp_path, channels):
    palette = torch.rand(31, channels, generator=torch.Generator().manual_seed(0)) * 2 - 1
    write_palette(tmp_path / "p.npy", palette)
    assert np.load(tmp_path / "p.npy").dtype == np.float32
    assert np.array_equal(np.load(tmp_path / "p.npy"), palette.numpy())
    read, note = read_palette(tmp_path / "p.npy")
    assert torch.equal(read, palette)
    assert note is None
    assert os.listdir(tmp_path) == ["p.npy"]


@pytest.mark.parametrize("palette", [[[0.0, 0.25, 1.0], [0.5, 0.5, 0.5]], [[0.0]], [[1.0, 1, 1]]])
def test_write_palette_of_light_colors_is_not_taken_for_one_from_0_to_1(tmp_path, palette):
    write_palette(tmp_path / "p.npy", torch.tensor(palette))
    read, note = read_palette(tmp_path / "p.npy")
    assert torch.allclose(read, torch.tensor(palette), atol=2e-7)
    assert "0..255" in note


COLORS = np.array([[0, 51, 255], [102, 204, 153]])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (COLORS.astype(np.uint8), "0..255"),
        (COLORS.astype(np.int64), "0..255"),
        (COLORS.astype(">f4"), "0..255"),
        (np.asfortranarray(COLORS.astype(np.float64)), "0..255"),
        (COLORS / 255, "[0, 1]"),
        ((COLORS / 255).astype(np.float32) - 1e-7, "[0, 1]"),
        (COLORS / 127.5 - 1, None),
        ((COLORS / 127.5 - 1) * (1 + 1e-7), None),
    ],
)
def test_read_palette_recognises_its_range(tmp_path, values, found):
    palette, note = read_palette(saved(tmp_path / "p.npy", values))
    assert palette.dtype == torch.float32
    assert torch.allclose(palette, torch.from_numpy(COLORS / 127.5 - 1).float(), atol=1e-6)
    assert palette.abs().max() <= 1
    if found is None:
        assert note is None
    else:
        assert note == f"palette {tmp_path / 'p.npy'}: values in {found}, converted to [-1, 1]"


def test_read_palette_takes_zeros_and_ones_by_their_type(tmp_path):
    values = np.array([[0, 1, 0], [1, 1, 1]])
    dark, _ = read_palette(saved(tmp_path / "p.npy", values.astype(np.uint8)))
    light, _ = read_palette(saved(tmp_path / "p.npy", values.astype(np.float32)))
    assert dark.max().item() == pytest.approx(1 / 127.5 - 1)
    assert light.tolist() == [[-1, 1, -1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.zeros(3), "has the shape (3,)"),
        (np.zeros((4, 2)), "has the shape (4, 2)"),
        (np.zeros((4, 4, 3)), "has the shape (4, 4, 3)"),
        (np.zeros((0, 3)), "has the shape (0, 3)"),
        (np.zeros((70_000, 1)), "has the shape (70000, 1)"),
        (np.zeros((800_000, 3)), "is larger than any palette"),
        (np.full((4, 3), np.nan), "infinite or no numbers"),
        (np.array([[0.0, 1, np.inf]]), "infinite or no numbers"),
        (np.array([[0.0, 1, 256]]), "values from 0 to 256"),
        (np.array([[-1.1, 0, 1]]), "values from -1.1 to 1"),
        (np.array([[-0.5, 0, 200]]), "values from -0.5 to 200"),
        (np.zeros((2, 3), np.complex64), "complex64, no real numbers"),
        (np.zeros((2, 3), bool), "bool, no real numbers"),
        (np.full((2, 3), "red"), "<U3, no real numbers"),
    ],
)
def test_read_palette_refuses_other_arrays(tmp_path, values, expected):
    with pytest.raises(InputError) as caught:
        read_palette(saved(tmp_path / "p.npy", values))
    message = str(caught.value)
    assert message.startswith(f"palette {tmp_path / 'p.npy'} ")
    assert expected in message
    assert "give a .npy file of shape (colours, 3)" in message
    assert "\n" not in message


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["PALETTE_BOMB"],)


def test_read_palette_never_unpickles(tmp_path, monkeypatch):
    monkeypatch.setenv("PALETTE_BOMB", str(tmp_path / "executed"))
    saved(tmp_path / "object.npy", np.array([[Bomb(), 1, 2]], dtype=object))
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Bomb()))
    np.savez(tmp_path / "archive.npz", a=np.zeros((2, 3)))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    for name in ("object", "pickle", "archive"):
        with pytest.raises(InputError, match=f"{name}.npy cannot be read"):
            read_palette(tmp_path / f"{name}.npy")
    assert not (tmp_path / "executed").exists()


def header(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def whole_file() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, uniform_palette(8).numpy())
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"not an array",
        b"PK\x03\x04 not a zip file either",
        whole_file()[:-1],
        whole_file()[:60],
        header("(10**12, 3)"),
        header("(1000000000000, 3)"),
        header("(-1, 3)"),
        header("(" * 5000),
        header("(2, 3)", descr="'<f4', 'x': __import__('os').mkdir('executed')"),
        header("(2, 3)", descr="'|O'"),
        header("(2, 3)", descr="'<f99'"),
        header("(2, 3)"),
    ],
)
def test_read_palette_refuses_damaged_files_in_one_line(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("p.npy").write_bytes(content)
    with pytest.raises(InputError, match=r"^palette p\.npy cannot be read \([^\n]+\): give a \.npy file[^\n]+$"):
        read_palette(Path("p.npy"))
    assert os.listdir() == ["p.npy"]


def test_read_palette_refuses_what_is_no_file(tmp_path):
    with pytest.raises(InputError, match="does not exist: `vitlab palette` writes one"):
        read_palette(tmp_path / "p.npy")
    os.mkfifo(tmp_path / "pipe.npy")
    for path in (tmp_path, tmp_path / "pipe.npy"):
        with pytest.raises(InputError, match="is no regular file"):
            read_palette(path)
