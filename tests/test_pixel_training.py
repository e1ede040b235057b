"""ImageGPT through the commands that train, score and predict: palette, losses, what comes along to a second run."""

import dataclasses
import io
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from rich.console import Console

from vitlab.__main__ import main
from vitlab.config import ModelConfig, MonitorConfig, ObjectiveConfig
from vitlab.data.palette_file import write_palette
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.state import list_states, load_state
from vitlab.errors import InputError, Interrupted
from vitlab.inference.scoring import read_split, score
from vitlab.models.files import load_model
from vitlab.runs.training import run_training

SHAPE = {"num_colors": 16, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture
def pixel_run(tiny_run):
    """Give a small configuration of an ImageGPT, changed by dotted fields."""

    def build(*, name="next_pixel", overrides=None, **changes):
        return dataclasses.replace(
            tiny_run(**changes),
            model=ModelConfig(
                name="imagegpt_small",
                image_size=(4, 6),
                overrides=SHAPE | (overrides or {}),
            ),
            objective=ObjectiveConfig(name=name),
        )

    return build


@pytest.fixture(scope="module")
def drawn(color_folder, tmp_path_factory):
    """Give the folder of a run that learned to draw."""
    arguments = ["--data.root", str(color_folder), "--data.workers", "0", "--data.resize_mode", "squash"]
    arguments += ["--model.name", "imagegpt_small", "--model.image_size", "4", "--model.overrides", json.dumps(SHAPE)]
    arguments += ["--objective.name", "next_pixel", "--optim.lr", "1e-2", "--train.epochs", "8"]
    run = tmp_path_factory.mktemp("drawn") / "run"
    assert main(["train", *arguments, "--train.run_dir", str(run)]) == 0
    return run


def test_palette_is_fitted_to_the_training_images_and_kept(drawn, color_folder):
    model = load_model(drawn)
    used = {tuple(color) for color in model.network.decode(torch.arange(16).repeat(1, 1)).flatten(2)[0].T.tolist()}
    assert len(used) == 16
    pixels = model.network.palette
    assert (pixels.amax(dim=0) > 0.3).all(), "red, green and blue images are in the training split"
    assert model.preprocess.mean == model.preprocess.std == (0.5, 0.5, 0.5)
    assert model.objective["name"] == "next_pixel"


def test_losses_fall_and_are_logged_in_nats_and_bits(drawn):
    rows = RunFolder(drawn).read_metrics()
    assert rows[-1]["val/nats_per_pixel"] < 0.9 * np.log(16)  # the pixels are noise around one of three colours
    assert rows[-1]["val/bits_per_pixel"] == pytest.approx(rows[-1]["val/nats_per_pixel"] / np.log(2))
    assert "train/accuracy" not in rows[-1]
    assert "val/top1" not in rows[-1]
    assert (drawn / "results.png").exists()
    assert not (drawn / "confusion.png").exists()


def test_evaluate_gives_the_loss_of_the_log(drawn, color_folder, tmp_path, capsys):
    out = tmp_path / "scores.json"
    assert main(["evaluate", str(drawn), "--data", str(color_folder), "--workers", "0", "--json", str(out)]) == 0
    best = min(row["val/loss"] for row in RunFolder(drawn).read_metrics())
    scores = json.loads(out.read_text())
    assert scores["loss"] == pytest.approx(best, rel=1e-6)
    assert f"loss {best:.4f} pixels {best / np.log(2):.4f} bits, 15 images (raw weights)" in capsys.readouterr().out


def test_predict_says_that_there_are_no_classes(drawn, color_folder, capsys):
    assert main(["predict", str(drawn), str(color_folder / "val")]) == 2
    line = "was trained for next_pixel and knows no classes: train from it with --model.weights"
    assert line in capsys.readouterr().err


def test_compare_of_runs_of_pixels_tells_where_they_part(drawn, pixel_run, tmp_path, capsys):
    out = tmp_path / "same.json"
    assert main(["compare", str(drawn), str(drawn), "--json", str(out)]) == 0
    assert "configurations: alike" in (said := capsys.readouterr().out)
    assert said.splitlines()[-2] == "the runs are identical to the last bit"
    assert json.loads(out.read_text())["identical"] is True
    runs = [
        run_training(dataclasses.replace(pixel_run(train__run_dir=str(tmp_path / str(lr)), optim__lr=lr)))
        for lr in (1e-3, 2e-3)
    ]
    assert main(["compare", *map(str, runs)]) == 4
    said = capsys.readouterr().out
    assert "optim.lr" in said
    assert "the runs are not identical" in said


def test_a_second_run_from_a_model_file_needs_no_more_than_its_name(drawn, color_folder, tmp_path, capsys):
    run = tmp_path / "read"
    arguments = ["--data.root", str(color_folder), "--data.workers", "0", "--model.weights", str(drawn)]
    arguments += ["--objective.name", "joint", "--train.epochs", "4", "--optim.lr", "1e-2"]
    assert main(["train", *arguments, "--train.run_dir", str(run)]) == 0
    before, after = load_model(drawn), load_model(run)
    assert after.network.config_dict() == before.network.config_dict()
    assert torch.equal(after.network.palette, before.network.palette)
    assert after.preprocess == before.preprocess
    assert "palette fitted" not in capsys.readouterr().out
    row = RunFolder(run).read_metrics()[0]
    assert row["val/loss"] == pytest.approx(row["val/class_loss"] + row["val/nats_per_pixel"], rel=1e-6)
    assert row["val/nats_per_pixel"] < RunFolder(drawn).read_metrics()[0]["val/nats_per_pixel"]
    scores = score(after, read_split(after, str(color_folder), "val").split, batch_size=4, workers=0, on_error="stop")
    assert scores.summary()["nats_per_pixel"] == pytest.approx(after.metrics["nats_per_pixel"], rel=1e-5)
    assert main(["predict", str(run), str(color_folder / "test"), "--workers", "0"]) == 0


@pytest.mark.parametrize("name", ["next_pixel", "masked_pixel", "joint"])
def test_interrupted_runs_of_pixels_end_alike(name, pixel_run, tmp_path, monkeypatch):
    causal = {"causal": name != "masked_pixel", "drop_rate": 0.1}
    config = pixel_run(name=name, overrides=causal, train__accumulate=2)
    whole = run_training(
        dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=str(tmp_path / "w")))
    )
    from vitlab.engine import keeper

    ended = keeper.Keeper.step_ended

    def end_once(self, trainer, *, epoch_ends):
        if trainer.progress.step == 4:
            monkeypatch.setattr(keeper.Keeper, "step_ended", ended)
            self._signal = 15
        ended(self, trainer, epoch_ends=epoch_ends)

    monkeypatch.setattr(keeper.Keeper, "step_ended", end_once)
    with pytest.raises(Interrupted):
        run_training(config)
    resumed = run_training(config)
    first, second = load_model(whole / "last.safetensors"), load_model(resumed / "last.safetensors")
    for key, value in first.network.state_dict().items():
        assert torch.equal(value, second.network.state_dict()[key]), key
    assert first.metrics == second.metrics


