"""Features of layers against hooks and arithmetic by hand, at randomised weights and images that are not square."""

from contextlib import closing

import numpy as np
import pytest
import torch

from vitlab.data.images import ImageError
from vitlab.data.loader import Batch, Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.data.splits import ArraySplit
from vitlab.inference.features import count_layers, pooled_layers, read_features
from vitlab.models.catalog import create_model

NETWORKS = {
    "vit": ("vit_tiny", {"image_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3}),
    "vit_mean": (
        "vit_tiny",
        {"image_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "pool": "mean"},
    ),
    "swin": (
        "swin_tiny",
        {"image_size": (24, 40), "window_size": 3, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "davit": (
        "davit_tiny",
        {"image_size": (20, 32), "embed_dims": (12, 24), "depths": (1, 2), "num_heads": (2, 4), "window_size": 3},
    ),
    "imagegpt": (
        "imagegpt_small",
        {"image_size": (4, 6), "num_colors": 16, "embed_dim": 12, "depth": 3, "num_heads": 3},
    ),
    "timm_vit": ("timm/vit_tiny_patch16_224", {"image_size": (32, 48), "depth": 2}),
    "timm_convnext": ("timm/convnext_atto", {"image_size": (64, 96), "depths": (1, 1, 1, 1)}),
}


def build(family):
    """Give a network with dropout whose parameters are all noise, in evaluation mode."""
    name, settings = NETWORKS[family]
    network = create_model(name, num_classes=5, drop_path_rate=0.5, **settings).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(network.named_parameters()):
            parameter.copy_(float((parameter == 1).all()) + 0.2 * torch.randn(parameter.shape, generator=generator))
    return network


def images_for(network, count=3):
    return torch.rand(count, 3, *network.image_size, generator=torch.Generator().manual_seed(4)) * 2 - 1


def outputs_of(modules, network, images):
    """Run a network and give what each of the modules put out, in the order of their calls."""
    outputs = []
    handles = [module.register_forward_hook(lambda _, __, output: outputs.append(output)) for module in modules]
    with torch.no_grad():
        network(images)
    for handle in handles:
        handle.remove()
    return [output.double().numpy() for output in outputs]


def layer_norm(x):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("family", NETWORKS)
def test_pooled_layers_are_means_of_normalised_positions(family):
    network = build(family)
    images = images_for(network)
    blocks = network.net.stages if family == "timm_convnext" else network.repeated_blocks()
    outputs = outputs_of(blocks, network, images)
    assert len(outputs) == {"vit": 3, "vit_mean": 2, "swin": 4, "davit": 6, "imagegpt": 3, "timm_vit": 2}.get(family, 4)
    with torch.no_grad():
        layers = list(pooled_layers(network, images))
    assert count_layers(network) == len(layers) == len(outputs)
    for layer, output in zip(layers, outputs, strict=True):
        if family == "imagegpt":
            expected = (output / np.sqrt((output**2).mean(axis=-1, keepdims=True) + 1e-5)).mean(axis=1)
        elif family == "timm_convnext":
            expected = layer_norm(output.transpose(0, 2, 3, 1)).mean(axis=(1, 2))
        elif family in ("swin", "davit"):
            expected = layer_norm(output).mean(axis=(1, 2))
        else:
            expected = layer_norm(output)[:, 1:].mean(axis=1)
        np.testing.assert_allclose(layer.numpy(), expected, atol=2e-5)
        assert np.ptp(expected, axis=0).max() > 1e-3  # images differ, so that the comparison says something


def test_pooled_layers_of_imagegpt_standardise_to_the_papers_own():
    """The paper pools the output of the next block's norm, gain and all: the same up to signs once standardised."""
    network = build("imagegpt")
    images = images_for(network, count=7)
    norms = [*(block.norm1 for block in network.blocks[1:]), network.norm]
    with torch.no_grad():
        layers = list(pooled_layers(network, images))
    for layer, normed in zip(layers, outputs_of(norms, network, images), strict=True):
        ours, papers = ((x - x.mean(axis=0)) / x.std(axis=0) for x in (layer.double().numpy(), normed.mean(axis=1)))
        np.testing.assert_allclose(np.abs(ours), np.abs(papers), atol=1e-3)


@pytest.mark.parametrize("family", ["vit", "swin", "davit", "imagegpt", "timm_vit"])
def test_read_features_do_not_depend_on_the_batch_size(family):
    network = build(family)
    height, width = network.image_size
    pixels = np.random.default_rng(5).integers(0, 256, (9, height, width, 3), dtype=np.uint8)
    labels = np.array([2, 0, 1, 1, 0, 2, 2, 1, 0])
    split = ArraySplit(name="train", labels=labels, paths=list("abcdefghi"), images=pixels)
    preprocess = Preprocess(image_size=(height, width), resize_mode="squash", mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    found = []
    for batch_size in (1, 4, 9):
        calls = []
        with closing(Loader(split, EvalTransform(preprocess), batch_size=batch_size)) as loader:
            features = read_features(network, preprocess, loader.epoch(0), [2], on_batch=calls.append)
        assert sum(calls) == 9
        assert features.labels.tolist() == labels.tolist()
        assert list(features.layers) == [2]
        assert features.layers[2].dtype == np.float32
        found.append(features.layers[2])
    inputs = preprocess.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    with torch.no_grad():
        expected = list(pooled_layers(network, inputs))[1].numpy()
    for vectors in found:
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_read_features_are_float32_under_a_callers_autocast_and_stop_at_the_last_layer(monkeypatch):
    network = build("vit")
    preprocess = Preprocess(image_size=(8, 12))
    batch = Batch(
        images=torch.randint(256, (2, 3, 8, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        labels=torch.tensor([0, 1]),
        indices=torch.arange(2),
    )
    plain = read_features(network, preprocess, [batch], [1, 3])

    def fail(tokens):
        raise AssertionError("a block after the last layer ran")

    monkeypatch.setattr(network.blocks[2], "forward", fail)
    with torch.autocast("cpu", torch.bfloat16):
        cast = read_features(network, preprocess, [batch], [1])
    assert np.array_equal(cast.layers[1], plain.layers[1])


def test_read_features_keep_what_could_not_be_read_apart():
    network = build("vit")
    preprocess = Preprocess(image_size=(8, 12))
    images = torch.zeros(2, 3, 8, 12, dtype=torch.uint8)
    errors = (ImageError("b.png", "damaged"),)
    whole = Batch(images=images, labels=torch.tensor([1, 0]), indices=torch.tensor([0, 2]), errors=errors)
    empty = Batch(images=images[:0], labels=whole.labels[:0], indices=whole.indices[:0], errors=errors)
    calls = []
    features = read_features(network, preprocess, [whole, empty], [1], on_batch=calls.append)
    assert features.labels.tolist() == [1, 0]
    assert features.layers[1].shape == (2, 12)
    assert features.errors == errors * 2
    assert calls == [3, 1]
    with pytest.raises(ImageError, match=r"b\.png: damaged"):
        read_features(network, preprocess, [empty], [1])
