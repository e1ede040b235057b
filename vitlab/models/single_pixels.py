"""A fault of torch's convolutions on a CPU, and which networks meet it."""

from functools import partial

import torch
from torch import Tensor, nn

from vitlab.models.network import Network, device_of


def strides_over_single_pixels(network: Network) -> list[str]:
    """Name the convolutions that go over a map of a single pixel with a stride and a kernel of more.

    In bfloat16 on a CPU the gradient of their weights is memory that nothing was written to (seen in torch 2.14 with
    AVX-512; float32, larger maps, and kernels or strides of 1 are right). A ResNet meets it with images of up to 16
    pixels a side. It runs the network once.
    """
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].shape[-2:] == (1, 1):
            found.append(name)

    strided = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d) and max(module.stride) > 1 and max(module.kernel_size) > 1
    ]
    if not strided:
        return []
    modes = [(module, module.training) for module in network.modules()]
    hooks = [module.register_forward_pre_hook(partial(look, name)) for name, module in strided]
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(1, network.in_channels, *network.image_size, device=device_of(network)))
    finally:
        for module, is_training in modes:
            module.training = is_training
        for hook in hooks:
            hook.remove()
    return found
