"""Measure how fast images come from a folder to batches, beside torchvision and timm, in turns.

All read the same files in one process on one thread, and processor time counts, which other work on the machine
disturbs least. Batches are bytes, to be normalised on the device, or with `--float` normalised floats. In training a
random resized crop and a flip (images of up to 64 pixels: a crop out of a border of 4 pixels), in evaluation a centre
crop of 0.9. Torchvision comes twice, with transforms on Pillow images and on tensors; timm's bytes are those that its
prefetcher collates. The ratio is the median over the rounds of ours to the better of them.

    python scripts/bench_loading.py --data trashnet/train
    python scripts/bench_loading.py --data cifar10/train --image_size 32 --images 4000
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from timm.data import create_dataset
from timm.data.loader import fast_collate
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from vitlab.config import AugmentConfig
from vitlab.data.augment import TrainTransform
from vitlab.data.datasets import files_split
from vitlab.data.loader import Loader, Transform
from vitlab.data.preprocess import EvalTransform, Preprocess

Batches = Callable[[], Iterator[Tensor]]


def main() -> None:
    """Time everyone in turns, training and evaluation, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--image_size", type=int, default=224, help="(%(default)s)")
    parser.add_argument("--images", type=int, default=600, help="images a round (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--min_scale", type=float, default=0.25, help="smallest crop's share of the area (%(default)s)")
    parser.add_argument("--interpolation", choices=["bilinear", "bicubic"], default="bilinear", help="(%(default)s)")
    parser.add_argument("--float", action="store_true", help="normalised floats in place of bytes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    folder = ImageFolder(args.data)
    rows = np.random.default_rng(0).choice(len(folder), min(args.images, len(folder)), replace=False).tolist()
    for is_training in (True, False):
        subjects = {
            "vitlab": ours(args, [folder.samples[row][0] for row in rows], is_training=is_training),
            "torchvision": torchvision(args, rows, is_training=is_training, on_tensors=False),
            "torchvision, tensors": torchvision(args, rows, is_training=is_training, on_tensors=True),
            "timm": timm(args, rows, is_training=is_training),
        }
        show("training" if is_training else "evaluation", measure(subjects, len(rows), args.rounds), args)


def ours(args: argparse.Namespace, paths: list[str], *, is_training: bool) -> Batches:
    """Give this package's batches."""
    preprocess = Preprocess(image_size=(args.image_size, args.image_size), interpolation=args.interpolation)
    augment = AugmentConfig(crop_min_scale=args.min_scale)
    transform: Transform = TrainTransform(augment, preprocess) if is_training else EvalTransform(preprocess)
    loader = Loader(files_split(paths), transform, batch_size=args.batch, shuffle=is_training)
    epochs = itertools.count()
    finish = preprocess.normalize if args.float else (lambda images: images)
    return lambda: (finish(batch.images) for batch in loader.epoch(next(epochs)))


def torchvision(args: argparse.Namespace, rows: list[int], *, is_training: bool, on_tensors: bool) -> Batches:
    """Give torchvision's batches."""
    side = args.image_size
    filtered = {"interpolation": InterpolationMode(args.interpolation), "antialias": True}
    crop: list[Any] = [v2.Resize(int(side / 0.9), **filtered), v2.CenterCrop(side)]
    if is_training:
        crop = [v2.RandomResizedCrop(side, (args.min_scale, 1.0), **filtered), v2.RandomHorizontalFlip()]
        if side <= 64:
            crop = [v2.RandomCrop(side, padding=4, padding_mode="reflect"), v2.RandomHorizontalFlip()]
    tensor = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    steps = [v2.ToImage(), *crop] if on_tensors else [*crop, v2.ToImage()]
    if args.float:
        steps += tensor
    subset = Subset(ImageFolder(args.data, v2.Compose(steps)), rows)
    loader: DataLoader[Any] = DataLoader(subset, args.batch, shuffle=is_training)
    return lambda: (images for images, _ in loader)


def timm(args: argparse.Namespace, rows: list[int], *, is_training: bool) -> Batches:
    """Give timm's batches; small images get DeiT's crop out of a border in place of the resized one."""
    shape = {"interpolation": args.interpolation, "crop_pct": 0.9, "scale": (args.min_scale, 1.0)}
    transform = create_transform(
        args.image_size, is_training=is_training, use_prefetcher=not args.float, color_jitter=None, **shape
    )
    if is_training and args.image_size <= 64:
        transform.transforms[0] = v2.RandomCrop(args.image_size, padding=4, padding_mode="reflect")
    dataset = Subset(create_dataset("", args.data, transform=transform), rows)
    collate = None if args.float else fast_collate
    loader: DataLoader[Any] = DataLoader(dataset, args.batch, shuffle=is_training, collate_fn=collate)
    return lambda: (images for images, _ in loader)


def measure(subjects: dict[str, Batches], count: int, rounds: int) -> dict[str, list[float]]:
    """Give images a second of each subject, round by round, after one that is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds + 1):
        for name, batches in subjects.items():
            start = time.process_time()
            seen = sum(len(images) for images in batches())
            speeds[name].append(seen / (time.process_time() - start))
            assert seen == count
    return {name: values[1:] for name, values in speeds.items()}


def show(title: str, speeds: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Print a table."""
    table = Table("loader", "images/s per core", "vitlab against it", title=f"{title}, {args.data}, {args.image_size}")
    mine = speeds["vitlab"]
    for name, values in speeds.items():
        ratio = median(a / b for a, b in zip(mine, values, strict=True))
        table.add_row(name, f"{median(values):,.0f}", f"{ratio:.2f}")
    peers = [values for name, values in speeds.items() if name != "vitlab"]
    better = median(mine[turn] / max(values[turn] for values in peers) for turn in range(len(mine)))
    table.add_row("the better of each round", "", f"{better:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
