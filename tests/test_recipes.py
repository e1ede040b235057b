"""What the recipes' options do to whole runs."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from vitlab.config import AugmentConfig, DataConfig, ModelConfig, ObjectiveConfig, OptimConfig, RunConfig, TrainConfig
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.state import list_states, load_state
from vitlab.engine.trainer import Trainer
from vitlab.errors import Finished, InputError, Interrupted
from vitlab.inference.scoring import read_split, score
from vitlab.models.files import load_model
from vitlab.runs.training import run_training


def weights_of(run):
    return load_file(run / "last.safetensors")


def assert_same_weights(run, other):
    ours, theirs = weights_of(run), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_same_seed_gives_the_same_run_and_another_seed_another(tiny_run, tmp_path):
    recipe = {"augment__mixup": 0.4, "augment__repeats": 2, "data__sampling": "balanced", "train__ema_decay": 0.9}
    runs = [
        run_training(tiny_run(train__run_dir=str(tmp_path / name), train__seed=seed, train__epochs=1, **recipe))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert_same_weights(runs[0], runs[1])
    same, other = weights_of(runs[0]), weights_of(runs[2])
    assert not torch.equal(same["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_validation_images_do_not_depend_on_the_training_seed(tiny_run, tmp_path):
    runs = [
        run_training(
            tiny_run(
                data__root="digits",
                model__image_size=8,
                train__run_dir=str(tmp_path / f"{seed}"),
                train__seed=seed,
                train__steps=1,
            )
        )
        for seed in (0, 1)
    ]
    hashes = [load_model(run).data["fingerprint"]["sha256"]["val"] for run in runs]
    assert hashes[0] == hashes[1]


def test_ema_is_scored_beside_the_weights_and_each_score_says_which(tiny_run):
    run = run_training(tiny_run(train__epochs=3, train__ema_decay=0.8))
    rows = RunFolder(run).read_metrics()
    assert [(row["val/weights"], row["val_ema/weights"]) for row in rows] == [("raw", "ema")] * 3
    assert any(row["val/loss"] != row["val_ema/loss"] for row in rows)
    best = load_model(run)
    assert load_model(run / "last.safetensors").weights == "raw"
    ranked = {
        (row[f"{part}/top1"], -row[f"{part}/loss"]): row[f"{part}/weights"]
        for row in rows
        for part in ("val", "val_ema")
    }
    assert best.weights == best.metrics["weights"] == ranked[max(ranked)]
    assert best.metrics["loss"] == -max(ranked)[1]


def test_ema_in_the_best_file_is_the_average_of_the_steps(tiny_run, monkeypatch):
    """The average that the state holds is the one worked from each step's weights."""
    seen = []
    make_step = Trainer.train_step

    def recorded(self, batches):
        report = make_step(self, batches)
        seen.append(self.objective.network.head.weight.detach().clone())
        return report

    monkeypatch.setattr(Trainer, "train_step", recorded)
    run = run_training(tiny_run(train__epochs=1, train__ema_decay=0.7))
    tensors, _ = load_state(list_states(run / "resume")[0])
    average = torch.zeros_like(seen[0])
    for update, weight in enumerate(seen, start=1):
        decay = min(1 - update ** (-2 / 3), 0.7)
        average = decay * average + (1 - decay) * weight
    torch.testing.assert_close(tensors["ema.network.head.weight"], average)
    assert not torch.equal(tensors["ema.network.head.weight"], tensors["model.network.head.weight"])


