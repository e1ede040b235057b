"""A model file small enough for tests, and images of many shapes."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data.preprocess import Preprocess
from vitlab.models.catalog import create_model
from vitlab.models.files import save_model

CLASSES = ("zebra", "ant", "mole", "bee", "owl", "elk", "cow")


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    """A random ViT of 12x20 pixels with dropout, its classes not in alphabetical order."""
    torch.manual_seed(0)
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    network = create_model(
        "vit_tiny", num_classes=len(CLASSES), image_size=(12, 20), drop_rate=0.5, drop_path_rate=0.5, **sizes
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.5)
        network.get_classifier().weight.mul_(4)
    path = tmp_path_factory.mktemp("model") / "best.safetensors"
    preprocess = Preprocess(image_size=(12, 20), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_fraction=0.8)
    save_model(path, network, classes=CLASSES, preprocess=preprocess, metrics={}, data={})
    return path


@pytest.fixture(scope="session")
def odd_images(tmp_path_factory):
    """Thirty images of as many shapes in a folder for each class, ROOT/CLASS/NN.png; gives ROOT."""
    root = tmp_path_factory.mktemp("odd")
    generator = np.random.default_rng(1)
    for index in range(30):
        height, width = generator.integers(1, 60, 2)
        coarse = generator.integers(0, 256, (3, 4, 3), dtype=np.uint8)
        folder = root / CLASSES[index % len(CLASSES)]
        folder.mkdir(exist_ok=True)
        Image.fromarray(coarse).resize((int(width), int(height))).save(folder / f"{index:02d}.png")
    return root


@pytest.fixture
def random_imagegpt():
    """A function that builds an ImageGPT of 16 colours for 4 x 6 pixels, changed by its fields, with random weights."""

    def build(**changes):
        shape = {"image_size": (4, 6), "num_colors": 16, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
        network = create_model("imagegpt_small", **(shape | changes)).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(float((parameter == 1).all()) + 0.2 * torch.randn(parameter.shape, generator=generator))
            network.token_embed.mul_(8)  # so that the next colour depends on those before it
        return network.requires_grad_(requires_grad=False)

    return build
