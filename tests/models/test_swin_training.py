"""What training a Swin needs: fresh weights, gradients, groups of parameters, drop path."""

import math

import pytest
import timm.optim
import torch
from timm.models import group_parameters
from torch.nn import functional as F

from vitlab.layers.droppath import DropPath
from vitlab.models.catalog import create_model


def random_images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_swin_trains_as_timm_does(optimizer, tiny_swin, timm_swin, randomise):
    """20 steps from the same weights on the same batches; the grid of 7 x 9 is padded, shifted and masked."""
    network = randomise(tiny_swin(image_size=(28, 36)).double())
    peer = timm_swin(network).double()
    peer.load_state_dict(network.state_dict())
    losses = [train(each, optimizer) for each in (network, peer)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-8)
    assert losses[0][-1] < losses[0][0] - 0.3
    for ours, theirs in zip(network.state_dict().values(), peer.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def train(network, optimizer):
    labels = torch.arange(8) % 5
    optimizer = optimizer(network.parameters(), lr=0.01)
    losses = []
    for step in range(20):
        loss = F.cross_entropy(network(random_images(8, 3, 28, 36, seed=step % 4)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_swin_gradient_reaches_every_parameter(tiny_swin, randomise):
    network = randomise(tiny_swin())
    network(random_images(2, 3, 24, 40).float()).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name
        if name.endswith("bias_table"):
            assert parameter.grad.abs().amax(dim=1).min() > 0, f"{name}: every offset occurs"


def test_swin_overfits_a_tiny_batch(tiny_swin):
    torch.manual_seed(0)
    network = tiny_swin()
    images, labels = random_images(8, 3, 24, 40).float(), torch.arange(8) % 5
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(60):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05, "chance is ln 5 = 1.6"


def test_swin_grad_checkpointing_changes_no_bit(tiny_swin, randomise):
    images = random_images(4, 3, 24, 40).float()
    gradients = []
    for enable in (False, True):
        network = randomise(tiny_swin(drop_rate=0.1, drop_path_rate=0.3))
        network.set_grad_checkpointing(enable)
        blocks_run = []
        for block in network.repeated_blocks():
            block.register_forward_pre_hook(lambda *_, blocks_run=blocks_run: blocks_run.append(1))
        torch.manual_seed(0)
        network(images).square().sum().backward()
        assert len(blocks_run) == (8 if enable else 4)
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


def drop_path_rates(network):
    return [module.rate for module in network.modules() if isinstance(module, DropPath)]


def test_swin_drop_path_rises_linearly_over_the_blocks_of_all_stages(tiny_swin, timm_swin):
    assert drop_path_rates(tiny_swin(depths=(1, 4), drop_path_rate=0.2)) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert drop_path_rates(tiny_swin(depths=(1,), num_heads=(2,), drop_path_rate=0.2)) == [0]
    with torch.device("meta"):
        network = create_model("swin_small", drop_path_rate=0.3)
        peer = timm_swin(network)
    theirs = [getattr(block.drop_path2, "drop_prob", 0.0) for stage in peer.layers for block in stage.blocks]
    assert drop_path_rates(network) == pytest.approx(theirs, abs=1e-7)
    assert len(theirs) == 24


def test_swin_dropout_follows_patches_and_all_linear_layers_but_qkv(tiny_swin):
    network = tiny_swin(depths=(1,), num_heads=(2,), drop_rate=0.3)
    dropped = {name: module.p for name, module in network.named_modules() if isinstance(module, torch.nn.Dropout)}
    block = "layers.0.blocks.0."
    assert dropped == dict.fromkeys(
        ["pos_drop", f"{block}attn.proj_drop", f"{block}mlp.drop1", f"{block}mlp.drop2"], 0.3
    )
    torch.nn.init.normal_(network.head.fc.weight)  # equal weights would sum a norm, to 0
    images = torch.randn(1, 3, 24, 40)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


def test_swin_no_weight_decay_names_the_bias_tables(timm_swin):
    with torch.device("meta"):
        network = create_model("swin_tiny")
        peer = timm_swin(network)
    assert network.no_weight_decay() == peer.no_weight_decay()
    matrices = {name for name, parameter in network.named_parameters() if parameter.ndim > 1}
    assert {name for name in matrices if not name.endswith("weight")} == network.no_weight_decay()


@pytest.mark.parametrize("coarse", [False, True])
def test_swin_group_matcher_gives_timms_groups(coarse, timm_swin):
    with torch.device("meta"):
        network = create_model("swin_tiny")
        peer = timm_swin(network)
    groups = [group_parameters(each, each.group_matcher(coarse), reverse=True) for each in (network, peer)]
    assert groups[0] == groups[1]
    assert groups[0]["layers.2.downsample.norm.weight"] == groups[0]["layers.2.blocks.0.norm1.weight"]
    assert coarse or groups[0]["norm.weight"] == groups[0]["layers.3.blocks.1.mlp.fc2.bias"]
    assert max(groups[0].values()) == groups[0]["head.fc.weight"] == (5 if coarse else 13)


def test_swin_layer_decay_falls_from_head_to_patches(timm_swin):
    with torch.device("meta"):
        network = create_model("swin_tiny")
    groups = timm.optim.param_groups_layer_decay(
        network, 0.05, no_weight_decay_list=network.no_weight_decay(), layer_decay=0.75
    )
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    scale = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert scale.keys() == set(names.values())
    assert scale["patch_embed.proj.weight"] == scale["patch_embed.norm.bias"] == pytest.approx(0.75**13)
    assert scale["layers.0.blocks.0.attn.relative_position_bias_table"] == pytest.approx(0.75**12)
    assert scale["layers.3.downsample.reduction.weight"] == pytest.approx(0.75**2)
    assert scale["head.fc.bias"] == 1.0


def test_swin_fresh_weights_beside_timms(timm_swin):
    """Standard deviations of all parameters of Swin-T's widths: ours follow each layer's size, timm's are .02."""
    torch.manual_seed(0)
    network = create_model("swin_tiny", depths=(1, 1, 1, 1), num_classes=100)
    own, theirs = dict(network.named_parameters()), dict(timm_swin(network).named_parameters())
    for name, parameter in own.items():
        ours, timms = fresh_std(name, parameter)
        assert parameter.std().item() == pytest.approx(ours, rel=0.07), name
        assert theirs[name].std().item() == pytest.approx(timms, rel=0.07), name
        centre = float(name.endswith("weight") and "norm" in name)
        assert parameter.mean().item() == pytest.approx(centre, abs=0.01), name


def fresh_std(name, parameter):
    """Give the documented standard deviations, ours and timm's."""
    if name == "patch_embed.proj.weight":
        return 1 / math.sqrt(48), 1 / math.sqrt(3 * 48)
    if name == "patch_embed.proj.bias":
        return 0.0, 1 / math.sqrt(3 * 48)
    if name.endswith("bias_table"):
        return 0.02, 0.02
    if name == "head.fc.weight":
        return 0.0, 0.02
    if parameter.ndim == 1:
        return 0.0, 0.0
    fan_out, fan_in = parameter.shape
    fan_out = fan_out // 3 if name.endswith("qkv.weight") else fan_out
    return math.sqrt(2 / (fan_in + fan_out)), 0.02
