"""Measure whole jobs beside timm's, each in a process of its own by the clock, in turns, start-up included.

- `epoch`: `vitlab train` for one epoch, beside timm's loaders, network and AdamW in a plain loop (`peer_jobs.py`). Same
  folder, shape, batches, crops, workers and precision, and one score of the same few validation images on both sides.
  Ours also draws its curves and a confusion matrix, and saves a state to go on from.
- `predict_folder`: `vitlab predict` on a folder of photographs, beside timm's loader and network in such a loop; the
  weights are the same, float32, and both write the five likeliest classes of each image as CSV.
- `cold_start`: `vitlab --help` beside the help of a script that imports what timm's own do; the first training step of
  a compiled run with an empty cache of the compiler (`first_step.py`: ours compiles its blocks, theirs the whole
  network); and prediction of one image as above.

timm comes as it is and with its fused attention off, which is quicker on some processors. About six minutes on two
cores, two of them for the compiler.

    python scripts/bench_jobs.py --photos trashnet --cifar cifar10 --json jobs.json
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from measuring import Row, compare, in_turns, write_rows
from safetensors.torch import save_file
from torch import nn

from vitlab.config import AugmentConfig, DataConfig, ModelConfig, MonitorConfig, OptimConfig, RunConfig, TrainConfig
from vitlab.data.images import list_images
from vitlab.data.loader import default_workers
from vitlab.data.preprocess import Preprocess
from vitlab.models.catalog import create_model
from vitlab.models.files import save_model

HERE = Path(__file__).parent
VITLAB = [sys.executable, "-m", "vitlab"]
PEER = [sys.executable, str(HERE / "peer_jobs.py")]
SETTINGS = {"timm, fused": {}, "timm, unfused": {"TIMM_FUSED_ATTN": "0"}}
"""Environments that timm's scripts run in."""
PEERS = {"timm": ("timm, fused",), "timm best": tuple(SETTINGS)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one epoch trains on; the network is a ViT-Tiny."""

    image_size: int
    patch_size: int
    batch_size: int


SHAPES = {
    "photographs": Shape(image_size=224, patch_size=16, batch_size=32),
    "cifar": Shape(image_size=32, patch_size=4, batch_size=128),
}


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = ["epoch", "predict_folder", "cold_start"]
    parser.add_argument("--works", nargs="+", choices=works, default=works, help="(%(default)s)")
    parser.add_argument("--photos", type=Path, help="folder of photographs, train and val with class folders in them")
    parser.add_argument("--cifar", type=Path, help="folder of images of 32x32 pixels, likewise or with test for val")
    parser.add_argument("--photo_batches", type=int, default=9, help="batches of 32 an epoch (%(default)s)")
    parser.add_argument("--cifar_batches", type=int, default=12, help="batches of 128 an epoch (%(default)s)")
    parser.add_argument("--predicted", type=int, default=160, help="photographs that are classified (%(default)s)")
    parser.add_argument("--compiled", nargs="*", default=["vit_small"], help="networks that are compiled (%(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="of training (%(default)s)")
    parser.add_argument("--workers", type=int, default=default_workers(), help="loader processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of short jobs; long ones have one less (%(default)s)")
    parser.add_argument("--uncounted", type=int, default=1, help="rounds of short jobs before (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows (else the terminal)")
    args = parser.parse_args()
    folders = {name: path for name in SHAPES if (path := args.photos if name == "photographs" else args.cifar)}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        if "epoch" in args.works:
            for name, folder in folders.items():
                rows += epoch(name, folder, args, Path(scratch))
        if "predict_folder" in args.works and args.photos:
            rows += predict(args, Path(scratch), count=args.predicted)
        if "cold_start" in args.works:
            rows += help_text(args)
            rows += [row for model in args.compiled for row in first_step(model, args, Path(scratch))]
            if args.photos:
                rows += predict(args, Path(scratch), count=1)
    write_rows(rows, args.json)


def epoch(name: str, source: Path, args: argparse.Namespace, scratch: Path) -> list[Row]:
    """Train one epoch."""
    shape = SHAPES[name]
    count = shape.batch_size * (args.photo_batches if name == "photographs" else args.cifar_batches)
    folder, recipe = scratch / name, scratch / f"{name}.yaml"
    validation = next(path for split in ("val", "test") if (path := source / split).is_dir())
    num_classes = link_images(source / "train", folder / "train", count)
    link_images(validation, folder / "val", shape.batch_size)
    config = RunConfig(
        model=ModelConfig(name="vit_tiny", image_size=shape.image_size, overrides={"patch_size": shape.patch_size}),
        data=DataConfig(root=str(folder), workers=args.workers),
        augment=AugmentConfig(crop_min_scale=0.25),
        optim=OptimConfig(lr=5e-4, weight_decay=0.05),
        train=TrainConfig(epochs=1, batch_size=shape.batch_size, precision=args.precision, device=args.device),
        monitor=MonitorConfig(tensorboard=False),
    )
    recipe.write_text(config.to_yaml())
    runs = (scratch / f"{name}-{number}" for number in range(1000))
    theirs = [*PEER, "train", folder, "--out", scratch / "peer.pth", *network_options(shape, num_classes)]
    theirs += ["--workers", args.workers, "--device", args.device]
    theirs += ["--batch_size", shape.batch_size, *(["--amp"] if args.precision == "bf16" else [])]
    subjects = {"vitlab": lambda: timed([*VITLAB, "train", "--config", recipe, "--train.run_dir", next(runs)])}
    figures = in_turns(subjects | with_settings(theirs), rounds=max(args.rounds - 1, 1), uncounted=0)
    note = f"{count} images at {shape.image_size}"
    return rows_of(figures, args, work="epoch", subject=name, precision=args.precision, mode="training", note=note)


def predict(args: argparse.Namespace, scratch: Path, *, count: int) -> list[Row]:
    """Classify a folder of photographs with random weights."""
    shape, folder = SHAPES["photographs"], scratch / f"{count}-photographs"
    link_images(args.photos, folder, count)
    ours, weights = scratch / "ours.safetensors", scratch / "theirs.safetensors"
    write_weights(ours, weights, num_classes=10, image_size=shape.image_size)
    more = ["--workers", args.workers, "--device", args.device]
    own = [*VITLAB, "predict", ours, folder, "--out", scratch / "ours.csv", *more]
    theirs = [*PEER, "predict", folder, "--checkpoint", weights, "--out", scratch / "theirs.csv", *more]
    subjects = {"vitlab": lambda: timed(own)} | with_settings([*theirs, *network_options(shape, 10)])
    figures = in_turns(subjects, rounds=args.rounds, uncounted=args.uncounted)
    if count == 1:
        return rows_of(figures, args, work="cold_start", subject="vit_tiny", precision="fp32", mode="first prediction")
    note = f"vit_tiny, {count} images"
    return rows_of(
        figures, args, work="predict_folder", subject="photographs", precision="fp32", mode="evaluation", note=note
    )


def help_text(args: argparse.Namespace) -> list[Row]:
    """Ask for help."""
    subjects = {"vitlab": lambda: timed([*VITLAB, "--help"]), "timm": lambda: timed([*PEER, "--help"])}
    figures = in_turns(subjects, rounds=args.rounds, uncounted=args.uncounted)
    return rows_of(
        figures, args, peers={"timm": ("timm",)}, work="cold_start", subject="vitlab --help", precision="", mode=""
    )


def first_step(model: str, args: argparse.Namespace, scratch: Path) -> list[Row]:
    """Compile a network and make its first step."""

    def measure(subject: str) -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as cache:
            command = [sys.executable, str(HERE / "first_step.py"), subject, model, "--device", args.device]
            return float(run(command, {"TORCHINDUCTOR_CACHE_DIR": cache}))

    subjects = {name: partial(measure, name) for name in ("vitlab", *SETTINGS)}
    figures = in_turns(subjects, rounds=1, uncounted=0)
    return rows_of(figures, args, work="cold_start", subject=model, precision="bf16", mode="first step, compiled")


def rows_of(
    figures: Mapping[str, Sequence[float]],
    args: argparse.Namespace,
    peers: Mapping[str, Sequence[str]] = PEERS,
    **columns: str,
) -> list[Row]:
    """Give the rows of seconds."""
    return compare(figures, peers, unit="s", device=args.device, **columns)


def with_settings(command: Sequence[object]) -> dict[str, Callable[[], float]]:
    """Give what times timm's command in each of its settings."""
    return {name: partial(timed, command, environment) for name, environment in SETTINGS.items()}


def timed(command: Sequence[object], environment: Mapping[str, str] | None = None) -> float:
    """Give the seconds that a command takes."""
    began = time.perf_counter()
    run(command, environment or {})
    return time.perf_counter() - began


def run(command: Sequence[object], environment: Mapping[str, str]) -> str:
    """Run a command, and give what it prints.

    Raises:
        RuntimeError: it failed; the message has what it said.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def network_options(shape: Shape, num_classes: int) -> list[object]:
    """Name the network to timm's script."""
    sizes = ["--image_size", shape.image_size, "--patch_size", shape.patch_size]
    return ["--model", "vit_tiny_patch16_224", "--num_classes", num_classes, *sizes]


def link_images(source: Path, into: Path, count: int) -> int:
    """Make a folder of links to some images, spread over the classes; give the number of folders that hold them."""
    images, _ = list_images([source])
    chosen = [images[row] for row in np.linspace(0, len(images) - 1, count).astype(int)]
    links = {into / image.relative_to(source): image.resolve() for image in chosen}
    for link, image in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(image)
    return len({link.parent for link in links})


def write_weights(ours: Path, theirs: Path, *, num_classes: int, image_size: int) -> None:
    """Write the same random weights as a model file and as timm's; the parameters bear the same names."""
    network = create_model("vit_tiny", num_classes=num_classes, image_size=image_size)
    nn.init.normal_(network.get_classifier().weight, std=0.2)  # type: ignore[arg-type]  # a fresh one is 0
    preprocess = Preprocess(image_size=(image_size, image_size))
    classes = [str(label) for label in range(num_classes)]
    save_model(ours, network, classes=classes, preprocess=preprocess, metrics={}, data={})
    save_file(network.state_dict(), theirs)


if __name__ == "__main__":
    main()
