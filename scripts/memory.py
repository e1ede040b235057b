"""Measure the peak memory and time of a training step, with and without gradient checkpointing, each in a process.

    python scripts/memory.py --models vit_small swin_tiny davit_tiny --batch_size 16
    python scripts/memory.py --models imagegpt_small --image_size 64 --batch_size 1 --precision bf16 --steps 1

Ours stands beside timm's network of the same name as it comes, an ImageGPT, whose step is that of its pixels' colours,
beside transformers'. The peak is the growth of the process (on a GPU of its memory) in the steps, with weights and
gradients there already and torch warm from a step of another network. Peaks differ by 5 % from process to process, with
the holes that the allocator leaves: they are medians of some processes, in turns. `--exact` has the C library give
every block of 128 KiB and more back when it is free, on both sides, which is slower: the peak is then what a step
needs, to half a MiB. The time is that of the last step. Transformers' ImageGPT keeps the square of the pixels for each
layer and head: without checkpointing it is left out where they do not fit.

On two cores a round of the three networks takes two minutes, one of the ImageGPT at 64x64 two more.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from bench_networks import TIMM, autocast, build_ours
from measuring import Row, compare, in_turns, write_rows
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vitlab.allocator import keep_freed_memory
from vitlab.data.cache import free_memory
from vitlab.models.catalog import create_model

MODES = ("plain", "checkpointed")
# Our commands obey these, and then keep nothing that they free.
_EXACT = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072"}


def main() -> None:
    """Measure each network in each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_small", "swin_tiny", "davit_tiny"])
    parser.add_argument("--image_size", type=int, help="side in pixels (the network's own)")
    parser.add_argument("--batch_size", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (%(default)s)")
    parser.add_argument("--exact", action="store_true", help="what a step needs, without what the allocator keeps")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows (else a table on the terminal)")
    parser.add_argument("--one", nargs=2, metavar=("SUBJECT", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        subject, mode = args.one
        print(json.dumps(measure(args, args.models[0], subject, checkpointed=mode == "checkpointed")))
        return
    rows = [row for name in args.models for row in compare_modes(args, name)]
    if args.json:
        write_rows(rows, args.json)
        return
    table = Table("network", "mode", "MiB", "peer", "theirs", "ratio", "")
    for row in rows:
        table.add_row(
            row.subject, row.mode, f"{row.ours:.0f}", row.peer, f"{row.theirs:.0f}", f"{row.ratio:.2f}", row.note
        )
    Console().print(table)


def compare_modes(args: argparse.Namespace, name: str) -> list[Row]:
    """Give a row for each way to train a network."""
    peer = "transformers" if is_pixels(name) else "timm"
    jobs = [(subject, mode) for mode in MODES for subject in ("vitlab", peer)]
    if not fits(args, name):
        jobs.remove((peer, "plain"))
    figures = in_turns({job: partial(in_process, args, name, *job) for job in jobs}, rounds=args.rounds, uncounted=0)
    peaks = {job: [mib for mib, _ in measured] for job, measured in figures.items()}
    seconds = {job: median(s for _, s in measured) for job, measured in figures.items()}
    rows = []
    for mode in MODES:
        if (peer, mode) not in jobs:
            continue
        ours, theirs, plain = ("vitlab", mode), (peer, mode), ("vitlab", "plain")
        smaller, slower = median(peaks[ours]) / median(peaks[plain]), seconds[ours] / seconds[plain]
        note = "" if mode == "plain" else f"x {smaller:.2f} of plain in x {slower:.2f} the time, "
        rows += compare(
            {"vitlab": peaks[ours], peer: peaks[theirs]},
            {peer: (peer,)},
            unit="MiB",
            work="peak_memory",
            subject=name,
            precision=args.precision,
            mode=f"{mode}, exact" if args.exact else mode,
            device=torch.device(args.device).type,
            note=f"{note}{seconds[ours]:.1f} s a step, theirs {seconds[theirs]:.1f}",
        )
    return rows


def is_pixels(name: str) -> bool:
    """Say whether a network is an ImageGPT."""
    return name.startswith("imagegpt")


def fits(args: argparse.Namespace, name: str) -> bool:
    """Say whether the squares that transformers' ImageGPT keeps fit into memory: scores and weights, 6 or 8 bytes."""
    if not is_pixels(name) or args.device != "cpu":
        return True
    with torch.device("meta"):
        config = create_model(name).config_dict()
    squares: int = config["depth"] * config["num_heads"] * (args.image_size or 32) ** 4 * args.batch_size
    bytes_each = 6 if args.precision == "bf16" else 8
    return squares * bytes_each < 0.8 * free_memory()


def in_process(args: argparse.Namespace, name: str, subject: str, mode: str) -> tuple[float, float]:
    """Measure in a process of its own: MiB and seconds."""
    command = [sys.executable, __file__, "--models", name, "--batch_size", str(args.batch_size)]
    command += ["--precision", args.precision, "--steps", str(args.steps), "--device", args.device]
    command += ["--image_size", str(args.image_size)] if args.image_size else []
    environment = {**os.environ, **(_EXACT if args.exact else {})}
    done = subprocess.run([*command, "--one", subject, mode], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} of {subject}, {mode}, ended with {done.returncode}:\n{done.stderr[-2000:]}")
    mib, seconds = json.loads(done.stdout)
    return mib, seconds


def measure(args: argparse.Namespace, name: str, subject: str, *, checkpointed: bool) -> tuple[float, float]:
    """Give the growth of the peak in MiB over some steps, and the seconds of the last."""
    device = torch.device(args.device)
    if subject == "vitlab":
        keep_freed_memory()  # as our commands do

    def step(loss: Callable[[], Tensor]) -> float:
        began = time.perf_counter()
        loss().backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    warm = create_model("vit_tiny", image_size=32, embed_dim=12, depth=1)
    step(lambda: warm(torch.randn(2, 3, 32, 32)).sum())  # what torch loads only now is no part of the growth
    network, loss = (pixel_loss if is_pixels(name) else image_loss)(args, name, subject)
    checkpoint(network, enable=checkpointed)
    for parameter in network.parameters():  # neither are gradients
        parameter.grad = torch.zeros_like(parameter)
    before = reset_peak(device)
    seconds = 0.0
    for _ in range(args.steps):
        seconds = step(loss)
        network.zero_grad(set_to_none=False)
    return peak_mib(device) - before, seconds


def image_loss(args: argparse.Namespace, name: str, subject: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Give a network, and what computes a loss of a batch of noise."""
    peer, shape = TIMM[name]
    side = args.image_size or shape.get("img_size", 224)
    if subject == "vitlab":
        network: nn.Module = create_model(name, image_size=side) if args.image_size else build_ours(name)
    else:
        network = timm.create_model(peer, **(shape if "davit" in name else {**shape, "img_size": side}))
    network = network.to(args.device).train()
    images = torch.randn(args.batch_size, 3, side, side, device=args.device)

    def loss() -> Tensor:
        with autocast(images.device, args.precision):
            logits: Tensor = network(images)
        return logits.float().logsumexp(dim=1).mean()

    return network, loss


def pixel_loss(args: argparse.Namespace, name: str, subject: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Give an ImageGPT, and what computes the loss of the colours of random images."""
    from bench_pixels import loss_of  # here, since transformers takes seconds to import
    from bench_sampling import build_peer

    image_size = args.image_size or 32
    with torch.device("cpu" if subject == "vitlab" else "meta"):
        network: Any = create_model(name, bias=True, image_size=image_size)
    if subject != "vitlab":
        network = build_peer(network)
    network = network.to(args.device).train()
    tokens = torch.randint(512, (args.batch_size, image_size**2), device=args.device)
    return network, loss_of(network, tokens, args.precision)


def checkpoint(network: nn.Module, *, enable: bool) -> None:
    """Turn checkpointing on, by the name that transformers has for it or by timm's and ours."""
    ours_or_timms, transformers = (
        getattr(network, name, None) for name in ("set_grad_checkpointing", "gradient_checkpointing_enable")
    )
    if enable and transformers:
        transformers()
    elif ours_or_timms:
        ours_or_timms(enable)


def reset_peak(device: torch.device) -> float:
    """Begin the peak anew, where the system can, and give the memory from which it grows, in MiB."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # Linux alone has it
        Path("/proc/self/clear_refs").write_text("5")
    return peak_mib(device)


def peak_mib(device: torch.device) -> float:
    """Give the largest memory of this process, or of its GPU, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


if __name__ == "__main__":
    main()