def test_ema_of_a_resumed_run_equals_the_unbroken_one(tiny_run, tmp_path, monkeypatch):
    recipe = {"train__epochs": 3, "train__ema_decay": 0.9, "augment__mixup": 0.3}
    whole = run_training(tiny_run(**recipe, train__run_dir=str(tmp_path / "whole")))
    config = tiny_run(**recipe, train__run_dir=str(tmp_path / "parts"))
    make_step = Trainer.train_step

    def stopped(self, batches):
        if self.progress.step == 7:
            raise Interrupted("as a signal would")
        return make_step(self, batches)

    monkeypatch.setattr(Trainer, "train_step", stopped)
    with pytest.raises(Interrupted):
        run_training(config)
    monkeypatch.setattr(Trainer, "train_step", make_step)
    parts = run_training(config)
    (ours, record), (theirs, other) = (load_state(list_states(run / "resume")[0]) for run in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert record["progress"] == other["progress"]


def test_patience_ends_the_run_after_as_many_evaluations_without_a_better_one(tiny_run, monkeypatch):
    scores = iter([0.5, 0.7, 0.6, 0.7, 0.1, 0.1, 0.9])
    monkeypatch.setattr("vitlab.engine.objectives.Objective.rank", lambda self, summary: (next(scores), 0.0))
    run = run_training(tiny_run(train__epochs=7, train__patience=3, optim__warmup_steps=0))
    rows = RunFolder(run).read_metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    assert load_model(run).metrics["epoch"] == 2
    with pytest.raises(Finished, match=r"is finished: .* more train\.patience to go on"):
        run_training(tiny_run(train__epochs=7, train__patience=3, optim__warmup_steps=0))
    run_training(tiny_run(train__epochs=7, train__patience=4, optim__warmup_steps=0))
    assert [row["epoch"] for row in RunFolder(run).read_metrics()] == [1, 2, 3, 4, 5, 6]


def test_mixing_stops_for_the_last_epochs(tiny_run, monkeypatch):
    mixed = []
    prepare = Trainer.prepare

    def noted(self, batch):
        prepared = prepare(self, batch)
        mixed.append((self.progress.epoch, prepared.labels.ndim == 2))
        return prepared

    monkeypatch.setattr(Trainer, "prepare", noted)
    run_training(tiny_run(train__epochs=4, augment__mixup=0.5, augment__unmixed_epochs=3, train__accumulate=2))
    assert sorted(set(mixed)) == [(0, True), (1, False), (2, False), (3, False)]


def test_model_files_hold_the_temperature_of_their_own_evaluation(tiny_run):
    run = run_training(
        tiny_run(
            data__root="digits",
            model__image_size=8,
            optim__lr=0.01,
            train__epochs=2,
            train__ema_decay=0.5,
            objective__label_smoothing=0.3,
        )
    )
    for path in (run / "best.safetensors", run / "last.safetensors"):
        model = load_model(path)
        split = read_split(model, "digits", "val").split
        scores = score(model, split, batch_size=8, workers=0, on_error="stop")
        assert scores.loss == model.metrics["loss"]
        assert model.temperature == scores.fit_temperature() != 1.0
        assert scores.calibrated()["loss"] < scores.loss


def test_find_lr_changes_nothing_in_the_run(tiny_run, tmp_path):
    recipe = {"augment__mixup": 0.3, "train__ema_decay": 0.9, "train__epochs": 2}
    plain = run_training(tiny_run(train__run_dir=str(tmp_path / "plain"), **recipe))
    found = run_training(tiny_run(train__run_dir=str(tmp_path / "found"), train__find_lr=True, **recipe))
    assert_same_weights(plain, found)
    curve = json.loads((found / "lr_finder.json").read_text())
    assert curve["rates"][0] == pytest.approx(1e-6)
    assert len(curve["rates"]) == len(curve["losses"]) == len(curve["smoothed"]) >= 10
    assert curve["smoothed"][0] == pytest.approx(sum(curve["losses"][:5]) / 5)
    assert (found / "lr_finder.png").stat().st_size > 5_000
    assert not (plain / "lr_finder.json").exists()
    assert "find_lr" not in (found / "config.yaml").read_text()


def test_seeds_make_one_run_each_and_go_on_after_a_stop(tiny_run, tmp_path):
    config = tiny_run(train__run_dir=str(tmp_path / "runs"), train__seeds=(5, 6), train__epochs=1)
    parent = run_training(config)
    assert sorted(path.name for path in parent.iterdir()) == ["seed-5", "seed-6"]
    alone = run_training(tiny_run(train__run_dir=str(tmp_path / "alone"), train__seed=6, train__epochs=1))
    assert_same_weights(parent / "seed-6", alone)
    before = (parent / "seed-5" / "last.safetensors").stat().st_mtime_ns
    assert run_training(config) == parent
    assert (parent / "seed-5" / "last.safetensors").stat().st_mtime_ns == before


def test_class_weights_reach_the_loss(tiny_run, tmp_path):
    plain, equal, weighted = (
        run_training(
            tiny_run(train__run_dir=str(tmp_path / f"{index}"), train__steps=1, objective__class_weights=weights)
        )
        for index, weights in enumerate(("none", (1.0, 1.0, 1.0), (5.0, 1.0, 1.0)))
    )
    losses = [RunFolder(run).read_metrics()[0]["train/loss"] for run in (plain, equal, weighted)]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[2] > 1.2 * losses[0]


@pytest.mark.parametrize(
    ("section", "changes", "line"),
    [
        (DataConfig, {"sampling": "balance"}, "unknown data.sampling balance: did you mean balanced"),
        (OptimConfig, {"schedule": "poly"}, "unknown optim.schedule poly"),
        (AugmentConfig, {"policy": "rand"}, "unknown augment.policy rand: Valid are none, randaugment, autoaugment"),
        (ModelConfig, {"freeze": "head"}, "unknown model.freeze head: Valid are none, backbone"),
    ],
)
def test_choices_are_checked_in_python_too(section, changes, line):
    with pytest.raises(InputError, match=line):
        section(**changes)


def test_options_that_undo_each_other_are_refused(tiny_run):
    with pytest.raises(InputError, match=r"augment.unmixed_epochs 2 leaves none of 2 epochs to mix"):
        tiny_run(augment__mixup=0.5, augment__unmixed_epochs=2)
    with pytest.raises(InputError, match=r"would count rare classes twice"):
        dataclasses.replace(
            RunConfig(),
            data=DataConfig(sampling="balanced"),
            objective=ObjectiveConfig(class_weights="balanced"),
        )


def test_seeds_do_not_go_into_the_folder_of_a_run(tiny_run, finished_run):
    with pytest.raises(InputError, match=r"holds a run of one seed: give another folder for several"):
        run_training(tiny_run(train__run_dir=str(finished_run), train__seeds=(1, 2)))
    assert not list(finished_run.glob("seed-*"))


def test_seeds_leave_no_empty_folder_behind(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        run_training(tiny_run(data__root="nowhere", train__run_dir=None, train__seeds=(1, 2)))
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ema_decay": 1.0}, "train.ema_decay is 1.0: give a number between 0 and 1"),
        ({"seeds": (1, 1)}, r"train.seeds is \[1, 1\]: give different numbers"),
        ({"seeds": ()}, r"train.seeds is \[\]: give different numbers"),
        ({"seeds": (-1,)}, "train.seeds is .* give 0 or more"),
        ({"patience": 0}, "train.patience is 0: give more than 0"),
    ],
)
def test_train_config_refuses(changes, line):
    with pytest.raises(InputError, match=line):
        TrainConfig(**changes)


