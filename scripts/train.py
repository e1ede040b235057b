"""A training script on the Python API: `vitlab train` as code, to copy and change.

python scripts/train.py --data PHOTOS --run runs/mine
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

import vitlab
from vitlab.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from vitlab.errors import InputError


def main() -> int:
    """Train a small ViT on a folder, then classify one of its images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of images, or digits")
    parser.add_argument("--run", required=True, help="folder for the run")
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
        train=TrainConfig(run_dir=arguments.run, epochs=arguments.epochs, batch_size=32),
    )
    try:
        run = vitlab.train(config, console=Console())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    predictor = vitlab.Predictor(run)
    preview = Path(run) / "train_batch.jpg"
    probabilities = predictor.predict([preview])[0]
    print(f"{preview}: {predictor.classes[probabilities.argmax()]} ({probabilities.max():.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
