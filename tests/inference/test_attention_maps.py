"""Weights and maps of attention: against the layers' own outputs, and against values worked by hand."""

import pytest
import torch
from einops import rearrange

from vitlab.inference.attention_maps import (
    AttentionLayer,
    attention_layers,
    attention_maps,
    class_token_map,
    group_map,
    last_of_each,
    received,
    roll_out,
    weights_of,
)
from vitlab.layers.window_attention import WindowAttention
from vitlab.layers.windows import pad_to_multiple, partition, reverse
from vitlab.models.catalog import create_model

SHAPES = {
    "vit_tiny": {"image_size": (12, 20), "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3},
    # Grids of 5 x 9 and 3 x 5 in windows of 2 x 4: padded on both sides, and shifted.
    "swin_tiny": {
        "image_size": (10, 18),
        "patch_size": 2,
        "window_size": (2, 4),
        "embed_dim": 12,
        "depths": (2, 2),
        "num_heads": (2, 3),
    },
    "davit_tiny": {
        "image_size": (10, 18),
        "stem_stride": 2,
        "window_size": (2, 4),
        "embed_dims": (12, 24),
        "depths": (1, 1),
        "num_heads": (2, 3),
    },
    "imagegpt_small": {"image_size": (4, 6), "num_colors": 8, "embed_dim": 12, "depth": 2, "num_heads": 3},
}


def random_network(name, **changes):
    torch.manual_seed(0)
    network = create_model(name, num_classes=5, **(SHAPES[name] | changes)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def images_for(network, count=2):
    return torch.randn(count, 3, *network.image_size, generator=torch.Generator().manual_seed(1))


def passes(network, images):
    """Give each attention layer with its input, what its qkv gave, and its output."""
    seen = []
    for layer in attention_layers(network):
        record = {"layer": layer}
        layer.module.qkv.register_forward_hook(lambda _, inputs, output, record=record: record.update(qkv=output))
        layer.module.register_forward_hook(
            lambda _, inputs, output, record=record: record.update(input=inputs[0], output=output)
        )
        seen.append(record)
    with torch.no_grad():
        network(images)
    return seen


def average(layer, weights, qkv, grid):
    """Average the values by the weights, window by window, and project as the layer does."""
    h = layer.module.num_heads
    if layer.kind == "channel":
        value = rearrange(qkv, "b h w (three g e) -> three b g e (h w)", three=3, g=h)[0]
        mixed = rearrange(weights[:, 0] @ value, "b g e (h w) -> b h w (g e)", h=layer.grid[0])
        return layer.module.proj(mixed)
    V = weights.shape[1]
    tokens = qkv if layer.kind in ("full", "causal") else partition(qkv, layer.module.window)
    value = rearrange(tokens, "(b v) n (three h d) -> three b v h n d", three=3, v=V, h=h)[2]
    mixed = layer.module.proj(rearrange(weights @ value, "b v h n d -> (b v) n (h d)"))
    if layer.kind in ("full", "causal"):
        return mixed
    (H, W), window = layer.grid, layer.module.window
    padded = reverse(mixed, window, (H + -H % window[0], W + -W % window[1]))[:, :H, :W]
    return padded.roll(getattr(layer.module, "shift", (0, 0)), (1, 2))


@pytest.mark.parametrize("name", SHAPES)
def test_weights_of_average_the_values_to_the_layer_s_own_output(name):
    network = random_network(name)
    kinds = set()
    for record in passes(network, images_for(network)):
        layer = record["layer"]
        weights = weights_of(layer, record["qkv"])
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        output = average(layer, weights, record["qkv"], record["input"])
        torch.testing.assert_close(output, record["output"], atol=2e-5, rtol=1e-4)
        kinds.add(layer.kind)
    expected = {"vit_tiny": {"full"}, "swin_tiny": {"window", "shifted"}, "davit_tiny": {"window", "channel"}}
    assert kinds == expected.get(name, {"causal"})


def test_attention_layers_know_grids_and_kinds():
    layers = attention_layers(random_network("swin_tiny"))
    assert [(layer.number, layer.kind, layer.grid) for layer in layers] == [
        (1, "window", (5, 9)),
        (2, "shifted", (5, 9)),
        (3, "window", (3, 5)),
        (4, "shifted", (3, 5)),
    ]
    assert attention_layers(random_network("imagegpt_small", causal=False))[0].kind == "full"
    vit = attention_layers(random_network("vit_tiny"))
    assert [(layer.number, layer.grid, layer.num_prefix) for layer in vit] == [(n, (3, 5), 1) for n in (1, 2, 3)]
    assert [layer.number for layer in last_of_each(vit)] == [3]
    assert [layer.number for layer in last_of_each(layers)] == [1, 2, 3, 4]


def test_roll_out_gives_the_values_worked_by_hand():
    weights = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).reshape(1, 1, 1, 2, 2)
    once = roll_out(None, weights)
    assert once.tolist() == [[[1.0, 0.0], [0.5, 0.5]]]
    assert roll_out(once, weights).tolist() == [[[1.0, 0.0], [0.75, 0.25]]]


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_rollout_of_a_network_sums_to_one_and_maps_are_its_rows(pool):
    network = random_network("vit_tiny", pool=pool)
    maps = attention_maps(network, images_for(network), attention_layers(network)[1:])
    torch.testing.assert_close(maps.rollout.sum(-1), torch.ones(2, 16))
    assert not torch.allclose(maps.rollout[0], maps.rollout[1])
    row = maps.rollout[:, 0, 1:] if pool == "cls" else maps.rollout[:, 1:, 1:].mean(1)
    assert torch.equal(maps.rollout_map, row.reshape(2, 3, 5))
    assert {name: tuple(heads.shape) for name, heads in maps.heads.items()} == {
        "layer_02_full": (2, 3, 3, 5),
        "layer_03_full": (2, 3, 3, 5),
    }


def test_class_token_map_is_the_class_tokens_row_or_the_patches_mean():
    layer = AttentionLayer(1, "full", (2, 3), 1, None)
    weights = torch.arange(49.0).reshape(1, 1, 1, 7, 7)
    assert class_token_map(layer, weights, pool="cls").tolist() == [[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]]
    assert class_token_map(layer, weights, pool="mean")[0, 0, 0, 0] == 1 + 7 * 3.5  # rows 1 to 6 of column 1


def window_layer(grid, *, shifted):
    """Give a layer of one head whose keys are the tokens and whose queries are ones: a large token draws attention."""
    torch.manual_seed(0)
    module = WindowAttention(
        4, 1, grid_size=grid, window_size=(2, 4), shifted=shifted, qkv_bias=True, drop_rate=0.0
    ).eval()
    with torch.no_grad():
        module.relative_position_bias_table.zero_()
        module.qkv.weight.zero_()
        module.qkv.bias.zero_()
        module.qkv.weight[4:8] = torch.eye(4)
        module.qkv.bias[:4] = 1
    return AttentionLayer(1, "shifted" if shifted else "window", grid, 0, module)


def attend(layer, grid):
    kept = []
    hook = layer.module.qkv.register_forward_hook(lambda _, inputs, output: kept.append(output))
    layer.module(grid)
    hook.remove()
    return received(layer, weights_of(layer, kept[0]))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("place", [(0, 0), (1, 6), (5, 11), (3, 2)])
def test_received_stitches_windows_where_they_lie_in_the_image(shifted, place):
    layer = window_layer((6, 12), shifted=shifted)
    even = attend(layer, torch.zeros(1, 6, 12, 4))
    torch.testing.assert_close(even, torch.ones(1, 1, 6, 12))
    grid = torch.zeros(1, 6, 12, 4)
    grid[0, place[0], place[1]] = 3.0
    found = attend(layer, grid)[0, 0]
    assert divmod(int(found.argmax()), 12) == place
    torch.testing.assert_close(found.sum(), torch.tensor(72.0))
    # Only those that share its window give it more than others, and others of the window get less.
    less = (found < 0.99).nonzero().tolist()
    row, column = place
    assert less
    assert all(abs(r - row) < 2 and abs(c - column) < 4 for r, c in less)


def test_received_leaves_out_what_continues_the_grid():
    layer = window_layer((5, 9), shifted=False)
    found = attend(layer, torch.zeros(1, 5, 9, 4))[0, 0]
    torch.testing.assert_close(found[:4, :8], torch.ones(4, 8))
    torch.testing.assert_close(found[:4, 8], torch.full((4,), 2 / 8))  # 2 tokens of the window's 8 are real
    torch.testing.assert_close(found[4, 8], torch.tensor(1 / 8))
    kept = pad_to_multiple(torch.ones(1, 5, 9, 1), (2, 4))
    assert partition(kept, (2, 4)).sum() == 45


def test_group_map_weighs_channels_by_the_attention_they_receive():
    layer = AttentionLayer(1, "channel", (1, 2), 0, torch.nn.Module())
    layer.module.num_heads = 1
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).reshape(1, 1, 1, 2, 2)  # the channels receive 3/4 and 1/4
    qkv = torch.zeros(1, 1, 2, 6)
    qkv[0, 0, 0, :2] = torch.tensor([2.0, 0.0])  # values of two channels at the first position
    qkv[0, 0, 1, :2] = torch.tensor([0.0, -4.0])
    expected = torch.tensor([[(0.75 * 4) ** 0.5, (0.25 * 16) ** 0.5]])
    torch.testing.assert_close(group_map(layer, qkv, weights)[0, 0], expected)


def test_attention_maps_leave_the_network_as_it_was():
    network = random_network("swin_tiny")
    images = images_for(network)
    with torch.no_grad():
        before = network(images)
    attention_maps(network, images, attention_layers(network))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    with torch.no_grad():
        assert torch.equal(network(images), before)
