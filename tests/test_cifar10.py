"""CIFAR-10 as 60,000 JPEGs in folders, and the same pixels packed into CIFAR's own batches: one data set."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.datasets import load_dataset
from vitlab.data.images import read_image
from vitlab.runs.training import run_training

IMAGES_PER_BATCH = 10_000


@pytest.fixture(scope="module")
def cifar_folder(shared_data, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("jpegs")
    with tarfile.open(shared_data("cifar10-jpeg.tar.xz"), "r|xz") as archive:
        archive.extractall(root, filter="data")
    return root / "cifar10"


@pytest.fixture(scope="module")
def cifar_batches(cifar_folder, tmp_path_factory) -> Path:
    """Pack the folder's images, in the folder's order, into CIFAR-10's binary batches."""
    root = tmp_path_factory.mktemp("batches") / "cifar-10-batches-bin"
    root.mkdir()
    classes = sorted(path.name for path in (cifar_folder / "train").iterdir())
    (root / "batches.meta.txt").write_text("\n".join(classes) + "\n", encoding="utf-8")
    names = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
    for split, files in names.items():
        records = np.empty((IMAGES_PER_BATCH * len(files), 1 + 3 * 32 * 32), dtype=np.uint8)
        row = 0
        for label, name in enumerate(classes):
            for path in sorted((cifar_folder / split / name).iterdir()):
                records[row, 0] = label
                records[row, 1:] = read_image(path).transpose(2, 0, 1).reshape(-1)
                row += 1
        assert row == len(records)
        for number, file in enumerate(files):
            records[number * IMAGES_PER_BATCH : (number + 1) * IMAGES_PER_BATCH].tofile(root / file)
    return root


def test_batches_hold_the_folders_pixels_and_splits(cifar_folder, cifar_batches):
    folder, batches = (load_dataset(root, val_fraction=0.1, seed=5) for root in (cifar_folder, cifar_batches))
    assert folder.classes == batches.classes
    assert {name: len(split) for name, split in folder.splits.items()} == {
        "train": 45_000,
        "val": 5_000,
        "test": 10_000,
    }
    for name, split in folder.splits.items():
        packed = batches.splits[name]
        assert np.array_equal(split.labels, packed.labels)
        rows = range(0, len(split), 7)
        assert all(np.array_equal(split.read(row), packed.read(row)) for row in rows)


def test_batches_give_the_folders_first_losses(cifar_folder, cifar_batches, tiny_run, tmp_path):
    """The same run from either: losses, gradients and the score on 5,000 validation images, to the last bit."""
    lines = []
    for root in (cifar_folder, cifar_batches):
        config = tiny_run(
            data__root=str(root), model__image_size=32, train__steps=3, train__run_dir=str(tmp_path / root.name)
        )
        (row,) = (run_training(config) / "metrics.jsonl").read_text().splitlines()
        kept = row.partition('"train/images_per_s"')[0] + row.partition('"val/top1"')[2]
        lines.append(kept)
    assert lines[0] == lines[1]
    assert '"train/grad_norm"' in lines[0]
