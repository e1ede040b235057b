import importlib.util
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def baseline():
    spec = importlib.util.spec_from_file_location("baseline", ROOT / "scripts" / "baseline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def misfiled(tmp_path_factory):
    """Red and blue images; of four validation images one lies in the wrong folder, of two test images none."""
    root = tmp_path_factory.mktemp("misfiled")
    generator = np.random.default_rng(0)
    colors = {"red": (220, 30, 30), "blue": (30, 30, 220)}
    places = [("train", name, name) for name in colors for _ in range(40)]
    places += [("val", "red", "red"), ("val", "red", "blue"), ("val", "blue", "blue"), ("val", "blue", "blue")]
    places += [("test", "red", "red"), ("test", "blue", "blue")]
    for index, (split, name, color) in enumerate(places):
        folder = root / split / name
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.normal(colors[color], 10, (10, 14, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return root


@pytest.mark.parametrize("model", ["logistic", "knn", "mlp"])
def test_baseline_counts_right_images_of_each_split(baseline, misfiled, capsys, model):
    for split, expected in (("val", "75.00 % of 4 val"), ("test", "100.00 % of 2 test")):
        arguments = ["--data", str(misfiled), "--model", model, "--split", split, "--side", "3"]
        assert baseline.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert f"on 3x3 thumbnails: {expected} images right, trained on 80, " in lines[0]


def test_baseline_says_in_one_line_what_is_wrong(baseline, tmp_path, color_folder, capsys):
    assert baseline.main(["--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    (tmp_path / "red").symlink_to(color_folder / "train" / "red")
    (tmp_path / "blue").symlink_to(color_folder / "train" / "blue")
    assert baseline.main(["--data", str(tmp_path), "--split", "test"]) == 2
    assert capsys.readouterr().err == f"{tmp_path} has no split test: give --split train or val\n"


def test_baseline_on_photographs_of_waste_is_near_half(baseline, tmp_path, capsys):
    archive = ROOT.parent / "shared" / "data" / "trashnet.tar"
    if not archive.is_file():
        pytest.skip(f"no {archive}")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    assert baseline.main(["--data", str(tmp_path / "trashnet")]) == 0
    match = re.search(r"thumbnails: ([\d.]+) % of 177 val images right, trained on 600", capsys.readouterr().out)
    assert 44 < float(match[1]) < 52
