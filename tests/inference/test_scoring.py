"""A model file on a split: what `vitlab evaluate` reports of scores, intervals and calibration."""

import json
import re

import numpy as np
import pytest

from vitlab.__main__ import main
from vitlab.data.datasets import fingerprint, load_dataset, load_split
from vitlab.inference.predictor import Predictor
from vitlab.inference.scoring import read_split, score
from vitlab.models.files import load_model, save_model


@pytest.fixture
def warm_file(finished_run, tmp_path):
    """The model of a finished run with a temperature."""
    model = load_model(finished_run)
    fields = {name: getattr(model, name) for name in ("classes", "preprocess", "metrics", "weights", "data")}
    save_model(tmp_path / "warm.safetensors", model.network, **fields, temperature=0.4)
    return tmp_path / "warm.safetensors"


def test_score_calibrates_by_the_files_temperature(warm_file, finished_run, color_folder):
    """What evaluate calls calibrated is the loss of the probabilities that the predictor gives."""
    model = load_model(warm_file)
    split = read_split(model, str(color_folder), "test").split
    scores = score(model, split, batch_size=5, workers=0, on_error="stop")
    shares = Predictor(warm_file, device="cpu").predict(split.paths)[np.arange(12), split.labels]
    assert scores.calibrated()["loss"] == pytest.approx(-np.log(shares.astype(np.float64)).mean(), abs=1e-6)
    shares = Predictor(finished_run, device="cpu").predict(split.paths)[np.arange(12), split.labels]
    assert scores.loss == pytest.approx(-np.log(shares.astype(np.float64)).mean(), abs=1e-6)
    assert scores.images.index.tolist() == list(range(12))


def test_read_split_knows_the_runs_own_images(finished_run, color_folder, tmp_path):
    model = load_model(finished_run)
    for name in ("train", "val", "test"):
        scored = read_split(model, str(color_folder), name)
        assert scored.is_own
        assert scored.note == ("the model was trained on these images" if name == "train" else None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "val").symlink_to(color_folder / "test")
    scored = read_split(model, str(tmp_path / "other"), "val")
    assert not scored.is_own
    assert scored.note == "these are not the val images of the model's own run, and it may have seen some"


def test_read_split_cuts_validation_as_the_run_did(finished_run, color_folder, tmp_path):
    data = load_dataset(color_folder / "train", val_fraction=0.3, seed=5)
    model = load_model(finished_run)
    origin = {"val_fraction": 0.3, "seed": 5, "fingerprint": fingerprint(data)}
    fields = {"classes": model.classes, "preprocess": model.preprocess, "metrics": {}, "data": origin}
    save_model(tmp_path / "m.safetensors", model.network, **fields)
    scored = read_split(load_model(tmp_path / "m.safetensors"), str(color_folder / "train"), "val")
    assert scored.is_own
    assert list(scored.split.paths) == list(data.splits["val"].paths)
    other, _ = load_split(color_folder / "train", "val", classes=model.classes, val_fraction=0.3, seed=0)
    assert list(other.paths) != list(scored.split.paths)


def test_read_split_knows_training_images_under_any_name_of_a_split(finished_run, color_folder, tmp_path):
    model = load_model(finished_run)
    whole = read_split(model, str(color_folder / "train"), "all")  # the run's own train folder, without a cut
    assert whole.note == "the model was trained on these images"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "test").symlink_to(color_folder / "train")
    assert read_split(model, str(tmp_path / "other"), "test").note == "the model was trained on these images"


def test_read_split_counts_how_many_of_all_images_the_run_trained_on(finished_run, color_folder, tmp_path):
    data = load_dataset(color_folder / "train", val_fraction=0.3, seed=5)
    model = load_model(finished_run)
    for seed, note in (
        (5, "the model was trained on 27 of these 39 images"),
        (6, "as many images as the model's run had; if they are the same, it was trained on most of them"),
    ):
        origin = {"val_fraction": 0.3, "seed": seed, "fingerprint": fingerprint(data)}
        fields = {"classes": model.classes, "preprocess": model.preprocess, "metrics": {}, "data": origin}
        save_model(tmp_path / "m.safetensors", model.network, **fields)
        assert read_split(load_model(tmp_path / "m.safetensors"), str(color_folder / "train"), "all").note == note


def test_evaluate_prints_intervals_and_both_calibrations(warm_file, color_folder, tmp_path, capsys):
    out = tmp_path / "scores.json"
    line = ["evaluate", str(warm_file), "--data", str(color_folder), "--split", "test", "--workers", "0"]
    assert main([*line, "--json", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    low, high = result["intervals"]["top1"]
    assert f"top-1 {result['top1']:.2%} ({100 * low:.1f}-{100 * high:.1f})" in printed
    low, high = result["intervals"]["loss"]
    assert f"loss {result['loss']:.4f} ({low:.4f}-{high:.4f})" in printed
    assert f"calibration error (ECE) {result['ece']:.2%} (" in printed
    calibrated = result["calibrated"]
    assert (
        f"as predict has it, at the file's temperature 0.400: loss {calibrated['loss']:.4f}, "
        f"ECE {calibrated['ece']:.2%}, Brier {calibrated['brier']:.4f}" in printed
    )
    assert (result["temperature"], calibrated.keys()) == (0.4, {"loss", "ece", "brier"})
    low, high = result["per_class"][0]["recall_interval"]
    assert re.search(rf"blue .* {result['per_class'][0]['recall']:.1%} \({100 * low:.1f}-{100 * high:.1f}\)", printed)
    assert main([*line, "--json", str(out)]) == 0
    assert json.loads(out.read_text()) == result  # the bootstrap is seeded


def test_evaluate_says_nothing_of_a_temperature_that_is_one(finished_run, color_folder, tmp_path, capsys):
    model = load_model(finished_run)
    fields = {name: getattr(model, name) for name in ("classes", "preprocess", "metrics", "data")}
    save_model(tmp_path / "plain.safetensors", model.network, **fields)
    out = tmp_path / "scores.json"
    assert main(["evaluate", str(tmp_path / "plain.safetensors"), "--data", str(color_folder), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert "as predict has it" not in capsys.readouterr().out
    assert result["calibrated"] == pytest.approx({name: result[name] for name in ("loss", "ece", "brier")}, abs=1e-6)
