import json
import math

import pytest
import timm
import torch

from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError
from vitlab.models import davit
from vitlab.models.catalog import create_model
from vitlab.models.davit import DaViT, DaViTConfig, SpatialAttention, channel_attention
from vitlab.models.files import load_model, save_model


def random_tensor(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SIZES = [32, 56, 60, 64, 96, 112, 200, 224, 384, (50, 70), (192, 224)]
SHAPES = [
    {"depths": (2, 1)},
    {"embed_dims": (8,), "depths": (1,), "num_heads": (1,)},
    {"embed_dims": (4, 6, 8, 12), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 3)},
    {"stem_stride": 1},
    {"stem_stride": 2},
    {"stem_stride": 3},
    {"window_size": 5},
    {"window_size": 9},
    {"window_size": (2, 7)},
    {"mlp_ratio": 2.3, "qkv_bias": False},
]


def check_equals_timm(network, peer):
    peer.load_state_dict(network.state_dict())
    images = random_tensor(2, network.in_channels, *network.image_size)
    with torch.no_grad():
        torch.testing.assert_close(network(images), peer(images), rtol=0, atol=1e-10)
        features, theirs = network.forward_features(images), peer.forward_features(images)
        torch.testing.assert_close(features, theirs.permute(0, 2, 3, 1), rtol=0, atol=1e-10)
        pooled = network.forward_head(features, pre_logits=True)
        torch.testing.assert_close(pooled, peer.forward_head(theirs, pre_logits=True), rtol=0, atol=1e-10)


@pytest.mark.parametrize("image_size", SIZES, ids=str)
def test_davit_equals_timm_at_every_size_of_image(image_size, tiny_davit, timm_davit, randomise):
    shape = {"embed_dims": (4, 6, 8, 12), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 3), "window_size": 7}
    network = randomise(tiny_davit(image_size=image_size, **shape).double())
    check_equals_timm(network, timm_davit(**shape).double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_davit_equals_timm_in_every_shape(shape, tiny_davit, timm_davit, randomise):
    check_equals_timm(randomise(tiny_davit(**shape).double()), timm_davit(**shape).double())


def test_davit_equals_timm_on_grey_images(tiny_davit, timm_davit, randomise):
    check_equals_timm(randomise(tiny_davit(in_channels=1).double()), timm_davit(in_chans=1).double())


def test_davit_tiny_equals_timm_in_float32():
    torch.manual_seed(0)
    peer = timm.create_model("davit_tiny")
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    network = create_model("davit_tiny")
    network.load_state_dict(peer.state_dict())
    images = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        logits = network(images)
        torch.testing.assert_close(logits, peer(images), rtol=0, atol=1e-4)
    assert logits.std() > 0.1


def test_channel_attention_is_the_formula():
    query, key, value = (random_tensor(2, 3, 5, 4, seed=seed) for seed in range(3))
    output = channel_attention(query, key, value)
    for b in range(2):
        for g in range(3):
            for i in range(4):
                scores = [sum(query[b, g, n, i] * key[b, g, n, j] for n in range(5)) / math.sqrt(4) for j in range(4)]
                total = sum(score.exp() for score in scores)
                for n in range(5):
                    expected = sum(score.exp() / total * value[b, g, n, j] for j, score in enumerate(scores))
                    assert output[b, g, n, i].item() == pytest.approx(expected.item(), abs=1e-12)


def test_channel_attention_of_large_float16_values_is_finite():
    """Scores of 40 * 40 * 50 overflow float16; those of scaled queries do not."""
    query = torch.full((1, 1, 50, 16), 40.0, dtype=torch.float16)
    torch.testing.assert_close(channel_attention(query, query, query), query)


@pytest.mark.parametrize("image_size", [(32, 32), (30, 44)])
def test_spatial_attention_is_the_same_projected_in_windows_and_in_the_map(
    image_size, tiny_davit, randomise, monkeypatch
):
    network = randomise(tiny_davit(image_size=image_size).double())
    images = random_tensor(2, 3, *image_size)
    in_windows = network(images)
    calls = []
    monkeypatch.setattr(davit, "is_fused", lambda *given, causal: calls.append(given))
    torch.testing.assert_close(network(images), in_windows, rtol=0, atol=1e-12)
    assert calls[0][1:] == (torch.device("cpu"), torch.float64)


def test_channel_attention_commutes_with_a_shuffle_of_positions(tiny_davit, randomise):
    channel = randomise(tiny_davit().double()).stages[1].blocks[1][1].attn
    grid, shuffle = random_tensor(2, 5, 3, 24), torch.randperm(15, generator=torch.Generator().manual_seed(0))
    shuffled = grid.flatten(1, 2)[:, shuffle].view(2, 5, 3, 24)
    expected = channel(grid).flatten(1, 2)[:, shuffle].view(2, 5, 3, 24)
    torch.testing.assert_close(channel(shuffled), expected, rtol=0, atol=1e-12)


def test_channel_attention_mixes_the_channels_of_a_group_alone():
    tensors = [random_tensor(1, 2, 6, 3, seed=seed) for seed in range(3)]
    before = channel_attention(*tensors)
    for position in range(3):
        changed = [tensor.clone() for tensor in tensors]
        changed[position][0, 1, 4, 2] += 1
        reached = (channel_attention(*changed) - before).abs().amax(dim=2)[0] > 1e-9
        assert not reached[0].any()
        assert reached[1].any()


@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 3), (4, 6), (2, 5)])
def test_spatial_attention_reaches_exactly_its_window(row, column, randomise):
    config = DaViTConfig(embed_dims=(12,), depths=(1,), num_heads=(2,), window_size=(2, 3))
    attention = randomise(SpatialAttention(config, 0).double())
    grid = random_tensor(2, 5, 7, 12)
    changed = grid.clone()
    changed[1, row, column, 4] += 1
    reached = (attention(changed) - attention(grid)).abs().amax(dim=-1) > 1e-9
    expected = torch.zeros(2, 5, 7, dtype=torch.bool)
    top, left = row - row % 2, column - column % 3
    expected[1, top : top + 2, left : left + 3] = True
    assert torch.equal(reached, expected)


