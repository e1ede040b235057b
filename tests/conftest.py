"""What several tests need: small image folders, and a configuration that trains on them in seconds."""

import dataclasses
import os
import signal
from functools import partial
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.config import AugmentConfig, DataConfig, ModelConfig, MonitorConfig, OptimConfig, RunConfig, TrainConfig
from vitlab.runs.training import run_training

# What a shell starts in the background ignores it, and so would the runs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # such small networks lose time on more

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
COLORS = {"blue": (30, 40, 200), "green": (30, 180, 40), "red": (200, 40, 30)}


def write_images(folder: Path, color: tuple[int, int, int], count: int, seed: int) -> None:
    """Write noisy images of one colour, 14 high and 18 wide."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for index in range(count):
        pixels = np.clip(generator.normal(color, 40, (14, 18, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03d}.png")


@pytest.fixture(scope="session")
def color_folder(tmp_path_factory) -> Path:
    """A folder with train, val and test of three classes: 13, 5 and 4 images each."""
    root = tmp_path_factory.mktemp("colors")
    for seed, (name, color) in enumerate(COLORS.items()):
        for part, (split, count) in enumerate((("train", 13), ("val", 5), ("test", 4))):
            write_images(root / split / name, color, count, 10 * seed + part)
    return root


@pytest.fixture(scope="session")
def noise_folder(tmp_path_factory) -> Path:
    """A folder like `color_folder`, whose classes are all grey noise: nothing can be learned, and mistakes are left."""
    root = tmp_path_factory.mktemp("noise")
    for seed, name in enumerate(COLORS):
        for part, (split, count) in enumerate((("train", 13), ("val", 5))):
            write_images(root / split / name, (128, 128, 128), count, 10 * seed + part)
    return root


def tiny_config(data: Path, run_dir: Path, **changes) -> RunConfig:
    """Give a small configuration, changed by dotted fields such as `train__epochs=2`."""
    config = RunConfig(
        model=ModelConfig(
            name="vit_tiny",
            image_size=(8, 12),
            overrides={"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.2},
        ),
        data=DataConfig(root=str(data), workers=0, resize_mode="squash"),
        augment=AugmentConfig(crop="padded", crop_padding=1),
        optim=OptimConfig(lr=3e-3),
        train=TrainConfig(run_dir=str(run_dir), epochs=2, batch_size=8, precision="fp32"),
        monitor=MonitorConfig(log_every_steps=1),
    )
    for key, value in changes.items():
        section, field = key.split("__")
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


@pytest.fixture(scope="session")
def color_config(color_folder):
    """Give `tiny_config` on the coloured images; called with the run's folder."""
    return partial(tiny_config, color_folder)


@pytest.fixture
def tiny_run(color_folder, tmp_path):
    """Give `tiny_config` on the coloured images, with its run in the test's own folder."""
    return partial(tiny_config, color_folder, tmp_path / "run")


@pytest.fixture(scope="session")
def finished_run(color_folder, tmp_path_factory) -> Path:
    """Give the folder of a finished run; tests must not change it."""
    return run_training(tiny_config(color_folder, tmp_path_factory.mktemp("finished") / "run", train__epochs=6))


@pytest.fixture(scope="session")
def shared_data():
    """Give a function from a file name to its path in ../shared/data, which skips where it is absent."""

    def find(name):
        if not (SHARED_DATA / name).is_file():
            pytest.skip(f"../shared/data/{name} is not beside the checkout")
        return SHARED_DATA / name

    return find
