"""Measure how fast ImageGPT draws, beside transformers' `generate` with its cache, in turns, in one process.

The networks have random weights: speed does not depend on them. Each round times some steps of transformers and the
same steps of each precision of ours, after the same given pixels; the ratio is the median of the rounds' ratios. Times
of reading the given pixels are left out on both sides.

    python scripts/bench_sampling.py
    python scripts/bench_sampling.py --given 0 960 --steps 64 --rounds 3 --threads 2
"""

import argparse
import math
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from vitlab.inference.sampling import sample
from vitlab.models.catalog import create_model
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.weights import load_weights
from vitlab.pixel_options import DrawPrecision


class Enough(Exception):  # noqa: N818 - an ending, not an error
    """So many steps were timed."""


class Clock(LogitsProcessor):
    """Notes when each step ends, of either subject, and says when it is enough."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note a step of transformers, whose network has just given these scores."""
        self.tick()
        return scores

    def tick(self, pixels: int = 1) -> None:
        """Note a step."""
        self.times.append(time.perf_counter())
        if len(self.times) > self.steps:
            raise Enough

    def steps_per_s(self, draw: Callable[[], object]) -> float:
        """Run something that ticks, and give its speed."""
        self.times = []
        with suppress(Enough):
            draw()
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


def main() -> None:
    """Time both and print a row for each precision, batch and place in the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="imagegpt_small", help="which of our networks (%(default)s)")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "int8"], help="(%(default)s)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="images at a time (%(default)s)")
    parser.add_argument("--given", nargs="+", type=int, default=[0, 480, 960], help="first pixels (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="steps that are timed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times in turn (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    peer, network = build(args.name, args.device)
    console = Console()
    title = f"{args.name}, {args.threads} threads, {args.steps} steps, median of {args.rounds} rounds"
    for batch in args.batches:
        for given in args.given:
            table = Table("precision", "ours, steps/s", "transformers", "ratio", title=f"{title}; {batch=} {given=}")
            for row in compare(peer, network, args, batch, given):
                table.add_row(*row)
            console.print(table)


def build(name: str, device: str) -> tuple[ImageGPTForCausalImageModeling, ImageGPT]:
    """Give transformers' network and ours, of the same random weights."""
    torch.manual_seed(0)
    network = create_model(name, bias=True)
    assert isinstance(network, ImageGPT)
    config = network.config
    peer = ImageGPTForCausalImageModeling(
        ImageGPTConfig(
            vocab_size=config.num_colors + 1,
            n_positions=math.prod(network.image_size),
            n_embd=config.embed_dim,
            n_layer=config.depth,
            n_head=config.num_heads,
        )
    )
    load_weights(network, peer.state_dict())
    return peer.eval().to(device), network.eval().to(device)  # type: ignore[no-untyped-call]


def compare(
    peer: ImageGPTForCausalImageModeling, network: ImageGPT, args: argparse.Namespace, batch: int, given: int
) -> list[tuple[str, str, str, str]]:
    """Time both in turns; give the cells of a row for each precision."""
    prefix = torch.randint(network.config.num_colors, (batch, given), device=args.device)
    start = prefix.new_full((batch, 1), network.config.num_colors)
    clock = Clock(args.steps)

    def theirs() -> None:
        peer.generate(
            torch.cat([start, prefix], dim=1),
            max_new_tokens=args.steps + 1,
            do_sample=True,
            top_k=0,
            use_cache=True,
            logits_processor=LogitsProcessorList([clock]),
        )

    def ours(precision: DrawPrecision) -> Callable[[], object]:
        return lambda: sample(
            network, count=batch, given=prefix, precision=precision, batch_size=batch, on_step=clock.tick
        )

    speeds: dict[str, list[float]] = {name: [] for name in ("transformers", *args.precisions)}
    for _ in range(args.rounds):
        speeds["transformers"].append(clock.steps_per_s(theirs))
        for precision in args.precisions:
            speeds[precision].append(clock.steps_per_s(ours(precision)))
    rows = []
    for precision in args.precisions:
        ratio = median(a / b for a, b in zip(speeds[precision], speeds["transformers"], strict=True))
        numbers = (f"{median(speeds[name]):.1f}" for name in (precision, "transformers"))
        rows.append((precision, *numbers, f"{ratio:.2f}"))
    return rows


if __name__ == "__main__":
    main()
