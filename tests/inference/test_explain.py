"""`vitlab explain`: what it writes and prints, and one line for each wrong input."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.__main__ import main
from vitlab.data.images import read_image
from vitlab.data.preprocess import Preprocess
from vitlab.inference.attention_maps import attention_layers, attention_maps
from vitlab.inference.attribution import gradient_map, surprisal
from vitlab.inference.explain import safe_name
from vitlab.inference.overlays import overlay, positions_picture, reach_picture
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model


def run(*arguments):
    return main([*map(str, arguments)])


@pytest.fixture
def photos(tmp_path):
    """Two folders with an image of one name each, odd names, and one that is no image."""
    generator = np.random.default_rng(0)
    for name in ("a/cat.png", "b/cat.png", "b/Ümläut $(x) ..png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (19, 24, 3), dtype=np.uint8)).save(path)
    (tmp_path / "photos" / "b" / "bad.png").write_bytes(b"no image")
    return tmp_path / "photos"


def inputs_of(model, path):
    pixels = torch.from_numpy(model.preprocess.apply(read_image(path))).permute(2, 0, 1)[None]
    return model.preprocess.normalize(pixels)


def test_explain_writes_pictures_and_the_values_of_the_library(model_file, photos, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert run("explain", model_file, photos, "--out", out, "--workers", 0, "--batch_size", 2) == 3
    printed = capsys.readouterr().out
    assert f"unreadable: {photos / 'b' / 'bad.png'}: " in printed
    assert printed.endswith(f"3 images explained, 1 unreadable: {out}\n")
    stems = ["1-cat", "3-cat", "4-Ümläut___x___"]
    files = {f"{stem}{end}" for stem in stems for end in (".png", ".npz", "-attention.png")}
    assert {path.name for path in out.iterdir()} == files | {"network.npz", "reach.png", "positions.png"}
    model = load_model(model_file)
    layers = attention_layers(model.network)
    for stem, path in (("1-cat", photos / "a" / "cat.png"), ("3-cat", photos / "b" / "cat.png")):
        arrays = np.load(out / f"{stem}.npz")
        inputs = inputs_of(model, path)
        logits, gradient = gradient_map(model.network, inputs)
        maps = attention_maps(model.network, inputs, layers[-1:])
        assert arrays["target"] == logits.argmax()
        close = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(arrays["probabilities"], logits.softmax(1)[0], **close)
        np.testing.assert_allclose(arrays["gradient"], gradient[0], **close)
        np.testing.assert_allclose(arrays["rollout"], maps.rollout_map[0], **close)
        np.testing.assert_allclose(arrays["rollout_matrix"].sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(arrays["layer_02_full"], maps.heads["layer_02_full"][0], **close)
        assert np.array_equal(arrays["image"], model.preprocess.apply(read_image(path)))
        assert "layer_01_full" not in arrays
    network = np.load(out / "network.npz")
    assert network["reach_layer_01_full"].all()
    assert network["position_similarity"].shape == (15, 15)


def test_explain_leaves_a_used_folder_as_it_is(model_file, photos, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".DS_Store").touch()
    assert run("explain", model_file, photos / "a", "--out", out, "--workers", 0) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert run("explain", model_file, photos / "b" / "cat.png", "--out", out, "--workers", 0) == 2
    assert f"--out {out} holds files, which would lie among the new ones" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_explain_asks_for_a_class_and_layers(model_file, photos, tmp_path):
    out = tmp_path / "out"
    arguments = ["--class", "owl", "--layers", "all", "--workers", 0]
    assert run("explain", model_file, photos / "a", "--out", out, *arguments) == 0
    arrays = np.load(out / "1-cat.npz")
    model = load_model(model_file)
    assert model.classes[arrays["target"]] == "owl"
    inputs = inputs_of(model, photos / "a" / "cat.png")
    expected = gradient_map(model.network, inputs, torch.tensor([4]))[1][0]
    np.testing.assert_allclose(arrays["gradient"], expected, rtol=1e-4, atol=1e-6)
    assert {"layer_01_full", "layer_02_full"} < set(arrays)


SMALL = {
    "davit_tiny": {"embed_dims": (8, 16), "depths": (1, 1), "num_heads": (2, 2), "window_size": 4, "stem_stride": 2},
    "swin_tiny": {"embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4, "patch_size": 2},
    "timm/resnet18": {},
    "imagegpt_small": {"num_colors": 8, "embed_dim": 8, "depth": 2, "num_heads": 2},
}


@pytest.mark.parametrize(
    ("name", "size", "objective", "expected"),
    [
        (
            "davit_tiny",
            (18, 22),
            "classification",
            {
                "gradient",
                "layer_01_window",
                "layer_02_channel",
                "layer_02_channel_weights",
                "layer_03_window",
                "layer_04_channel",
                "layer_04_channel_weights",
            },
        ),
        (
            "swin_tiny",
            (18, 22),
            "classification",
            {"gradient", "layer_01_window", "layer_02_shifted", "layer_03_window", "layer_04_shifted"},
        ),
        ("timm/resnet18", (32, 48), "classification", {"gradient"}),
        ("imagegpt_small", (4, 6), "classification", {"gradient"}),
        ("imagegpt_small", (4, 6), "joint", {"gradient", "surprisal"}),
        ("imagegpt_small", (4, 6), "next_pixel", {"surprisal"}),
    ],
)
def test_explain_shows_what_each_family_has(name, size, objective, expected, photos, tmp_path, capsys):
    torch.manual_seed(0)
    network = create_model(name, num_classes=3, image_size=size, **SMALL[name])
    path, out = tmp_path / "model.safetensors", tmp_path / "out"
    record = Preprocess(image_size=size, mean=(0.5,) * 3, std=(0.5,) * 3, resize_mode="squash")
    saved = {"classes": list("xyz"), "preprocess": record, "metrics": {}, "data": {}, "objective": {"name": objective}}
    save_model(path, network, **saved)
    assert run("explain", path, photos / "a", "--out", out, "--workers", 0) == 0
    arrays = set(np.load(out / "1-cat.npz"))
    probabilities = set() if objective == "next_pixel" else {"probabilities", "target"}
    assert arrays == expected | probabilities | {"image"}
    assert ("note: no maps of" in capsys.readouterr().out) == (name in ("timm/resnet18", "imagegpt_small"))
    assert (out / "1-cat-attention.png").exists() == (name in ("davit_tiny", "swin_tiny"))
    assert (out / "network.npz").exists() == (name != "timm/resnet18")
    if objective == "next_pixel":
        model = load_model(path)
        nats = surprisal(model.network, inputs_of(model, photos / "a" / "cat.png"))[0]
        np.testing.assert_allclose(np.load(out / "1-cat.npz")["surprisal"], nats, rtol=1e-5)


def test_explain_says_which_networks_of_pixels_it_takes(photos, tmp_path, capsys):
    shape = SMALL["imagegpt_small"] | {"causal": False}
    network = create_model("imagegpt_small", num_classes=3, image_size=(4, 6), **shape)
    record = Preprocess(image_size=(4, 6), mean=(0.5,) * 3, std=(0.5,) * 3)
    saved = {"preprocess": record, "metrics": {}, "data": {}, "objective": {"name": "masked_pixel"}}
    save_model(tmp_path / "model.safetensors", network, classes=list("xyz"), **saved)
    assert run("explain", tmp_path / "model.safetensors", photos / "a", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "give one that objective.name classification, joint or next_pixel trained" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["PHOTOS", "--out", "OUT", "--class", "oul"], "unknown class oul: did you mean owl?"),
        (
            ["PHOTOS", "--out", "OUT", "--layers", "3"],
            "--layers holds 3, and vit_tiny has 2 blocks: give numbers up to that",
        ),
        (["PHOTOS", "--out", "OUT", "--layers", "x"], "--layers is x: give numbers from 1 on"),
        (
            ["PHOTOS", "--out", "PHOTOS"],
            "photos holds files, which would lie among the new ones: give a new or an empty folder",
        ),
        (["PHOTOS/b/bad.png", "--out", "OUT"], "bad.png: not an image"),
        (["PHOTOS", "--out", "PHOTOS/a/cat.png"], "a folder of several files is written"),
        (["PHOTOS", "--out", "PHOTOS/a/cat.png/maps"], "cat.png is a file): give another folder"),
        (["NOWHERE", "--out", "OUT"], "NOWHERE does not exist"),
        (["PHOTOS", "--out", "OUT", "--batch_size", "0"], "--batch_size is 0"),
    ],
)
def test_explain_refuses_wrong_input_in_one_line(model_file, photos, tmp_path, capsys, arguments, message):
    places = {"PHOTOS": str(photos), "OUT": str(tmp_path / "out")}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    assert run("explain", model_file, *arguments, "--workers", 0) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/../../etc/passwd.png", "07-passwd"),
        ("..", "07-__"),
        ("x/.hidden", "07-_hidden"),
        ("x/a b\x1b[31m\udcff.jpg", "07-a_b__31m_"),
        ("x/" + "猫" * 90 + ".png", "07-" + "猫" * 40),
        (r"x\..\y.png", "07-x____y"),
    ],
)
def test_safe_name_stays_in_the_folder(path, name):
    assert safe_name(6, 12, path) == name


def test_overlay_is_brightest_where_the_map_is_largest():
    image = np.full((4, 8, 1), 128, np.uint8)
    values = np.zeros((2, 4), np.float32)
    values[1, 3], values[0, 0] = 5.0, -9.0
    picture = overlay(image, values).astype(int)
    assert picture.shape == (112, 224, 3)
    brightness = picture.sum(-1)
    row, column = np.unravel_index(brightness.argmax(), brightness.shape)
    assert row >= 56
    assert column >= 168
    assert brightness[:20, :100].max() == brightness.min()  # below 0 is drawn as 0
    assert np.array_equal(overlay(image, values * 3), picture)


def test_reach_picture_and_positions_picture_draw_each_panel():
    matrices = {f"layer_{n}": np.eye(6, dtype=bool) for n in range(4)}
    empty = reach_picture({name: np.zeros((6, 6), bool) for name in matrices})
    drawn = reach_picture(matrices)
    changed = np.abs(drawn.astype(int) - empty).sum(-1) > 0
    height, width = changed.shape
    for part in (changed[: height // 2, : width // 3], changed[height // 2 :, : width // 3]):
        assert part.any()
    assert not changed[height // 2 :, width // 3 :].any()
    grid = (2, 3)
    flat = positions_picture(np.full((6, 6), 0.5, np.float32), grid)
    assert not np.array_equal(flat, positions_picture(np.eye(6, dtype=np.float32), grid))
