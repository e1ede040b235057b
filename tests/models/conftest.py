import pytest
import torch

from vitlab.models.catalog import create_model


@pytest.fixture
def tiny_vit():
    """A function that builds a small ViT for images of 8 x 12 pixels, changed by fields of its config."""

    def build(**changes):
        shape = {"image_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
        return create_model("vit_tiny", **(shape | changes))

    return build


@pytest.fixture
def randomise():
    """A function that fills every parameter with seeded noise: fresh biases of 0 and gains of 1 hide mistakes."""

    def fill(network, seed=0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in sorted(network.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(float((parameter == 1).all()) + 0.2 * noise)
        return network

    return fill


@pytest.fixture
def timm_vit():
    """A function that builds timm's VisionTransformer in the same shape as `tiny_vit`."""
    from timm.models.vision_transformer import VisionTransformer

    def build(**changes):
        shape = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
        return VisionTransformer(**(shape | changes))

    return build


@pytest.fixture
def torchvision_vit():
    """A function that builds torchvision's VisionTransformer for images of 8 x 8 pixels."""
    from torchvision.models.vision_transformer import VisionTransformer

    def build(**changes):
        shape = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 3, "hidden_dim": 12, "mlp_dim": 48}
        return VisionTransformer(**(shape | {"num_classes": 5} | changes))

    return build


@pytest.fixture
def tiny_davit():
    """A function that builds a small DaViT for images of 20 x 32 pixels, changed by fields of its config."""

    def build(**changes):
        shape = {"image_size": (20, 32), "embed_dims": (12, 24), "depths": (1, 2), "num_heads": (2, 4)}
        return create_model("davit_tiny", **(shape | {"window_size": 3, "num_classes": 5} | changes))

    return build


@pytest.fixture
def timm_davit():
    """A function that builds timm's DaVit in the same shape as `tiny_davit`; it takes any size of image."""
    from timm.models.davit import DaVit

    def build(*, stem_stride=4, **changes):
        shape = {"embed_dims": (12, 24), "depths": (1, 2), "num_heads": (2, 4), "window_size": 3, "num_classes": 5}
        network = DaVit(**(shape | changes))
        network.stem.stride = network.stem.conv.stride = (stem_stride, stem_stride)  # its constructor takes 4 alone
        return network

    return build


@pytest.fixture
def tiny_swin():
    """A function that builds a small Swin for images of 24 x 40 pixels (grids of 6 x 10 and 3 x 5), or as changed."""

    def build(**changes):
        shape = {"image_size": (24, 40), "window_size": 3, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)}
        return create_model("swin_tiny", **(shape | {"num_classes": 5} | changes))

    return build


@pytest.fixture
def timm_swin():
    """A function that builds timm's SwinTransformer in the shape of a Swin of ours, drop path and all."""
    from timm.models.swin_transformer import SwinTransformer

    renamed = {"image_size": "img_size", "in_channels": "in_chans"}

    def build(network, **changes):
        config = {name: value for name, value in network.config_dict().items() if name != "drop_rate"}
        return SwinTransformer(**({renamed.get(name, name): value for name, value in config.items()} | changes))

    return build


@pytest.fixture
def tiny_imagegpt():
    """A function that builds a small ImageGPT of 16 colours for images of 4 x 6 pixels, changed by its fields."""

    def build(**changes):
        shape = {"image_size": (4, 6), "num_colors": 16, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
        return create_model("imagegpt_small", **(shape | changes))

    return build


@pytest.fixture
def transformers_imagegpt():
    """A function that builds transformers' ImageGPT, `causal` or `classifier`, in the shape of `tiny_imagegpt`."""
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling, ImageGPTForImageClassification

    def build(kind, **changes):
        shape = {"vocab_size": 17, "n_positions": 24, "n_embd": 12, "n_layer": 2, "n_head": 3, "num_labels": 5}
        build_one = {"causal": ImageGPTForCausalImageModeling, "classifier": ImageGPTForImageClassification}[kind]
        return build_one(ImageGPTConfig(**(shape | changes)))

    return build