def test_davit_logits_do_not_depend_on_neighbours(tiny_davit, randomise):
    network = randomise(tiny_davit().double())
    images = random_tensor(4, 3, 20, 32)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone, rtol=0, atol=1e-12)


def test_davit_takes_images_in_either_order_of_memory(tiny_davit, randomise):
    network = randomise(tiny_davit())
    images = random_tensor(2, 3, 20, 32).float()
    logits = network(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(logits, network(images), rtol=1e-5, atol=1e-5)


def test_davit_keeps_every_map_channels_last_in_memory(tiny_davit):
    network = tiny_davit()
    images = torch.randn(2, 3, 20, 32).contiguous(memory_format=torch.channels_last)
    grids = [network.stem(images), *network.forward_intermediates(images)]
    assert all(grid.is_contiguous() for grid in grids)


def test_davit_forward_intermediates_gives_each_block_of_repeated_blocks(tiny_davit, randomise):
    network = randomise(tiny_davit().double())
    images = random_tensor(2, 3, 20, 32)
    outputs, seen = network.forward_intermediates(images), []
    for block in network.repeated_blocks():
        block.register_forward_hook(lambda block, inputs, output: seen.append(output))
    torch.testing.assert_close(network.forward_features(images), outputs[-1], rtol=0, atol=0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, seen, strict=True))
    assert [tuple(output.shape[1:]) for output in outputs] == [(5, 8, 12)] * 2 + [(3, 4, 24)] * 4


def test_davit_reset_classifier_leaves_the_rest_alone(tiny_davit, randomise):
    network = randomise(tiny_davit().double())
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    images = random_tensor(2, 3, 20, 32)
    network.reset_classifier(7)
    assert network.get_classifier() is network.head.fc
    assert network.num_classes == network.config_dict()["num_classes"] == 7
    assert network(images).shape == (2, 7)
    assert network(images).eq(0).all()
    after = network.state_dict()
    assert after["head.fc.weight"].dtype == torch.float64
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head.fc."))


def test_davit_comes_back_from_its_file(tiny_davit, randomise, tmp_path):
    network = randomise(tiny_davit(stem_stride=2, window_size=(3, 4), qkv_bias=False, mlp_ratio=3)).eval()
    preprocess = Preprocess(image_size=(20, 32))
    save_model(tmp_path / "davit.safetensors", network, classes="abcde", preprocess=preprocess, metrics={}, data={})
    loaded = load_model(tmp_path / "davit.safetensors").network
    images = random_tensor(2, 3, 20, 32).float()
    assert torch.equal(loaded(images), network(images))
    assert loaded.config == network.config
    assert loaded.config_dict() == json.loads(json.dumps(network.config_dict()))


def test_davit_names_the_sizes_that_it_takes(tiny_davit):
    with pytest.raises(InputError, match=r"images are 32 x 20 \(height x width\), the network takes 20 x 32"):
        tiny_davit()(torch.zeros(1, 3, 32, 20))
    with pytest.raises(InputError, match="images have 1 channels, the network takes 3"):
        tiny_davit()(torch.zeros(1, 1, 20, 32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": (3, 6, 12)}, "num_heads has 3 values for 4 embed_dims: give one for each stage"),
        ({"depths": (1, 1, 3, 1, 1)}, "depths has 5 values for 4 embed_dims: give one for each stage"),
        ({"embed_dims": (96, 192)}, "depths has 4 values for 2 embed_dims: give one for each stage"),
        ({"embed_dims": ()}, r"embed_dims is \(\): give one or more values, each a whole number"),
        ({"embed_dims": 96}, "embed_dims is 96: give one or more values, each a whole number"),
        (
            {"embed_dims": (96, 200, 384, 768)},
            r"embed_dims\[1\] 200 is not a multiple of num_heads\[1\] 6: use 198 or 204",
        ),
        ({"depths": (1, 0, 3, 1)}, r"depths is \(1, 0, 3, 1\): give more than 0"),
        ({"stem_stride": 8}, "stem_stride is 8: give at most 7"),
        ({"stem_stride": 0}, "stem_stride is 0: give more than 0"),
        ({"window_size": (7, 0)}, r"window_size is \(7, 0\): give more than 0"),
        ({"drop_path_rate": 1.5}, "drop_path_rate is 1.5: give a number from 0 to 1"),
    ],
)
def test_davit_config_refuses_what_cannot_be_built(fields, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        DaViTConfig(**fields)


def test_davit_config_defaults_are_the_network_of_its_name():
    with torch.device("meta"):
        network = DaViT(DaViTConfig())
        named = create_model(network.name)
    assert network.config_dict() == named.config_dict()
