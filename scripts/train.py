"""A training script on the Python API: `vitlab train` as code, to copy and change.

python scripts/train.py --data PHOTOS --run_dir runs/mine
"""

import argparse
import os
import sys

from rich.console import Console

import vitlab
from vitlab.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from vitlab.data.datasets import load_dataset
from vitlab.errors import InputError, Interrupted, RunError, is_told_here


def main() -> int:
    """Train a small ViT on a folder, then classify one of its validation images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of images, or digits")
    parser.add_argument("--run_dir", required=True, help="folder for the run")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--image_size", type=int, default=64)
    arguments = parser.parse_args()
    config = RunConfig(
        model=ModelConfig(
            name="vit_tiny",
            image_size=arguments.image_size,
            overrides={"patch_size": arguments.image_size // 8, "embed_dim": 128, "depth": 6, "num_heads": 4},
        ),
        data=DataConfig(root=arguments.data),
        augment=AugmentConfig(crop="resized"),
        optim=OptimConfig(lr=1e-3, clip_grad=1.0),
        train=TrainConfig(run_dir=arguments.run_dir, epochs=arguments.epochs, batch_size=32),
    )
    try:
        run = vitlab.train(config, console=Console())
    except (InputError, RunError, Interrupted) as error:
        if is_told_here(error):
            print(error, file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    if os.environ.get("RANK", "0") != "0":  # of several processes one is enough for the rest
        return 0
    dataset = load_dataset(config.data.root, val_fraction=config.data.val_fraction, seed=config.data.val_seed)
    val, predictor = dataset.splits["val"], vitlab.Predictor(run)
    probabilities = predictor.predict([val.read(0)])[0]
    print(f"{val.paths[0]}: {predictor.classes[probabilities.argmax()]} ({probabilities.max():.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
