import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models.catalog import create_model
from vitlab.models.costs import count_macs, count_parameters, training_memory

# Billions, to the digits that were measured on independent implementations; named networks are in test_published.py.
VARIANTS = [
    ("vit_small", {"patch_size": 32}, 1.143),
    ("vit_base", {"patch_size": 32}, 4.409),
    ("vit_base", {"image_size": 384}, 55.484),
    ("vit_large", {"patch_size": 32}, 15.378),
    ("vit_large", {"patch_size": 14}, 81.013),
    ("vit_large", {"image_size": 384}, 191.066),
    ("swin_base", {"image_size": 384, "window_size": 12}, 47.083),
    ("davit_large", {"image_size": 224, "window_size": 7}, 34.540),
]
# Multiply-adds and 5 operations for each element that a LayerNorm normalises, as the released code of DaViT states it.
WITH_NORMS = {
    "davit_tiny": 4_540_244_736,
    "davit_small": 8_800_488_192,
    "davit_base": 15_510_430_720,
    "davit_large": 34_594_985_472,
    "davit_huge": 61_232_433_152,
    "davit_giant": 192_919_170_048,
}
SMALL = {
    "vit_tiny": {"image_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3},
    "swin_tiny": {"image_size": (24, 40), "window_size": 3, "embed_dim": 12, "depths": (2, 3), "num_heads": (2, 4)},
    "davit_tiny": {
        "image_size": (20, 32),
        "window_size": 3,
        "embed_dims": (12, 24),
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
}


def on_meta(name, **fields):
    with torch.device("meta"):
        return create_model(name, **fields)


def plain_count(network):
    """Count with torch alone, every block."""
    images = torch.empty(1, network.in_channels, *network.image_size, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.forward_head(network.forward_features(images))
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(("name", "fields", "billions"), VARIANTS)
def test_count_macs_gives_the_published_numbers_of_variants(name, fields, billions):
    assert round(count_macs(on_meta(name, **fields)) / 1e9, 3) == billions


@pytest.mark.parametrize("name", WITH_NORMS)
def test_count_macs_differs_from_the_released_davit_by_the_norms_alone(name):
    network = on_meta(name, image_size=224, window_size=7)
    elements = 0

    def add(module, inputs, output):
        nonlocal elements
        elements += output.numel()

    macs = count_macs(network)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(add)
    with torch.no_grad():
        network(torch.empty(1, 3, 224, 224, device="meta"))
    assert macs + 5 * elements == WITH_NORMS[name]


def test_count_macs_of_a_vit_follows_the_closed_form():
    patches, D, L, K = 6, 12, 3, 5
    N = patches + 1
    network = create_model("vit_tiny", num_classes=K, in_channels=1, **SMALL["vit_tiny"])
    assert count_macs(network) == patches * 4 * 4 * D + L * (12 * N * D * D + 2 * N * N * D) + D * K


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("drop_path_rate", [0.0, 0.3])
def test_count_macs_counts_equal_blocks_as_often_as_they_are_there(name, drop_path_rate):
    network = on_meta(name, drop_path_rate=drop_path_rate, **SMALL[name])
    assert count_macs(network) == plain_count(network) > 0


@pytest.mark.parametrize("name", SMALL)
def test_count_macs_gives_the_same_on_every_device_and_leaves_the_network_alone(name):
    network = create_model(name, num_classes=5, **SMALL[name])
    images = torch.rand(2, 3, *network.image_size)
    before = copy.deepcopy(network)(images)
    assert count_macs(network) == count_macs(on_meta(name, num_classes=5, **SMALL[name]))
    assert network.training
    assert torch.equal(network(images), before)


@pytest.mark.parametrize("causal", [True, False])
def test_count_macs_of_an_imagegpt_follows_the_closed_form(causal):
    N, D, L, V = 24, 12, 3, 16
    shape = {"image_size": (4, 6), "embed_dim": D, "depth": L, "num_heads": 3, "num_colors": V}
    expected = L * (12 * N * D * D + 2 * N * N * D) + N * D * V
    assert count_macs(create_model("imagegpt_small", causal=causal, **shape)) == expected
    assert count_macs(on_meta("imagegpt_small", causal=causal, drop_path_rate=0.3, **shape)) == expected


class PeakMemory(TorchDispatchMode):
    """Keeps account of the bytes of all tensors made within, at their height."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.alive = {place: entry for place, entry in self.alive.items() if not entry[0].expired()}
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                self.alive.setdefault(storage.data_ptr(), (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return results


@pytest.mark.parametrize(
    ("changes", "batch_size", "autocast"),
    [
        ({}, 4, False),
        ({}, 4, True),
        ({"depth": 4, "num_colors": 16}, 8, False),
        ({"mlp_ratio": 2, "embed_dim": 128}, 2, False),
        ({"image_size": (8, 12), "num_heads": 8}, 16, True),
    ],
)
def test_training_memory_is_within_30_percent_of_what_a_step_takes(changes, batch_size, autocast):
    shape = {"image_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_colors": 256, "num_classes": 5}
    network = create_model("imagegpt_small", **(shape | changes))
    optimizer = torch.optim.AdamW(network.parameters())
    H, W = network.image_size
    tokens = torch.randint(network.config.num_colors, (batch_size, H * W))
    with PeakMemory() as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = network.pixel_logits(tokens).flatten(0, 1)
        F.cross_entropy(logits.float(), tokens.flatten()).backward()
        optimizer.step()
    measured = memory.peak + 4 * count_parameters(network)  # the weights were there before
    estimated = training_memory(
        network.config,
        batch_size=batch_size,
        bytes_per_value=2 if autocast else 4,
        fused_attention=not autocast,
    )
    assert estimated == pytest.approx(measured, rel=0.3)


def test_training_memory_grows_with_the_batch_and_the_pixels():
    """Only the parameters and their positions are there once."""
    configs = [on_meta("imagegpt_small", image_size=side).config for side in (32, 64)]
    one, two = (training_memory(configs[0], batch_size=size) for size in (1, 2))
    large = training_memory(configs[1], batch_size=1)
    assert training_memory(configs[0], batch_size=5) == one + 4 * (two - one)
    assert large == one + 3 * (two - one) + 16 * (4096 - 1024) * 512


def test_count_macs_counts_networks_of_timm():
    assert round(count_macs(on_meta("timm/deit_tiny_patch16_224")) / 1e9, 3) == 1.254


def test_count_parameters_counts_frozen_ones_and_shared_ones_once():
    first, second = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    assert count_parameters(nn.Sequential(first, second, nn.BatchNorm1d(4))) == 3 * 4 + 4 + 2 * 4
