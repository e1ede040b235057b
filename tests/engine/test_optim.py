"""Learning rates and parameter groups."""

import copy
import itertools
import math
import subprocess
import sys

import pytest
import timm.optim
import torch

from vitlab.config import OptimConfig
from vitlab.engine.optim import (
    build_ema,
    build_optimizer,
    build_schedule,
    freeze,
    lr_at,
    parameter_groups,
    require_shardable,
    set_lr,
)
from vitlab.errors import InputError
from vitlab.models.catalog import create_model


def network(**overrides):
    settings = {"patch_size": 4, "embed_dim": 24, "depth": 12, "num_heads": 3} | overrides
    return create_model("vit_tiny", num_classes=5, image_size=(8, 12), **settings)


def test_lr_at_warms_up_peaks_and_reaches_the_minimum():
    rates = [lr_at(step, total_steps=10, lr=1.0, warmup_steps=3, min_lr=0.1) for step in range(10)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[9] == pytest.approx(0.1)
    assert all(earlier > later for earlier, later in itertools.pairwise(rates[2:]))
    assert rates[4] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 2 / 7)) / 2)


def test_lr_at_without_warmup_begins_at_the_peak():
    assert lr_at(0, total_steps=5, lr=2.0) == 2.0
    assert lr_at(4, total_steps=5, lr=2.0) == pytest.approx(0.0)
    assert lr_at(0, total_steps=1, lr=2.0) == 2.0


def test_lr_at_constant_stays_after_warmup():
    rates = [lr_at(step, total_steps=6, lr=3.0, warmup_steps=2, schedule="constant") for step in range(6)]
    assert rates == [1.5, 3.0, 3.0, 3.0, 3.0, 3.0]


def test_lr_at_linear_falls_by_equal_amounts_to_the_minimum():
    rates = [lr_at(step, total_steps=8, lr=1.0, warmup_steps=2, schedule="linear", min_lr=0.4) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])


def test_lr_at_step_falls_after_each_share_of_the_run():
    settings = {"total_steps": 8, "lr": 1.0, "schedule": "step", "decay_at": (0.5, 0.75), "decay_factor": 0.1}
    rates = [lr_at(step, **settings) for step in range(8)]
    assert rates == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert lr_at(7, **settings, min_lr=0.05) == 0.05


def test_schedule_takes_the_steps_from_the_configuration():
    schedule = build_schedule(
        OptimConfig(lr=2.0, schedule="step", decay_at=(0.25,), decay_factor=0.5, warmup_steps=0), 4
    )
    assert [schedule(step) for step in range(4)] == [2.0, 1.0, 1.0, 1.0]


def test_ema_follows_the_warmed_up_average_by_hand():
    module = torch.nn.Linear(1, 1, bias=False)
    ema = build_ema(module, 0.5)
    average = 0.0
    for update, weight in enumerate((1.0, 2.0, 4.0, 8.0), start=1):
        torch.nn.init.constant_(module.weight, weight)
        decay = min(1 - update ** (-2 / 3), 0.5)  # 0, .37, .5, .5
        average = decay * average + (1 - decay) * weight
        ema.update(module, step=update)
        assert ema.module.weight.item() == pytest.approx(average)
    assert average == pytest.approx(((1 + 2 ** (-2 / 3)) / 2 + 4 / 2) / 2 + 8 / 2)


