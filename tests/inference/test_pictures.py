"""`vitlab sample` and `vitlab complete`: what they write and print, and one line for each wrong input."""

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image

from vitlab.__main__ import main
from vitlab.data.images import read_image
from vitlab.data.preprocess import Preprocess
from vitlab.engine.figures import TILE_GAP, load_image
from vitlab.inference.sampling import beam_search, complete, sample
from vitlab.models.files import load_model, save_model

ZOOM = 16  # 4 x 6 pixels are enlarged to 64 x 96


def run(*arguments):
    return main([*map(str, arguments)])


def fails(capsys, *arguments):
    """Run a command line that must end with exit code 2 and one line; give the line."""
    capsys.readouterr()
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.fixture
def drawer(random_imagegpt, tmp_path):
    """Give a function that saves a random ImageGPT of 4 x 6 pixels and RGB, changed by its fields, as a model file."""

    def save(**changes):
        network = random_imagegpt(**changes)
        path = tmp_path / "drawer.safetensors"
        record = Preprocess(image_size=(4, 6), mean=(0.5,) * 3, std=(0.5,) * 3, resize_mode="squash")
        save_model(path, network, classes=list("abcde"), preprocess=record, metrics={}, data={})
        return path

    return save


@pytest.fixture
def photos(tmp_path):
    """Give a folder of two images and one that is none."""
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in ("a.png", "c.png"):
        Image.fromarray(generator.integers(0, 256, (9, 14, 3), dtype=np.uint8)).save(folder / name)
    (folder / "b.png").write_bytes(b"no image")
    return folder


def tile(picture, row, column, row_height):
    """Cut one image out of a grid of images that are enlarged to 64 x 96 pixels, and shrink it again."""
    top, left = TILE_GAP + row * row_height, TILE_GAP + column * (96 + TILE_GAP)
    return picture[top : top + 64 : ZOOM, left : left + 96 : ZOOM]


def test_sample_writes_the_images_that_the_library_draws(drawer, tmp_path, capsys):
    path, out, npy = drawer(), tmp_path / "new" / "grid.png", tmp_path / "images.npy"
    options = ["--temperature", 0.7, "--top_k", 8, "--top_p", 0.9, "--seed", 3, "--precision", "fp32"]
    assert run("sample", path, "--count", 5, "--out", out, "--npy", npy, "--batch_size", 2, *options) == 0
    network = load_model(path).network
    tokens = sample(network, count=5, temperature=0.7, top_k=8, top_p=0.9, seed=3, precision="fp32")
    images = rearrange(network.decode(tokens).numpy(), "b c h w -> b h w c")
    assert np.array_equal(np.load(npy), images)
    picture = load_image(out)
    for index, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]):
        assert np.array_equal(tile(picture, row, column, 64 + TILE_GAP), images[index])
    assert capsys.readouterr().out == f"5 images drawn: {out}\n"
    assert not any(image.name.endswith(".tmp") for image in tmp_path.rglob("*"))


def test_sample_with_a_beam_writes_the_likeliest(drawer, tmp_path, capsys):
    path, out, npy = drawer(), tmp_path / "grid.png", tmp_path / "images.npy"
    arguments = ["--count", 2, "--beam", 6, "--out", out, "--npy", npy, "--precision", "fp32"]
    assert run("sample", path, *arguments) == 0
    network = load_model(path).network
    tokens = beam_search(network, width=6, precision="fp32").tokens[:2]
    assert np.array_equal(np.load(npy), rearrange(network.decode(tokens).numpy(), "b c h w -> b h w c"))
    assert capsys.readouterr().out == f"2 images found: {out}\n"


