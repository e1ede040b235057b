import math

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn import functional as F

from vitlab.layers.droppath import DropPath
from vitlab.models import davit
from vitlab.models.catalog import create_model
from vitlab.models.davit import channel_attention


def random_tensor(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_davit_trains_as_timm_does(tiny_davit, timm_davit, randomise):
    network, peer = randomise(tiny_davit().double()), timm_davit().double()
    peer.load_state_dict(network.state_dict())
    losses = []
    for each in (network, peer):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-3, weight_decay=0.05)
        for step in range(20):
            images, labels = random_tensor(4, 3, 20, 32, seed=step), torch.arange(step, step + 4) % 5
            loss = F.cross_entropy(each(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:20] == pytest.approx(losses[20:], rel=0, abs=1e-8)
    assert max(losses) - min(losses) > 0.05


def test_davit_gradient_reaches_every_parameter(tiny_davit, randomise):
    network = randomise(tiny_davit())
    network(random_tensor(2, 3, 20, 32).float()).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name


def test_davit_overfits_a_tiny_batch(tiny_davit):
    torch.manual_seed(0)
    network = tiny_davit()
    images, labels = random_tensor(8, 3, 20, 32).float(), torch.arange(8) % 5
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(60):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05, "chance is ln 5 = 1.6"


def test_davit_fresh_weights_spread_beside_those_of_timm():
    torch.manual_seed(0)
    network, peer = create_model("davit_tiny"), timm.create_model("davit_tiny")
    block, every = "stages.2.blocks.1.", slice(None)
    spread_of_rows = [
        ("stem.conv.weight", every, 1 / math.sqrt(147), 1 / math.sqrt(3 * 147)),
        ("stem.conv.bias", every, 0, 1 / math.sqrt(3 * 147)),
        ("stages.2.downsample.conv.weight", every, 1 / math.sqrt(4 * 192), 1 / math.sqrt(3 * 4 * 192)),
        (block + "0.cpe1.proj.weight", every, 1 / math.sqrt(27), 1 / math.sqrt(27)),
        (block + "1.cpe2.proj.bias", every, 1 / math.sqrt(27), 1 / math.sqrt(27)),
        (block + "0.attn.qkv.weight", every, 1 / math.sqrt(384), 0.02),
        (block + "1.attn.qkv.weight", slice(384), 1 / math.sqrt(384), 0.02),
        (block + "1.attn.qkv.weight", slice(384, None), math.sqrt(math.sqrt(32) / 14**2 / 384), 0.02),
        (block + "1.attn.qkv.bias", every, 0, 0),
        (block + "1.attn.proj.weight", every, 1 / math.sqrt(384), 0.02),
        (block + "1.mlp.fc1.weight", every, math.sqrt(2 / (5 * 384)), 0.02),
        (block + "0.mlp.fc2.weight", every, math.sqrt(2 / (5 * 384)), 0.02),
        (block + "0.norm2.weight", every, 0, 0),
        ("head.fc.weight", every, 0, 0.02),
    ]
    for name, rows, *spreads in spread_of_rows:
        for each, spread in zip((network, peer), spreads, strict=True):
            assert each.get_parameter(name)[rows].std().item() == pytest.approx(spread, rel=0.08), name
    with torch.no_grad():
        logits = network(torch.randn(2, 3, 224, 224))
    assert F.cross_entropy(logits, torch.tensor([3, 999])).item() == pytest.approx(math.log(1000), abs=1e-5)


@pytest.mark.parametrize("image_size", [64, (160, 224)])
def test_davit_channel_scores_start_small_on_every_map(image_size, monkeypatch):
    spreads = []

    def spy(query, key, value):
        spreads.append((query.transpose(-2, -1) @ key / math.sqrt(query.shape[-1])).std().item())
        return channel_attention(query, key, value)

    monkeypatch.setattr(davit, "channel_attention", spy)
    torch.manual_seed(0)
    network = create_model("davit_tiny", image_size=image_size)
    smooth = F.interpolate(torch.randn(2, 3, 3, 3), network.image_size, mode="bilinear")
    with torch.no_grad():
        network(smooth)
    assert len(spreads) == 6
    assert all(0.3 < spread < 1.2 for spread in spreads), spreads


def test_davit_init_weights_draws_every_parameter(tiny_davit):
    network = tiny_davit()
    states = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(torch.nan)
        torch.manual_seed(0)
        network.init_weights()
        states.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
    assert all(tensor.isfinite().all() and torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_davit_drop_path_rises_linearly_from_block_to_block(tiny_davit):
    rates = [module.rate for module in tiny_davit(drop_path_rate=0.2).modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0, 0.04, 0.08, 0.12, 0.16, 0.2])


def test_davit_dropped_block_is_its_convolutions(tiny_davit, randomise):
    network = randomise(tiny_davit(drop_path_rate=1.0).double())
    block = network.repeated_blocks()[-1]
    grid = random_tensor(2, 3, 4, 24)
    torch.testing.assert_close(block(grid), block.cpe2(block.cpe1(grid)), rtol=0, atol=0)
    assert (block.eval()(grid) - block.cpe2(block.cpe1(grid))).abs().max() > 1e-3


def test_davit_dropout_follows_all_linear_layers_of_a_block_but_qkv(tiny_davit):
    network = tiny_davit(embed_dims=(12,), depths=(1,), num_heads=(2,), drop_rate=0.3)
    dropped = {name: module.p for name, module in network.named_modules() if isinstance(module, nn.Dropout)}
    layers = [f"stages.0.blocks.0.{block}.{layer}" for block in (0, 1) for layer in ("attn.proj_drop", "mlp.drop1")]
    layers += [f"stages.0.blocks.0.{block}.mlp.drop2" for block in (0, 1)]
    assert dropped == dict.fromkeys(layers, 0.3)
    for layer in network.repeated_blocks():
        grid = torch.randn(1, 2, 3, 12)
        assert not torch.equal(layer.attn(grid), layer.attn(grid))


def test_davit_grad_checkpointing_changes_no_bit(tiny_davit, randomise):
    images = random_tensor(4, 3, 20, 32).float()
    gradients = []
    for enable in (False, True):
        network = randomise(tiny_davit(drop_rate=0.1, drop_path_rate=0.3))
        network.set_grad_checkpointing(enable)
        blocks_run = []
        for block in network.repeated_blocks():
            block.register_forward_pre_hook(lambda *_, blocks_run=blocks_run: blocks_run.append(1))
        torch.manual_seed(0)
        network(images).square().sum().backward()
        assert len(blocks_run) == (12 if enable else 6)
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


@pytest.mark.parametrize("coarse", [False, True])
def test_davit_layer_groups_are_those_of_timm(coarse):
    with torch.device("meta"):
        network, peer = create_model("davit_tiny"), timm.create_model("davit_tiny")
    groups = group_parameters(network, network.group_matcher(coarse=coarse), reverse=True)
    assert groups == group_parameters(peer, peer.group_matcher(coarse=coarse), reverse=True)
    assert len(set(groups.values())) == (6 if coarse else 8)


def test_davit_decays_all_weights_of_two_axes_and_more(tiny_davit):
    network = tiny_davit()
    decaying = {name for name, parameter in network.named_parameters() if parameter.ndim > 1}
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = param_groups_weight_decay(network, 0.05, no_weight_decay_list=network.no_weight_decay())
    assert {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]} == decaying
    assert "stages.0.blocks.0.1.cpe2.proj.weight" in decaying
