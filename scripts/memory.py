"""Measure the peak memory and time of a training step, with and without gradient checkpointing, each in a process.

    python scripts/memory.py --models vit_small swin_tiny davit_tiny --batch_size 16

In float32 on a CPU. The peak is the growth of the process beyond what a step on a single image needed, so that weights
and gradients are left out; the time is that of a second step.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from vitlab.models.catalog import create_model


def main() -> int:
    """Print a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_small", "swin_tiny", "davit_tiny"])
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--one", choices=("plain", "checkpointed"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.models[0], args.batch_size, checkpointed=args.one == "checkpointed")))
        return 0
    table = Table("network", "plain MiB", "checkpointed MiB", "memory", "time")
    for name in args.models:
        rows = []
        for one in ("plain", "checkpointed"):
            command = [sys.executable, __file__, "--models", name, "--batch_size", str(args.batch_size), "--one", one]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        (plain, seconds), (less, longer) = rows
        table.add_row(name, f"{plain:.0f}", f"{less:.0f}", f"x {less / plain:.2f}", f"x {longer / seconds:.2f}")
    Console().print(table)
    return 0


def measure(name: str, batch_size: int, *, checkpointed: bool) -> tuple[float, float]:
    """Give the growth of the peak in MiB over two steps, and the seconds of the second."""
    network = create_model(name).train()
    network.set_grad_checkpointing(checkpointed)

    def step(images: torch.Tensor) -> float:
        began = time.perf_counter()
        network(images).logsumexp(dim=1).mean().backward()
        network.zero_grad()
        return time.perf_counter() - began

    images = torch.randn(batch_size, 3, *network.image_size)
    step(images[:1])  # loads what torch loads only now, and makes the gradients
    before = peak_mib()
    step(images)
    return peak_mib() - before, step(images)


def peak_mib() -> float:
    """Give the largest resident memory of this process so far."""
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


if __name__ == "__main__":
    sys.exit(main())
