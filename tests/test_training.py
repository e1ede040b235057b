"""Whole runs on a small folder: what they write, how they resume, how they fail."""

import json
import math
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitlab.__main__ import main
from vitlab.engine import objectives, trainer
from vitlab.engine.run_folder import RunFolder, fresh_run_folder
from vitlab.engine.state import list_states, load_state, save_state
from vitlab.errors import InputError, Interrupted, RunError
from vitlab.inference.scoring import read_split
from vitlab.models.files import load_model
from vitlab.runs import training
from vitlab.runs.training import run_training


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class CrashError(Exception):
    pass


def crash_in_epoch(monkeypatch, epoch: int, config) -> None:
    """Run until an epoch's evaluation has been logged and its state not yet saved, and die there."""
    shown = training.show_evaluation

    def show(trainer, config, dataset, scores):
        shown(trainer, config, dataset, scores)
        if trainer.progress.epoch + 1 == epoch:
            raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(training, "show_evaluation", show)
        with pytest.raises(CrashError):
            run_training(config)


def assert_same_end(run: Path, other: Path) -> None:
    """Weights, optimizer, progress and every logged value that is not a time are equal to the last bit."""
    state, other_state = list_states(run / "resume")[0], list_states(other / "resume")[0]
    assert state.name == other_state.name
    (tensors, record), (other_tensors, other_record) = load_state(state), load_state(other_state)
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)
    assert record["progress"] == other_record["progress"]
    for name in ("best.safetensors", "last.safetensors"):
        weights, other_weights = load_file(run / name), load_file(other / name)
        assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
    for tag in ("train/loss", "train/lr", "train/grad_norm", "val/loss", "val/top1"):
        assert scalars(run, tag) == scalars(other, tag)
    timed = {"train/images_per_s", "train/data_wait"}
    for row, other_row in zip(metrics(run), metrics(other), strict=True):
        assert {k: v for k, v in row.items() if k not in timed} == {
            k: v for k, v in other_row.items() if k not in timed
        }


def test_run_learns_and_writes_the_whole_run_folder(tiny_run, capsys):
    config = tiny_run(train__epochs=6, data__workers=1)
    run = run_training(config)
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "README.md",
        "best.safetensors",
        "config.yaml",
        "confusion.png",
        "last.safetensors",
        "metrics.jsonl",
        "resume",
        "results.png",
        "tensorboard",
        "train_batch.jpg",
    }
    rows = metrics(run)
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 25, 30]
    assert rows[-1]["val/count"] == 15
    best = load_model(run)
    assert best.metrics["top1"] == max(row["val/top1"] for row in rows) > 0.9
    assert best.classes == ("blue", "green", "red")
    assert best.weights == "raw"
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 6
    assert [step for step, _ in scalars(run, "train/loss")] == list(range(1, 31))
    assert [step for step, _ in scalars(run, "val/top1")] == [5, 10, 15, 20, 25, 30]
    assert capsys.readouterr().out == ""


def test_same_seed_gives_the_same_run_and_another_seed_another(tiny_run, tmp_path):
    runs = [
        run_training(tiny_run(train__run_dir=str(tmp_path / name), train__seed=seed, data__workers=workers))
        for name, seed, workers in (("a", 3, 0), ("b", 3, 2), ("c", 4, 0))
    ]
    assert_same_end(runs[0], runs[1])
    assert scalars(runs[0], "train/loss") != scalars(runs[2], "train/loss")


def test_resumed_run_ends_with_the_same_bits(tiny_run, tmp_path, monkeypatch):
    changes = {"train__epochs": 4, "augment__mixup": 0.8, "augment__cutmix": 1.0, "train__accumulate": 2}
    whole = run_training(tiny_run(**changes, train__run_dir=str(tmp_path / "whole")))
    broken = tiny_run(**changes, train__run_dir=str(tmp_path / "broken"), train__checkpoint_every_steps=2)
    for epoch in (2, 3, 4):
        crash_in_epoch(monkeypatch, epoch, broken)
    run_training(broken)
    assert_same_end(whole, tmp_path / "broken")


