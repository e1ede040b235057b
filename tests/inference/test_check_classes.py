"""The quick part of a data check: classes by their sizes, and copies between splits."""

import shutil

import numpy as np
import pytest
from PIL import Image

from vitlab.data.datasets import load_dataset, load_parts
from vitlab.inference import check_classes
from vitlab.inference.check_classes import class_findings, quick_lines


@pytest.fixture
def write(tmp_path):
    """Give a function that writes so many different pictures of a class into a split."""

    def write(split, name, count):
        (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.random.default_rng(len(name) * 1000 + number).integers(0, 256, (5, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / name / f"{split}{number}.bmp")  # all of one size in bytes
        return tmp_path

    return write


def notes(findings):
    return {finding.kind: [case.note for case in finding.cases] for finding in findings}


def test_class_findings_name_each_fault(write):
    write("train", "a", 101)
    write("train", "bb", 10)
    write("train", "ccc", 9)
    write("train", "empty", 0)
    write("val", "a", 1)
    root = write("val", "new", 1)
    assert notes(class_findings(load_parts(root))) == {
        "empty_class": ["empty"],
        "missing_class": ["train has no image of new", "val has no image of bb", "val has no image of ccc"],
        "tiny_class": ["ccc has 9"],
        "imbalance": [
            "a has 101, ccc 9: data.sampling balanced or objective.class_weights may help",
        ],
    }


def test_class_findings_are_none_at_the_limits(write):
    write("train", "a", 99)
    root = write("train", "bb", 10)
    assert class_findings(load_parts(root)) == []


def test_quick_lines_name_copies_between_splits(write, monkeypatch):
    write("train", "a", 12)
    write("train", "bb", 12)
    (write("val", "a", 0) / "val/bb").mkdir()
    root = write("val", "ccccc", 1)
    shutil.move(root / "val/ccccc/val0.bmp", root / "val/a/own.bmp")
    (root / "val/ccccc").rmdir()
    dataset = load_dataset(root, val_fraction=0.1, seed=0)
    assert quick_lines(dataset, "DATA") == []
    shutil.copy(root / "train/a/train3.bmp", root / "val/a/copy.bmp")
    dataset = load_dataset(root, val_fraction=0.1, seed=0)
    assert quick_lines(dataset, "DATA") == [
        f"images in several splits, which makes scores too good: 1, such as {root}/train/a/train3.bmp (train) = "
        f"{root}/val/a/copy.bmp (val); vitlab check DATA lists all"
    ]
    monkeypatch.setattr(check_classes, "_MOST_FILES", 25)  # 26 files of one size
    assert quick_lines(dataset, "DATA") == []


def test_quick_lines_say_what_is_small_in_a_line_each(write):
    write("train", "a", 40)
    root = write("train", "bb", 3)
    lines = quick_lines(load_dataset(root / "train", val_fraction=0.1, seed=0), "DATA")
    assert lines == [
        "classes with fewer than 10 images in train: bb has 2",
        "classes of very unequal size in train: a has 36, bb 2: data.sampling balanced or objective.class_weights "
        "may help",
    ]
