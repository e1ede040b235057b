"""Maps of what speaks for a class, against derivatives by hand; surprisal, against the loss that evaluation reports."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitlab.data.datasets import files_split
from vitlab.data.preprocess import Preprocess
from vitlab.inference.attribution import explain_map, gradient_map, surprisal, to_pixels
from vitlab.inference.scoring import score
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model

NETWORKS = {
    "vit_tiny": {"image_size": (12, 20), "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2},
    "swin_tiny": {
        "image_size": (30, 38),
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 12,
        "depths": (2, 2),
        "num_heads": (2, 2),
    },
    "davit_tiny": {
        "image_size": (30, 38),
        "stem_stride": 2,
        "window_size": 4,
        "embed_dims": (12, 24),
        "depths": (1, 1),
        "num_heads": (2, 2),
    },
    "imagegpt_small": {"image_size": (4, 6), "num_colors": 8, "embed_dim": 12, "depth": 2, "num_heads": 2},
    "timm/resnet18": {"image_size": (64, 96)},
    "timm/vit_tiny_patch16_224": {"image_size": (32, 48), "embed_dim": 24, "depth": 2, "num_heads": 2},
    "timm/swin_tiny_patch4_window7_224": {"image_size": (56, 84), "embed_dim": 12, "depths": (1, 1, 1, 1)},
}


def random_network(name, **changes):
    torch.manual_seed(0)
    network = create_model(name, num_classes=5, **(NETWORKS[name] | changes)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def images_for(network, count=3):
    return torch.randn(count, 3, *network.image_size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NETWORKS)
def test_explain_map_depends_on_image_and_class_alone(name):
    network = random_network(name)
    images = images_for(network)
    with torch.no_grad():
        logits = network(images)
    map_of_best = explain_map(network, images)
    assert map_of_best.shape == (3, *network.image_size)
    assert map_of_best.isfinite().all()
    assert (map_of_best >= 0).all()
    assert all(values.max() > 0 for values in map_of_best)
    torch.testing.assert_close(explain_map(network, images, logits.argmax(1)), map_of_best)
    other = explain_map(network, images, (logits.argmax(1) + 1) % 5)
    assert not torch.allclose(other, map_of_best, rtol=0.1)
    alone = torch.cat([explain_map(network, images[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(alone, map_of_best, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny", "imagegpt_small"])
def test_gradient_map_leaves_no_trace_and_needs_no_gradients_of_parameters(name):
    network = random_network(name)
    images = images_for(network)
    expected = gradient_map(network, images)[1]
    network.requires_grad_(requires_grad=False)
    network.set_grad_checkpointing(enable=True)
    with torch.inference_mode():
        logits, found = gradient_map(network, images.clone())
        torch.testing.assert_close(found, expected)  # not to the bit: a bias that learns has products of its own
        torch.testing.assert_close(logits, network(images))
    assert network.checkpoint_blocks
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_gradient_map_of_swin_is_of_the_last_map_of_seven_positions():
    network = random_network("swin_tiny", image_size=(26, 38))  # 13 x 19, then 7 x 10
    images = images_for(network)
    _, found = gradient_map(network, images)
    with torch.no_grad():
        features = network.forward_features(images)
        best = network(images).argmax(dim=1)
        shares = (features @ network.head.fc.weight.T / 70).gather(-1, best.reshape(3, 1, 1, 1).expand(3, 7, 10, 1))
    shares = shares.squeeze(-1)  # what each position adds to the logit, but for the bias
    torch.testing.assert_close(found, shares - shares.mean(dim=(1, 2), keepdim=True))
    assert found.shape == (3, 7, 10)
    assert gradient_map(random_network("swin_tiny"), images_for(random_network("swin_tiny")))[1].shape == (3, 8, 10)
    small = random_network("swin_tiny", image_size=(24, 24))  # 12, then 6
    assert gradient_map(small, images_for(small))[1].shape == (3, 12, 12)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_gradient_map_of_vit_equals_attention_in_the_graph(pool, monkeypatch):
    """Chefer's rule with the weights kept as tensors of the graph, by an explicit softmax in the blocks."""
    network = random_network("vit_tiny", pool=pool)
    images = images_for(network)
    _, found = gradient_map(network, images)
    kept = []

    def explicit(query, key, value):
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        kept.append(weights)
        weights.retain_grad()
        return weights @ value

    monkeypatch.setattr("vitlab.layers.attention.attention", explicit)
    network(images).max(dim=1).values.sum().backward()
    joint = torch.eye(16).expand(3, 16, 16)
    for weights in kept:
        joint = joint + (weights * weights.grad).clamp_min(0).mean(1) @ joint
    joint = joint - torch.eye(16)
    rows = joint[:, 0, 1:] if pool == "cls" else joint[:, 1:, 1:].mean(1)
    torch.testing.assert_close(found, rows.detach().reshape(3, 3, 5))