def test_interrupted_run_saves_exits_and_goes_on(tiny_run, tmp_path, monkeypatch):
    whole = run_training(tiny_run(train__epochs=3, train__run_dir=str(tmp_path / "whole")))
    broken = tiny_run(train__epochs=3, train__run_dir=str(tmp_path / "broken"))
    for number, at in ((signal.SIGINT, 4), (signal.SIGTERM, 5), (signal.SIGUSR1, 11)):
        make_step = trainer.Trainer.train_step

        def step(self, micro_batches, number=number, at=at, make_step=make_step):
            report = make_step(self, micro_batches)
            if self.progress.step == at:
                os.kill(os.getpid(), number)
            return report

        with monkeypatch.context() as patch:
            patch.setattr(trainer.Trainer, "train_step", step)
            with pytest.raises(Interrupted, match=f"{number.name}: state saved in .*step-{at}"):
                run_training(broken)
    run_training(broken)
    assert_same_end(whole, tmp_path / "broken")


@pytest.mark.parametrize("optimizer", ["lamb", "adan", "sgd"])
def test_resume_keeps_whatever_an_optimizer_remembers(tiny_run, tmp_path, monkeypatch, optimizer):
    settings = {"optim__name": optimizer, "train__epochs": 3}
    whole = run_training(tiny_run(**settings, train__run_dir=str(tmp_path / "whole")))
    crash_in_epoch(monkeypatch, 3, tiny_run(**settings))
    run_training(tiny_run(**settings))
    assert_same_end(whole, tmp_path / "run")


def test_signal_at_the_last_step_leaves_only_the_evaluation(tiny_run, tmp_path, monkeypatch):
    whole = run_training(tiny_run(train__steps=7, train__run_dir=str(tmp_path / "whole")))
    make_step = trainer.Trainer.train_step

    def step(self, micro_batches):
        report = make_step(self, micro_batches)
        if self.progress.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", step)
        with pytest.raises(Interrupted):
            run_training(tiny_run(train__steps=7))
    run_training(tiny_run(train__steps=7))
    assert_same_end(whole, tmp_path / "run")


def test_run_killed_in_its_first_epoch_starts_again_under_the_same_command(tiny_run, tmp_path, monkeypatch):
    whole = run_training(tiny_run(train__run_dir=str(tmp_path / "whole")))
    crash_in_epoch(monkeypatch, 1, tiny_run())
    assert (tmp_path / "run" / "best.safetensors").exists()
    run_training(tiny_run())
    assert_same_end(whole, tmp_path / "run")


def test_resume_refuses_a_data_set_that_has_changed(tiny_run, color_folder, tmp_path, monkeypatch):
    root = tmp_path / "photos"
    shutil.copytree(color_folder, root)
    config = tiny_run(data__root=str(root), train__epochs=3)
    crash_in_epoch(monkeypatch, 2, config)
    (root / "train" / "red" / "003.png").unlink()
    with pytest.raises(InputError, match=r"it had train 39, .*here are train 38"):
        run_training(config)


def test_resume_refuses_a_changed_pixel_where_contents_are_hashed(tiny_run, color_folder, tmp_path, monkeypatch):
    root = tmp_path / "photos"
    shutil.copytree(color_folder, root)
    config = tiny_run(data__root=str(root), data__hash_contents=True, train__epochs=3)
    crash_in_epoch(monkeypatch, 2, config)
    model = load_model(config.train.run_dir)
    assert read_split(model, str(root), "val").is_own
    for name in ("train", "val"):
        path = next((root / name / "red").iterdir())
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    scored = read_split(model, str(root), "val")
    assert not scored.is_own
    assert "not the val images of the model's own run" in scored.note
    told = r"the images of .*photos are not those of .*step-.* \(as many, train 39, val 15, test 12, but their contents"
    with pytest.raises(InputError, match=told):
        run_training(config)
    (root / "val/red/000.png").rename(root / "val/red/renamed.png")
    with pytest.raises(InputError, match="but their names, sizes or classes differ"):
        run_training(config)
    (root / "val/red/renamed.png").rename(root / "val/red/000.png")
    run_training(tiny_run(data__root=str(root), train__epochs=3))  # without it name and size count


