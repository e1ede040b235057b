"""Tell what training the large networks asks of each GPU and of the disks, computed from their configurations.

    python scripts/gpu_needs.py --batch_size 32 --gpus 8 --tflops 400

Nothing is trained: the networks have no data. Of each, in GiB on a GPU: what `train.parallel` ddp and fsdp hold of
weights, gradients and AdamW's two moments, all in float32; and what a forward pass in bf16 keeps for the backward pass,
with and without `train.grad_checkpointing`. Then the images and JPEG bytes a second that one GPU takes at the rate of
matrix products given by --tflops, which is an assumption, as is the mean size of an ImageNet JPEG.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from vitlab.models.catalog import create_model
from vitlab.models.costs import count_macs, count_parameters
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import Network

MODELS = ("vit_large", "vit_huge", "swin_large", "davit_huge", "davit_giant", "imagegpt_large", "imagegpt_xlarge")
STATE_BYTES = 16
"""Of a parameter: weight, gradient and two moments, 4 bytes each."""
WHOLE_BYTES = 8
"""Of a parameter of the block that computes: weight and gradient, whole."""
JPEG_BYTES = 110_000
"""Mean of ImageNet's training images: 138 GB over 1.28 million."""


def main() -> int:
    """Print a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batch_size", type=int, default=32, help="images of one GPU")
    parser.add_argument("--gpus", type=int, default=8, help="processes that fsdp shards over")
    parser.add_argument(
        "--tflops", type=float, default=400.0, help="bf16 matrix products that a GPU reaches in training"
    )
    args = parser.parse_args()
    columns = ("parameters", "ddp", f"fsdp/{args.gpus}", "activations", "checkpointed", "images/s", "MB/s")
    table = Table("network", *columns, box=MARKDOWN)
    for name in args.models:
        with torch.device("meta"):
            network = create_model(name)
        count, block = count_parameters(network), max(map(count_parameters, network.repeated_blocks()))
        sharded = STATE_BYTES * count / args.gpus + WHOLE_BYTES * block
        flops = 6 * count_macs(network)  # two to a multiply-add, and the backward pass is two forward ones
        rate = args.tflops * 1e12 / flops
        kept = [kept_bytes(network, args.batch_size, checkpointed=flag) for flag in (False, True)]
        bytes_of = [f"{number / 2**30:.1f}" for number in (STATE_BYTES * count, sharded, *kept)]
        table.add_row(name, f"{count / 1e6:.0f} M", *bytes_of, f"{rate:.0f}", f"{rate * JPEG_BYTES / 1e6:.0f}")
    Console(width=120).print(table)
    return 0


def kept_bytes(network: Network, batch_size: int, *, checkpointed: bool) -> int:
    """Count the bytes that a forward pass in bf16 keeps for the backward pass, parameters left out.

    With checkpointing that is each block's input, and what one block keeps while it is computed again.
    """
    network = network.to(torch.bfloat16).train()
    network.set_grad_checkpointing(checkpointed)
    images = torch.empty(batch_size, network.in_channels, *network.image_size, device="meta", dtype=torch.bfloat16)
    inputs: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in network.repeated_blocks()
    ]
    with counting(network) as kept:
        run(network, images)
    for hook in hooks:
        hook.remove()
    total = sum(kept.values())
    if not checkpointed:
        return total
    network.set_grad_checkpointing(False)
    largest = 0
    for block, given in zip(network.repeated_blocks(), inputs, strict=True):
        with counting(network) as kept:
            block(given.detach().requires_grad_())
        largest = max(largest, sum(kept.values()))
    return total + largest


def run(network: Network, images: Tensor) -> None:
    """Make the forward pass that is trained: the colours of all pixels of an ImageGPT, else the classes."""
    if isinstance(network, ImageGPT):
        num_pixels = math.prod(network.image_size)
        network.pixel_logits(torch.empty(len(images), num_pixels, dtype=torch.int64, device="meta"))
    else:
        network(images)


@contextmanager
def counting(network: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that the operations within keep for their backward pass."""
    own = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage that is freed would give its place to another

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    plain, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, fused_attention
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        functional.scaled_dot_product_attention = plain


class _FusedAttention(torch.autograd.Function):
    """Keeps what a GPU's fused kernels keep: queries, keys, values and the result, but no square of the tokens."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = torch.empty_like(query)
        context.save_for_backward(query, key, value, result)
        return result


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand in for torch's function, which keeps the square of the tokens where there is no device."""
    result: Tensor = _FusedAttention.apply(query, key, value)
    return result


if __name__ == "__main__":
    sys.exit(main())