def test_gradient_map_of_imagegpt_lays_a_pixels_share_on_that_pixel():
    """The tokens enter one position later; the last pixel never does."""
    network = random_network("imagegpt_small")
    images = images_for(network, 1)
    _, found = gradient_map(network, images)
    assert found[0, -1, -1] == 0
    embedded = (F.embedding(F.pad(network.encode(images)[:, :-1], (1, 0), value=8), network.token_embed)) + (
        network.pos_embed
    )
    embedded = embedded.detach().requires_grad_()
    features = embedded
    for block in network.blocks:
        features = block(features)
    logits = network.forward_head(network.norm(features))
    (gradient,) = torch.autograd.grad(logits.max(), embedded)
    expected = ((embedded - embedded.mean(1, keepdim=True)) * gradient).sum(-1)[0]
    torch.testing.assert_close(found[0, 0, 0], expected[1].detach())
    torch.testing.assert_close(found[0, 2, 3], expected[16].detach())


def test_to_pixels_puts_positions_where_they_lie_and_cuts_what_lies_beyond():
    network = random_network("swin_tiny")  # 30 x 38 pixels; the second stage's 8 x 10 positions cover 32 x 40
    coarse = torch.zeros(1, 8, 10)
    coarse[0, 7, 9] = 1.0
    stretched = to_pixels(network, coarse)[0]
    assert stretched.shape == (30, 38)
    assert divmod(int(stretched.argmax()), 38) == (29, 37)
    expected = F.interpolate(coarse[None], (32, 40), mode="bilinear")[0, 0, :30, :38]
    torch.testing.assert_close(stretched, expected)
    torch.testing.assert_close(to_pixels(network, torch.ones(2, 3, 15, 19)), torch.ones(2, 3, 30, 38))


@pytest.mark.parametrize("objective", ["next_pixel", "joint"])
def test_surprisal_sums_to_the_loss_that_evaluation_reports(objective, color_folder, random_imagegpt, tmp_path):
    network = random_imagegpt(num_classes=3)
    record = Preprocess(image_size=(4, 6), mean=(0.5,) * 3, std=(0.5,) * 3, resize_mode="squash")
    path = tmp_path / "gpt.safetensors"
    classes = ["blue", "green", "red"]
    save_model(path, network, classes=classes, preprocess=record, metrics={}, data={}, objective={"name": objective})
    model = load_model(path)
    files = sorted((color_folder / "test").rglob("*.png"))
    split = files_split(files)
    split.labels[:] = [classes.index(file.parent.name) for file in files]
    scores = score(model, split, batch_size=5, workers=0, on_error="stop")
    pixels = np.stack([model.preprocess.apply(split.read(i)) for i in range(len(split))])
    images = model.preprocess.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    nats = surprisal(model.network, images)
    assert nats.shape == (12, 4, 6)
    assert nats.std() > 0.1
    assert float(nats.sum()) / (12 * 24) == pytest.approx(scores.to_dict()["nats_per_pixel"], rel=1e-5)
    # A pixel's surprise depends on those before it and on itself.
    changed = images.clone()
    changed[:, :, 2, 3] = -changed[:, :, 2, 3].sign()
    same = (surprisal(model.network, changed) - nats).abs().amax(0).flatten() < 1e-6
    assert same[: 2 * 6 + 3].all()
    assert not same[2 * 6 + 3 :].all()