def test_going_back_to_an_older_state_leaves_the_later_ones_behind(tiny_run, tmp_path, monkeypatch):
    run = run_training(tiny_run(train__epochs=4))
    whole = shutil.copytree(run, tmp_path / "whole")
    assert [state.name for state in list_states(run / "resume")] == ["step-20", "step-15"]
    monkeypatch.chdir(tmp_path)  # the same folder, written in two ways
    back = tiny_run(train__epochs=4, train__run_dir="run", train__resume=str(run / "resume" / "step-15"))
    crash_in_epoch(monkeypatch, 4, back)
    assert [state.name for state in list_states(run / "resume")] == ["step-15"]
    run_training(tiny_run(train__epochs=4))
    assert_same_end(whole, run)


def test_two_runs_do_not_share_a_folder(tiny_run, tmp_path):
    with RunFolder(tmp_path / "run").claimed(), pytest.raises(InputError, match="in use by another run"):
        run_training(tiny_run())
    assert not (tmp_path / "run").exists()
    run_training(tiny_run())


def test_unnamed_runs_started_together_get_a_folder_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: fresh_run_folder(tmp_path / "runs", "vit"), range(24)))
    assert len({folder.path for folder in folders}) == 24


def test_a_folder_with_files_of_others_is_refused(tiny_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("# mine\n")
    with pytest.raises(InputError, match=r"is in use \(it holds config.yaml\)"):
        run_training(tiny_run())
    assert (tmp_path / "run" / "config.yaml").read_text() == "# mine\n"


def test_a_run_inside_its_data_is_refused(tiny_run, color_folder):
    with pytest.raises(InputError, match=r"lies inside data.root"):
        run_training(tiny_run(train__run_dir=str(color_folder / "run")))
    assert not (color_folder / "run").exists()


def test_training_without_a_readable_image_is_an_error(tiny_run, color_folder, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(color_folder, root)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"x")
    with pytest.raises(InputError, match=r"none of 39 training images could be read"):
        run_training(tiny_run(data__root=str(root), data__on_error="skip"))


def test_a_shorter_run_than_its_state_is_refused(tiny_run, monkeypatch):
    crash_in_epoch(monkeypatch, 3, tiny_run(train__epochs=4))
    with pytest.raises(InputError, match=r"step-10 is beyond the 7 steps"):
        run_training(tiny_run(train__steps=7, train__epochs=4))


def test_a_missing_best_file_is_written_again(tiny_run, tmp_path, monkeypatch):
    crash_in_epoch(monkeypatch, 3, tiny_run(train__epochs=4))
    (tmp_path / "run" / "best.safetensors").unlink()
    assert load_model(run_training(tiny_run(train__epochs=4))).metrics["step"] in {15, 20}


def test_learning_rates_of_a_resumed_run_are_those_of_the_unbroken_one(tiny_run, tmp_path, monkeypatch):
    whole = run_training(tiny_run(train__epochs=6, train__run_dir=str(tmp_path / "whole")))
    broken = tiny_run(train__epochs=6, train__run_dir=str(tmp_path / "broken"))
    crash_in_epoch(monkeypatch, 4, broken)
    run_training(broken)
    assert scalars(whole, "train/lr") == scalars(tmp_path / "broken", "train/lr")
    assert len(scalars(whole, "train/lr")) == 30


def test_a_longer_run_goes_on_under_the_schedule_of_the_new_length(tiny_run, tmp_path, capsys):
    run = run_training(tiny_run(train__epochs=2, optim__min_lr=1e-4))
    assert scalars(run, "train/lr")[-1] == (10, pytest.approx(1e-4))
    config = tiny_run(train__epochs=4, optim__min_lr=1e-4)
    run_training(config, console=Console())
    assert "train.epochs was 2, is 4" in capsys.readouterr().out
    rates = dict(scalars(run, "train/lr"))
    expected = run_training(tiny_run(train__epochs=4, optim__min_lr=1e-4, train__run_dir=str(tmp_path / "new")))
    new = dict(scalars(expected, "train/lr"))
    assert [rates[step] for step in range(11, 21)] == [new[step] for step in range(11, 21)]


def test_resume_refuses_another_configuration_and_names_the_fields(tiny_run, monkeypatch):
    crash_in_epoch(monkeypatch, 2, tiny_run(train__epochs=3))
    with pytest.raises(InputError, match=r"optim.lr was 0.003, is 0.5"):
        run_training(tiny_run(train__epochs=3, optim__lr=0.5))
    many = {"optim__lr": 0.5, "optim__min_lr": 0.1, "optim__weight_decay": 0.2, "train__seed": 3, "data__channels": 1}
    with pytest.raises(InputError) as caught:
        run_training(tiny_run(train__epochs=3, **many))
    own = Path(tiny_run().train.run_dir) / "config.yaml"
    assert str(caught.value).count(" was ") == 3
    assert f"; and 2 more): set them back (--config {own} has them all), or give" in str(caught.value)


def test_resume_goes_on_from_a_state_that_lacks_a_field_with_its_default(tiny_run, monkeypatch):
    crash_in_epoch(monkeypatch, 2, tiny_run(train__epochs=3))
    (state, *_) = list_states(Path(tiny_run().train.run_dir) / "resume")
    tensors, record = load_state(state)
    del record["run"]["config"]["train"]["parallel"], record["run"]["config"]["monitor"]["drawings"]
    save_state(state, tensors, record)
    assert run_training(tiny_run(train__epochs=3)).is_dir()


def test_resume_passes_over_a_damaged_state(tiny_run, tmp_path, monkeypatch, capsys):
    whole = run_training(tiny_run(train__epochs=4, train__run_dir=str(tmp_path / "whole")))
    broken = tiny_run(train__epochs=4)
    crash_in_epoch(monkeypatch, 3, broken)
    newest = list_states(tmp_path / "run" / "resume")[0] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    run_training(broken, console=Console())
    out = capsys.readouterr().out
    assert "passed over" in out
    assert "step-10" in out
    assert_same_end(whole, tmp_path / "run")


def test_existing_run_is_never_overwritten(tiny_run, tmp_path):
    run = run_training(tiny_run())
    before = (run / "best.safetensors").read_bytes()
    for resume in ("never", "auto"):
        with pytest.raises(InputError, match=r"finished|in use"):
            run_training(tiny_run(train__resume=resume))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(InputError, match=r"is in use \(it holds holiday.jpg\)"):
        run_training(tiny_run(train__run_dir=str(tmp_path / "photos")))
    assert (run / "best.safetensors").read_bytes() == before


def test_unnamed_runs_are_numbered(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (run_training(tiny_run(train__run_dir=None, train__epochs=1)) for _ in range(2))
    assert first.parent == second.parent == Path("runs")
    assert second.name == f"{first.name}-2"


def test_resume_from_a_path_goes_on_in_a_new_folder(tiny_run, tmp_path, monkeypatch):
    whole = run_training(tiny_run(train__epochs=3, train__run_dir=str(tmp_path / "whole")))
    crash_in_epoch(monkeypatch, 3, tiny_run(train__epochs=3))
    state = str(list_states(tmp_path / "run" / "resume")[0])
    moved = run_training(tiny_run(train__epochs=3, train__run_dir=str(tmp_path / "moved"), train__resume=state))
    weights, others = load_file(whole / "last.safetensors"), load_file(moved / "last.safetensors")
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    with pytest.raises(InputError, match=r"train.resume .*nowhere holds no state"):
        run_training(tiny_run(train__resume=str(tmp_path / "nowhere")))


def test_non_finite_loss_stops_the_run_and_leaves_good_files(tiny_run, tmp_path, monkeypatch):
    forward = objectives.Classification.forward

    def poisoned(self, batch):
        step = forward(self, batch)
        poisoned.calls += self.training
        if poisoned.calls == 8:
            return objectives.Step(loss=step.loss * math.inf, outputs=step.outputs)
        return step

    poisoned.calls = 0
    monkeypatch.setattr(objectives.Classification, "forward", poisoned)
    with pytest.raises(RunError, match=r"loss is inf at step 8: kept are .*best.safetensors.*step-5"):
        run_training(tiny_run(train__epochs=3))
    run = tmp_path / "run"
    for name in ("best.safetensors", "last.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(run / name).values())
    assert all(tensor.isfinite().all() for tensor in load_state(list_states(run / "resume")[0])[0].values())
    assert (run / "results.png").exists()


def test_unreadable_images_stop_the_run_or_are_skipped_and_counted(tiny_run, color_folder, tmp_path, capsys):
    root = tmp_path / "photos"
    shutil.copytree(color_folder, root)
    broken = [root / "train" / "red" / "004.png", root / "val" / "blue" / "001.png"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:150])
    (tmp_path / "c.yaml").write_text(tiny_run(data__root=str(root)).to_yaml(), encoding="utf-8")
    line = ["train", "--config", str(tmp_path / "c.yaml"), "--train.run_dir", str(tmp_path / "run")]
    assert main(line) == 2
    assert str(broken[0]) in capsys.readouterr().err
    assert main([*line, "--data.on_error", "skip"]) == 3
    printed = capsys.readouterr().out
    assert all(printed.count(f"skipped {path}") == 1 for path in broken)
    assert printed.count("2 images skipped") == 2
    rows = metrics(tmp_path / "run")
    assert [row["val/count"] for row in rows] == [14, 14]
    assert [(row["train/unreadable"], row["val/unreadable"]) for row in rows] == [(1, 1), (1, 1)]


def test_train_names_wrong_class_counts(tiny_run):
    with pytest.raises(InputError, match=r"model.num_classes is 10, and .* has 3 classes \(blue, green, red\)"):
        run_training(tiny_run(model__num_classes=10))


def test_fine_tuning_on_other_classes_loads_all_but_the_head_and_says_so(
    tiny_run, finished_run, color_folder, tmp_path, capsys
):
    for name, source in (("night", "blue"), ("day", "red")):
        shutil.copytree(color_folder / "train" / source, tmp_path / "photos" / name)
    config = tiny_run(data__root=str(tmp_path / "photos"), model__weights=str(finished_run), train__epochs=1)
    run = run_training(config, console=Console())
    lines = capsys.readouterr().out.splitlines()
    assert "30 parameters loaded from vitlab names; reinitialised head.weight, head.bias" in lines
    assert load_model(run).classes == ("day", "night")
    assert not any("--model.image_size" in line for line in lines)  # it was given


def test_a_network_that_weights_bring_along_says_where_its_image_size_comes_from(tiny_run, finished_run, capsys):
    left_open = {"model__name": None, "model__image_size": None, "model__overrides": {}}
    run_training(tiny_run(**left_open, model__weights=str(finished_run), train__epochs=1), console=Console())
    line = f"images 8x12, as {finished_run} has them: --model.image_size takes others"
    assert line in capsys.readouterr().out.splitlines()


def test_weights_are_those_of_the_source_before_the_first_step(tiny_run, finished_run, monkeypatch):
    config = tiny_run(model__weights=str(finished_run))
    source, started = load_file(finished_run / "best.safetensors"), {}

    def fit(self, on_evaluation=None):
        started.update(self.objective.network.state_dict())
        raise CrashError

    monkeypatch.setattr(trainer.Trainer, "fit", fit)
    with pytest.raises(CrashError):
        run_training(config)
    assert started.keys() == source.keys()
    assert all(torch.equal(started[name], source[name]) for name in source)


def test_steps_end_a_run_within_an_epoch(tiny_run):
    run = run_training(tiny_run(train__steps=7))
    assert [row["step"] for row in metrics(run)] == [5, 7]
    assert load_model(run / "last.safetensors").metrics["step"] == 7


def test_evaluations_follow_their_interval_and_the_end(tiny_run):
    run = run_training(tiny_run(train__epochs=5, train__evaluate_every_epochs=2))
    assert [row["epoch"] for row in metrics(run) if "val/loss" in row] == [2, 4, 5]
    assert [row["epoch"] for row in metrics(run)] == [1, 2, 3, 4, 5]


def test_score_of_the_log_is_the_score_of_evaluate(tiny_run, color_folder, tmp_path, capsys):
    run = run_training(tiny_run(train__epochs=2, train__precision="bf16"))
    out = tmp_path / "scores.json"
    assert main(["evaluate", str(run), "--data", str(color_folder), "--split", "val", "--json", str(out)]) == 0
    scores, logged = json.loads(out.read_text()), load_model(run).metrics
    assert scores["top1"] == logged["top1"]
    assert scores["loss"] == pytest.approx(logged["loss"], abs=1e-6)
    assert f"{scores['top1']:.2%}" in capsys.readouterr().out


def test_train_command_prints_plain_lines_and_the_run_last(tiny_run, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(tiny_run().to_yaml(), encoding="utf-8")
    assert main(["train", "--config", str(path), "--train.run_dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\r" not in out
    lines = out.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert lines[-1] == f"run: {tmp_path / 'out'}"
