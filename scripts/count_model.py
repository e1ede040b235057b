"""Score a count model of colours on a folder: the loss that an ImageGPT has to beat on the same pixels.

    python scripts/count_model.py --data CIFAR --image_size 16
    python scripts/count_model.py --data CIFAR --checkpoint runs/gpt

A pixel's colour given its left and its upper neighbour, counted on the training images and interpolated with the colour
given the left one, given the upper one, given nothing, and the uniform distribution. The weights of the interpolation
depend on how often the context was seen, and are fitted by expectation maximisation to a tenth of the training images
that is not counted. No more images are read than take 256 MiB. The palette is the checkpoint's, or fitted as training
fits it. The scored split chooses nothing.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitlab.config import DataConfig
from vitlab.data.datasets import load_dataset
from vitlab.data.palette import encode, fit_palette, to_unit
from vitlab.data.preprocess import Preprocess
from vitlab.data.sample import read_sample, spread
from vitlab.engine.objectives import as_pixel_network
from vitlab.errors import InputError
from vitlab.models.files import load_model

ROUNDS = 30
Tokens = NDArray[np.int64]


def main() -> int:
    """Print one line with the loss; give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of images or built-in name")
    parser.add_argument("--image_size", type=int, default=16, help="side in pixels (default: %(default)s)")
    parser.add_argument("--num_colors", type=int, default=512)
    parser.add_argument("--checkpoint", type=Path, help="an ImageGPT: its palette, size and split")
    parser.add_argument("--split", choices=("val", "test"), default="val", help="split to score (default: %(default)s)")
    args = parser.parse_args()
    start_s = time.perf_counter()
    try:
        counted, tuned, scored, num_colors = read_tokens(args)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    model = CountModel(counted, num_colors)
    model.tune(tuned)
    nats = -np.log(model.probabilities(scored)).mean()
    print(
        f"count model of {num_colors} colours given left and upper neighbour: {nats:.4f} nats a pixel "
        f"({nats / math.log(2):.4f} bits) on {len(scored)} {args.split} images, counted on {len(counted)}, "
        f"{time.perf_counter() - start_s:.0f} s"
    )
    return 0


def read_tokens(args: argparse.Namespace) -> tuple[Tokens, Tokens, Tokens, int]:
    """Give the tokens (N, H, W) to count, to tune and to score on, and the number of colours."""
    side = args.image_size
    preprocess = Preprocess(image_size=(side, side), resize_mode="squash", mean=(0.5,) * 3, std=(0.5,) * 3)
    palette, val_fraction, seed = None, DataConfig.val_fraction, DataConfig.val_seed
    if args.checkpoint is not None:
        model = load_model(args.checkpoint)
        preprocess, palette = model.preprocess, as_pixel_network(model.network).palette
        val_fraction, seed = model.data.get("val_fraction", val_fraction), model.data.get("seed", seed)
    dataset = load_dataset(args.data, val_fraction=val_fraction, seed=seed)
    images = {}
    for name in ("train", args.split):
        images[name], _ = read_sample(
            dataset.splits[name],
            preprocess,
            max_images=10**9,
            seed=0,
            workers=None,
            on_error="skip",
            on_images=lambda done, total: None,
        )
    if palette is None:
        palette = fit_palette(spread(images["train"], 5000), args.num_colors, seed=0)
    tokens = {name: np.stack([encode(to_unit(image), palette).numpy() for image in images[name]]) for name in images}
    train = tokens["train"]
    rows = np.random.default_rng(0).permutation(len(train))
    tenth = len(train) // 10
    return train[rows[tenth:]], train[rows[:tenth]], tokens[args.split], len(palette)


class CountModel:
    """Interpolated counts; contexts are (left and upper), left, upper, none. Outside the image lies another colour."""

    def __init__(self, tokens: Tokens, num_colors: int) -> None:
        """Count colours after each context in tokens (N, H, W)."""
        self.num_colors = num_colors
        self.tables = []
        colors = tokens.ravel()
        for context in contexts(tokens, num_colors):
            pairs, counts = np.unique(context * num_colors + colors, return_counts=True)
            seen, totals = np.unique(context, return_counts=True)
            self.tables.append((pairs, counts, seen, totals))

    def experts(self, tokens: Tokens) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Give each pixel's probability (M, 5) under each table and the uniform one, and the bin of its context."""
        colors, columns, levels = tokens.ravel(), [], []
        for context, (pairs, counts, seen, totals) in zip(contexts(tokens, self.num_colors), self.tables, strict=True):
            of_pair, of_context = (
                look_up(pairs, counts, context * self.num_colors + colors),
                look_up(seen, totals, context),
            )
            columns.append(of_pair / np.maximum(of_context, 1))
            levels.append(np.minimum(np.log2(of_context + 1).astype(np.int64), 15))
        columns.append(np.full(len(colors), 1 / self.num_colors))
        return np.stack(columns, axis=1), levels[0]

    def tune(self, tokens: Tokens) -> None:
        """Fit the weights of the interpolation, by how often the context of both neighbours was seen."""
        experts, bucket = self.experts(tokens)
        self.weights = np.full((16, experts.shape[1]), 1 / experts.shape[1])
        for _ in range(ROUNDS):
            shares = experts * self.weights[bucket]
            shares /= shares.sum(axis=1, keepdims=True)
            for index in range(16):
                if (bucket == index).any():
                    self.weights[index] = shares[bucket == index].mean(axis=0)

    def probabilities(self, tokens: Tokens) -> NDArray[np.float64]:
        """Give each pixel's probability."""
        experts, bucket = self.experts(tokens)
        mixed: NDArray[np.float64] = (experts * self.weights[bucket]).sum(axis=1)
        return mixed


def contexts(tokens: Tokens, num_colors: int) -> list[Tokens]:
    """Give the four contexts of each pixel as numbers (M,)."""
    left = np.pad(tokens, ((0, 0), (0, 0), (1, 0)), constant_values=num_colors)[:, :, :-1].ravel()
    upper = np.pad(tokens, ((0, 0), (1, 0), (0, 0)), constant_values=num_colors)[:, :-1].ravel()
    return [left * (num_colors + 1) + upper, left, upper, np.zeros_like(left)]


def look_up(keys: Tokens, values: Tokens, wanted: Tokens) -> Tokens:
    """Give the values of sorted keys; 0 where one is not there."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


if __name__ == "__main__":
    sys.exit(main())
