"""Train several networks on 1, 10 and 100 % of the training images: what each needs of data, as table and plot.

    python scripts/data_need.py --data CIFAR --out runs/need

CIFAR is a folder with train and test inside. The recipes are those of configs/cifar10; a smaller share has more epochs
(and so fewer steps still). The shares are nested and drawn by class with seed 0. Validation is cut from each share, the
test split is scored once, with each run's best weights. The same command goes on after a stop.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console

from vitlab.__main__ import main as vitlab
from vitlab.checks import require
from vitlab.data.datasets import load_dataset
from vitlab.errors import InputError

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RECIPES = {"vit": "ViT", "swin": "Swin", "davit": "DaViT", "resnet18": "timm/resnet18"}
EPOCHS = {1: 80, 10: 15, 100: None}
"""Percent of the training images: epochs; None for the recipe's own."""


def main() -> int:
    """Make the runs that are missing, then write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train and test inside")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs, table and plot")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--shares", nargs="+", type=int, choices=EPOCHS, default=list(EPOCHS), help="percent")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for share in args.shares:
        try:
            manifest = write_share(args.data, share, args.out)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        for recipe in args.recipes:
            run = args.out / f"{recipe}-{share}"
            if not (run / "test.json").exists() and (code := train_and_score(recipe, share, manifest, run)):
                return code
    rows = [row for recipe in RECIPES for share in EPOCHS if (row := read(args.out, recipe, share))]
    (args.out / "need.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, args.out / "need.png")
    Console().print(table(rows), markup=False, highlight=False)
    return 0


def write_share(data: Path, share: int, out: Path) -> Path:
    """Write the manifest of a share of the training images and of the whole test split."""
    path = out / f"share-{share}.csv"
    dataset = load_dataset(str(data), val_fraction=0.1, seed=0)
    first = Path(dataset.splits["train"].paths[0])
    require(first.is_file(), f"{data} holds no image files ({first.name}): give a folder of train/CLASS and test/CLASS")
    rng = np.random.default_rng(0)
    train = [split for name, split in dataset.splits.items() if name != "test"]  # what was cut off goes back
    images = sorted((str(p), int(label)) for split in train for p, label in zip(split.paths, split.labels, strict=True))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        for index, name in enumerate(dataset.classes):
            mine = [image for image, label in images if label == index]
            for i in sorted(rng.permutation(len(mine))[: len(mine) * share // 100]):
                writer.writerow([Path(mine[i]).resolve(), name, "train"])
        test = dataset.splits["test"]
        for image, label in zip(test.paths, test.labels, strict=True):
            writer.writerow([Path(image).resolve(), dataset.classes[label], "test"])
    return path


def train_and_score(recipe: str, share: int, manifest: Path, run: Path) -> int:
    """Train a recipe on a share and score its best weights on the test split; give the exit code."""
    epochs = EPOCHS[share]
    length = [] if epochs is None else ["--train.epochs", str(epochs)]
    often = max(1, (epochs or 1) // 15)
    config = Path(__file__).parents[1] / f"configs/cifar10/{recipe}.yaml"
    train = ["train", "--config", config, "--data.root", manifest, "--train.run_dir", run, *length]
    train += ["--train.evaluate_every_epochs", often]
    code = 0 if (run / "done").exists() else vitlab([str(word) for word in train])
    if code:
        return code
    (run / "done").touch()
    scores = ["evaluate", run, "--data", manifest, "--split", "test", "--json", run / "test.json"]
    return vitlab([str(word) for word in scores])


def read(out: Path, recipe: str, share: int) -> dict[str, Any] | None:
    """Give a finished run's row."""
    run = out / f"{recipe}-{share}"
    if not (run / "test.json").exists():
        return None
    scores = json.loads((run / "test.json").read_text())
    return {"recipe": recipe, "share": share, "top1": scores["top1"], "count": scores["count"]}


def table(rows: list[dict[str, Any]]) -> str:
    """Give a Markdown table, a row a network."""
    top1 = {(row["recipe"], row["share"]): f"{row['top1']:.1%}" for row in rows}
    lines = [" | ".join(["", "network", *(f"{share} %" for share in EPOCHS), ""]).strip(), "|---" * 4 + "|"]
    for recipe, name in RECIPES.items():
        lines.append(" | ".join(["", name, *(top1.get((recipe, share), "") for share in EPOCHS), ""]).strip())
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw top-1 over the share of the images, a line a network."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for recipe, marker in zip(RECIPES, "osD^", strict=True):
        mine = [row for row in rows if row["recipe"] == recipe]
        axes.plot(
            [row["share"] for row in mine], [100 * row["top1"] for row in mine], marker=marker, label=RECIPES[recipe]
        )
    axes.set(xscale="log", xticks=list(EPOCHS), xlabel="training images, %", ylabel="test top-1, %")
    axes.set_xticklabels([str(share) for share in EPOCHS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
