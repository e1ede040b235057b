"""`vitlab probe`: what is fitted, chosen and reported, and one line for each wrong input."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from vitlab.__main__ import main
from vitlab.data.datasets import fingerprint, load_dataset
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.statistics import wilson_interval
from vitlab.inference import probe as probe_module
from vitlab.inference.features import Features, read_features
from vitlab.inference.probe import fit_probes, probe_layers
from vitlab.models.files import ModelFile, load_model, save_model
from vitlab.models.network import Network
from vitlab.options import ProbeOptions


def run(*arguments):
    return main(["probe", "--workers", "0", *map(str, arguments)])


def fails(capsys, *arguments):
    """Run a command line that must end with exit code 2 and one line; give the line."""
    capsys.readouterr()
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def features_of(model, split, layers, rows=None):
    """Read features without a loader, all images at once."""
    rows = range(len(split)) if rows is None else rows
    pixels = np.stack([model.preprocess.apply(split.read(row)) for row in rows])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    batch = Batch(images=images, labels=torch.from_numpy(split.labels[rows]), indices=torch.tensor(rows))
    return read_features(model.network, model.preprocess, [batch], layers)


def random_features(count, seed, *, num_classes=4, width=8, layers=(1, 2), shuffled=False):
    """Give features that are one number high for each class, or labels that have nothing to do with them."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % num_classes
    shown = generator.permutation(labels) if shuffled else labels
    noise = {layer: generator.normal(size=(count, width)).astype(np.float32) for layer in layers}
    return Features({layer: x + 12 * np.eye(width, dtype=np.float32)[shown] for layer, x in noise.items()}, labels, ())


def share_right(probe, features, layer):
    return float((probe.predict(features.layers[layer]) == features.labels).mean())


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_fit_probes_tell_separable_classes_apart_and_shuffled_ones_not(method):
    train, val, test = (random_features(count, seed) for seed, count in enumerate((200, 60, 400)))
    candidates, chosen, probe = fit_probes(train, val, method)
    assert {candidate.num_correct for candidate in candidates} == {60}
    assert (chosen.layer, chosen.value) == (1, 0.001 if method == "linear" else 50)  # of equals the smoothest
    assert share_right(probe, test, 1) == 1
    train, val, test = (random_features(count, seed, shuffled=True) for seed, count in enumerate((200, 60, 400)))
    _, chosen, probe = fit_probes(train, val, method)
    assert abs(share_right(probe, test, chosen.layer) - 0.25) < 3 * np.sqrt(0.25 * 0.75 / 400)


def test_fit_probes_by_neighbours_are_scikit_learns_on_standardised_features():
    """k is no larger than the training images are many, and the metric is the cosine."""
    generator = np.random.default_rng(0)
    train, val = (
        Features({3: generator.normal(1, (1, 9, 90), (n, 3)).astype(np.float32)}, generator.integers(3, size=n), ())
        for n in (40, 200)
    )
    train.layers[3][:, 1] += 9 * train.labels
    val.layers[3][:, 1] += 9 * val.labels
    mean, std = train.layers[3].mean(axis=0, dtype=np.float64), train.layers[3].std(axis=0, dtype=np.float64)
    fitted, scored = (train.layers[3] - mean) / std, (val.layers[3] - mean) / std
    cosines = (fitted / np.linalg.norm(fitted, axis=1, keepdims=True)) @ scored.T
    expected = {}
    for k in (20, 10, 5, 1):
        nearest = train.labels[np.argsort(-cosines, axis=0)[:k]]
        votes = np.stack([(nearest == label).sum(axis=0) for label in range(3)])
        expected[k] = int((votes.argmax(axis=0) == val.labels).sum())
        peer = KNeighborsClassifier(k, metric="cosine").fit(fitted, train.labels)
        assert (peer.predict(scored) == val.labels).sum() == expected[k]
    assert len(set(expected.values())) > 1
    calls = []
    candidates, chosen, probe = fit_probes(train, val, "knn", on_fit=lambda: calls.append(1))
    assert {candidate.value: candidate.num_correct for candidate in candidates} == expected
    assert chosen.num_correct == max(expected.values())
    assert (probe.predict(val.layers[3]) == val.labels).sum() == chosen.num_correct
    assert len(calls) == 5


