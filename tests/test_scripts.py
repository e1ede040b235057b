"""The scripts run as their help says."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_train_script_trains_and_classifies(color_folder, tmp_path):
    out = run("train.py", "--data", color_folder, "--run_dir", tmp_path / "run", "--epochs", 1, "--image_size", 16)
    assert (tmp_path / "run" / "best.safetensors").is_file()
    image, _, answer = out.splitlines()[-1].partition(": ")
    assert image == str(color_folder / "val" / "blue" / "000.png")
    assert answer.split(" (")[0] in {"blue", "green", "red"}


def test_write_digits_writes_the_test_images_with_their_classes(tmp_path):
    run("write_digits.py", "--out", tmp_path / "digits", "--count", 5)
    paths = sorted((tmp_path / "digits").iterdir())
    assert len(paths) == 5
    assert {path.stem.partition("-is-")[2] for path in paths} <= set("0123456789")
    with Image.open(paths[0]) as image:
        assert image.size == (8, 8)


def test_killed_and_signalled_runs_end_in_the_same_bits(tmp_path):
    """20 kills and 9 signals; the script's own help tells how to ask for 200 and 60."""
    out = run("kill_test.py", "--kills", 20, "--signals", 3, "--report", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kills"] >= 20
    assert report["signals"] == 9
    assert report["inside_saves"] >= 3
    assert report["inside_accumulations"] >= 1
    assert {trial["recipe"].split(",")[0] for trial in report["trials"] if trial["kills"]} > {"vit fp32", "davit"}
    assert [trial["differences"] for trial in report["trials"]] == [[]] * report["runs"], out


def test_norm_order_prints_a_row_for_each_order_and_warmup():
    out = run("norm_order.py", "--depth", 2, "--steps", 2, "--warmup_steps", 1)
    rows = [line.split("│")[1:3] for line in out.splitlines() if line.startswith("│")]
    assert [(norm.strip(), steps.strip()) for norm, steps in rows] == [
        ("post", "0"),
        ("post", "1"),
        ("pre", "0"),
        ("pre", "1"),
    ]


def test_count_model_gives_the_entropy_of_what_its_neighbours_do_not_tell(color_folder, tmp_path):
    """Stripes: the left neighbour tells a pixel's colour, but for the first of each row."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 120), ("test", 40)):
        for index in range(count):
            path = tmp_path / "stripes" / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = generator.integers(0, 2, (8, 1, 1), dtype=np.uint8) * 255
            Image.fromarray(np.broadcast_to(rows, (8, 8, 3)).copy()).save(path)
    out = run("count_model.py", "--data", tmp_path / "stripes", "--image_size", 8, "--num_colors", 2, "--split", "test")
    nats = float(out.split("neighbour: ")[1].split(" nats")[0])
    assert nats == pytest.approx(math.log(2) / 8, abs=0.004)


def test_measuring_compares_with_a_peers_best_setting_round_by_round():
    measuring = load("measuring")
    speeds = iter([9.0, 9.0, 6.0, 2.0, 8.0, 4.0])  # a round that does not count, and two that do
    figures = measuring.in_turns({"vitlab": lambda: next(speeds), "slow": lambda: next(speeds)}, rounds=2)
    assert figures == {"vitlab": [6.0, 8.0], "slow": [2.0, 4.0]}
    figures["fast"] = [3.0, 5.0]
    columns = {"work": "w", "subject": "s", "precision": "fp32", "mode": "eager", "device": "cpu"}
    (rate,) = measuring.compare(figures, {"peer": ("slow", "fast")}, unit="images/s", **columns)
    assert (rate.ours, rate.theirs, rate.note) == (7.0, 4.0, "fast")
    assert rate.ratio == pytest.approx((6 / 3 + 8 / 5) / 2)
    (time,) = measuring.compare(figures, {"peer": ("slow", "fast"), "none": ("absent",)}, unit="s", **columns)
    assert (time.theirs, time.note) == (3.0, "slow")
    assert time.ratio == pytest.approx((2 / 6 + 4 / 8) / 2)


def test_data_need_draws_nested_shares_by_class(tmp_path):
    data_need = load("data_need")
    for split, count in (("train", 200), ("test", 3)):
        for name in "ab":
            for index in range(count):
                path = tmp_path / "data" / split / name / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    rows = {}
    for share in (1, 10, 100):
        lines = data_need.write_share(tmp_path / "data", share, tmp_path).read_text().splitlines()[1:]
        rows[share] = {line for line in lines if line.endswith("train")}
        assert len(lines) - len(rows[share]) == 6
        assert sum(",a," in line for line in rows[share]) == sum(",b," in line for line in rows[share]) == 2 * share
    assert rows[1] < rows[10] < rows[100]
    table = data_need.table([{"recipe": "swin", "share": 10, "top1": 0.5, "count": 6}])
    assert "| Swin |  | 50.0% |  |" in table


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("memory.py", ["--models", "vit_try", "--batch_size", 2, "--one", "vitlab", "checkpointed"], "["),
        ("bench_pixels.py", ["--image_size", 8, "--precisions", "bf16", "--rounds", 1], '"unit": "tokens/s"'),
        (
            "bench_sampling.py",
            ["--given", 8, "--steps", 2, "--rounds", 1, "--batches", 1, "--precisions", "fp32"],
            "after 8",
        ),
        (
            "bench_networks.py",
            ["--models", "vit_try", "--precisions", "bf16", "--batch", 2, "--rounds", 1],
            '"peer": "timm best"',
        ),
        ("save_cost.py", ["--steps", 3, "--every", 1, "--repeats", 1, "--batch_size", 2], "a save costs"),
    ],
)
def test_measuring_scripts_run(script, arguments, line):
    assert line in run(script, *arguments)


def test_bench_loading_compares_training_and_evaluation(color_folder, tmp_path):
    options = ["--image_size", 16, "--images", 6, "--rounds", 1, "--json", tmp_path / "rows.json"]
    run("bench_loading.py", "--data", color_folder / "train", *options)
    rows = json.loads((tmp_path / "rows.json").read_text())
    modes = ("training", "training, cached", "evaluation", "evaluation, cached")
    assert [(row["mode"], row["peer"]) for row in rows] == [
        (mode, peer) for mode in modes for peer in ("torchvision", "timm")
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ours"] / row["theirs"])
        assert ("peers decode again" in row["note"]) == ("cached" in row["mode"])
