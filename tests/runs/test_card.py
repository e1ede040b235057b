import dataclasses
import re
import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

from vitlab.__main__ import main
from vitlab.config import ObjectiveConfig, RunConfig
from vitlab.data.splits import ArraySplit, Dataset
from vitlab.engine.run_folder import RunFolder
from vitlab.errors import Finished
from vitlab.models.files import load_model
from vitlab.runs.card import card_text
from vitlab.runs.training import run_training
from vitlab.text import markdown

HOSTILE = ("a|b", "`rm`", "<script>alert(1)</script>", "[x](http://y)", "line\nbreak", "../x", "\x1b[31mred", "plain")
# Of each class: images of val, right ones, images that got its name.
TALLY = dict.fromkeys(HOSTILE, (40, 36, 40)) | {"plain": (4, 1, 2)}


def table_rows(text, first):
    """Give the cells of the rows that begin with a cell; a pipe behind a backslash parts none."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in row] for row in rows]


def per_class(name, count, right, named):
    return {
        "class": name,
        "count": count,
        "precision": right / named,
        "recall": right / count,
        "recall_interval": [0.25, 0.75],
        "f1": 2 * right / (count + named),
    }


def split(name, counts):
    labels = np.repeat(np.arange(len(HOSTILE)), counts)
    images = np.zeros((len(labels), 2, 3, 3), np.uint8)
    return ArraySplit(name=name, labels=labels, paths=[""] * len(labels), images=images)


def hostile_card(**objective):
    config = dataclasses.replace(RunConfig(), objective=ObjectiveConfig(**objective))
    counts = {"train": [300] * 7 + [20], "val": [40] * 7 + [4]}
    record = {
        "model": {"name": "vit_tiny", "config": {"image_size": [12, 20], "num_classes": 8, "depth": 2}},
        "preprocess": {"mean": [0.5]},
        "weights": "ema",
        "version": "0.1.0",
        "temperature": 1.25,
        "data": {"fingerprint": {"counts": {}, "sha256": {"train": "a" * 64, "val": "b" * 64}}},
        "metrics": {"step": 30, "epoch": 3, "count": 284, "loss": 0.5},
    }
    if config.objective.classifies:
        tally = [per_class(name, *numbers) for name, numbers in TALLY.items()]
        record["metrics"] |= {"top1": 253 / 284, "ece": 0.1, "brier": 0.2, "per_class": tally}
    else:
        record["metrics"] |= {"nats_per_pixel": 0.5, "bits_per_pixel": 0.7213}
    rows = [{"step": 10 * n, "epoch": n, "val/loss": 1.0, "train/images_per_s": 53.0} for n in (1, 2, 3, 4)]
    data = Dataset(classes=HOSTILE, splits={name: split(name, number) for name, number in counts.items()})
    return card_text(record, rows, config, data, parameters=1234, machine="cpu in float32")


def test_markdown_escapes_what_would_be_markup():
    assert markdown("a|b `c` <d> [e](f) _g_ *h*") == r"a\|b \`c\` \<d\> \[e\](f) \_g\_ \*h\*"
    assert markdown("line\n# break\x1b") == r"line\\n\# break\\x1b"


def test_card_shows_hostile_names_as_they_are():
    text = hostile_card()
    for line in text.splitlines():
        assert not re.search(r"(?<!\\)<", line)
        assert "\x1b" not in line
    for name in HOSTILE:
        counts, scores = table_rows(text, markdown(name))
        assert len(counts) == 3
        assert len(scores) == 5
    assert text.count("rm\\`") >= 2


def test_card_gives_each_class_its_numbers_and_intervals():
    text = hostile_card()
    assert table_rows(text, "plain") == [
        ["plain", "20", "4"],
        ["plain", "4", "50.0%", "25.0% (25.0-75.0)", "33.3%"],
    ]
    # Wilson's interval of 253 of 284, worked out by hand.
    z, n, p = 1.959964, 284, 253 / 284
    half = z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5 / (1 + z * z / n)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    assert table_rows(text, "top-1") == [["top-1", f"89.08% ({100 * (centre - half):.1f}-{100 * (centre + half):.1f})"]]
    assert "the best of 4 evaluations" in text
    assert "in about 2:40" in text  # 4 epochs of 2,120 images at 53 a second
    assert "the moving average of the weights after step 30 (epoch 3)" in text


def test_card_names_the_limits_that_hold():
    text = hostile_card()
    assert r"In training a\|b has 300 images and plain 20, 15.0 times fewer: great imbalance" in text
    assert "Fewer than 30 validation images, and so wide intervals: plain." in text
    assert "The data set has no test split" in text
    assert "divides the logits by 1.250" in text


def test_card_of_pixels_knows_no_classes():
    text = hostile_card(name="next_pixel")
    assert "gives each pixel of an image the probabilities of its colours (`next_pixel`)" in text
    assert table_rows(text, "bits a pixel") == [["bits a pixel", "0.7213"]]
    assert "predict" not in text
    assert "plain" not in text
    assert "confusion" not in text


def test_run_leaves_a_card_whose_numbers_are_those_of_its_model_file(finished_run):
    text = RunFolder(finished_run).card.read_text(encoding="utf-8")
    metrics = load_model(finished_run).metrics
    for row in metrics["per_class"]:
        low, high = row["recall_interval"]
        recall = f"{row['recall']:.1%} ({100 * low:.1f}-{100 * high:.1f})"
        assert table_rows(text, row["class"]) == [
            [row["class"], "13", "5", "4"],
            [row["class"], "5", f"{row['precision']:.1%}", recall, f"{row['f1']:.1%}"],
        ]
    assert f"after step {metrics['step']} (epoch {metrics['epoch']})" in text
    assert "30 steps in 6 epochs" in text
    assert "| `optim.lr` | 0.003 |" in text


def test_lines_of_a_card_run(finished_run, color_folder, tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("README.md", "best.safetensors"):
        shutil.copy(finished_run / name, folder)
    monkeypatch.chdir(folder)
    Image.new("RGB", (9, 7), (200, 40, 30)).save("photo.png")
    text = RunFolder(folder).card.read_text(encoding="utf-8")
    shell, python = re.findall(r"```(?:sh|python)\n(.*?)```", text, re.DOTALL)
    lines = [line.replace("DATA", str(color_folder)).replace("IMAGES", "photo.png") for line in shell.splitlines()]
    lines += re.findall(r"`vitlab (evaluate .*?)`", text.replace("DATA", str(color_folder)))
    assert len(lines) == 4
    for line in lines:
        assert main([*shlex.split(line.removeprefix("vitlab ")), "--workers", "0"]) == 0
    names = {}
    exec(python.replace("IMAGE", "photo.png"), names)
    assert names["probabilities"].shape == (1, 3)


def test_card_goes_while_a_longer_run_goes_on_and_comes_back(tiny_run, monkeypatch):
    run = run_training(tiny_run(train__epochs=1))
    card = RunFolder(run).card
    assert "5 steps in 1 epoch on" in card.read_text(encoding="utf-8")
    monkeypatch.setattr("vitlab.engine.trainer.Trainer.fit", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_training(tiny_run(train__epochs=2))
    assert not card.exists()
    monkeypatch.undo()
    run_training(tiny_run(train__epochs=2))
    assert "10 steps in 2 epochs" in card.read_text(encoding="utf-8")
    card.unlink()  # as where it was killed just before
    with pytest.raises(Finished):
        run_training(tiny_run(train__epochs=2))
    assert "10 steps in 2 epochs" in card.read_text(encoding="utf-8")
