"""Files, folders and names that weights come from, and the preprocessing that they state."""

import json
import shutil

import pytest
import safetensors.torch
import timm
import torch

from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.sources import read_source
from vitlab.models.weights import load_weights

TIMM_CONFIG = {
    "architecture": "vit_tiny",
    "pretrained_cfg": {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.1],
        "interpolation": "bilinear",
        "crop_pct": 0.95,
        "crop_mode": "squash",
    },
}


def save(path, network):
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(network.state_dict(), path)


def test_timm_config_beside_the_weights_states_the_preprocessing(tiny_vit, tmp_path):
    save(tmp_path / "hub" / "model.safetensors", tiny_vit())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(TIMM_CONFIG))
    expected = {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.1],
        "interpolation": "bilinear",
        "crop_fraction": 0.95,
        "resize_mode": "squash",
    }
    assert load_weights(tiny_vit(), tmp_path / "hub").preprocess == expected
    assert read_source(tmp_path / "hub" / "model.safetensors").preprocess == expected


def test_transformers_processor_beside_the_weights_states_the_preprocessing(tiny_vit, tmp_path):
    save(tmp_path / "model.safetensors", tiny_vit())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 12}))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2, "size": {"height": 8}})
    )
    assert read_source(tmp_path).preprocess == {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "interpolation": "bilinear",
        "resize_mode": "squash",
    }


def test_weights_alone_state_nothing(tiny_vit, tmp_path):
    save(tmp_path / "a.safetensors", tiny_vit())
    (tmp_path / "config.json").write_text("no json")
    assert read_source(tmp_path / "a.safetensors").preprocess == {}


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty folder in the place of earlier downloads, and no network."""
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("vitlab.models.sources.socket.create_connection", refuse)
    return tmp_path


def test_timm_name_loads_from_earlier_downloads(hub_cache, tmp_path):
    name = "resnet10t.c3_in1k"
    torch.manual_seed(1)
    peer = timm.create_model("resnet10t")
    repository = timm.get_pretrained_cfg(name).hf_hub_id
    folder = hub_cache / f"models--{repository.replace('/', '--')}"
    save(folder / "snapshots" / "abc" / "model.safetensors", peer)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    network = create_model("timm/resnet10t", num_classes=7)
    report = load_weights(network, f"timm/{name}")
    assert report.layout == "timm"
    assert set(report.reinitialised) == {"net.fc.weight", "net.fc.bias"}
    assert torch.equal(network.net.conv1[0].weight, peer.conv1[0].weight)
    assert report.preprocess["crop_fraction"] == timm.get_pretrained_cfg(name).crop_pct


def test_timm_name_without_a_network_is_one_clear_line(hub_cache):
    network = create_model("timm/resnet10t", num_classes=7)
    with pytest.raises(
        InputError,
        match=r"^the weights timm/resnet10t\.c3_in1k are not on this machine and cannot be fetched "
        r"\(Network is unreachable\): give a file",
    ):
        load_weights(network, "timm/resnet10t.c3_in1k")


def test_timm_name_that_is_none_gives_the_nearest(hub_cache, tiny_vit):
    with pytest.raises(
        InputError, match=r"unknown timm network vit_tyni_patch16_224: did you mean vit_tiny_patch16_224"
    ):
        load_weights(tiny_vit(), "timm/vit_tyni_patch16_224")


def test_timm_tag_that_is_none_gives_the_nearest(hub_cache, tiny_vit):
    with pytest.raises(InputError, match=r"unknown timm weights resnet10t\.c9_in1k: did you mean resnet10t\.c3_in1k"):
        load_weights(tiny_vit(), "timm/resnet10t.c9_in1k")


def test_folder_of_that_name_goes_before_timm(tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "timm" / "mine" / "model.safetensors", tiny_vit())
    shutil.copy(tmp_path / "timm" / "mine" / "model.safetensors", tmp_path / "b.safetensors")
    assert load_weights(tiny_vit(), "timm/mine").layout == "timm"


@pytest.mark.parametrize(("patch", "channels"), [(2, 3), (4, 1), (2, 1)])
def test_patch_kernels_are_resampled_as_timm_does(patch, channels, tiny_vit, randomise):
    from timm.layers.patch_embed import resample_patch_embed
    from timm.models import adapt_input_conv

    source = randomise(tiny_vit(image_size=8))
    network = tiny_vit(image_size=2 * patch, patch_size=patch, in_channels=channels)
    report = load_weights(network, source.state_dict())
    assert report.resized == ("patch_embed.proj.weight",)
    kernel = source.patch_embed.proj.weight.detach()
    kernel = adapt_input_conv(channels, kernel)
    torch.testing.assert_close(network.patch_embed.proj.weight.detach(), resample_patch_embed(kernel, [patch, patch]))


def test_relative_biases_of_another_window_are_resampled(tiny_swin, randomise):
    source = randomise(tiny_swin(image_size=96, window_size=3))
    network = tiny_swin(image_size=(96, 96), window_size=6)
    report = load_weights(network, source.state_dict())
    assert len(report.resized) == 4
    assert all(name.endswith("relative_position_bias_table") for name in report.resized)
    old = source.layers[0].blocks[1].attn.relative_position_bias_table.detach()
    new = network.layers[0].blocks[1].attn.relative_position_bias_table.detach()
    picture = torch.nn.functional.interpolate(old.T.reshape(1, 2, 5, 5), (11, 11), mode="bicubic", align_corners=False)
    torch.testing.assert_close(new, picture.reshape(2, 121).T)
