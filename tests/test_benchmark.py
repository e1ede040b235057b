"""The benchmark puts its figures together rightly: ratios, rows, pages, parts that are measured anew."""

import argparse
import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vitlab.__main__ import main as vitlab

ROOT = Path(__file__).parent.parent
COLUMNS = {"work": "train_step", "subject": "vit_small", "precision": "bf16", "mode": "eager", "device": "cpu"}


@pytest.fixture
def script(monkeypatch):
    """A function that imports a script by its name."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


def row(**changes) -> dict:
    figures = {"unit": "images/s", "ours": 12.0, "peer": "timm", "theirs": 8.0, "ratio": 1.5, "spread": [1.4, 1.75]}
    return COLUMNS | figures | {"share": 0.5, "note": "", "part": "networks_bf16"} | changes


def record(*rows, growth=()) -> dict:
    return {
        "machine": {"cpu": "a processor"},
        "date": "2026-01-02",
        "versions": {"torch": "2"},
        "settings": {"networks_bf16, cpu": {"command": "bench_networks.py", "date": "2026-01-02", "duration_s": 90.0}},
        "matrix_rate": {"cpu": {"float32": 7e10}},
        "rows": list(rows),
        "growth": list(growth),
    }


@pytest.mark.parametrize(
    ("unit", "ratios", "best"),
    [
        ("images/s", [2.0, 2.0, 1.0], (4.0, "given, b", 1.0, (1.0, 9.0))),
        ("images/s per core", [2.0, 2.0, 1.0], (4.0, "given, b", 1.0, (1.0, 9.0))),
        ("s", [0.5, 0.5, 1.0], (3.0, "given, a", 0.5, (0.5, 1.0))),
        ("MiB", [0.5, 0.5, 1.0], (3.0, "given, a", 0.5, (0.5, 1.0))),
    ],
)
def test_ratio_is_more_of_a_rate_and_less_of_seconds_and_memory(script, unit, ratios, best):
    measuring = script("measuring")
    figures = {"vitlab": [4.0, 6.0, 9.0], "a": [2.0, 3.0, 9.0], "b": [4.0, 6.0, 1.0]}
    assert measuring.ratios_of(figures["vitlab"], figures["a"], unit=unit) == ratios
    (found,) = measuring.compare(figures, {"peer": ("a", "b")}, unit=unit, note="given", **COLUMNS)
    assert (found.theirs, found.note, found.ratio, found.spread) == best


def test_readme_gets_the_table_between_its_markers_and_nowhere_else(script):
    pages = script("performance_page")
    text = "# top\n\n<!-- performance -->\nold\n<!-- /performance -->\n\n| a | b |\n"
    once = pages.put_between(text, "| new |\n")
    assert once == text.replace("old\n", "| new |\n")
    assert pages.put_between(once, "| new |\n") == once
    with pytest.raises(ValueError, match=r"the README has no <!-- performance -->"):
        pages.put_between("<!-- /performance --> <!-- performance -->", "")


def test_summary_takes_our_best_precision_and_the_hardest_peer(script):
    rows = [
        row(),
        row(peer="timm best", theirs=10.0, ratio=1.2),
        row(precision="fp32", ours=5.0, theirs=5.0, ratio=1.0),
        row(mode="compiled", ours=90.0, ratio=9.0),
        row(work="peak_memory", unit="MiB"),
        row(work="disk_to_batch", subject="cifar", precision="uint8", mode="training, cached", ratio=30.0),
        row(
            work="cold_start",
            subject="vitlab --help",
            precision="",
            mode="",
            unit="s",
            ours=0.3,
            theirs=4.0,
            ratio=13.3,
        ),
    ]
    lines = script("performance_page").summary(record(*rows)).splitlines()[2:]
    assert lines == [
        "| Training step | vit_small, bf16 | 12.0 images/s | 10.0 images/s (timm) | 1.20 x |",
        "| Cold start | vitlab --help | 0.30 s | 4.00 s (timm) | 13.3 x |",
    ]


def test_pages_hold_every_row_the_notes_and_the_growth(script, tmp_path):
    (tmp_path / "performance_notes.md").write_text("By hand.\n")
    point = {"subject": "vit_tiny", "precision": "bf16", "device": "cpu", "image_size": 96, "batch_size": 4}
    found = record(
        row(note="unfused"),
        row(work="peak_memory", unit="MiB", ours=1234.5, share=None),
        growth=[
            point | {"step_s": 0.125, "peak_mib": 45.9},
            point | {"image_size": 448, "step_s": 2.0, "peak_mib": 999},
        ],
    )
    script("performance_page").write_pages(found, tmp_path, None)
    text = (tmp_path / "performance.md").read_text()
    for line in (
        "| vit_small | bf16 | eager | cpu | 12.0 images/s | timm | 8.00 | 1.50 x | 1.40 to 1.75 | 50% | unfused |",
        "| vit_small | bf16 | eager | cpu | 1,234 MiB | timm | 8.00 | 1.50 x | 1.40 to 1.75 |  |  |",
        "| vit_tiny | bf16 | 4 | 96 | 0.12 | 45.9 |",
        "## Notes\n\nBy hand.\n",
        "| networks_bf16, cpu | `scripts/bench_networks.py` | 2026-01-02 | 1.5 |",
        "float32 70",
    ):
        assert line in text
    assert (tmp_path / "performance.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def suite(script, monkeypatch, tmp_path):
    """A benchmark of three parts that write one row each, or fail while a file `broken` is there; it is called."""
    benchmark = script("benchmark")
    (tmp_path / "fake.py").write_text(
        "import json, pathlib, sys\n"
        "name, number, _, path = sys.argv[1:]\n"
        "log = pathlib.Path(__file__).with_name('log'); log.open('a').write(name + ' ')\n"
        f"row = {row()!r}; del row['part']\n"
        "if name == 'second' and pathlib.Path(__file__).with_name('broken').exists(): sys.exit('it broke')\n"
        "pathlib.Path(path).write_text(json.dumps([row | {'subject': name, 'ours': float(number)}]))\n"
    )
    names = {"first": "networks_bf16", "second": "pixels", "third": "sampling"}

    def run(*arguments, number=1):
        parts = [
            benchmark.Part(name=name, command=f"fake.py {word} {number}", timeout_s=60) for word, name in names.items()
        ]
        parts.append(benchmark.Part(name="epoch_cifar", command="fake.py CIFAR/train 1", timeout_s=60))
        monkeypatch.setattr(benchmark, "FULL", parts)
        folders = ["--docs", str(tmp_path / "docs"), "--work", str(tmp_path / "work")]
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *folders, *arguments])
        (tmp_path / "log").write_text("")
        return benchmark.main(), (tmp_path / "log").read_text().split()

    monkeypatch.setattr(benchmark, "HERE", tmp_path)
    monkeypatch.setattr(benchmark, "matrix_rate", lambda device, dtype: 1e9)
    return run


def test_benchmark_measures_one_part_anew_and_keeps_the_others(suite, tmp_path, capsys):
    (tmp_path / "README.md").write_text("before\n<!-- performance -->\n<!-- /performance -->\nafter\n")
    readme = ("--readme", str(tmp_path / "README.md"))
    assert suite(*readme) == (0, ["first", "second", "third"])
    assert "4/4 epoch_cifar: left out, needs --cifar" in capsys.readouterr().out
    assert suite("--parts", "pixels", *readme, number=7) == (0, ["second"])
    written = json.loads((tmp_path / "docs" / "performance.json").read_text())
    assert [(row["part"], row["subject"], row["ours"]) for row in written["rows"]] == [
        ("networks_bf16", "first", 1.0),
        ("pixels", "second", 7.0),
        ("sampling", "third", 1.0),
    ]
    assert written["settings"]["pixels, cpu"]["command"] == "fake.py second 7"
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter\n")
    assert "| second, bf16 | 7.00 images/s |" in text


def test_benchmark_goes_on_where_a_part_failed(suite, tmp_path, capsys):
    (tmp_path / "broken").touch()
    assert suite() == (1, ["first", "second", "third"])
    out = capsys.readouterr().out
    assert "2/4 pixels: failed: it broke" in out
    assert "failed: pixels; the same command tries them again" in out
    (tmp_path / "broken").unlink()
    assert suite() == (0, ["second"])
    written = json.loads((tmp_path / "docs" / "performance.json").read_text())
    assert [row["subject"] for row in written["rows"]] == ["first", "second", "third"]
    assert suite() == (0, ["first", "second", "third"])  # all was written, so the next call measures again


def test_benchmark_keeps_what_was_done_when_time_is_up(suite, tmp_path, capsys):
    slow = (tmp_path / "fake.py").read_text() + "import time\nif name == 'second': time.sleep(60)\n"
    (tmp_path / "fake.py").write_text(slow)
    assert suite("--minutes", "0.05")[0] == 1
    out = capsys.readouterr().out
    assert "2/4 pixels: failed: not done after" in out
    assert "3/4 sampling: left out, time is up" in out
    written = json.loads((tmp_path / "docs" / "performance.json").read_text())
    assert [row["subject"] for row in written["rows"]] == ["first", "second"]


def test_rows_of_another_device_stay(script, monkeypatch):
    benchmark = script("benchmark")
    monkeypatch.setattr(benchmark, "matrix_rate", lambda device, dtype: 1e9)
    earlier = record(row(device="cuda"), row(ours=1.0), row(part="memory"))
    result = {"command": "c", "date": "d", "duration_s": 1.0, "found": [row(ours=2.0)]}
    merged = benchmark.merge(earlier, {"networks_bf16": result}, "cpu")
    assert [(row["device"], row["part"], row["ours"]) for row in merged["rows"]] == [
        ("cpu", "networks_bf16", 2.0),
        ("cpu", "memory", 12.0),
        ("cuda", "networks_bf16", 12.0),
    ]


def test_every_part_names_a_script_and_options_that_it_takes(script):
    benchmark = script("benchmark")
    for part in (*benchmark.FULL, *benchmark.QUICK, *benchmark.GPU):
        name, *options = part.command.split()
        text = (ROOT / "scripts" / name).read_text()
        for option in (word for word in options if word.startswith("--")):
            assert f'"{option}"' in text, f"{part.name}: {option}"


def test_epoch_gives_both_the_same_work(script, monkeypatch, color_folder, tmp_path):
    jobs = script("bench_jobs")
    calls, seconds = [], iter([2.0, 3.0, 4.0])
    monkeypatch.setattr(jobs, "timed", lambda command, env=None: calls.append((command, env)) or next(seconds))
    args = argparse.Namespace(photo_batches=1, precision="bf16", workers=3, device="cpu", rounds=1)
    rows = jobs.epoch("photographs", color_folder, args, tmp_path)
    assert [(row.peer, row.ours, row.theirs, row.ratio) for row in rows] == [
        ("timm", 2.0, 3.0, 1.5),
        ("timm best", 2.0, 3.0, 1.5),
    ]
    (ours, _), (theirs, _), (unfused, environment) = calls
    recipe = yaml.safe_load(Path(ours[ours.index("--config") + 1]).read_text())
    options = dict(zip(theirs[4::2], theirs[5::2], strict=False))
    assert recipe["data"]["root"] == str(theirs[3]) == str(tmp_path / "photographs")
    assert recipe["data"]["workers"] == options["--workers"] == 3
    assert recipe["train"]["batch_size"] == options["--batch_size"] == 32
    assert recipe["train"]["precision"] == "bf16"
    assert "--amp" in theirs
    assert environment == {"TIMM_FUSED_ATTN": "0"}
    assert unfused == theirs
    assert options["--num_classes"] == 3
    assert len(list((tmp_path / "photographs" / "train").rglob("*.png"))) == 32


def test_memory_stands_beside_the_same_mode_of_the_peer(script, monkeypatch):
    memory = script("memory")
    found = {
        ("vitlab", "plain"): [(80.0, 2.0), (70.0, 2.0), (99.0, 1.0)],
        ("vitlab", "checkpointed"): [(40.0, 3.0)] * 3,
    }
    found |= {("timm", "plain"): [(120.0, 4.0), (140.0, 9.0), (99.0, 3.0)], ("timm", "checkpointed"): [(50.0, 5.0)] * 3}
    monkeypatch.setattr(memory, "in_process", lambda args, name, subject, mode: found[subject, mode].pop(0))
    args = argparse.Namespace(precision="fp32", device="cpu", image_size=None, batch_size=2, rounds=3, exact=False)
    plain, less = memory.compare_modes(args, "vit_small")
    assert (plain.mode, plain.unit, plain.ours, plain.peer, plain.theirs) == ("plain", "MiB", 80.0, "timm", 120.0)
    assert (plain.ratio, less.ratio) == (1.5, 1.25)
    assert not any(found.values())
    assert less.note == "x 0.50 of plain in x 1.50 the time, 3.0 s a step, theirs 5.0"


@pytest.mark.parametrize("exact", [True, False])
def test_exact_memory_is_measured_where_the_allocator_keeps_nothing(exact, script, monkeypatch):
    memory = script("memory")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    started = []

    def run(command, env, **options):
        started.append(env)
        return subprocess.CompletedProcess(command, 0, stdout="[12.5, 3.0]", stderr="")

    monkeypatch.setattr(memory.subprocess, "run", run)
    columns = {"precision": "fp32", "device": "cpu", "image_size": 64, "batch_size": 8, "steps": 2}
    measured = memory.in_process(argparse.Namespace(exact=exact, **columns), "vit_small", "vitlab", "plain")
    assert measured == (12.5, 3.0)
    assert ("glibc.malloc.mmap_threshold" in started[0].get("GLIBC_TUNABLES", "")) == exact
    assert started[0]["PATH"] == os.environ["PATH"]


def test_transformers_squares_are_left_out_where_memory_lacks(script, monkeypatch):
    memory = script("memory")
    args = argparse.Namespace(precision="bf16", device="cpu", image_size=64, batch_size=1)
    needed = 24 * 8 * 4096**2 * 6  # layers, heads, a square, bytes: scores in bf16 and weights in float32
    monkeypatch.setattr(memory, "free_memory", lambda: round(needed / 0.8) + 9)
    assert memory.fits(args, "imagegpt_small")
    monkeypatch.setattr(memory, "free_memory", lambda: round(needed / 0.8) - 9)
    assert not memory.fits(args, "imagegpt_small")
    assert memory.fits(args, "vit_small")


def test_timms_scripts_train_and_predict_as_ours_does(script, color_folder, tmp_path):
    jobs = script("bench_jobs")
    ours, weights = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    jobs.write_weights(ours, weights, num_classes=3, image_size=80)
    images = color_folder / "val"
    assert vitlab(["predict", str(ours), str(images), "--out", str(tmp_path / "ours.csv"), "--workers", "0"]) == 0
    options = ["--workers", 0, "--num_classes", 3, "--image_size", 80]
    theirs = ["--checkpoint", weights, "--out", tmp_path / "theirs.csv"]
    jobs.run([*jobs.PEER, "predict", images, *options, *theirs], {})
    tables = [read_table(tmp_path / name) for name in ("ours.csv", "theirs.csv")]
    assert len(tables[0]) == len(tables[1]) == 15
    assert max(max(shares.values()) for shares in tables[0].values()) > 0.5  # not all alike
    for name, shares in tables[0].items():
        assert tables[1][name] == pytest.approx(shares, abs=2e-3)
    small = ["--batch_size", 8, "--out", tmp_path / "weights.pth", "--amp"]
    assert "epoch 0: train loss" in jobs.run([*jobs.PEER, "train", color_folder, *options, *small], {})
    assert (tmp_path / "weights.pth").is_file()


def read_table(path: Path) -> dict[str, dict[str, float]]:
    """Read predictions: of each image, by class and file name, the probability of each class."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    share = "probability" if "probability_1" in rows[0] else "p"
    return {
        "/".join(Path(row["path"]).parts[-2:]): {row[f"label_{n}"]: float(row[f"{share}_{n}"]) for n in (1, 2, 3)}
        for row in rows
    }
