"""The Swin's answers: against timm's and torchvision's, at any size, and what its methods give."""

import json
import re

import pytest
import torch
import torchvision
from torch.nn import functional as F

from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model
from vitlab.models.swin import SwinConfig, SwinTransformer

# Four stages of grids up to 96 x 96, cheap enough for every size of image.
SLIM = {"embed_dim": 8, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 4), "mlp_ratio": 1.0, "window_size": 7}


def random_images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"image_size": 56, "window_size": 7},
        {"image_size": 96, "window_size": 7},
        {"image_size": 112, "window_size": 7},
        {"image_size": (120, 88), "window_size": 7, "depths": (2, 2, 2), "num_heads": (2, 4, 4)},
        {"image_size": (120, 88), "window_size": (4, 7)},
        {"patch_size": (2, 4), "window_size": (5, 4)},
        {"in_channels": 1},
        {"qkv_bias": False, "mlp_ratio": 2.3},
        {"depths": (1, 3, 1), "num_heads": (1, 4, 3)},
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()) or "tiny",
)
def test_swin_equals_timm(fields, tiny_swin, timm_swin, randomise):
    network = randomise(tiny_swin(**fields).double())
    peer = timm_swin(network).double()
    peer.load_state_dict(network.state_dict())
    images = random_images(2, network.in_channels, *network.image_size)
    torch.testing.assert_close(network(images), peer(images), rtol=0, atol=1e-10)
    features = network.forward_features(images)
    torch.testing.assert_close(features, peer.forward_features(images), rtol=0, atol=1e-10)
    pooled = network.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, peer.forward_head(features, pre_logits=True), rtol=0, atol=1e-10)


@pytest.mark.parametrize("image_size", [32, 64, 96, 112, 200, 224, 384, (192, 224), (36, 212)], ids=str)
def test_swin_equals_timm_at_every_size(image_size, timm_swin, randomise):
    """timm's dynamic sizes too, where it computes the mask from the image that comes."""
    network = randomise(create_model("swin_tiny", image_size=image_size, num_classes=5, **SLIM).double())
    images = random_images(1, 3, *network.image_size)
    with torch.inference_mode():
        logits = network(images)
        for strict in (True, False):
            peer = timm_swin(network, strict_img_size=strict).double()
            peer.load_state_dict(network.state_dict())
            torch.testing.assert_close(logits, peer(images), rtol=0, atol=1e-10)


@pytest.mark.parametrize("image_size", [112, (56, 112), (112, 224)], ids=str)
def test_swin_equals_torchvision_where_windows_divide_the_grids(image_size, tiny_swin, randomise):
    network = randomise(tiny_swin(image_size=image_size, window_size=7).double())
    peer = torchvision.models.SwinTransformer(
        [4, 4], 12, depths=[2, 2], num_heads=[2, 4], window_size=[7, 7], num_classes=5
    ).double()
    missing, unexpected = peer.load_state_dict(as_torchvision(network.state_dict()), strict=False)
    assert unexpected == []
    assert all(name.endswith("relative_position_index") for name in missing)
    images = random_images(2, 3, *network.image_size)
    torch.testing.assert_close(network(images), peer.eval()(images), rtol=0, atol=1e-10)


def as_torchvision(state):
    """Rename our tensors: torchvision numbers patches, stages and mergings in one row of features."""

    def rename(name):
        name = name.replace("patch_embed.proj", "features.0.0").replace("patch_embed.norm", "features.0.2")
        name = re.sub(r"layers\.(\d)\.blocks", lambda stage: f"features.{2 * int(stage[1]) + 1}", name)
        name = re.sub(r"layers\.(\d)\.downsample", lambda stage: f"features.{2 * int(stage[1])}", name)
        return name.replace("mlp.fc1", "mlp.0").replace("mlp.fc2", "mlp.3").replace("head.fc", "head")

    return {rename(name): tensor for name, tensor in state.items()}


def test_swin_tiny_equals_timm_at_full_size_in_float32(timm_swin):
    torch.manual_seed(0)
    network = create_model("swin_tiny")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    peer = timm_swin(network)
    peer.load_state_dict(network.state_dict())
    images = random_images(1, 3, 224, 224).float()
    with torch.inference_mode():
        logits = network(images)
        assert logits.std() > 0.5
        torch.testing.assert_close(logits, peer(images), rtol=0, atol=1e-4)


def test_swin_continues_an_image_that_is_not_whole_patches_by_zeros(tiny_swin, randomise):
    network, whole = (randomise(tiny_swin(image_size=size).double()) for size in ((23, 37), (24, 40)))
    images = random_images(2, 3, 23, 37)
    torch.testing.assert_close(network(images), whole(F.pad(images, (0, 3, 0, 1))), rtol=0, atol=1e-12)


def test_swin_forward_intermediates_gives_each_block_before_the_final_norm(tiny_swin, timm_swin, randomise):
    network = randomise(tiny_swin().double())
    images = random_images(2, 3, 24, 40)
    outputs = network.forward_intermediates(images)
    assert [tuple(output.shape) for output in outputs] == [(2, 6, 10, 12)] * 2 + [(2, 3, 5, 24)] * 2
    for stage in (0, 1):
        block = network.layers[stage].blocks[1]
        torch.testing.assert_close(block(outputs[2 * stage]), outputs[2 * stage + 1], rtol=0, atol=0)
    torch.testing.assert_close(network.norm(outputs[-1]), network.forward_features(images), rtol=0, atol=0)
    peer = timm_swin(network).double()
    peer.load_state_dict(network.state_dict())
    by_stage = peer.forward_intermediates(images, intermediates_only=True)
    for ours, theirs in zip(outputs[1::2], by_stage, strict=True):
        torch.testing.assert_close(ours, theirs.permute(0, 2, 3, 1), rtol=0, atol=1e-10)


