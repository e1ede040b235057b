"""Ask of each map of `vitlab explain` whether it finds what a network looks at: delete what it ranks highest.

Trains a small ViT, Swin, DaViT and ImageGPT on scikit-learn's digits, a minute in all, and prints how far the true
class's probability falls when the tenth of the cells that a map ranks highest is deleted, and when a random tenth is.
The cells are the networks' finest patches, 8 x 8 of them. To delete is to replace by the mean of the image's pixels:
black, the usual choice, is what most of a digit is. The 359 test digits, which chose nothing, are scored.

    python scripts/deletion_test.py
    python scripts/deletion_test.py --epochs 10 --draws 5 --out runs/deletion   # keeps the networks
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import reduce, repeat
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vitlab.config import AugmentConfig, DataConfig, ModelConfig, ObjectiveConfig, OptimConfig, RunConfig, TrainConfig
from vitlab.data.datasets import load_dataset
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.inference.attention_maps import attention_layers, attention_maps
from vitlab.inference.attribution import explain_map, surprisal, to_pixels
from vitlab.models.files import load_model
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import Network
from vitlab.runs.training import run_training

CELLS = 8
DELETED = round(CELLS * CELLS / 10)
SHARED = {"embed_dim": 48, "num_heads": 4, "depth": 4}
PYRAMID = {"num_heads": [3, 6], "window_size": 4}
NETWORKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ViT, class token": ("vit_tiny", 16, {**SHARED, "patch_size": 2}),
    "ViT, mean": ("vit_tiny", 16, {**SHARED, "patch_size": 2, "pool": "mean"}),
    "Swin": ("swin_tiny", 16, {**PYRAMID, "patch_size": 2, "embed_dim": 48, "depths": [2, 2]}),
    "DaViT": ("davit_tiny", 16, {**PYRAMID, "stem_stride": 2, "embed_dims": [48, 96], "depths": [1, 1]}),
    "ImageGPT": ("imagegpt_small", 8, {**SHARED, "num_colors": 17}),
}


@dataclass(frozen=True)
class Row:
    """A line of the table: falls of the true class's probability."""

    family: str
    map: str
    top_tenth: float
    random_tenth: float
    standard_error: float
    """Of `random_tenth`, over the draws."""


def main() -> None:
    """Train, delete, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="of each network (%(default)s)")
    parser.add_argument("--draws", type=int, default=20, help="of random tenths for each image (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the runs; those that lie there are not trained again")
    args = parser.parse_args()
    if args.draws < 2:
        parser.error(f"--draws is {args.draws}: give 2 or more, for the error over the draws")
    torch.set_num_threads(1)
    table = Table("family", "map", "top tenth", "random tenth", "accuracy")
    with tempfile.TemporaryDirectory() as temporary:
        for family in NETWORKS:
            run = (args.out or Path(temporary)) / family.replace(",", "").replace(" ", "-")
            if not (run / "best.safetensors").is_file():
                run_training(run_config(family, run, epochs=args.epochs), console=Console(quiet=True))
            model = load_model(run)
            images, labels = digits(model.preprocess)
            accuracy = float((model.network(model.preprocess.normalize(images)).argmax(1) == labels).float().mean())
            for row in rows(family, model.network, model.preprocess, images, labels, draws=args.draws):
                noise = f"{100 * row.random_tenth:.1f} +- {100 * row.standard_error:.1f}"
                table.add_row(row.family, row.map, f"{100 * row.top_tenth:.1f}", noise, f"{100 * accuracy:.1f}")
    Console(width=110).print(table)
    Console(width=110).print("points that the true class's probability falls by; standard error over the draws")


def run_config(family: str, run: Path, *, epochs: int) -> RunConfig:
    """Give the configuration of a small network on the digits."""
    name, size, overrides = NETWORKS[family]
    pixels = name.startswith("imagegpt")
    mean, std = (None, None) if pixels else ((0.31,), (0.37,))
    return RunConfig(
        model=ModelConfig(name=name, image_size=size, overrides=overrides),
        data=DataConfig(root="digits", channels=1, resize_mode="squash", workers=0, mean=mean, std=std),
        augment=AugmentConfig(crop="none", hflip=0.0),
        objective=ObjectiveConfig(name="joint") if pixels else ObjectiveConfig(),
        optim=OptimConfig(lr=2e-3, weight_decay=0.05, clip_grad=1.0),
        train=TrainConfig(run_dir=str(run), epochs=epochs, batch_size=64, precision="fp32"),
    )


def digits(preprocess: Preprocess) -> tuple[Tensor, Tensor]:
    """Give the test digits, uint8 `(N, 1, H, W)`, and their classes."""
    split = load_dataset("digits", val_fraction=DataConfig.val_fraction, seed=DataConfig.val_seed).splits["test"]
    with closing(Loader(split, EvalTransform(preprocess), batch_size=len(split), workers=0)) as loader:
        batch = next(iter(loader.epoch(0)))
    return batch.images, batch.labels


@torch.inference_mode()
def rows(
    family: str, network: Network, preprocess: Preprocess, images: Tensor, labels: Tensor, *, draws: int
) -> Iterator[Row]:
    """Score every map of a network on images, uint8 `(N, C, H, W)`."""
    inputs = preprocess.normalize(images)
    before = true_class(network, inputs, labels)
    generator = torch.Generator().manual_seed(0)
    falls = []
    for _ in range(draws):
        ranks = torch.rand(len(images), CELLS, CELLS, generator=generator)
        falls.append(float((before - true_class(network, delete(inputs, ranks), labels)).mean()))
    random = torch.tensor(falls)
    error = float(random.std() / len(falls) ** 0.5)
    for name, ranks in maps_of(network, inputs).items():
        cells = reduce(ranks, "b (h y) (w x) -> b h w", "mean", h=CELLS, w=CELLS)
        fall = before - true_class(network, delete(inputs, cells), labels)
        yield Row(family, name, float(fall.mean()), float(random.mean()), error)


def maps_of(network: Network, inputs: Tensor) -> dict[str, Tensor]:
    """Give each map of `vitlab explain` that stands for a whole network, `(B, H, W)`."""
    maps = {"gradient": explain_map(network, inputs)}
    attention = attention_maps(network, inputs, attention_layers(network))
    if attention.rollout_map is not None:
        maps["rollout"] = to_pixels(network, attention.rollout_map)
    for name, heads in attention.heads.items():
        maps[name] = to_pixels(network, heads.mean(dim=1))
    if isinstance(network, ImageGPT):
        maps["surprisal"] = surprisal(network, inputs)
    return maps


def delete(inputs: Tensor, ranks: Tensor) -> Tensor:
    """Put the image's mean in the cells of images `(B, C, H, W)` that a map `(B, 8, 8)` ranks in its top tenth."""
    deleted = torch.zeros(len(ranks), CELLS * CELLS, dtype=torch.bool)
    deleted.scatter_(1, ranks.flatten(1).topk(DELETED, dim=1).indices, value=True)
    down, right = inputs.shape[2] // CELLS, inputs.shape[3] // CELLS
    mask = repeat(deleted, "b (h w) -> b 1 (h y) (w x)", h=CELLS, y=down, x=right)
    return torch.where(mask, inputs.mean(dim=(2, 3), keepdim=True), inputs)


def true_class(network: Network, inputs: Tensor, labels: Tensor) -> Tensor:
    """Give the probability of each image's true class, `(B,)`."""
    probabilities: Tensor = network(inputs).softmax(dim=1)
    return probabilities.gather(1, labels[:, None])[:, 0]


if __name__ == "__main__":
    main()
