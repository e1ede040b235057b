import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from vitlab.engine import packing
from vitlab.engine.packing import PackedLinear, pack, packed
from vitlab.layers.mlp import Mlp
from vitlab.models.catalog import create_model

SIZES = {"vit_tiny": {"patch_size": 8}, "swin_tiny": {"patch_size": 2}, "davit_tiny": {}, "imagegpt_small": {}}


@pytest.fixture
def products(monkeypatch):
    """Record the dtypes of the packed products."""
    called, product = [], torch.ops.mkldnn._linear_pointwise

    def recorded(tokens, *args):
        called.append(tokens.dtype)
        return product(tokens, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recorded)
    return called


def network_of(name):
    small = {"depth": 2} if name in ("vit_tiny", "imagegpt_small") else {"depths": (1, 2, 1, 1)}
    side = 8 if name == "imagegpt_small" else 32
    network = create_model(name, num_classes=5, image_size=side, **small, **SIZES[name]).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return network, torch.randn(3, 3, side, side)


@pytest.mark.parametrize("name", SIZES)
def test_packed_networks_give_the_same_logits(name, products):
    network, images = network_of(name)
    with torch.inference_mode():
        expected = network(images)
        with packed(network):
            torch.testing.assert_close(network(images), expected, rtol=1e-4, atol=1e-4)
        count = len(products)
        assert count == sum(type(module) is nn.Linear for module in network.modules()) - (name == "imagegpt_small")
        assert torch.equal(network(images), expected)
        assert len(products) == count


def test_packed_layers_follow_autocast(products):
    network, images = network_of("vit_tiny")
    with torch.inference_mode():
        exact = network(images)
        with torch.autocast("cpu", torch.bfloat16):
            plain = network(images)
            with packed(network):
                fast = network(images)
    assert fast.dtype == plain.dtype == torch.bfloat16
    assert set(products) == {torch.bfloat16}
    spread = (plain - exact).abs().max()
    assert 0 < (fast - exact).abs().max() < 2 * spread


def test_packed_layers_take_up_new_weights(products):
    layer = Mlp(6, 8)
    tokens = torch.randn(2, 3, 6)
    with torch.no_grad(), packed(layer):
        before = layer(tokens)
        layer.fc1.bias.add_(1.0)
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
        after = layer(tokens)
    assert len(products) == 4
    torch.testing.assert_close(after, layer(tokens))
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("why", ["gradients", "float64", "float64 under autocast", "empty", "no bf16"])
def test_packed_layers_compute_as_ever_where_they_must(why, products, monkeypatch):
    layer = Mlp(6, 8)
    tokens = torch.randn(2, 0 if why == "empty" else 3, 6)
    if "float64" in why:
        layer, tokens = layer.double(), tokens.double()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    halved = why in ("float64 under autocast", "no bf16")
    with torch.set_grad_enabled(why == "gradients"), torch.autocast("cpu", torch.bfloat16, enabled=halved):
        expected = layer(tokens)
        with packed(layer):
            output = layer(tokens)
    assert output.dtype == expected.dtype
    assert torch.equal(output, expected)
    assert output.requires_grad == (why == "gradients")
    assert not products


def test_packed_layers_take_up_weights_that_a_fused_optimizer_has_changed():
    layer, tokens = Mlp(6, 8), torch.randn(2, 6)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    pack(layer)
    for _ in range(2):
        with torch.no_grad():
            fast = layer(tokens)
        plain = layer(tokens)
        torch.testing.assert_close(fast, plain.detach())
        plain.sum().backward()
        optimizer.step()


def test_packed_layers_take_up_a_new_parameter_at_an_old_address():
    layer, tokens = nn.Linear(6, 8), torch.randn(2, 6)
    pack(layer)
    with torch.no_grad():
        for _ in range(50):
            layer.weight = None
            layer.weight = nn.Parameter(torch.randn(8, 6))
            torch.testing.assert_close(layer(tokens), nn.functional.linear(tokens, layer.weight, layer.bias))


def test_packed_layers_refuse_what_torch_refuses():
    layer = nn.Linear(6, 8)
    with torch.no_grad(), packed(layer):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.randn(2, 6, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(torch.randn(2, 5))


def test_packed_leaves_what_was_packed_before():
    layer = Mlp(6, 8)
    pack(layer)
    with packed(layer), packed(layer):
        pass
    assert all(isinstance(module, PackedLinear) for module in (layer.fc1, layer.fc2))
    plain = Mlp(6, 8)
    with packed(plain), packed(plain):
        pass
    assert [type(module) for module in (plain.fc1, plain.act, plain.fc2)] == [nn.Linear, nn.GELU, nn.Linear]


def test_pack_leaves_a_forward_of_somebody_else():
    layer = Mlp(6, 8)
    layer.fc1.forward = lambda tokens: torch.ones(*tokens.shape[:-1], 8)
    with torch.no_grad(), packed(layer):
        assert torch.equal(layer.fc1(torch.randn(2, 6)), torch.ones(2, 8))
    assert torch.equal(layer.fc1(torch.randn(2, 6)), torch.ones(2, 8))


def test_packed_layers_go_with_their_network():
    layer = Mlp(6, 8)
    pack(layer)
    with torch.no_grad():
        layer(torch.randn(2, 6))
    weight = weakref.ref(layer.fc1.weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()


def test_pack_leaves_compiled_networks_and_others_alone(monkeypatch):
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile(backend="eager")
    assert pack(compiled) == []
    assert pack(nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2), nn.GELU())) == []
    monkeypatch.setattr(packing, "has_packed_products", lambda dtype: False)
    assert pack(nn.Linear(2, 2)) == []


def test_pack_survives_copies():
    layer, tokens = Mlp(6, 8), torch.randn(2, 6)
    pack(layer)
    with torch.no_grad():
        expected = layer(tokens)
        twin = copy.deepcopy(layer)
        layer.fc2.weight.zero_()
        assert torch.equal(twin(tokens), expected)
        assert not torch.equal(layer(tokens), expected)
