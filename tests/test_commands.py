"""Commands on real files: what they print and write, and one line for each wrong input."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from vitlab.__main__ import main


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def fails(capsys, *arguments: object) -> str:
    """Run a command line that must end with exit code 2 and one line; give the line."""
    capsys.readouterr()
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_evaluate_prints_and_writes_the_scores(finished_run, color_folder, tmp_path, capsys):
    out, picture = tmp_path / "new" / "scores.json", tmp_path / "new" / "confusion.png"
    assert (
        run("evaluate", finished_run, "--data", color_folder, "--split", "test", "--json", out, "--confusion", picture)
        == 0
    )
    scores = json.loads(out.read_text())
    assert {"top1", "top2", "loss", "count", "per_class", "confusion", "classes", "weights", "error"} <= scores.keys()
    assert scores["count"] == 12
    assert scores["classes"] == ["blue", "green", "red"]
    assert sum(map(sum, scores["confusion"])) == 12
    assert [row["count"] for row in scores["per_class"]] == [4, 4, 4]
    printed = capsys.readouterr().out
    assert f"top-1 {scores['top1']:.2%}" in printed
    assert "12 images (raw weights)" in printed
    with Image.open(picture) as image:
        assert image.size[0] > 300


def test_evaluate_gives_the_same_scores_for_any_batch_size(finished_run, color_folder, tmp_path):
    scores = []
    for size, workers in ((1, 0), (7, 2), (64, 0)):
        out = tmp_path / f"{size}.json"
        run("evaluate", finished_run, "--data", color_folder, "--json", out, "--batch_size", size, "--workers", workers)
        scores.append(json.loads(out.read_text()))
    assert all(other["confusion"] == scores[0]["confusion"] for other in scores)
    assert all(other["loss"] == pytest.approx(scores[0]["loss"], abs=1e-6) for other in scores)


def test_evaluate_matches_classes_by_name(finished_run, color_folder, tmp_path, capsys):
    """A validation split that lacks a class is scored right; the log names the class."""
    shutil.copytree(color_folder / "val", tmp_path / "val")
    shutil.rmtree(tmp_path / "val" / "green")
    out = tmp_path / "scores.json"
    assert run("evaluate", finished_run, "--data", tmp_path, "--json", out) == 0
    assert "green" in capsys.readouterr().out
    scores = json.loads(out.read_text())
    assert [row["count"] for row in scores["per_class"]] == [5, 0, 5]
    assert scores["top1"] > 0.8


def test_evaluate_says_where_the_model_may_have_seen_the_images(finished_run, color_folder, tmp_path, capsys):
    for split, note in (("train", "was trained on these images"), ("val", ""), ("test", "")):
        assert run("evaluate", finished_run, "--data", color_folder, "--split", split) == 0
        printed = capsys.readouterr().out
        assert ("note: " in printed) == bool(note)
        assert note in printed
    shutil.copytree(color_folder / "train", tmp_path / "flat")
    assert run("evaluate", finished_run, "--data", tmp_path / "flat") == 0
    assert "these are not the val images of the model's own run" in capsys.readouterr().out


def test_evaluate_skips_and_counts_unreadable_images(finished_run, color_folder, tmp_path, capsys):
    shutil.copytree(color_folder / "val", tmp_path / "val")
    broken = tmp_path / "val" / "red" / "002.png"
    broken.write_bytes(broken.read_bytes()[:200])
    assert str(broken) in fails(capsys, "evaluate", finished_run, "--data", tmp_path)
    out = tmp_path / "scores.json"
    assert run("evaluate", finished_run, "--data", tmp_path, "--on_error", "skip", "--json", out) == 3
    scores = json.loads(out.read_text())
    assert scores["count"] == 14
    assert [error["path"] for error in scores["unreadable"]] == [str(broken)]
    assert str(broken) in capsys.readouterr().out


def test_evaluate_says_where_no_image_can_be_read(finished_run, tmp_path, capsys):
    for name in ("red/a.png", "blue/b.png"):
        (tmp_path / "val" / name).parent.mkdir(parents=True)
        (tmp_path / "val" / name).write_bytes(b"no picture")
    error = fails(capsys, "evaluate", finished_run, "--data", tmp_path, "--on_error", "skip")
    assert f"none of 2 images can be read, such as {tmp_path / 'val' / 'blue' / 'b.png'}: not an image" in error


@pytest.mark.parametrize("line", [["check", "digits"], ["compare", "NOWHERE", "NOWHERE"]])
def test_an_unknown_device_is_refused_before_anything_is_read(capsys, line):
    assert "no device is called gpu: give auto, cpu, cuda, cuda:0 or mps" in fails(capsys, *line, "--device", "gpu")


def test_evaluate_refuses_other_classes(finished_run, color_folder, tmp_path, capsys):
    shutil.copytree(color_folder / "val", tmp_path / "val")
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "crimson")
    error = fails(capsys, "evaluate", finished_run, "--data", tmp_path)
    assert "crimson" in error
    assert "red" in error


def test_predict_writes_a_row_an_image(finished_run, color_folder, tmp_path):
    folder, out = tmp_path / "photos", tmp_path / "rows.csv"
    folder.mkdir()
    for number, path in enumerate(sorted((color_folder / "test").rglob("*.png"))[:10]):
        shutil.copy(path, folder / f"{number}.png")
    (folder / "5.png").write_bytes(b"")
    (folder / "notes.txt").write_text("not an image")
    assert run("predict", finished_run, folder, "--out", out, "--top_k", 2) == 3
    rows = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert list(rows[0]) == ["path", "error", "label_1", "probability_1", "label_2", "probability_2"]
    assert [row["path"] for row in rows] == [str(folder / f"{number}.png") for number in range(10)]
    assert [bool(row["error"]) for row in rows] == [number == 5 for number in range(10)]
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in rows if not row["error"])
    assert {row["label_1"] for row in rows[:4]} == {"blue"}


def test_predict_without_a_file_prints_a_table(finished_run, color_folder, capsys):
    assert run("predict", finished_run, color_folder / "test" / "red") == 0
    printed = capsys.readouterr().out
    folder = color_folder / "test" / "red"
    assert [line.partition(": red ")[0] for line in printed.splitlines()[:4]] == [
        str(folder / f"00{number}.png") for number in range(4)
    ]
    assert printed.splitlines()[4] == "4 images classified, 0 unreadable, 0 other files"
    assert run("predict", finished_run, folder / "000.png") == 0
    assert capsys.readouterr().out.splitlines()[1] == "1 image classified, 0 unreadable, 0 other files"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--data.root", "NOWHERE"], "NOWHERE does not exist"),
        (["train", "--data.root", "EMPTY"], "EMPTY"),
        (["train", "--data.root", "CIFAR"], "perhaps CIFAR/inner was meant"),
        (["train", "--data.root", "CIFAR/inner"], "lacks data_batch_2.bin"),
        (["train", "--data.root", "CIFAR/inner/cifar-10-batches-bin/data_batch_1.bin"], "is a file: give the folder"),
        (["train", "--model.name", "vit_tinny"], "did you mean vit_tiny?"),
        (["train", "--model.overrides.dept", "3"], "did you mean depth?"),
        (["train", "--model.overrides.depth", "x"], "depth is 'x': give a whole number"),
        (["train", "--model.image_size", "9"], "9 is not a multiple of patch size 2: use 8 or 10"),
        (["train", "--model.weights", "NOWHERE"], "NOWHERE"),
        (["train", "--optim.name", "adamww"], "did you mean adamw"),
        (["train", "--train.device", "cuda:7"], "cuda:7"),
        (["train", "--train.device", "gpu"], "no device is called gpu"),
        (["train", "--train.precision", "fp16", "--train.device", "cpu"], "fp16 needs a GPU"),
        (["train", "--model.num_classes", "7"], "model.num_classes is 7, and digits has 10 classes"),
        (["train", "--train.resume", "NOWHERE"], "NOWHERE holds no state"),
        (["train", "--optim.warmup_steps", "100000"], "optim.warmup_steps 100000 leaves nothing"),
        (["evaluate", "NOWHERE", "--data", "digits"], "NOWHERE"),
        (["evaluate", "EMPTY", "--data", "digits"], "EMPTY"),
        (["evaluate", "RUN", "--data", "NOWHERE"], "vitlab: NOWHERE does not exist: give a folder"),
        (["palette", "--data", "NOWHERE", "--out", "p.npy"], "vitlab: NOWHERE does not exist: give a folder"),
        (["evaluate", "RUN", "--data", "digits"], "the model knows 3"),
        (["predict", "RUN", "NOWHERE"], "NOWHERE"),
        (["predict", "RUN", "EMPTY"], "EMPTY"),
        (["predict", "RUN", "DATA", "--out", "rows.txt"], ".csv"),
        (["predict", "DATA/test/red/000.png", "DATA"], "000.png"),
    ],
)
def test_wrong_input_gives_one_line(capsys, tmp_path, finished_run, color_folder, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "CIFAR" / "inner" / "cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "CIFAR" / "inner" / "cifar-10-batches-bin" / "data_batch_1.bin").touch()
    places = {"RUN": str(finished_run), "DATA": str(color_folder)}
    for word, place in places.items():
        arguments = [argument.replace(word, place) for argument in arguments]
    assert expected in fails(capsys, *arguments)
    assert not (tmp_path / "runs").exists()


def test_commands_open_no_connection(color_folder, tmp_path):
    """Every command runs under a hook that refuses any socket but a local one between processes."""
    guard = tmp_path / "guard.py"
    guard.write_text(
        "import socket, sys\n"
        "def refuse(event, args):\n"
        "    if event in ('socket.getaddrinfo', 'socket.gethostbyname', 'urllib.Request'):\n"
        "        raise SystemExit(f'network: {event} {args}')\n"
        "    if event == 'socket.connect' and args[0].family != socket.AF_UNIX:\n"
        "        raise SystemExit(f'network: {event} {args}')\n"
        "sys.addaudithook(refuse)\n"
        "from vitlab.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run_dir = tmp_path / "run"
    small = ["--data.workers", 1, "--model.image_size", 16, "--model.overrides.patch_size", 8]
    drawer, shape = tmp_path / "drawer", {"num_colors": 8, "embed_dim": 8, "depth": 1, "num_heads": 1}
    gpt = ["--model.name", "imagegpt_small", "--model.image_size", 4, "--model.overrides", json.dumps(shape)]
    gpt += ["--objective.name", "next_pixel"]
    lines = [
        ["train", "--data.root", color_folder, "--train.run_dir", run_dir, "--train.steps", 1, *small],
        ["evaluate", run_dir, "--data", color_folder],
        ["predict", run_dir, color_folder / "test", "--workers", 1],
        ["compare", run_dir, run_dir, "--split", "test", "--workers", 0],
        ["palette", "--data", color_folder, "--out", tmp_path / "palette.npy", "--num_colors", 4, "--workers", 0],
        ["probe", run_dir, "--data", color_folder, "--workers", 0],
        [
            *["train", "--data.root", color_folder, "--train.run_dir", drawer, "--train.steps", 1, "--data.workers", 0],
            *gpt,
        ],
        ["sample", drawer, "--count", 1, "--out", tmp_path / "samples.png"],
        ["complete", drawer, color_folder / "test" / "red" / "000.png", "--out", tmp_path / "completed.png"],
        ["models"],
        ["--version"],
    ]
    for line in lines:
        command = [sys.executable, str(guard), *map(str, line)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        ["explain", "run", "a.png", "--out", "map.png"],
        ["evaluate", "run", "--data", "images", "--report", "page.html"],
        ["check", "images", "--report", "README.md"],
    ],
)
def test_name_of_a_file_is_refused_where_a_folder_is_written(tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    assert f"is {line[-1]}, and a folder of several files is written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        ["explain", "run", "a.png", "--out="],
        ["evaluate", "run", "--data", "images", "--report="],
        ["predict", "run", "images", "--by_class="],
    ],
)
def test_an_empty_name_is_not_the_folder_where_we_are(tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    assert f"{line[-1].rstrip('=')} is empty: give a folder" in fails(capsys, *line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--report", "--out", "--by_class"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    line = {"--report": ["evaluate", "run", "--data", "x"], "--out": ["explain", "run", "x"]}
    arguments = [*line.get(option, ["predict", "run", "x"]), option, tmp_path / "file" / "a" / "b"]
    assert f"cannot be written in ({tmp_path / 'file'} is a file): give another folder" in fails(capsys, *arguments)


def test_text_in_place_of_a_model_file_is_told_from_a_damaged_one(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_text("# no model, but words\n")
    assert main(["predict", str(tmp_path / "model.safetensors"), str(tmp_path)]) == 2
    assert "it does not begin as such a file does" in capsys.readouterr().err
