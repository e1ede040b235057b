"""Pieces of a run made again."""

import json
import shutil

import pytest

from vitlab.__main__ import main
from vitlab.config import RunConfig
from vitlab.engine.state import list_states, load_state, save_state
from vitlab.engine.state_writer import StateWriter
from vitlab.engine.tensorboard import EVENTS_NAME, read_events
from vitlab.errors import InputError, RunError
from vitlab.runs.replay import replay
from vitlab.runs.training import run_training

RECIPE = {
    "train__epochs": 2,
    "train__checkpoint_every_steps": 2,
    "train__keep_states": 20,
    "train__ema_decay": 0.9,
    "augment__mixup": 0.3,
    "objective__label_smoothing": 0.1,
}


def test_every_piece_of_a_run_comes_out_the_same(tiny_run):
    run = run_training(tiny_run(**RECIPE))
    states = list_states(run / "resume")[::-1]
    assert [state.name for state in states] == ["step-0", "step-2", "step-4", "step-5", "step-6", "step-8", "step-10"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    for state in states[:-1]:
        outcome = replay(state)
        assert outcome.agrees, outcome.lines
        assert outcome.lines == ()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_accumulation_across_the_end_of_an_epoch_comes_out_the_same(tiny_run):
    run = run_training(tiny_run(train__accumulate=2, train__epochs=3, train__keep_states=9))
    assert replay(run / "resume" / "step-0").agrees
    assert replay(run / "resume" / "step-3").agrees


def test_changed_state_is_found_out(tiny_run, capsys):
    run = run_training(tiny_run(train__steps=4, train__checkpoint_every_steps=2, train__keep_states=5))
    state = run / "resume" / "step-4"
    tensors, record = load_state(state)
    tensors["model.network.norm.weight"][0] += 1e-7 * 2
    save_state(state, tensors, record)
    outcome = replay(run / "resume" / "step-2")
    assert not outcome.agrees
    assert [line.split()[0] for line in outcome.lines] == ["model.network.norm.weight"]
    assert main(["replay", str(run / "resume" / "step-2")]) == 4
    assert "steps 3 to 4: the bits differ" in capsys.readouterr().out
    assert main(["replay", str(run / "resume" / "step-0")]) == 0


def test_last_state_has_nothing_to_be_compared_with(tiny_run):
    run = run_training(tiny_run(train__steps=1))
    with pytest.raises(InputError, match=r"step-1 has no later state beside it"):
        replay(run / "resume" / "step-1")
    with pytest.raises(InputError, match=r"step-9 is no state"):
        replay(run / "resume" / "step-9")


@pytest.mark.parametrize("lr", [1e15, 1e8])  # at the lower one, gradients of some parts are finite
def test_step_that_failed_is_kept_and_fails_again_alike(tiny_run, tmp_path, capsys, lr):
    """A rate so high that the loss overflows: nothing is staged, so the step made again must fail by itself."""
    config = tiny_run(optim__name="sgd", optim__lr=lr, optim__warmup_steps=0, train__epochs=2, augment__mixup=0.5)
    with pytest.raises(RunError, match=r"is (nan|inf) at step (\d+): .* vitlab replay .*crash-\d+ makes it again"):
        run_training(config)
    (crash,) = (tmp_path / "run").glob("crash-*")
    _, record = load_state(crash)
    step = record["progress"]["step"]
    assert crash.name == f"crash-{step + 1}"
    assert f"at step {step + 1}" in record["crash"]["what"]
    assert len(record["crash"]["indices"][0]) == 8
    assert {"block 0", "block 1", "head", "norm", "patch_embed", "cls_token", "pos_embed"} == set(
        record["crash"]["gradient_norms"]
    )
    assert (set(record["crash"]["gradient_norms"].values()) == {"nan"}) == (lr == 1e15)
    outcome = replay(crash)
    assert outcome.agrees, outcome.lines
    assert main(["replay", str(crash)]) == 0
    assert "the step fails again, alike" in capsys.readouterr().out


def test_no_saved_file_holds_what_is_not_finite(tiny_run, tmp_path):
    with pytest.raises(RunError):
        run_training(
            tiny_run(optim__name="sgd", optim__lr=1e15, optim__warmup_steps=0, train__checkpoint_every_steps=1)
        )
    folders = [*list_states(tmp_path / "run" / "resume"), *(tmp_path / "run").glob("crash-*")]
    assert len(folders) >= 2
    for folder in folders:
        tensors, _ = load_state(folder)
        weights = [tensor for name, tensor in tensors.items() if name.startswith("model.")]
        assert all(tensor.isfinite().all() for tensor in weights)


def test_images_that_moved_are_named_with_data(tiny_run, color_folder, tmp_path):
    shutil.copytree(color_folder, tmp_path / "here")
    run = run_training(tiny_run(data__root=str(tmp_path / "here"), train__epochs=1))
    shutil.move(tmp_path / "here", tmp_path / "there")
    with pytest.raises(InputError, match="does not exist"):
        replay(run / "resume" / "step-0")
    assert replay(run / "resume" / "step-0", root=str(tmp_path / "there")).agrees


def test_configuration_comes_back_from_its_dictionary(tiny_run):
    config = tiny_run(model__image_size=(8, 12), optim__betas=(0.9, 0.95), data__mean=(0.1, 0.2, 0.3))
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(InputError, match=r"unknown field of train epoch: did you mean epochs"):
        RunConfig.from_dict({"train": {"epoch": 3}})


def test_curves_reach_every_state_before_it_is_written(tiny_run, tmp_path, monkeypatch):
    """A kill right after a save must not lose points of steps that are behind the state."""
    seen = []
    start = StateWriter.start

    def noted(self, step, tensors, record):
        if step:
            events = [event for event, _ in read_events(tmp_path / "run" / "tensorboard" / EVENTS_NAME)]
            points = {event.step for event in events for value in event.summary.value if value.tag == "train/loss"}
            seen.append((step, points))
        start(self, step, tensors, record)

    monkeypatch.setattr(StateWriter, "start", noted)
    run_training(tiny_run(train__epochs=1, train__checkpoint_every_steps=1))
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5]
    assert all(points == set(range(1, step + 1)) for step, points in seen)