def test_palette_from_a_file_is_converted_and_said(pixel_run, tmp_path):
    colors = torch.rand(16, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    path = tmp_path / "colors.npy"
    np.save(path, ((colors + 1) * 127.5).numpy())
    config = pixel_run(train__steps=1)
    out = io.StringIO()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, palette=str(path)))
    run = run_training(config, console=Console(file=out, width=200))
    torch.testing.assert_close(load_model(run / "last.safetensors").network.palette, colors, rtol=0, atol=1e-5)
    assert f"palette: {path} (" in out.getvalue()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"palette": "wrong.npy"}, r"the palette is of shape \(3, 3\) .* the network takes \(16, 3\)"),
        ({"palette": "missing.npy"}, "palette missing.npy does not exist"),
        (
            {"name": "vit_tiny", "overrides": {"patch_size": 2}, "palette": "uniform"},
            "model.palette is for an ImageGPT",
        ),
    ],
)
def test_wrong_palettes_are_named(changes, line, pixel_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_palette(tmp_path / "wrong.npy", torch.zeros(3, 3) - 0.5)
    config = pixel_run(name="next_pixel" if "name" not in changes else "classification")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    with pytest.raises(InputError, match=line):
        run_training(config)


def test_other_statistics_than_the_palettes_are_refused(pixel_run):
    config = pixel_run(data__mean=(0.4, 0.4, 0.4))
    with pytest.raises(InputError, match=r"imagegpt_small reads colours with data.mean 0.5: leave the field out"):
        run_training(config)


def test_drawings_are_shown_at_each_evaluation_and_change_no_weight(drawn, pixel_run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(drawn / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    steps = [row["step"] for row in RunFolder(drawn).read_metrics()]
    for name in ("samples", "completions"):
        assert (drawn / f"{name}.png").exists()
        assert [image.step for image in events.Images(f"val/{name}")] == steps
    weights = []
    for drawings in (0, 3):
        config = pixel_run(train__run_dir=str(tmp_path / str(drawings)), overrides={"drop_rate": 0.2})
        run = run_training(dataclasses.replace(config, monitor=MonitorConfig(drawings=drawings)))
        assert (run / "samples.png").exists() == (drawings > 0)
        weights.append(load_model(run / "last.safetensors").network.state_dict())
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_growth_is_told_before_the_run(pixel_run):
    out = io.StringIO()
    run_training(pixel_run(train__steps=1), console=Console(file=out, width=300))
    line = next(line for line in out.getvalue().splitlines() if line.startswith("a step of 8 images takes about"))
    sizes = [part.split()[0] for part in line.split(": ")[1].split(", ")]
    memory = [float(part.split()[1]) for part in line.split(": ")[1].split(", ")]
    assert sizes == ["4x6", "32x32", "48x48", "64x64"]
    assert memory == sorted(memory)


def test_freezing_all_that_an_objective_trains_is_refused(pixel_run):
    config = pixel_run()
    with pytest.raises(InputError, match=r"model.freeze backbone leaves nothing to train for next_pixel"):
        run_training(dataclasses.replace(config, model=dataclasses.replace(config.model, freeze="backbone")))


def test_drawing_needs_trained_colours(pixel_run, color_folder, tmp_path, capsys):
    run = run_training(pixel_run(name="classification", train__steps=1))
    assert main(["sample", str(run), "--count", "1", "--out", str(tmp_path / "a.png")]) == 2
    assert "was trained for classes alone and knows no colours: train with --objective.name" in capsys.readouterr().err


def test_complete_does_not_write_over_its_images(drawn, color_folder, tmp_path, capsys):
    photo = tmp_path / "photo.png"
    shutil.copyfile(color_folder / "test" / "red" / "000.png", photo)
    before = photo.read_bytes()
    assert main(["complete", str(drawn), str(photo), "--out", str(photo)]) == 2
    assert "photo.png is one of the images: give another file" in capsys.readouterr().err
    assert photo.read_bytes() == before


def test_weights_on_digits_bring_their_network_and_no_recipe(drawn, tmp_path):
    arguments = ["--data.root", "digits", "--data.workers", "0", "--train.steps", "1", "--data.channels", "3"]
    run = tmp_path / "run"
    line = [
        "train",
        "--model.weights",
        str(drawn),
        "--objective.name",
        "joint",
        *arguments,
        "--train.run_dir",
        str(run),
    ]
    assert main(line) == 0
    assert load_model(run / "last.safetensors").network.config_dict()["embed_dim"] == 16


def test_a_run_whose_weights_file_has_gone_says_how_to_go_on(drawn, color_folder, tmp_path, capsys):
    source, run = tmp_path / "source.safetensors", tmp_path / "run"
    shutil.copyfile(drawn / "best.safetensors", source)
    line = ["train", "--model.weights", str(source), "--objective.name", "joint", "--data.root", str(color_folder)]
    line += ["--data.workers", "0", "--train.run_dir", str(run), "--train.epochs", "1"]
    assert main(line) == 0
    source.unlink()
    assert main([*line[:-1], "2"]) == 2
    assert f"the run that began from it goes on with --config {run / 'config.yaml'}" in capsys.readouterr().err
    assert (
        main(["train", "--config", str(run / "config.yaml"), "--train.run_dir", str(run), "--train.epochs", "2"]) == 0
    )


def test_a_signal_while_a_run_draws_is_heeded_and_nothing_is_counted_twice(pixel_run, tmp_path, monkeypatch):
    """The evaluation before it is over, logged and counted: the run that goes on must not make it again."""
    from vitlab.inference import decoder

    settings = {"train__epochs": 3, "train__patience": 3, "optim__lr": 1e-9}
    whole = run_training(pixel_run(**settings, train__run_dir=str(tmp_path / "whole")))
    step, steps = decoder.Decoder.step, []

    def signalled(self, colors):
        steps.append(1)
        if len(steps) == 30:  # in the first of 23 + 12 steps of each evaluation
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, colors)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.Decoder, "step", signalled)
        with pytest.raises(Interrupted, match=r"SIGTERM: state saved in .*step-5;"):
            run_training(pixel_run(**settings))
    assert len(steps) == 30
    resumed = run_training(pixel_run(**settings))
    logged, progress = [], []
    for run in (whole, resumed):
        rows = RunFolder(run).read_metrics()
        speeds = ("train/images_per_s", "train/data_wait")
        logged.append([{key: value for key, value in row.items() if key not in speeds} for row in rows])
        progress.append(load_state(list_states(run / "resume")[0])[1]["progress"])
    assert logged[0] == logged[1]
    assert progress[0] == progress[1]