def test_schedule_warms_up_for_a_twentieth_by_default():
    schedule = build_schedule(OptimConfig(lr=1.0), 100)
    assert [schedule(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule(5) < 1.0


def test_schedule_refuses_a_warmup_as_long_as_the_run():
    with pytest.raises(InputError, match=r"optim.warmup_steps 10 leaves nothing of the run's 10 steps"):
        build_schedule(OptimConfig(warmup_steps=10), 10)


@pytest.mark.parametrize("layer_decay", [None, 0.75])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_groups_hold_every_parameter_once_and_decay_only_matrices(layer_decay, pool):
    model = network(pool=pool)
    groups = parameter_groups(model, weight_decay=0.05, layer_decay=layer_decay)
    members = [parameter for group in groups for parameter in group["params"]]
    assert len(members) == len({id(parameter) for parameter in members})
    assert {id(parameter) for parameter in members} == {id(parameter) for parameter in model.parameters()}
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    matrices = {"patch_embed.proj.weight", "head.weight"}
    for block in range(12):
        matrices |= {f"blocks.{block}.{part}.weight" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert names == matrices


def test_layer_decay_gives_the_published_scales():
    model = network()
    optimizer = build_optimizer(OptimConfig(layer_decay=0.75), model)
    set_lr(optimizer, 2.0)
    rates = {id(p): group["lr"] / 2.0 for group in optimizer.param_groups for p in group["params"]}
    named = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert named["pos_embed"] == pytest.approx(0.023757, abs=1e-6)
    assert named["cls_token"] == pytest.approx(0.023757, abs=1e-6)
    assert named["patch_embed.proj.weight"] == pytest.approx(0.023757, abs=1e-6)
    assert named["blocks.0.attn.qkv.weight"] == pytest.approx(0.031676, abs=1e-6)
    assert named["blocks.11.mlp.fc2.bias"] == pytest.approx(0.75)
    assert named["norm.weight"] == pytest.approx(0.75)  # with the last block, as timm has it
    assert named["head.weight"] == pytest.approx(1.0)


def test_optimizer_takes_the_configured_settings():
    adamw = build_optimizer(OptimConfig(name="adamw", betas=(0.8, 0.95)), network())
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["betas"] == (0.8, 0.95)
    assert adamw.defaults["fused"]
    sgd = build_optimizer(OptimConfig(name="sgd", momentum=0.7, weight_decay=0.0), network())
    assert {group["momentum"] for group in sgd.param_groups} == {0.7}


def test_optimizer_names_the_nearest_for_an_unknown_one():
    with pytest.raises(InputError, match=r"unknown optim.name adamww: did you mean adamw"):
        build_optimizer(OptimConfig(name="adamww"), network())


def test_optimizer_reports_settings_that_it_does_not_take():
    with pytest.raises(InputError, match=r"optim.betas is \(0.9, 0.99\), and optim.name sgd has none"):
        build_optimizer(OptimConfig(name="sgd", betas=(0.9, 0.99)), network())


@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("none", 152),
        ("backbone", 2),
        (1, 2 + 2 + 12),  # head, norm and the last block
        (3, 2 + 2 + 36),
    ],
)
def test_freeze_leaves_what_is_asked_for(what, trained):
    model = network()
    freeze(model, what)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == trained
    assert {"head.weight", "head.bias"} <= set(names)
    groups = parameter_groups(model, weight_decay=0.05, layer_decay=0.75)
    assert sum(len(group["params"]) for group in groups) == trained


@pytest.mark.parametrize(("count", "blocks"), [(1, 1), (2, 2), (3, 3)])
def test_freeze_counts_the_blocks_of_a_davit_one_by_one(count, blocks):
    model = create_model(
        "davit_tiny", num_classes=5, image_size=32, embed_dims=(8, 16), depths=(1, 1), num_heads=(1, 2)
    )
    freeze(model, count)
    trained = [all(p.requires_grad for p in block.parameters()) for block in model.repeated_blocks()]
    assert trained == [False] * (4 - blocks) + [True] * blocks


def test_freeze_refuses_more_blocks_than_there_are():
    with pytest.raises(InputError, match=r"model.freeze 13 asks for more blocks than the network's 12"):
        freeze(network(), 13)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "nadamw", "lion", "lamb"])
def test_optimizers_whose_steps_on_shards_are_those_on_the_whole_are_let_through(name):
    require_shardable(OptimConfig(name=name))


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamp", "novograd"])
def test_optimizers_that_look_at_whole_matrices_are_refused_on_shards(name):
    with pytest.raises(InputError, match=f"optim.name {name} makes other steps of sharded parameters"):
        require_shardable(OptimConfig(name=name))


@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny", "davit_tiny", "imagegpt_small"])
def test_adamw_and_its_groups_are_those_of_timm(name):
    with torch.device("meta"):
        model = create_model(name)
    groups = parameter_groups(model, weight_decay=0.3, layer_decay=None)
    theirs = timm.optim.param_groups_weight_decay(model, 0.3, no_weight_decay_list=model.no_weight_decay())
    assert [group["weight_decay"] for group in groups] == [group["weight_decay"] for group in theirs] == [0.0, 0.3]
    for own, other in zip(groups, theirs, strict=True):
        assert list(map(id, own["params"])) == list(map(id, other["params"]))


def test_adamw_makes_torchs_steps_and_keeps_its_state():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.5, 0.75), "fused": True}
    optimizers = [type(build_optimizer(OptimConfig(), network(depth=1)))(ours, **settings)]
    optimizers.append(torch.optim.AdamW(theirs, **settings))
    for step in range(4):
        for optimizer, parameters in zip(optimizers, (ours, theirs), strict=True):
            for number, parameter in enumerate(parameters):
                parameter.grad = start[number].cos() * (step + 1)
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in parameters)
        if step == 1:
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number in range(2):
        pair = [state["state"][number] for state in states]
        assert all(torch.equal(pair[0][key], pair[1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_adamw_does_not_load_torchs_compiler():
    """Its import takes over a second of every run."""
    code = "import sys, torch; from vitlab.config import OptimConfig; from vitlab.engine.optim import build_optimizer; "
    code += "from vitlab.models.catalog import create_model; "
    code += "net = create_model('vit_tiny', image_size=8, patch_size=4, embed_dim=24, depth=1); "
    code += "made = build_optimizer(OptimConfig(), net); net(torch.zeros(1, 3, 8, 8)).sum().backward(); "
    code += "made.step(); made.zero_grad(); made.load_state_dict(made.state_dict()); "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_adamw_has_timms_settings():
    small = network(depth=1)
    config = OptimConfig(lr=0.1, weight_decay=0.3, betas=(0.5, 0.75))
    ours = build_optimizer(config, small)
    theirs = timm.optim.create_optimizer_v2(
        parameter_groups(small, weight_decay=0.3, layer_decay=None),
        opt="adamw", lr=0.1, weight_decay=0.0, betas=(0.5, 0.75), fused=True,
    )  # fmt: skip
    assert isinstance(ours, type(theirs))
    assert ours.defaults == theirs.defaults
    assert [group | {"params": []} for group in ours.param_groups] == [
        group | {"params": []} for group in theirs.param_groups
    ]