def test_fit_probes_by_regression_are_scikit_learns_and_take_an_unfinished_fit(monkeypatch):
    generator = np.random.default_rng(1)
    labels = [generator.integers(3, size=n) for n in (60, 300)]
    train, val = (
        Features({1: (generator.normal(size=(len(y), 20)) + y[:, None] * np.linspace(0, 0.6, 20)) * 100}, y, ())
        for y in labels
    )
    mean, std = train.layers[1].mean(axis=0), train.layers[1].std(axis=0)
    fitted, scored = (train.layers[1] - mean) / std, (val.layers[1] - mean) / std
    expected = {
        C: int((LogisticRegression(C=C, max_iter=1000).fit(fitted, labels[0]).predict(scored) == labels[1]).sum())
        for C in (0.001, 0.01, 0.1, 1.0, 10.0)
    }
    assert len(set(expected.values())) > 1
    candidates, chosen, _ = fit_probes(train, val, "linear")
    assert {candidate.value: candidate.num_correct for candidate in candidates} == expected
    assert chosen.num_correct == max(expected.values())
    monkeypatch.setattr(probe_module, "_MAX_ITERATIONS", 1)
    assert len(fit_probes(train, val, "linear")[0]) == 5


class ChannelNetwork(Network):
    """A network whose layer l says whether channel l is bright."""

    name = "channels"
    num_classes, in_channels, image_size = 2, 3, (4, 6)

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.batch_sizes = set()

    def forward_intermediates(self, images):
        assert not self.training
        assert self.unused.dtype == images.dtype == torch.float32
        self.batch_sizes.add(len(images))
        return [(images[:, channel, 0, :1, None] - 0.5) * torch.tensor([1.0, -1.0, 0.0]) for channel in (0, 1)]


@pytest.fixture
def two_channels(tmp_path):
    """Of training images red and green tell the class; of validation images green alone, of test images red alone."""
    for split, lies in (("train", ()), ("val", (0,)), ("test", (1,))):
        for label, name in enumerate("ab"):
            folder = tmp_path / "channels" / split / name
            folder.mkdir(parents=True)
            for number in range(6):
                bright = [label if channel not in lies else 1 - label for channel in (0, 1)]
                Image.new("RGB", (6, 4), (200 * bright[0] + number, 200 * bright[1] + number, 0)).save(
                    folder / f"{number}.png"
                )
    return tmp_path / "channels"


def channel_model():
    preprocess = Preprocess(image_size=(4, 6), resize_mode="squash", mean=(0.0,) * 3, std=(1.0,) * 3)
    return ModelFile(ChannelNetwork(), ("x", "y"), preprocess, {}, "raw", {}, "0")


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_probe_layers_choose_on_validation_though_the_test_split_speaks_for_another_layer(two_channels, method):
    options = ProbeOptions(checkpoint="m", data=str(two_channels), method=method, workers=0, batch_size=5)
    model = channel_model()
    found = probe_layers(model, options, say=lambda line: None).to_dict()
    assert model.network.batch_sizes == {1, 5, 2}  # a blank image, then twelve of each split
    assert [row["val_top1"] for row in found["layers"]] == [0, 1]
    assert found["chosen"]["layer"] == 2
    assert (found["split"], found["top1"], found["optimistic"]) == ("test", 0, False)
    shutil.rmtree(two_channels / "test")
    lines = []
    report = probe_layers(channel_model(), options, say=lines.append)
    found = report.to_dict()
    assert (found["split"], found["top1"], found["optimistic"]) == ("val", 1, True)
    assert found["interval"] == list(wilson_interval(12, 12))
    assert "so optimistic: there is no test split" in report.verdict()
    assert "test top-1" not in [column.header for column in report.table().columns]
    assert not any("note" in line for line in lines)


