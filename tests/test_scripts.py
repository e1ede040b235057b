"""The scripts run as their help says."""

import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_script_trains_and_classifies(color_folder, tmp_path):
    out = run("train.py", "--data", color_folder, "--run", tmp_path / "run", "--epochs", 1, "--image_size", 16)
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
