"""Measure how fast images come from a folder to batches, beside torchvision and timm, in turns.

All read the same files in one process on one thread, and processor time counts, which other work on the machine
disturbs least. Batches are bytes, to be normalised on the device, or with `--float` normalised floats. In training a
random resized crop and a flip, in evaluation a centre crop of 0.9; of images of up to 64 pixels a crop out of a border
of 4 pixels, and the whole. Torchvision comes twice, with transforms on Pillow images and on tensors, and the faster
counts; timm's bytes are those that its prefetcher collates. `cached` is ours from the second epoch on with `data.cache
disk`, whose pixels are decoded and resized already and mapped from a file; the peers have no cache and decode again.

About a minute each with photographs and with CIFAR.

    python scripts/bench_loading.py --data trashnet/train
    python scripts/bench_loading.py --data cifar10/train --subject cifar --image_size 32 --images 4000 --json rows.json
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from measuring import Row, compare, in_turns, write_rows
from peer_jobs import BORDER, transform_of
from rich.console import Console
from rich.table import Table
from timm.data import create_dataset
from timm.data.loader import fast_collate
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from vitlab.config import AugmentConfig, DataConfig, RunConfig, TrainConfig
from vitlab.data.datasets import Dataset, files_split
from vitlab.data.preprocess import Preprocess
from vitlab.runs.parts import build_data

Batches = Callable[[], Iterator[Tensor]]
PEERS = {"torchvision": ("torchvision, Pillow", "torchvision, tensors"), "timm": ("timm",)}


def main() -> None:
    """Time everyone in turns, training and evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--subject", choices=["photographs", "cifar"], default="photographs", help="(%(default)s)")
    parser.add_argument("--image_size", type=int, default=224, help="(%(default)s)")
    parser.add_argument("--images", type=int, default=600, help="images a round (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--min_scale", type=float, default=0.25, help="smallest crop's share of the area (%(default)s)")
    parser.add_argument("--interpolation", choices=["bilinear", "bicubic"], default="bilinear", help="(%(default)s)")
    parser.add_argument("--float", action="store_true", help="normalised floats in place of bytes")
    parser.add_argument("--json", type=Path, help="file for the rows (else a table on the terminal)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    folder = ImageFolder(args.data)
    rows = np.random.default_rng(0).choice(len(folder), min(args.images, len(folder)), replace=False).tolist()
    paths = [folder.samples[row][0] for row in rows]
    with tempfile.TemporaryDirectory() as cache:
        found = [
            row for is_training in (True, False) for row in measure(args, paths, rows, cache, is_training=is_training)
        ]
    if args.json:
        write_rows(found, args.json)
    else:
        show(found, args)


def measure(args: argparse.Namespace, paths: list[str], rows: list[int], cache: str, *, is_training: bool) -> list[Row]:
    """Measure all in turns, ours without and with a cache."""
    subjects = {
        "vitlab": ours(args, paths, None, is_training=is_training),
        "vitlab, cached": ours(args, paths, cache, is_training=is_training),
        "torchvision, Pillow": torchvision(args, rows, is_training=is_training, on_tensors=False),
        "torchvision, tensors": torchvision(args, rows, is_training=is_training, on_tensors=True),
        "timm": timm(args, rows, is_training=is_training),
    }
    speeds = in_turns(
        {name: partial(images_per_core_s, batches, len(rows)) for name, batches in subjects.items()},
        rounds=args.rounds,
    )
    found = []
    mode = "training" if is_training else "evaluation"
    for name, label, note in (("vitlab", mode, ""), ("vitlab, cached", f"{mode}, cached", "peers decode again")):
        found += compare(
            {**speeds, "vitlab": speeds[name]},
            PEERS,
            unit="images/s per core",
            work="disk_to_batch",
            subject=args.subject,
            precision="float32" if args.float else "uint8",
            mode=label,
            device="cpu",
            note=note,
        )
    return found


def ours(args: argparse.Namespace, paths: list[str], cache: str | None, *, is_training: bool) -> Batches:
    """Give this package's batches, as a run has them."""
    size = (args.image_size, args.image_size)
    preprocess = Preprocess(image_size=size, interpolation=args.interpolation, crop_fraction=crop_share(args))
    data = DataConfig(workers=0) if cache is None else DataConfig(workers=0, cache="disk", cache_dir=cache)
    config = RunConfig(
        data=data,
        augment=AugmentConfig(crop_min_scale=args.min_scale, crop_padding=BORDER),
        train=TrainConfig(batch_size=args.batch),
    )
    split = files_split(paths)
    dataset = Dataset(classes=("",), splits={"train": split, "val": split})
    built = build_data(config, dataset, preprocess, Console(quiet=True))
    loader = built.train if is_training else built.val
    epochs = itertools.count()
    finish = preprocess.normalize if args.float else (lambda images: images)
    return lambda: (finish(batch.images) for batch in loader.epoch(next(epochs)))


def torchvision(args: argparse.Namespace, rows: list[int], *, is_training: bool, on_tensors: bool) -> Batches:
    """Give torchvision's batches."""
    side = args.image_size
    filtered = {"interpolation": InterpolationMode(args.interpolation), "antialias": True}
    crop: list[Any] = [v2.Resize(int(side / crop_share(args)), **filtered), v2.CenterCrop(side)]
    if is_training:
        crop = [v2.RandomResizedCrop(side, (args.min_scale, 1.0), **filtered), v2.RandomHorizontalFlip()]
        if side <= 64:
            crop = [v2.RandomCrop(side, padding=BORDER, padding_mode="reflect"), v2.RandomHorizontalFlip()]
    tensor = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    steps = [v2.ToImage(), *crop] if on_tensors else [*crop, v2.ToImage()]
    if args.float:
        steps += tensor
    subset = Subset(ImageFolder(args.data, v2.Compose(steps)), rows)
    loader: DataLoader[Any] = DataLoader(subset, args.batch, shuffle=is_training)
    return lambda: (images for images, _ in loader)


def timm(args: argparse.Namespace, rows: list[int], *, is_training: bool) -> Batches:
    """Give timm's batches."""
    transform = transform_of(
        args.image_size,
        is_training=is_training,
        min_scale=args.min_scale,
        interpolation=args.interpolation,
        use_prefetcher=not args.float,
        crop_share=crop_share(args),
    )
    dataset = Subset(create_dataset("", args.data, transform=transform), rows)
    collate = None if args.float else fast_collate
    loader: DataLoader[Any] = DataLoader(dataset, args.batch, shuffle=is_training, collate_fn=collate)
    return lambda: (images for images, _ in loader)


def crop_share(args: argparse.Namespace) -> float:
    """Give the share of an image's side that evaluation sees; small ones are seen whole, as in the CIFAR recipes."""
    return 1.0 if args.image_size <= 64 else 0.9


def images_per_core_s(batches: Batches, count: int) -> float:
    """Run through the batches once."""
    start = time.process_time()
    seen = sum(len(images) for images in batches())
    assert seen == count
    return seen / (time.process_time() - start)


def show(rows: list[Row], args: argparse.Namespace) -> None:
    """Print a table."""
    table = Table(
        "mode", "vitlab, images/s per core", "peer", "theirs", "ratio", title=f"{args.data}, {args.image_size}"
    )
    for row in rows:
        table.add_row(row.mode, f"{row.ours:,.0f}", row.note or row.peer, f"{row.theirs:,.0f}", f"{row.ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
