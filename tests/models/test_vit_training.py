"""A ViT beside timm's at its full size, and step by step in training."""

import pytest
import timm
import torch
from torch.nn import functional as F

from vitlab.models.catalog import create_model


def random_images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_vit_tiny_equals_timm_at_full_size_in_float32():
    torch.manual_seed(0)
    network = create_model("vit_tiny").eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    peer = timm.create_model("vit_tiny_patch16_224").eval()
    peer.load_state_dict(network.state_dict())
    images = random_images(1, 3, 224, 224).float()
    with torch.inference_mode():
        logits = network(images)
        assert logits.std() > 0.5
        torch.testing.assert_close(logits, peer(images), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 0.5), (torch.optim.AdamW, 0.01)])
def test_vit_trains_as_timm_does(optimizer, lr, tiny_vit, timm_vit, randomise):
    """20 steps from the same weights on the same batches."""
    network = randomise(tiny_vit().double())
    peer = timm_vit().double()
    peer.load_state_dict(network.state_dict())
    losses = [train(each, optimizer, lr) for each in (network, peer)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-8)
    assert losses[0][-1] < losses[0][0] - 0.3
    for name, ours in network.state_dict().items():
        torch.testing.assert_close(ours, peer.state_dict()[name], rtol=0, atol=1e-8)


def train(network, optimizer, lr):
    labels = torch.arange(8) % 5
    optimizer = optimizer(network.parameters(), lr=lr)
    losses = []
    for step in range(20):
        loss = F.cross_entropy(network(random_images(8, 3, 8, 12, seed=step % 4)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