def test_probe_reports_the_same_on_terminal_and_in_json(finished_run, color_folder, tmp_path, capsys):
    out, picture = tmp_path / "new" / "probe.json", tmp_path / "new" / "probe.png"
    assert run(finished_run, "--data", color_folder, "--json", out, "--plot", picture) == 0
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    model = load_model(finished_run)
    splits = load_dataset(color_folder, val_fraction=0.1, seed=0).splits
    train, val, test = (features_of(model, splits[name], [1, 2]) for name in ("train", "val", "test"))
    candidates, chosen, probe = fit_probes(train, val, "linear")
    for layer, row in zip((1, 2), found["layers"], strict=True):
        grid = {candidate.value: candidate.num_correct / 15 for candidate in candidates if candidate.layer == layer}
        assert {entry["C"]: entry["val_top1"] for entry in row["grid"]} == grid
        assert row["val_top1"] == max(grid.values()) == grid[row["C"]]
        assert (row["layer"], row["features"]) == (layer, 16)
        assert row["val_interval"] == list(wilson_interval(round(row["val_top1"] * 15), 15))
    right = int((probe.predict(test.layers[chosen.layer]) == test.labels).sum())
    assert right >= 10  # the colours are easy
    assert {key: found[key] for key in found.keys() - {"layers"}} == {
        "checkpoint": str(finished_run),
        "data": str(color_folder),
        "method": "linear",
        "seed": 0,
        "classes": ["blue", "green", "red"],
        "counts": {"train": 39, "val": 15, "test": 12},
        "chosen": {"layer": chosen.layer, "C": chosen.value},
        "split": "test",
        "top1": right / 12,
        "interval": list(wilson_interval(right, 12)),
        "optimistic": False,
        "notes": ["train: the model was trained on these images"],
        "unreadable": [],
    }
    assert "note: train: the model was trained on these images" in printed
    assert f"layer {chosen.layer} with C {chosen.value:g}, chosen on 15 val images: top-1 {right / 12:.2%}" in printed
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    for (layer, width, setting, val_top1, test_top1), row in zip(cells, found["layers"], strict=True):
        assert (layer, width, setting) == (str(row["layer"]), "16", f"{row['C']:g}")
        assert val_top1.startswith(f"{row['val_top1']:.2%} (")
        assert test_top1.startswith(f"{right / 12:.2%} (") == (row["layer"] == chosen.layer)
    with Image.open(picture) as image:
        assert image.size[0] > 300


def test_probe_takes_the_data_sets_own_classes_layers_method_and_sample(finished_run, color_folder, tmp_path, capsys):
    shutil.copytree(color_folder, tmp_path / "data")
    for split in ("train", "val", "test"):
        for old, new in (("blue", "sea"), ("green", "wood"), ("red", "fire")):
            (tmp_path / "data" / split / old).rename(tmp_path / "data" / split / new)
        shutil.rmtree(tmp_path / "data" / split / "sea")
    found = []
    for seed in (0, 0, 1):
        out = tmp_path / "p.json"
        line = ["--data", tmp_path / "data", "--method", "knn", "--max_images", 11, "--seed", seed, "--json", out]
        assert run(finished_run, *line, "--layers", 2, "2") == 0
        found.append(json.loads(out.read_text()))
    assert found[0] == found[1]
    assert found[0]["classes"] == ["fire", "wood"]
    assert found[0]["counts"] == {"train": 11, "val": 10, "test": 8}
    assert [row["layer"] for row in found[0]["layers"]] == [2]
    assert [entry["k"] for entry in found[0]["layers"][0]["grid"]] == [10, 5, 1]
    assert found[0]["top1"] >= 0.75
    assert found[0]["notes"] == []  # classes that the model never knew
    assert "note" not in capsys.readouterr().out


def test_probe_draws_training_images_by_class_and_seed(finished_run, color_folder, monkeypatch):
    """Of 39 images, 13 a class, 20 are drawn: 6 or 7 of each, all different, others by another seed."""
    drawn = []
    read = probe_module._read

    def remember(model, split, *others):
        drawn.append(split)
        return read(model, split, *others)

    monkeypatch.setattr(probe_module, "_read", remember)
    for seed in (0, 0, 1):
        assert run(finished_run, "--data", color_folder, "--max_images", 20, "--layers", 1, "--seed", seed) == 0
    first, again, other = (split for split in drawn if split.name == "train")
    assert sorted(np.bincount(first.labels)) == [6, 7, 7]
    assert len(set(first.paths)) == 20
    assert list(first.paths) == list(again.paths) == sorted(first.paths)
    assert list(first.paths) != list(other.paths)
    assert {len(split) for split in drawn if split.name == "test"} == {12}


