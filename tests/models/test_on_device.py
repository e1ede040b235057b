"""Every network computes on a GPU, and in bf16, what it computes in float64 on the processor."""

import copy

import pytest
import torch
import torch.nn.functional as F

from vitlab.engine.compilation import compile_blocks
from vitlab.models.catalog import create_model

SHAPES = {
    "vit_tiny": {"image_size": (16, 24), "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "swin_tiny": {"image_size": (32, 48), "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
    "davit_tiny": {"image_size": (32, 48), "embed_dims": (12, 24), "depths": (1, 1), "num_heads": (2, 4)},
    "imagegpt_small": {"image_size": (6, 8), "embed_dim": 24, "depth": 2, "num_heads": 3, "num_colors": 16},
}
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=SHAPES)
def exact(request, randomise):
    """A network in float64, and images for it."""
    network = randomise(create_model(request.param, num_classes=5, **SHAPES[request.param])).double()
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 3, *network.image_size, generator=generator, dtype=torch.float64) * 2 - 1
    return network.train(), images


def logits_and_gradients(network, images):
    logits = network(images)
    F.cross_entropy(logits.double(), torch.arange(3, device=images.device)).backward()
    return logits.detach().cpu().double(), [parameter.grad for parameter in network.parameters()]


def relative_error(found, expected) -> float:
    return float((found.detach().cpu().double() - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize(
    ("device", "compiled"),
    [("cpu", False), pytest.param("cuda", False, marks=NEEDS_GPU), pytest.param("cuda", True, marks=NEEDS_GPU)],
)
def test_network_equals_float64_on_a_device_in_float32_and_bf16(exact, device, compiled, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network, images = exact
    expected, gradients = logits_and_gradients(network, images)
    single = copy.deepcopy(network).float().to(device)
    single.zero_grad()
    half = copy.deepcopy(single)
    if compiled:
        compile_blocks(single)
        compile_blocks(half)
    found, found_gradients = logits_and_gradients(single, images.float().to(device))
    assert relative_error(found, expected) < 1e-4
    for gradient, right in zip(found_gradients, gradients, strict=True):
        assert (gradient is None) == (right is None)
        assert right is None or relative_error(gradient, right) < 1e-3 or right.norm() < 1e-6
    with torch.autocast(device, torch.bfloat16):
        found = half(images.float().to(device))
    assert relative_error(found, expected) < 5e-2
