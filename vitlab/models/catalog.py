"""Names of networks, and the one function that builds them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from vitlab.errors import unknown_name
from vitlab.models.davit import DAVIT_SIZES, DaViT
from vitlab.models.imagegpt import IMAGEGPT_SIZES, ImageGPT
from vitlab.models.network import Network
from vitlab.models.size_limits import build_within_memory
from vitlab.models.swin import SWIN_SIZES, SwinTransformer
from vitlab.models.timm_network import PREFIX, TimmNetwork
from vitlab.models.vit import VIT_SIZES, VisionTransformer

# Each architecture: its network, built from its config alone, and the configs that have a name.
_ARCHITECTURES: tuple[tuple[Callable[[Any], Network], Mapping[str, Any]], ...] = (
    (VisionTransformer, VIT_SIZES),
    (SwinTransformer, SWIN_SIZES),
    (DaViT, DAVIT_SIZES),
    (ImageGPT, IMAGEGPT_SIZES),
)


def list_models() -> list[str]:
    """Give every name that `create_model` takes, architecture by architecture, small to large."""
    return [name for _, sizes in _ARCHITECTURES for name in sizes]


def create_model(
    name: str,
    *,
    num_classes: int = 1000,
    image_size: int | tuple[int, int] | None = None,
    in_channels: int = 3,
    **overrides: Any,
) -> Network:
    """Build a network with fresh weights.

    Args:
        name: one of `list_models()`, or `timm/NAME` for any network of timm.
        num_classes: number K of logits.
        image_size: side, or (height, width), in pixels; default: the named network's own.
        in_channels: channels C of the images.
        **overrides: other fields of the architecture's config, such as `depth=6`; keyword arguments of timm's network.

    Returns:
        The network on the CPU (or on the device of an enclosing `with torch.device(...)`), in training mode.

    Raises:
        InputError: an unknown name or field (the message gives the valid ones and the nearest), or a value that does
            not fit, or the network would take more than the machine's memory.
    """
    if name.startswith(PREFIX):
        return build_within_memory(
            lambda: TimmNetwork(
                name, num_classes=num_classes, image_size=image_size, in_channels=in_channels, overrides=overrides
            )
        )
    named = {name: (network, config) for network, sizes in _ARCHITECTURES for name, config in sizes.items()}
    if name not in named:
        raise unknown_name("model", name, named)
    build, config = named[name]
    of_their_own = {"num_classes", "image_size", "in_channels"}
    valid = [field.name for field in dataclasses.fields(config) if field.name not in of_their_own]
    for field in overrides:
        if field not in valid:
            raise unknown_name(f"{name} field", field, valid)
    size = {} if image_size is None else {"image_size": image_size}
    config = dataclasses.replace(config, num_classes=num_classes, in_channels=in_channels, **size, **overrides)

    def named_network() -> Network:
        network = build(config)
        network.name = name
        return network

    return build_within_memory(named_network)
