"""`vitlab palette`: what it writes and prints, and one line for each wrong input."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.__main__ import main
from vitlab.data.datasets import load_dataset
from vitlab.data.palette import decode, encode, palette_quality, to_unit
from vitlab.data.palette_file import read_palette
from vitlab.data.preprocess import Preprocess
from vitlab.inference import palette as palette_command
from vitlab.inference.palette import palette_picture


def run(*arguments):
    return main(["palette", "--workers", "0", *map(str, arguments)])


def fails(capsys, *arguments):
    """Run a command line that must end with exit code 2 and one line; give the line."""
    capsys.readouterr()
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def images_of(root, split, image_size, **preprocess):
    found = load_dataset(root, val_fraction=0.1, seed=0).splits[split]
    record = Preprocess(image_size=image_size, **preprocess)
    return np.stack([record.apply(found.read(row)) for row in range(len(found))])


def test_palette_writes_colors_and_a_picture_and_measures_both_splits(color_folder, tmp_path, capsys):
    out = tmp_path / "new" / "colors.npy"
    arguments = ["--data", color_folder, "--num_colors", 20, "--image_size", "6x9", "--resize_mode", "squash"]
    assert run(*arguments, "--out", out) == 0
    palette, note = read_palette(out)
    assert palette.shape == (20, 3)
    assert note is None
    printed = capsys.readouterr().out.splitlines()
    for line, split, is_fitted in ((printed[-4], "val", False), (printed[-3], "train", True)):
        quality = palette_quality(images_of(color_folder, split, (6, 9), resize_mode="squash"), palette)
        assert line == f"{split} ({'fitted' if is_fitted else 'held out'}): {quality.describe()}"
    assert printed[-5] == "fitting 20 colours to 39 train images of 6x9 pixels"
    assert printed[-2:] == [f"palette: {out}", f"picture: {tmp_path / 'new' / 'colors.png'}"]
    with Image.open(tmp_path / "new" / "colors.png") as picture:
        picture.load()
        assert picture.mode == "RGB"
    again = tmp_path / "again.npy"
    assert run(*arguments, "--out", again, "--workers", 1) == 0
    assert again.read_bytes() == out.read_bytes()
    assert run(*arguments, "--out", again, "--seed", 1) == 0
    assert again.read_bytes() != out.read_bytes()


def test_palette_reads_split_mode_channels_and_size(color_folder, tmp_path, capsys):
    """14x18 pixels: a crop to 14x14 has no resize, and grey is taken before the palette."""
    out = tmp_path / "p.npy"
    assert run("--data", color_folder, "--out", out, "--split", "val", "--channels", 1, "--image_size", 14) == 0
    printed = capsys.readouterr().out
    assert "fitting 512 colours to 15 val images of 14x14 pixels" in printed
    palette, _ = read_palette(out)
    assert palette.shape == (512, 1)
    grey = {"channels": 1, "mean": (0.5,), "std": (0.5,), "crop_fraction": 1.0}
    quality = palette_quality(images_of(color_folder, "val", (14, 14), **grey), palette)
    assert f"val (fitted): {quality.describe()}" in printed
    assert "val (fitted): exact" in printed  # fewer than 512 greys
    assert "train (held out): " in printed


def test_palette_of_digits_takes_their_own_size_and_all_their_greys(tmp_path, capsys):
    assert run("--data", "digits", "--out", tmp_path / "p.npy", "--num_colors", 17) == 0
    printed = capsys.readouterr().out
    assert "fitting 17 colours to 1,295 train images of 8x8 pixels" in printed
    assert "val (held out): exact, 17 of 17 colours used, 2.068 nats a pixel, images: 143" in printed
    greys = decode(torch.arange(17), read_palette(tmp_path / "p.npy")[0])
    assert greys[:, 0].tolist() == np.rint(np.arange(17) * 255 / 16).tolist()


def test_palette_bounds_what_it_reads(color_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(palette_command, "_NUM_FITTED", 10)
    monkeypatch.setattr(palette_command, "_NUM_MEASURED", 4)
    assert run("--data", color_folder, "--out", tmp_path / "p.npy", "--num_colors", 4) == 0
    printed = capsys.readouterr().out
    assert "fitting 4 colours to 10 train images of 32x32 pixels" in printed
    assert printed.count("images: 4\n") == 2


def test_palette_stops_at_or_skips_an_unreadable_image(color_folder, tmp_path, capsys):
    root = tmp_path / "images"
    shutil.copytree(color_folder, root)
    broken = [root / "train" / "red" / "001.png", root / "val" / "blue" / "000.png"]
    for path in broken:
        path.write_bytes(b"")
    out = tmp_path / "p.npy"
    assert str(broken[0]) in fails(capsys, "--data", root, "--out", out)
    assert not out.exists()
    assert run("--data", root, "--out", out, "--num_colors", 4, "--on_error", "skip") == 3
    printed = capsys.readouterr().out
    assert "to 38 train images" in printed
    assert "images: 14\n" in printed
    assert all(f"skipped {path}: the file is empty" in printed for path in broken)
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"")
    assert "no image could be read to measure" in fails(capsys, "--data", root, "--out", out, "--on_error", "skip")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "missing --data, --out"),
        (["--data", "digits"], "missing --out"),
        (["--data", "NOWHERE", "--out", "p.npy"], "NOWHERE does not exist"),
        (["--data", "digits", "--out", "p.png"], "--out is p.png: give a file that ends in .npy"),
        (["--data", "digits", "--out", "FOLDER.npy"], "--out is FOLDER.npy: give a file that ends in .npy"),
        (["--data", "digits", "--out", "file/p.npy"], "--out file/p.npy cannot be written"),
        (["--data", "digits", "--out", "p.npy", "--num_colors", "0"], "--num_colors is 0: give 1 or more"),
        (["--data", "digits", "--out", "p.npy", "--num_colors", "70000"], "num_colors is 70000: give 1 to 65,536"),
        (["--data", "digits", "--out", "p.npy", "--image_size", "8x"], "--image_size is 8x: give sides"),
        (["--data", "digits", "--out", "p.npy", "--channels", "2"], "--channels is 2: give one of 1, 3"),
        (["--data", "digits", "--out", "p.npy", "--resize_mode", "fit"], "give one of crop, squash, pad"),
        (["--data", "digits", "--out", "p.npy", "--split", "all"], "give one of train, val, test"),
        (["--data", "DATA", "--out", "p.npy", "--split", "test"], "DATA has no test split: give one of train, val"),
        (["--data", "digits", "--out", "p.npy", "--workers", "-1"], "--workers is -1: give 0 or more"),
    ],
)
def test_palette_of_wrong_input_gives_one_line(capsys, tmp_path, color_folder, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER.npy").mkdir()
    (tmp_path / "file").touch()
    for split in ("train", "val"):
        shutil.copytree(color_folder / split, tmp_path / "DATA" / split)
    assert expected in fails(capsys, *arguments)
    assert not (tmp_path / "p.npy").exists()


@pytest.mark.parametrize(("num_colors", "columns", "rows"), [(6, 6, 1), (64, 32, 2), (41, 21, 2), (512, 32, 16)])
def test_palette_picture_shows_every_color_in_order_and_images_before_and_after(num_colors, columns, rows):
    """Images of 4x6 pixels are enlarged to 64x96; eight of them make a picture of 8 x 102 + 6 pixels."""
    generator = torch.Generator().manual_seed(0)
    palette = torch.rand(num_colors, 3, generator=generator) * 2 - 1
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 6, 3), dtype=np.uint8)
    picture = palette_picture(palette, images, "a title")
    width, grid_height = 8 * 102 - 6, rows * (8 * 102 - 6) // columns
    assert picture.shape[1] == width + 12
    top = 6 + (np.arange(num_colors) // columns + 0.5) * grid_height / rows
    left = 6 + (np.arange(num_colors) % columns + 0.5) * width / columns
    colors = decode(torch.arange(num_colors), palette).numpy()
    assert np.array_equal(picture[top.astype(int), left.astype(int)], colors)

    below = picture[6 + grid_height + 6 + 18 + 6 :]
    assert np.array_equal(below[8:72:16, 14:110:16], images[0])
    after = decode(encode(to_unit(images), palette), palette).numpy()
    row = 64 + 6 + 18 + 6
    assert np.array_equal(below[row + 2 : row + 66 : 16, 6 + 7 * 102 + 8 : 6 + 7 * 102 + 104 : 16], after[7])
