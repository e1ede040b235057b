"""Measure how fast ImageGPT draws, beside transformers' `generate` with its cache, in turns, in one process.

The networks have random weights: speed does not depend on them. Each round times some steps of transformers, in float32
and in bf16, and the same steps of each precision of ours, after the same given pixels; the ratio is the median of the
rounds' ratios. Ours in float32 stands beside transformers' float32, the others beside each of its two. Times of reading
the given pixels are left out on both sides. About four minutes.

    python scripts/bench_sampling.py
    python scripts/bench_sampling.py --given 0 960 --steps 64 --rounds 3 --json sampling.json
"""

import argparse
import copy
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from measuring import Row, compare, in_turns, write_rows
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
        if torch.cuda.is_available() and len(self.times) in (0, self.steps):  # the ends of what is timed
            torch.cuda.synchronize()
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
    """Time both, and give a row for each precision, batch and place in the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="imagegpt_small", help="which of our networks (%(default)s)")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "int8"], help="(%(default)s)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="images at a time (%(default)s)")
    parser.add_argument("--given", nargs="+", type=int, default=[0, 480, 960], help="first pixels (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="steps that are timed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times in turn (%(default)s)")
    parser.add_argument("--threads", type=int, help="torch's threads (its own choice)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows (else tables on the terminal)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    peer, network = build(args.name, args.device)
    peers = {"theirs in fp32": peer, "theirs in bf16": copy.deepcopy(peer).bfloat16()}
    rows = [
        row for batch in args.batches for given in args.given for row in measure(peers, network, args, batch, given)
    ]
    if args.json:
        write_rows(rows, args.json)
        return
    title = f"{args.name}, {torch.get_num_threads()} threads, {args.steps} steps, median of {args.rounds} rounds"
    table = Table("work", "precision", "ours, steps/s", "transformers", "ratio", "", title=title)
    for row in rows:
        table.add_row(row.work, row.precision, f"{row.ours:.1f}", f"{row.theirs:.1f}", f"{row.ratio:.2f}", row.note)
    Console().print(table)


def build(name: str, device: str, **shape: int) -> tuple[ImageGPTForCausalImageModeling, ImageGPT]:
    """Give transformers' network and ours, of the same random weights; `shape` changes our config's fields."""
    torch.manual_seed(0)
    network = create_model(name, bias=True, **shape)
    assert isinstance(network, ImageGPT)
    peer = build_peer(network)
    load_weights(network, peer.state_dict())
    return peer.eval().to(device), network.eval().to(device)  # type: ignore[no-untyped-call]


def build_peer(network: ImageGPT) -> ImageGPTForCausalImageModeling:
    """Give transformers' network of the same shape, without dropout."""
    config = network.config
    return ImageGPTForCausalImageModeling(
        ImageGPTConfig(
            vocab_size=config.num_colors + 1,
            n_positions=math.prod(network.image_size),
            n_embd=config.embed_dim,
            n_layer=config.depth,
            n_head=config.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def measure(
    peers: dict[str, ImageGPTForCausalImageModeling],
    network: ImageGPT,
    args: argparse.Namespace,
    batch: int,
    given: int,
) -> list[Row]:
    """Time all in turns; give a row for each precision."""
    prefix = torch.randint(network.config.num_colors, (batch, given), device=args.device)
    start = prefix.new_full((batch, 1), network.config.num_colors)
    clock = Clock(args.steps)

    def theirs(peer: ImageGPTForCausalImageModeling) -> None:
        peer.generate(
            torch.cat([start, prefix], dim=1),
            max_new_tokens=args.steps + 1,
            do_sample=True,
            top_k=0,
            use_cache=True,
            logits_processor=LogitsProcessorList([clock]),
        )

    def ours(precision: DrawPrecision) -> None:
        sample(network, count=batch, given=prefix, precision=precision, batch_size=batch, on_step=clock.tick)

    draws: dict[str, Callable[[], object]] = {name: partial(theirs, peer) for name, peer in peers.items()}
    draws |= {precision: partial(ours, precision) for precision in args.precisions}
    speeds = in_turns(
        {name: partial(clock.steps_per_s, draw) for name, draw in draws.items()}, rounds=args.rounds, uncounted=0
    )
    rows = []
    for precision in args.precisions:
        for name in ["theirs in fp32"] if precision == "fp32" else peers:
            rows += compare(
                {"vitlab": speeds[precision], name: speeds[name]},
                {"transformers": [name]},
                unit="steps/s",
                work=f"sample_batch_{batch}",
                subject=args.name,
                precision=precision,
                mode="cached",
                device=torch.device(args.device).type,
                note=f"after {given} pixels, {name}",
            )
    return rows


if __name__ == "__main__":
    main()
