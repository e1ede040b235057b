"""Options reach the parts that they are for: each case fails where nothing reads the option."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from vitlab.data.datasets import load_dataset
from vitlab.engine.optim import lr_at
from vitlab.engine.run_folder import RunFolder
from vitlab.errors import InputError
from vitlab.runs.networks import build_network, build_preprocess
from vitlab.runs.parts import build_data, build_trainer


@pytest.fixture
def build(tiny_run, tmp_path):
    """Build a trainer from a tiny configuration with some fields changed."""

    def trainer(**changes):
        config = tiny_run(**changes)
        console = Console(file=io.StringIO())
        dataset = load_dataset(config.data.root, val_fraction=0.2, seed=0)
        network, stated = build_network(config, dataset, console, fresh=True)
        preprocess = build_preprocess(config.data, network, stated)
        data = build_data(config, dataset, preprocess, console)
        return build_trainer(config, dataset, network, data, RunFolder(tmp_path), console)

    return trainer


def indices(trainer, epoch=0):
    return np.concatenate([batch.indices.numpy() for batch in trainer.data.train.epoch(epoch)])


@pytest.mark.parametrize(
    ("field", "value", "look"),
    [
        ("data__resize_mode", "pad", lambda t: t.data.preprocess.resize_mode),
        ("data__crop_fraction", 0.8, lambda t: t.data.preprocess.crop_fraction),
        ("data__interpolation", "bilinear", lambda t: t.data.preprocess.interpolation),
        ("data__mean", (0.1, 0.2, 0.3), lambda t: t.data.preprocess.mean),
        ("data__std", (0.1, 0.2, 0.3), lambda t: t.data.preprocess.std),
        ("data__channels", 1, lambda t: t.objective.network.in_channels),
        ("data__workers", 2, lambda t: t.data.train.workers),
        ("data__workers", 2, lambda t: t.data.val.workers),
        ("data__on_error", "skip", lambda t: t.data.train.on_error),
        ("data__on_error", "skip", lambda t: t.data.val.on_error),
        ("augment__unmixed_epochs", 1, lambda t: t.data.unmixed_epochs),
        ("objective__label_smoothing", 0.2, lambda t: t.objective.label_smoothing),
        ("optim__clip_grad", 0.7, lambda t: t.clip_grad),
        ("optim__betas", (0.8, 0.95), lambda t: t.optimizer.param_groups[0]["betas"]),
        ("optim__weight_decay", 0.3, lambda t: max(group["weight_decay"] for group in t.optimizer.param_groups)),
        ("optim__layer_decay", 0.5, lambda t: sorted({g["lr_scale"] for g in t.optimizer.param_groups})[-2]),
        ("train__batch_size", 5, lambda t: len(t.data.train.epoch(0).__next__().labels)),
        ("train__epochs", 7, lambda t: t.total_steps / 5),
        ("train__steps", 3, lambda t: t.total_steps),
        ("train__ema_decay", 0.9, lambda t: t.ema.decay),
        ("train__checkpoint_every_steps", 3, lambda t: t.keeper.every_steps),
        ("train__grad_checkpointing", True, lambda t: t.objective.network.checkpoint_blocks),
        ("monitor__log_every_steps", 4, lambda t: t.monitor.log_every_steps),
        ("model__image_size", (12, 8), lambda t: t.objective.network.image_size),
    ],
)
def test_option_reaches_its_part(build, field, value, look):
    assert look(build(**{field: value})) == value


def test_momentum_reaches_sgd(build):
    assert build(optim__name="sgd", optim__momentum=0.6).optimizer.param_groups[0]["momentum"] == 0.6


def test_accumulation_makes_fewer_steps(build):
    assert build(train__accumulate=2, train__epochs=4).total_steps == 4 * 3


def test_schedule_options_reach_the_rate(build):
    shape = {"lr": 0.01, "warmup_steps": 2, "schedule": "step", "decay_at": (0.3, 0.6), "decay_factor": 0.2}
    trainer = build(train__steps=10, optim__min_lr=0.001, **{f"optim__{name}": value for name, value in shape.items()})
    expected = [lr_at(step, total_steps=10, min_lr=0.001, **shape) for step in range(10)]
    assert [trainer.schedule(step) for step in range(10)] == expected
    assert min(expected[2:]) == 0.001


def test_repeats_put_views_of_an_image_into_a_batch(build):
    once, thrice = indices(build()), indices(build(augment__repeats=3))
    assert len(set(once)) == len(once) == len(thrice) == 39
    assert len(set(thrice)) == 13


def test_balanced_sampling_draws_classes_equally(build, color_folder, tmp_path):
    for name, count in (("blue", 2), ("green", 13), ("red", 6)):
        folder = tmp_path / "uneven" / name
        folder.mkdir(parents=True)
        for path in sorted((color_folder / "train" / name).iterdir())[:count]:
            (folder / path.name).symlink_to(path)
    root = str(tmp_path / "uneven")
    trainer = build(data__root=root, data__sampling="balanced")
    labels = load_dataset(root, val_fraction=0.2, seed=0).splits["train"].labels
    counts = np.bincount(labels[indices(trainer)])
    assert counts.max() - counts.min() <= 1
    assert np.bincount(labels).max() > 5 * np.bincount(labels).min()


def test_mixing_options_reach_the_mixer(build):
    images, labels = torch.rand(4, 3, 8, 12), torch.tensor([0, 1, 2, 0])
    for field in ("augment__mixup", "augment__cutmix"):
        mixer = build(**{field: 1.0}).data.mixer
        torch.manual_seed(0)
        mixed, shares = mixer(images, labels)
        assert mixer.enabled
        assert ((shares > 0) & (shares < 1)).any()
        in_between = ((mixed - images).abs() > 0).float().mean(dim=(1, 2, 3))
        assert (in_between[0] == 1.0) == (field == "augment__mixup")  # mixup blends every pixel, cutmix a rectangle


def test_compile_compiles_each_block_in_place(build, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, backend, dynamic: compiled.append(self))
    trainer = build(train__compile=True)
    assert compiled == trainer.objective.network.repeated_blocks()[:-1], "the last works for the class token alone"
    compiled.clear()
    trainer = build(
        train__compile=True, model__overrides={"pool": "mean", "patch_size": 4, "embed_dim": 12, "depth": 2}
    )
    assert compiled == trainer.objective.network.repeated_blocks()
    compiled.clear()
    build()
    assert not compiled


@pytest.mark.parametrize("what", ["backbone", 1])
def test_freeze_reaches_the_network(build, what):
    names = {name for name, p in build(model__freeze=what).objective.network.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} <= names
    assert not any(name.startswith("blocks.0.") for name in names)
    assert any(name.startswith("blocks.1.") for name in names) == (what == 1)


@pytest.mark.parametrize(("batch_size", "better"), [(1, 3), (19, 20)])
def test_batch_of_one_is_refused_where_norms_need_more(build, batch_size, better):
    shape = {"model__name": "timm/resnet10t", "model__image_size": 32, "model__overrides": {}}
    with pytest.raises(InputError, match=rf"train.batch_size {batch_size} leaves a batch of one .* give {better}$"):
        build(train__batch_size=batch_size, **shape)
    assert build(train__batch_size=better, **shape)
    assert build(train__batch_size=batch_size)


def test_one_class_is_refused(build, color_folder, tmp_path):
    import gzip

    for part, count in (("train", 6), ("t10k", 2)):
        images = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (count, 8, 8)) + bytes(64 * count)
        labels = bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + bytes([7]) * count
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with pytest.raises(InputError, match="has only one class, 7: there is nothing to tell apart"):
        build(data__root=str(tmp_path))


@pytest.mark.parametrize(("side", "precision"), [(16, None), (40, torch.bfloat16)])
def test_networks_that_meet_torchs_wrong_gradients_train_in_fp32(side, precision, build, monkeypatch):
    """A ResNet of 16 pixels ends in maps of one, over which a strided convolution goes."""
    from vitlab.engine import device

    monkeypatch.setattr(device, "_computes_in_bf16", lambda device: True, raising=False)
    changes = {"model__name": "timm/resnet10t", "model__overrides": {}, "model__image_size": side}
    trainer = build(train__precision="bf16" if precision else "auto", **changes)
    assert trainer.autocast == precision
    if precision is None:
        with pytest.raises(
            InputError, match=r"which sees a single pixel, are wrong on a CPU: give --train.precision fp32"
        ):
            build(train__precision="bf16", **changes)