def test_every_field_of_the_configuration_is_read_somewhere():
    """An option that nothing reads would do nothing, silently."""
    import ast
    import dataclasses
    from pathlib import Path

    import vitlab.options

    package = Path(vitlab.__file__).parent
    read = {
        node.attr
        for path in package.rglob("*.py")
        if path.name not in ("config.py", "sections.py", "options.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    fields = [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(section.default_factory)
    ]
    fields += [
        f"{options.__name__}.{field.name}"
        for options in vars(vitlab.options).values()
        if dataclasses.is_dataclass(options)
        for field in dataclasses.fields(options)
    ]
    assert len(fields) > 100
    assert [name for name in fields if name.split(".")[1] not in read] == []


def test_preprocessing_comes_along_with_the_weights_and_survives_a_resume(tiny_run, tmp_path, monkeypatch):
    source = run_training(
        tiny_run(
            train__run_dir=str(tmp_path / "source"),
            train__steps=1,
            data__mean=(0.1, 0.2, 0.3),
            data__interpolation="bilinear",
        )
    )
    assert load_model(source).preprocess.resize_mode == "squash"
    config = tiny_run(model__weights=str(source), data__resize_mode=None, data__std=(0.5, 0.5, 0.5), train__epochs=2)
    make_step = Trainer.train_step

    def stopped(self, batches):
        if self.progress.step == 7:
            raise Interrupted("as a signal would")
        return make_step(self, batches)

    monkeypatch.setattr(Trainer, "train_step", stopped)
    with pytest.raises(Interrupted):
        run_training(config)
    monkeypatch.setattr(Trainer, "train_step", make_step)
    preprocess = load_model(run_training(config)).preprocess
    assert (preprocess.mean, preprocess.std) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    assert (preprocess.interpolation, preprocess.resize_mode) == ("bilinear", "squash")


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_cache_changes_nothing_in_the_run(cache, tiny_run, tmp_path):
    plain = run_training(tiny_run(train__run_dir=str(tmp_path / "plain")))
    kept = run_training(
        tiny_run(train__run_dir=str(tmp_path / "kept"), data__cache=cache, data__cache_dir=str(tmp_path / "cache"))
    )
    assert_same_weights(plain, kept)
    assert [row["val/loss"] for row in RunFolder(plain).read_metrics()] == [
        row["val/loss"] for row in RunFolder(kept).read_metrics()
    ]
    assert len(list(tmp_path.glob("cache/*.cache"))) == (2 if cache == "disk" else 0)


def test_grey_images_have_statistics_of_their_own(tiny_run):
    preprocess = load_model(run_training(tiny_run(data__channels=1, train__steps=1))).preprocess
    assert (preprocess.channels, preprocess.mean, preprocess.std) == (1, (0.5,), (0.25,))


def test_frozen_backbone_keeps_its_weights(tiny_run, tmp_path):
    source = run_training(tiny_run(train__run_dir=str(tmp_path / "source"), train__steps=1))
    run = run_training(tiny_run(model__weights=str(source), model__freeze="backbone", train__epochs=1))
    before, after = load_file(source / "best.safetensors"), weights_of(run)
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}
