"""Measure a training step of an ImageGPT beside transformers', in turns, in one process.

Both learn the next pixel of the same random images, with the same weights, in float32 or under autocast to bf16: the
forward pass, the mean cross-entropy of the colours, the backward pass and a step of AdamW (theirs torch's fused one, as
its Trainer has it). Dropout is off on both sides. Theirs is given the start token and all pixels but the last, so that
both run on as many tokens. Compiled, ours is compiled block by block as `train.compile` does, theirs whole. About a
minute.

    python scripts/bench_pixels.py --precisions bf16
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_networks import autocast, dtype_of, our_optimizer
from bench_sampling import build
from measuring import Row, compare, in_turns, matrix_rate, rate, write_rows
from torch import Tensor
from transformers import ImageGPTForCausalImageModeling

from vitlab.engine.compilation import compile_blocks
from vitlab.models.costs import count_macs
from vitlab.models.imagegpt import ImageGPT


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="imagegpt_small", help="which of our networks (%(default)s)")
    parser.add_argument("--image_size", type=int, default=32, help="side in pixels (%(default)s)")
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"], help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="images (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows (else the terminal)")
    args = parser.parse_args()
    rows = [row for precision in args.precisions for mode in args.modes for row in measure(args, precision, mode)]
    write_rows(rows, args.json)


def measure(args: argparse.Namespace, precision: str, mode: str) -> list[Row]:
    """Time both in turns."""
    device = torch.device(args.device)
    peer, network = build(args.name, args.device, image_size=args.image_size)
    peer.train(), network.train()
    num_pixels = math.prod(network.image_size)
    tokens = torch.randint(network.config.num_colors, (args.batch, num_pixels), device=device)

    def stepping(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], float]:
        def step() -> None:
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        least_s = 0.0 if device.type == "cpu" else 0.3
        return lambda: rate(step, tokens.numel(), device, least_s=least_s)

    if mode == "compiled":
        compile_blocks(network)
        peer.compile()
    subjects = {
        "vitlab": stepping(loss_of(network, tokens, precision), our_optimizer(network)),
        "transformers": stepping(
            loss_of(peer, tokens, precision), torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)
        ),
    }
    macs = 3 * count_macs(network) / num_pixels
    ceiling = matrix_rate(device, dtype_of(precision))
    rows = compare(
        in_turns(subjects, rounds=args.rounds),
        {"transformers": ("transformers",)},
        unit="tokens/s",
        work="train_step",
        subject=args.name,
        precision=precision,
        mode=mode,
        device=device.type,
        note=f"{args.batch} x {args.image_size}x{args.image_size} pixels",
    )
    return [replace(row, share=row.ours * macs / ceiling) for row in rows]


def loss_of(network: ImageGPT | ImageGPTForCausalImageModeling, tokens: Tensor, precision: str) -> Callable[[], Tensor]:
    """Give what computes the loss of the next pixels of images `(B, N)`, of ours or of transformers'."""
    if isinstance(network, ImageGPTForCausalImageModeling):
        given = F.pad(tokens[:, :-1], (1, 0), value=network.config.vocab_size - 1)

    def loss() -> Tensor:
        with autocast(tokens.device, precision):
            if isinstance(network, ImageGPT):
                logits = network.pixel_logits(tokens)
                return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
            theirs: Tensor = network(given, labels=given, use_cache=False).loss
            return theirs

    return loss


if __name__ == "__main__":
    main()
