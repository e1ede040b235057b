r"""Does it help to learn to draw before learning to read? And are the drawings any good? An ImageGPT answers.

    python scripts/draw_first.py --config configs/digits/imagegpt.yaml --out runs/draw_first \
        --judge configs/digits/vit.yaml

It trains the recipe (next pixels), then, for each seed, classes and pixels together (objective `joint`) from those
weights and from scratch, with equally many steps, and compares the two on the test split. With --judge a network of
another recipe, trained on the same data, reads 100 samples: how many classes it finds with a confidence of 0.9, and
whether a sample equals a training image. Runs that are finished are not made again.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

import vitlab as package
from vitlab.__main__ import main as vitlab
from vitlab.data.datasets import load_dataset
from vitlab.data.palette import decode, encode
from vitlab.models.files import load_model
from vitlab.models.network import PixelNetwork

CONFIDENCE = 0.9
SAMPLES = 100


def main() -> int:
    """Make the runs that are missing, then say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="recipe of an ImageGPT with objective next_pixel")
    parser.add_argument("--data", default="digits", help="what it learns to draw")
    parser.add_argument("--labelled", help="what it learns to read; default: the same")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    parser.add_argument("--reading", nargs="*", default=[], help="options of the joint runs, such as train.epochs=20")
    parser.add_argument("--judge", help="recipe of the network that reads the samples")
    args = parser.parse_args()
    draw, labelled = args.out / "draw", args.labelled or args.data
    reading = [word for option in args.reading for word in f"--{option}".split("=")]
    joint = [*reading, "--objective.name", "joint", "--train.seeds", *args.seeds, "--monitor.drawings", "0"]
    jobs = [
        train(args.config, args.data, draw),
        train(args.config, labelled, args.out / "first", "--model.weights", str(draw), *joint),
        train(args.config, labelled, args.out / "scratch", *joint),
        ["compare", str(args.out / "first"), str(args.out / "scratch"), "--json", str(args.out / "compare.json")],
    ]
    picture, array = str(args.out / "samples.png"), str(args.out / "samples.npy")
    jobs.append(["sample", str(draw), "--count", str(SAMPLES), "--out", picture, "--npy", array, "--precision", "fp32"])
    if args.judge:
        jobs.append(train(args.judge, args.data, args.out / "judge"))
    for job in jobs:
        if (code := vitlab(job)) not in (0, 4):  # of compare, 4 says that the runs differ, as they should
            return code
    if args.judge:
        verdict = judge(args.out, args.data)
        (args.out / "judge.json").write_text(json.dumps(verdict, indent=1) + "\n")
        print(*(f"{name}: {value}" for name, value in verdict.items()), sep="\n")
    return 0


def train(config: str, data: str, run: Path, *more: str) -> list[str]:
    """Give the command line of a run."""
    return ["train", "--config", config, "--data.root", data, "--train.run_dir", str(run), *more]


def judge(out: Path, data: str) -> dict[str, int]:
    """Let the judge read the samples, and look for them among the training images."""
    samples = np.load(out / "samples.npy")
    predictor = package.Predictor(out / "judge")
    shown = np.repeat(samples, 3, axis=3) if samples.shape[3] == 1 else samples
    probabilities = predictor.predict(list(shown))
    sure = probabilities.max(axis=1) >= CONFIDENCE
    classes = {predictor.classes[index] for index in probabilities.argmax(axis=1)[sure]}
    file = load_model(out / "draw")
    assert isinstance(file.network, PixelNetwork)
    palette = file.network.palette
    split = load_dataset(data, val_fraction=0.1, seed=0).splits["train"]
    seen = set()
    for index in range(len(split)):
        pixels = torch.from_numpy(file.preprocess.apply(split.read(index))).float() / 127.5 - 1
        seen.add(decode(encode(pixels, palette), palette).numpy().tobytes())
    copies = sum(sample.tobytes() in seen for sample in samples)
    return {"samples": len(samples), "sure": int(sure.sum()), "classes": len(classes), "copies": copies}


if __name__ == "__main__":
    sys.exit(main())
