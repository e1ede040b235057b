"""What a network costs: its parameters, and the multiply-adds of one image."""

import copy
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models.network import Network
from vitlab.models.timm_network import TimmNetwork


def count_parameters(module: nn.Module) -> int:
    """Count the trainable and frozen numbers of a module, shared ones once; buffers are none."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_macs(network: Network) -> int:
    """Count the multiply-adds of a forward pass of one image of the network's own size.

    Matrix products, convolutions and the two products of attention count; norms, activations and sums do not. Papers
    often call this number FLOPs. A copy without data does the counting, so that the size of the network does not
    matter, and so that attention is the plain products that torch can count.

    Args:
        network: on any device; a network without data, on the device `meta`, is quickest.
    """
    network = copy.deepcopy(network).to("meta").eval()
    images = torch.empty(1, network.in_channels, *network.image_size, device="meta")
    blocks = [] if isinstance(network, TimmNetwork) else network.repeated_blocks()  # what timm's take is not known
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        repeats = _Repeats(blocks, counter)
        network(images)
    flops: int = counter.get_total_flops() + repeats.flops
    return flops // 2


class _Repeats:
    """Runs one block of each kind, and for the others of its kind takes its result, which has no data, and its count.

    Counting is slow, and a network has up to 32 equal blocks: this makes it three times as fast.
    """

    def __init__(self, blocks: Iterable[nn.Module], counter: FlopCounterMode) -> None:
        self.flops = 0
        self.counter = counter
        self.known: dict[tuple[str, torch.Size], tuple[int, Tensor]] = {}
        for block in blocks:
            block.forward = partial(self._run, block.forward, repr(block))

    def _run(self, forward: Callable[[Tensor], Tensor], kind: str, tokens: Tensor) -> Tensor:
        key = (kind, tokens.shape)
        if key in self.known:
            flops, result = self.known[key]
            self.flops += flops
            return result
        before = self.counter.get_total_flops()
        result = forward(tokens)
        self.known[key] = (self.counter.get_total_flops() - before, result)
        return result