def test_probe_cuts_validation_as_the_models_run_did(finished_run, color_folder, tmp_path, capsys):
    model = load_model(finished_run)
    root = color_folder / "train"
    own = {"val_fraction": 0.3, "seed": 5}
    data = own | {"fingerprint": fingerprint(load_dataset(root, **own))}
    save_model(
        tmp_path / "m.safetensors",
        model.network,
        classes=model.classes,
        preprocess=model.preprocess,
        metrics={},
        data=data,
    )
    assert run(tmp_path / "m.safetensors", "--data", root) == 0
    printed = capsys.readouterr().out
    assert "a share of 0.3 by class, seed 5" in printed
    assert "note: train: the model was trained on these images" in printed
    assert "note: val" not in printed
    assert "there is no test split" in printed
    assert run(finished_run, "--data", root) == 0
    printed = capsys.readouterr().out
    assert "note: val: these are not the val images of the model's own run, and it may have seen some" in printed
    assert "note: train" not in printed


def test_probe_skips_and_lists_unreadable_images(finished_run, color_folder, tmp_path, capsys):
    shutil.copytree(color_folder, tmp_path / "data")
    broken = [tmp_path / "data" / split / "red" / "002.png" for split in ("train", "val", "test")]
    for path in broken:
        path.write_bytes(path.read_bytes()[:200])
    assert str(broken[0]) in fails(capsys, finished_run, "--data", tmp_path / "data")
    out = tmp_path / "p.json"
    assert run(finished_run, "--data", tmp_path / "data", "--on_error", "skip", "--json", out) == 3
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert found["counts"] == {"train": 38, "val": 14, "test": 11}
    assert [row["path"] for row in found["unreadable"]] == list(map(str, broken))
    assert all(f"skipped {path}: " in printed for path in broken)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--layers", "3"], "--layers has 3, and {run} has layers 1 to 2: give those"),
        (["--layers", "0", "1"], "--layers is 0 1: give numbers from 1 on, such as 3 6 9, or all"),
        (["--layers", "all", "1"], "--layers is all 1: give numbers from 1 on"),
        (["--layers", "-1"], "--layers is -1: give numbers"),
        (["--method", "svm"], "--method is svm: give one of linear, knn"),
        (["--max_images", "0"], "--max_images is 0: give 1 or more"),
        (["--max_images", "1"], "the 1 training images of {data} that are used are all of the class green"),
        (["--batch_size", "0"], "--batch_size is 0"),
        (["--json", "x.txt"], "--json is x.txt: give a file that ends in .json"),
        (["--plot", "x.jpg"], "--plot is x.jpg: give a file that ends in .png"),
        (["--device", "tpu"], "no device is called tpu"),
    ],
)
def test_probe_gives_one_line_for_a_mistake(finished_run, color_folder, capsys, arguments, expected):
    error = fails(capsys, finished_run, "--data", color_folder, *arguments)
    assert expected.format(run=finished_run, data=color_folder) in error


def test_probe_gives_one_line_for_data_that_cannot_be_probed(finished_run, color_folder, tmp_path, capsys):
    assert "no such file or run folder" in fails(capsys, tmp_path / "x", "--data", color_folder)
    assert "does not exist" in fails(capsys, finished_run, "--data", tmp_path / "x")
    shutil.copytree(color_folder, tmp_path / "data")
    (tmp_path / "data" / "train").rename(tmp_path / "aside")
    assert "has test, val but no train folder" in fails(capsys, finished_run, "--data", tmp_path / "data")
    (tmp_path / "aside").rename(tmp_path / "data" / "train")
    for path in (tmp_path / "data" / "train" / "red").iterdir():
        path.unlink()
    assert "holds no images" in fails(capsys, finished_run, "--data", tmp_path / "data")
    for split in ("train", "val", "test"):
        shutil.rmtree(tmp_path / "data" / split / "red")
        shutil.rmtree(tmp_path / "data" / split / "green")
    assert "only one class folder, blue" in fails(capsys, finished_run, "--data", tmp_path / "data")


def test_probe_refuses_one_class_that_is_left_of_two(finished_run, color_folder, tmp_path, capsys):
    shutil.copytree(color_folder, tmp_path / "data")
    for name in ("red", "green"):
        for path in (tmp_path / "data" / "train" / name).iterdir():
            path.write_bytes(b"damaged")
    error = fails(capsys, finished_run, "--data", tmp_path / "data", "--on_error", "skip")
    assert "the 13 training images" in error
    assert "are all of the class blue: give two classes or more" in error