def test_swin_logits_do_not_depend_on_neighbours(tiny_swin, randomise):
    network = randomise(tiny_swin().double())
    images = random_images(4, 3, 24, 40)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone, rtol=0, atol=1e-12)


def test_swin_reloads_to_identical_logits(tiny_swin, randomise, tmp_path):
    network = randomise(tiny_swin(image_size=(30, 41), window_size=(4, 2), depths=[1, 2]))
    path = tmp_path / "best.safetensors"
    described = {"classes": tuple("abcde"), "preprocess": Preprocess(image_size=(30, 41)), "metrics": {}, "data": {}}
    save_model(path, network, **described)
    images = random_images(2, 3, 30, 41).float()
    loaded = load_model(path).network
    assert torch.equal(loaded(images), network.eval()(images))
    assert loaded.config_dict() == network.config_dict()


def test_swin_rebuilds_from_the_config_that_json_carried(tiny_swin):
    network = tiny_swin(window_size=[4, 3], depths=[1, 2], num_heads=(3, 2))
    config = json.loads(json.dumps(network.config_dict()))
    assert config == network.config_dict() == create_model(network.name, **config).config_dict()
    assert (config["depths"], config["num_heads"], config["window_size"]) == ([1, 2], [3, 2], [4, 3])


def test_swin_state_is_its_parameters_and_timms_names(timm_swin):
    with torch.device("meta"):
        network = create_model("swin_tiny")
        peer = timm_swin(network)
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    assert shapes == {name: parameter.shape for name, parameter in network.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in peer.state_dict().items()}
    assert len(shapes) == 173


def test_swin_works_after_it_was_built_without_memory(tiny_swin, randomise):
    with torch.device("meta"):
        network = tiny_swin(image_size=(28, 32))
    network.to_empty(device="cpu").init_weights()
    expected = tiny_swin(image_size=(28, 32))
    assert all(torch.equal(buffer, expected.get_buffer(name)) for name, buffer in network.named_buffers())
    images = random_images(2, 3, 28, 32).float()
    assert torch.equal(randomise(network)(images), randomise(expected)(images))


def test_swin_blocks_compile_whole(tiny_swin, randomise):
    network = randomise(tiny_swin(depths=(2,), num_heads=(2,)).double())
    images = random_images(2, 3, 24, 40)
    with torch.no_grad():
        expected = network(images)
        for block in network.repeated_blocks():
            block.compile(fullgraph=True, backend="eager")
        torch.testing.assert_close(network(images), expected, rtol=0, atol=1e-12)


def test_swin_repeated_blocks_are_its_blocks(tiny_swin):
    network = tiny_swin(depths=(1, 3))
    assert network.repeated_blocks() == [*network.layers[0].blocks, *network.layers[1].blocks]


def test_swin_reset_classifier_leaves_the_rest_alone(tiny_swin, randomise):
    network = randomise(tiny_swin().double())
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.reset_classifier(7)
    assert network.get_classifier() is network.head.fc
    assert network.num_classes == network.config_dict()["num_classes"] == 7
    logits = network(random_images(2, 3, 24, 40))
    assert logits.shape == (2, 7)
    assert logits.eq(0).all()
    after = network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 40, 24), r"images are 40 x 24 \(height x width\), the network takes 24 x 40"),
        ((1, 1, 24, 40), "images have 1 channels, the network takes 3"),
    ],
)
def test_swin_names_the_images_that_it_takes(shape, message, tiny_swin):
    with pytest.raises(InputError, match=message):
        tiny_swin()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"embed_dim": 100},
            r"embed_dim 100 is not a multiple of what num_heads \(3, 6, 12, 24\) need, 3: use 99 or 102",
        ),
        (
            {"embed_dim": 9, "num_heads": (1, 4, 8, 8)},
            r"embed_dim 9 is .* num_heads \(1, 4, 8, 8\) need, 2: use 8 or 10",
        ),
        ({"depths": (2, 2)}, "num_heads has 4 values for 2 depths: give one for each stage"),
        ({"depths": ()}, r"depths is \(\): give one or more values, each a whole number"),
        ({"depths": 2}, "depths is 2: give one or more values, each a whole number"),
        ({"depths": (2, 2, 2.5, 2)}, r"depths is \(2, 2, 2.5, 2\): give one or more values, each a whole number"),
        ({"depths": (2, 0, 2, 2)}, r"depths is \(2, 0, 2, 2\): give more than 0"),
        ({"num_heads": (3, 6, 12, 0)}, r"num_heads is \(3, 6, 12, 0\): give more than 0"),
        ({"window_size": 0}, "window_size is 0: give more than 0"),
        (
            {"window_size": (7, 7, 7)},
            r"window_size is \(7, 7, 7\): give a whole number or 2 values, each a whole number",
        ),
        ({"drop_path_rate": 1.5}, "drop_path_rate is 1.5: give a number from 0 to 1"),
    ],
)
def test_swin_config_refuses_what_cannot_be_built(fields, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        SwinConfig(**fields)


def test_swin_config_defaults_are_the_network_of_its_name():
    with torch.device("meta"):
        network = SwinTransformer(SwinConfig())
        named = create_model(network.name)
    assert network.config_dict() == named.config_dict()
