"""Measure a training step of an ImageGPT beside transformers', each in its process, in turns.

Both learn the next pixel of the same random images, with the same weights, in float32 or under autocast to bf16: the
forward pass, the mean cross-entropy of the colours, the backward pass and a step of AdamW (theirs torch's fused one, as
its Trainer has it). Dropout is off on both sides. Theirs is given the start token and all pixels but the last, so that
both run on as many tokens. Compiled, ours is compiled block by block as `train.compile` does, theirs whole. About a
minute.

    python scripts/bench_pixels.py --precisions bf16
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_networks import autocast, dtype_of, our_optimizer
from bench_sampling import build
from measuring import Row, Subject, compare, in_turns, matrix_rate, rate, serve, subjects_in_processes, write_rows
from torch import Tensor, nn
from transformers import ImageGPTForCausalImageModeling

from vitlab.engine.compilation import compile_blocks
from vitlab.models.catalog import create_model
from vitlab.models.costs import count_macs
from vitlab.models.imagegpt import ImageGPT

SUBJECTS = ["vitlab", "transformers"]


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
    parser.add_argument("--serve", choices=SUBJECTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, partial(prepare, args.serve))
        return
    kinds = [(precision, mode) for precision in args.precisions for mode in args.modes]
    with subjects_in_processes(__file__, SUBJECTS) as subjects:
        rows = [row for kind in kinds for row in measure(args, subjects, *kind)]
    write_rows(rows, args.json)


def measure(args: argparse.Namespace, subjects: Mapping[str, Subject], precision: str, mode: str) -> list[Row]:
    """Time both in turns."""
    device = torch.device(args.device)
    fields = {"name": args.name, "image_size": args.image_size, "batch": args.batch, "device": args.device}
    job = {**fields, "precision": precision, "mode": mode}
    network = create_model(args.name, bias=True, image_size=args.image_size)
    macs = 3 * count_macs(network) / args.image_size**2
    ceiling = matrix_rate(device, dtype_of(precision))
    rows = compare(
        in_turns({name: partial(subject.measure, job) for name, subject in subjects.items()}, rounds=args.rounds),
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


def prepare(
    subject: str, *, name: str, image_size: int, batch: int, device: str, precision: str, mode: str
) -> Callable[[], float]:
    """Build a subject's network, and give what times a step of it once."""
    peer, ours = build(name, device, image_size=image_size)
    network: Any = (ours if subject == "vitlab" else peer).train()
    tokens = torch.randint(ours.config.num_colors, (batch, image_size**2), device=device)
    if mode == "compiled":
        compile_blocks(ours) if subject == "vitlab" else network.compile()
    loss = loss_of(network, tokens, precision)
    optimizer = our_optimizer(ours) if subject == "vitlab" else adamw(network)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    least_s = 0.0 if tokens.device.type == "cpu" else 0.3
    return lambda: rate(step, tokens.numel(), tokens.device, least_s=least_s)


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    """Build transformers' AdamW, which is torch's."""
    return torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)


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
