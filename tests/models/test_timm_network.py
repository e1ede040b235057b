"""timm's networks behind our face: the same logits, and every method that the engine calls."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import group_parameters

from vitlab.data.preprocess import Preprocess
from vitlab.engine.optim import freeze, parameter_groups
from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model
from vitlab.models.weights import load_weights


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def resnet(**settings):
    torch.manual_seed(0)
    return create_model("timm/resnet10t", num_classes=5, image_size=(32, 48), **settings)


def test_logits_are_timms_own():
    network = resnet().eval()
    peer = timm.create_model("resnet10t", num_classes=5).eval()
    peer.load_state_dict({name.removeprefix("net."): tensor for name, tensor in network.state_dict().items()})
    batch = images(2, 3, 32, 48)
    assert torch.equal(network(batch), peer(batch))


@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        ("resnet10t", (32, 48), {}),
        ("vit_tiny_patch16_224", (32, 48), {"depth": 2}),
        ("swin_tiny_patch4_window7_224", (56, 56), {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16}),
        ("convnext_atto", (32, 64), {"drop_path_rate": 0.1}),
    ],
)
def test_network_answers_to_every_name(name, size, settings, tmp_path):
    network = create_model(f"timm/{name}", num_classes=5, image_size=size, in_channels=1, **settings).eval()
    batch = images(2, 1, *size)
    logits = network(batch)
    features = network.forward_features(batch)
    torch.testing.assert_close(network.forward_head(features), logits)
    assert network.get_classifier().out_features == 5
    assert len(network.forward_intermediates(batch)) >= 2
    groups = group_parameters(network, network.group_matcher())
    named = [parameter for names in groups.values() for parameter in names]
    assert sorted(named) == sorted(name for name, _ in network.named_parameters())
    assert len(groups) > 2
    held = [p for group in parameter_groups(network, weight_decay=0.1, layer_decay=0.7) for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in network.parameters()}
    save_model(
        tmp_path / "m.safetensors",
        network,
        classes=list("abcde"),
        preprocess=Preprocess(image_size=size, channels=1, mean=(0.5,), std=(0.5,)),
        metrics={},
        data={},
    )
    loaded = load_model(tmp_path / "m.safetensors").network
    assert loaded.name == f"timm/{name}"
    assert torch.equal(loaded(batch), logits)
    network.reset_classifier(3)
    assert network(batch).shape == (2, 3)
    assert network.num_classes == 3


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "image_size": 32}),
        ("resnet10t", {"image_size": 32}),
        ("efficientnet_b0", {"image_size": 32}),
        ("beit_base_patch16_224", {"depth": 2, "embed_dim": 24, "num_heads": 2, "image_size": 32}),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "image_size": 56}),
        ("convnext_atto", {"image_size": 32}),
    ],
)
def test_layers_are_grouped_as_timm_groups_them(name, settings):
    network = create_model(f"timm/{name}", num_classes=5, **settings)
    ours = group_parameters(network, network.group_matcher(), reverse=True)
    theirs = group_parameters(network.net, network.net.group_matcher(), reverse=True)
    assert {parameter.removeprefix("net."): depth for parameter, depth in ours.items()} == theirs


def test_freezing_a_vit_of_timm_freezes_its_embeddings():
    network = create_model("timm/vit_tiny_patch16_224", num_classes=5, image_size=32, depth=3)
    freeze(network, 1)
    trained = {name.split(".")[1] for name, p in network.named_parameters() if p.requires_grad}
    assert trained == {"blocks", "norm", "head"}
    assert [p.requires_grad for p in network.net.blocks[1].parameters()] == [False] * 12


def test_network_of_several_heads_is_refused():
    with pytest.raises(InputError, match=r"timm/deit_tiny_distilled_patch16_224 has several heads"):
        create_model("timm/deit_tiny_distilled_patch16_224", num_classes=5, image_size=32, depth=1)


def test_blocks_are_frozen_from_the_front():
    network = resnet()
    blocks = network.repeated_blocks()
    assert len(blocks) == 4
    freeze(network, 1)
    assert all(p.requires_grad for p in blocks[-1].parameters())
    assert not any(p.requires_grad for p in blocks[0].parameters())
    assert network.get_classifier().weight.requires_grad


def test_native_size_is_timms():
    with torch.device("meta"):
        assert create_model("timm/vit_base_patch16_384", depth=1).image_size == (384, 384)
        assert create_model("timm/resnet18").image_size == (224, 224)


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("timm/resnet81", {}, "unknown timm network resnet81: did you mean resnet18"),
        ("timm/resnet18", {"depht": 3}, "timm/resnet18 cannot be built: .*depht"),
        ("timm/vit_tiny_patch16_224", {"image_size": 30}, "image height 30 is not a multiple of patch size 16"),
        ("timm/resnet18", {"image_size": (0, 4)}, "image_size is .* give a side"),
        ("timm/inception_v3", {"image_size": 32}, "timm/inception_v3 does not take images of 32 x 32 pixels"),
    ],
)
def test_create_model_refuses(name, settings, line):
    with pytest.raises(InputError, match=line):
        create_model(name, **settings)


def test_images_of_another_size_are_refused():
    with pytest.raises(InputError, match=r"images are 32 x 32 \(height x width\), the network takes 32 x 48"):
        resnet()(images(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("name", "settings", "resized"),
    [
        ("vit_tiny_patch16_224", {"depth": 2}, ["net.pos_embed", "net.patch_embed.proj.weight"]),
        (
            "swin_tiny_patch4_window7_224",
            {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "window_size": 4},
            [f"net.layers.{i}.blocks.0.attn.relative_position_bias_table" for i in (0, 1)]
            + ["net.patch_embed.proj.weight"],
        ),
        ("resnet10t", {}, ["net.conv1.0.weight"]),
    ],
)
@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # in timm's own loading
def test_weights_of_another_size_and_of_rgb_load_as_timm_loads_them(
    own_file, name, settings, resized, tmp_path, randomise
):
    source = randomise(create_model(f"timm/{name}", num_classes=5, image_size=64, **settings))
    path = tmp_path / "m.safetensors"
    if own_file:
        preprocess = Preprocess(image_size=(64, 64))
        save_model(path, source, classes=list("abcde"), preprocess=preprocess, metrics={}, data={})
    else:
        save_file({name.removeprefix("net."): tensor for name, tensor in source.state_dict().items()}, path)
    if "window_size" in settings:
        settings = {**settings, "window_size": 8}
    network = create_model(f"timm/{name}", num_classes=7, image_size=96, in_channels=1, **settings)
    report = load_weights(network, path)
    assert sorted(report.resized) == sorted(resized)
    bare = tmp_path / "bare.safetensors"
    save_file({name.removeprefix("net."): tensor for name, tensor in source.state_dict().items()}, bare)
    size = {} if name == "resnet10t" else {"img_size": 96}
    cfg = {"url": "", "file": str(bare), "num_classes": 5, "first_conv": network.net.pretrained_cfg["first_conv"]}
    cfg["classifier"] = network.net.pretrained_cfg["classifier"]
    peer = timm.create_model(name, pretrained=True, pretrained_cfg=cfg, num_classes=7, in_chans=1, **size, **settings)
    theirs, ours = peer.state_dict(), network.state_dict()
    assert set(report.loaded) | set(report.resized) | set(report.reinitialised) == set(ours)
    for key in theirs.keys() - {entry.removeprefix("net.") for entry in report.reinitialised}:
        torch.testing.assert_close(ours[f"net.{key}"], theirs[key], rtol=0, atol=0, msg=key)
