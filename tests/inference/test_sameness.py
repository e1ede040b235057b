"""Where two runs part, to the last bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from vitlab.__main__ import main
from vitlab.config import RunConfig
from vitlab.engine import trainer
from vitlab.engine.tensorboard import EVENTS_NAME, EventLog, cut_metrics
from vitlab.errors import InputError
from vitlab.inference.sameness import compare_bits
from vitlab.models.files import load_model, save_model
from vitlab.runs.training import run_training


@pytest.fixture
def run(tiny_run, tmp_path):
    return run_training(tiny_run(train__run_dir=str(tmp_path / "a")))


def changed_model(run, copy, change):
    """Write a copy of a run's model file whose network `change` has changed."""
    model = load_model(run)
    with torch.no_grad():
        change(dict(model.network.named_parameters()))
    save_model(
        copy,
        model.network,
        classes=model.classes,
        preprocess=model.preprocess,
        metrics=model.metrics,
        data=model.data,
        temperature=model.temperature,
    )


def test_the_same_run_made_twice_is_identical_and_ends_with_0(run, tiny_run, tmp_path, capsys):
    again = run_training(tiny_run(train__run_dir=str(tmp_path / "b"), data__workers=1))
    capsys.readouterr()
    assert main(["compare", str(run), str(again), "--workers", "0", "--json", str(tmp_path / "c.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "losses are identical at all 12 points logged, up to step 10" in lines  # ten steps and two epochs
    assert "best weights are identical in all 32 tensors" in lines
    assert "last weights are identical in all 32 tensors" in lines
    assert "the runs are identical to the last bit" in lines
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["identical"] is True
    assert result["pairs"][0]["sameness"]["losses"]["first_step"] is None


def test_runs_part_at_the_step_after_a_weight_moved(run, tiny_run, tmp_path, monkeypatch, capsys):
    make_step = trainer.Trainer.train_step

    def step(self, micro_batches):
        report = make_step(self, micro_batches)
        if self.progress.step == 6:
            with torch.no_grad():
                self.objective.network.head.bias[1] += 1e-3
        return report

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", step)
        other = run_training(tiny_run(train__run_dir=str(tmp_path / "b")))
    same = compare_bits(run, other)
    assert not same.identical
    assert same.losses.first_step == 7
    assert same.losses.values[0] != same.losses.values[1]
    a, b = (load_file(path / "last.safetensors") for path in (run, other))
    last = same.weights[1]
    assert last.largest == max((a[name].double() - b[name].double()).abs().max().item() for name in a)
    assert (a[last.where].double() - b[last.where].double()).abs().max().item() == last.largest
    assert last.differing == sum(not torch.equal(a[name], b[name]) for name in a) > 20
    capsys.readouterr()
    assert main(["compare", str(run), str(other), "--workers", "0"]) == 4
    printed = capsys.readouterr().out
    assert f"logged losses first part at step 7: A {same.losses.values[0]!r}, B {same.losses.values[1]!r}\n" in printed
    assert (
        f"last weights differ in {last.differing} of 32 tensors, by up to {last.largest:.3g} ({last.where})" in printed
    )
    assert printed.endswith("the runs are not identical\n")


def test_one_bit_in_one_weight_is_found(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "b")

    def next_float(parameters):
        parameters["blocks.1.attn.qkv.weight"][2, 3] = torch.nextafter(
            parameters["blocks.1.attn.qkv.weight"][2, 3], torch.tensor(9.0)
        )

    changed_model(run, copy / "best.safetensors", next_float)
    best, last = compare_bits(run, copy).weights
    assert (best.identical, best.differing, best.where) == (False, 1, "blocks.1.attn.qkv.weight")
    assert 0 < best.largest < 1e-6
    assert last.identical


def test_the_sign_of_zero_is_a_bit(run, tmp_path):
    for name, value in (("a", 0.0), ("b", -0.0)):
        changed_model(run, tmp_path / f"{name}.safetensors", lambda p, value=value: p["head.bias"].fill_(value))
    same = compare_bits(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert same.losses is None
    assert same.lines() == [
        "losses are not compared, a run has no curves",
        "the weights differ in 1 of 32 tensors, by up to 0 (head.bias)",
    ]


def test_a_run_that_stopped_earlier_is_not_identical(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "b")
    cut_metrics(copy / "metrics.jsonl", 5)
    EventLog(copy / "tensorboard", keep_steps=5).close()
    losses = compare_bits(run, copy).losses
    assert not losses.identical
    assert losses.line() == "losses are identical at all 6 common points; A ends at step 10, B at 5"


def test_an_epoch_that_differs_shows_without_events(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "b")
    (copy / "tensorboard" / EVENTS_NAME).unlink()
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert compare_bits(run, copy).losses.points == 2
    kept = rows[1]["train/loss"]
    rows[1]["train/loss"] = None
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = compare_bits(run, copy).losses
    assert (losses.first_step, losses.values) == (10, (kept, None))


def test_other_networks_are_not_compared_weight_by_weight(run, tiny_run, tmp_path, capsys):
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    other = run_training(tiny_run(train__run_dir=str(tmp_path / "b"), model__overrides=sizes))
    capsys.readouterr()
    assert main(["compare", str(run), str(other), "--workers", "0"]) == 4
    assert "best weights are of other networks, whose tensors have other names or shapes" in capsys.readouterr().out


def test_digits_need_no_data_option(tmp_path, capsys):
    sizes = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    config = RunConfig.from_dict(
        {
            "model": {"name": "vit_tiny", "overrides": sizes},
            "data": {"root": "digits", "workers": 0},
            "train": {"steps": 1, "run_dir": str(tmp_path / "d"), "device": "cpu"},
        }
    )
    digits = str(run_training(config))
    assert main(["compare", digits, digits, "--workers", "0", "--device", "cpu"]) == 0
    assert "identical to the last bit" in capsys.readouterr().out


def test_damaged_curves_are_named(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "b")
    (copy / "metrics.jsonl").write_text('{"step": 5\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged .*: restore it, or compare the model files"):
        compare_bits(run, copy)