def test_complete_writes_a_row_an_image_and_names_what_it_could_not_read(drawer, photos, tmp_path, capsys):
    path, out, npy = drawer(), tmp_path / "grid.png", tmp_path / "images.npy"
    arguments = ["--keep", 0.4, "--count", 2, "--out", out, "--npy", npy, "--seed", 1, "--precision", "fp32"]
    assert run("complete", path, photos, *arguments) == 3
    printed = capsys.readouterr().out
    assert str(photos / "b.png") in printed
    assert f"4 completions drawn, 1 images unreadable: {out}\n" in printed
    model = load_model(path)
    originals = np.stack([model.preprocess.apply(read_image(photos / name)) for name in ("a.png", "c.png")])
    pixels = model.preprocess.normalize(rearrange(torch.from_numpy(originals), "b h w c -> b c h w"))
    tokens = model.network.encode(pixels)
    drawn = complete(model.network, tokens[:, :10], count=2, seed=1, precision="fp32")  # .4 of 24 is 9.6
    images = rearrange(model.network.decode(drawn.flatten(0, 1)).numpy(), "(b k) c h w -> b k h w c", k=2)
    assert np.array_equal(np.load(npy), images)
    seen = rearrange(model.network.decode(tokens).numpy(), "b c h w -> b (h w) c")
    seen[:, 10:] = 128
    picture = load_image(out)
    row_height = (picture.shape[0] - TILE_GAP) // 2
    for row in range(2):
        tiles = [tile(picture, row, column, row_height) for column in range(4)]
        assert np.array_equal(tiles[0].reshape(-1, 3), seen[row])
        assert np.array_equal(tiles[1], images[row, 0])
        assert np.array_equal(tiles[2], images[row, 1])
        assert np.array_equal(tiles[3], originals[row])


def test_complete_ends_with_0_where_all_images_could_be_read(drawer, photos, tmp_path):
    arguments = [photos / "a.png", photos / "c.png", "--keep", 0, "--count", 1, "--out", tmp_path / "grid.png"]
    assert run("complete", drawer(), *arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sample", "MODEL", "--count", 1, "--out", "grid.jpg"], "--out is grid.jpg: give a file that ends in .png"),
        (["sample", "MODEL", "--count", 1, "--out", "OUT", "--npy", "x.png"], "--npy is x.png: give a file that ends"),
        (["sample", "MODEL", "--count", 0, "--out", "OUT"], "--count is 0: give 1 or more"),
        (["sample", "MODEL", "--count", 3, "--beam", 2, "--out", "OUT"], "--count is 3, and a beam of 2 finds no more"),
        (["sample", "MODEL", "--count", 3, "--beam", -1, "--out", "OUT"], "--beam is -1"),
        (["sample", "MODEL", "--count", 1, "--out", "OUT", "--temperature", -1], "temperature is -1"),
        (["sample", "MODEL", "--count", 1, "--out", "OUT", "--top_p", 1.5], "top_p is 1.5"),
        (["sample", "MODEL", "--count", 1, "--out", "OUT", "--precision", "fp16"], "--precision is fp16"),
        (["sample", "MODEL", "--count", 1, "--out", "OUT", "--batch_size", 0], "--batch_size is 0"),
        (["sample", "VIT", "--count", 1, "--out", "OUT"], "vit_tiny cannot draw images: give an ImageGPT"),
        (["complete", "VIT", "PHOTOS", "--out", "OUT"], "vit_tiny cannot draw images: give an ImageGPT"),
        (["complete", "MODEL", "PHOTOS", "--out", "OUT", "--keep", 1.5], "--keep is 1.5: give a number from 0 to 1"),
        (["complete", "MODEL", "PHOTOS/b.png", "--out", "OUT"], "b.png: not an image"),
        (["complete", "MODEL", "NOWHERE", "--out", "OUT"], "NOWHERE does not exist"),
    ],
)
def test_sample_and_complete_refuse_wrong_input_in_one_line(
    drawer, model_file, photos, tmp_path, monkeypatch, capsys, arguments, expected
):
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": drawer(), "VIT": model_file, "PHOTOS": photos, "OUT": "grid.png"}
    words = [str(argument) for argument in arguments]
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    assert expected in fails(capsys, *words)
    assert not (tmp_path / "grid.png").exists()


def test_sample_refuses_a_network_of_masked_pixels(drawer, tmp_path, capsys):
    error = fails(capsys, "sample", drawer(causal=False), "--count", 1, "--out", tmp_path / "grid.png")
    assert "is not causal, it was trained on masked pixels" in error
