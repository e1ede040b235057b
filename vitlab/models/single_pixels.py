"""A fault of torch's convolutions on a CPU, and which networks meet it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.models.catalog import create_model
from vitlab.models.network import Network


def strides_over_single_pixels(network: Network) -> list[str]:
    """Name the convolutions that go over a map of a single pixel with a stride and a kernel of more.

    In bfloat16 on a CPU the gradient of their weights is memory that nothing was written to (seen in torch 2.14 with
    AVX-512; float32, larger maps, and kernels or strides of 1 are right). A ResNet meets it with images of up to 16
    pixels a side.
    """
    found: list[str] = []

    def look(name: str, module: nn.Conv2d, inputs: tuple[Tensor, ...], output: Any) -> None:
        if inputs[0].shape[-2:] == (1, 1) and max(module.stride) > 1 and max(module.kernel_size) > 1:
            found.append(name)

    with torch.device("meta"), torch.no_grad():
        skeleton = create_model(network.name, **network.config_dict()).eval()
        for name, module in skeleton.named_modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(partial(look, name))
        try:
            skeleton(torch.empty(1, network.in_channels, *network.image_size))
        except NotImplementedError:  # an operation that torch knows only with numbers
            return []
    return found
