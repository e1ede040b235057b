"""Measure what saving a resume state costs a run of ViT-Ti at 224 on made-up images, side by side with not saving.

    python scripts/save_cost.py --steps 40 --every 5 --repeats 3

Runs with and without saving alternate. The cost of one save is the difference of their medians over the number of
saves, the writing beside the training included; the last line gives it as a share of 100 steps.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.config import AugmentConfig, DataConfig, ModelConfig, MonitorConfig, RunConfig, TrainConfig
from vitlab.engine.trainer import Trainer
from vitlab.runs.training import run_training

_BATCHES = 8
"""To an epoch, at whose end a state is saved in both kinds of run."""


def main() -> int:
    """Print the seconds of both kinds of run, and the share of a save every 100 steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between states where they are saved")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images", _BATCHES * args.batch_size)
        for repeat in range(args.repeats):
            for saving in (False, True):
                run = Path(folder) / f"run-{repeat}-{saving}"
                seconds[saving].append(timed_run(args, Path(folder) / "images", run, saving=saving))
                print(f"{'saving' if saving else 'plain'}: {seconds[saving][-1]:.2f} s", flush=True)
    plain, saved = (statistics.median(seconds[kind]) for kind in (False, True))
    saves = sum(step % args.every == 0 and step % _BATCHES != 0 for step in range(1, args.steps))
    cost, step = (saved - plain) / saves, plain / args.steps
    print(f"a save costs {cost * 1e3:.0f} ms, a step {step * 1e3:.0f} ms: every 100 steps {cost / (100 * step):.2%}")
    return 0


def write_images(root: Path, count: int) -> None:
    """Write noise in two classes."""
    generator = np.random.default_rng(0)
    for index in range(count):
        path = root / "train" / f"class{index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(path)


def timed_run(args: argparse.Namespace, images: Path, run: Path, *, saving: bool) -> float:
    """Give the seconds of the training loop, without start and evaluation."""
    config = RunConfig(
        model=ModelConfig(name="vit_tiny"),
        data=DataConfig(root=str(images), cache="memory", workers=0),
        augment=AugmentConfig(crop="none"),
        train=TrainConfig(
            run_dir=str(run),
            steps=args.steps,
            batch_size=args.batch_size,
            checkpoint_every_steps=args.every if saving else None,
        ),
        monitor=MonitorConfig(tensorboard=False),
    )
    spent = 0.0
    train_epoch = Trainer.train_epoch

    def timed(self: Trainer) -> None:
        nonlocal spent
        began = time.perf_counter()
        train_epoch(self)
        spent += time.perf_counter() - began

    Trainer.train_epoch = timed  # type: ignore[method-assign]
    try:
        run_training(config)
    finally:
        Trainer.train_epoch = train_epoch  # type: ignore[method-assign]
    return spent


if __name__ == "__main__":
    sys.exit(main())
