"""Forty names that nobody means well with, as classes and as files, through train, evaluate, report and predict."""

import csv
import json
import os
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from vitlab.__main__ import main
from vitlab.models.files import load_model

FORMULAS = (
    *(
        "=cmd|' -C calc'!A0",
        '=HYPERLINK("x")',
        "+1+1",
        "-2+3",
        "@SUM(1)",
        "\uff1d1+1",
        "a;=1+1",
        'a;"=1"',
        "a\t=1",
    ),
    *("a\n=1", "'=1", "a,=1", 'a"b', "a\r\nb"),
)
ESCAPES = (
    *("\x1b[41mred", "\x1b]0;title\x07", "\x1b]8;;x\x1b\\link", "\x9b41m", "a\rb", "a\bb", "a\x7f", "\x1b[2J"),
    *("[bold]b", "[red]", "\u202egnp.exe", "a\u200bb", "\u2028line", "```\n<b>", "<script>alert(1)"),
)
PATHS = ("a..", "~", "$HOME", "`id`", "--out", "%s%n", "CON", "n" * 255, os.fsdecode(b"caf\xe9"), "\U0001f600", "犬")
NAMES = FORMULAS + ESCAPES + PATHS
# A file system takes none of these, a manifest does.
LABELS = ("../../outside", "/tmp/outside", "a\x1b[2Jb", "..", "C:\\x", "a/b/../../c")
NETWORK = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def write_image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), 6 * number, dtype=np.uint8)).save(path, format="PNG")


def train(root: Path, run_dir: Path, *more: object) -> int:
    fields = [f"--model.overrides.{name}={value}" for name, value in NETWORK.items()]
    shape = ("--model.name", "vit_tiny", "--model.image_size", 8, *fields)
    course = ("--train.epochs", 1, "--train.batch_size", 32, "--train.precision", "fp32", "--data.workers", 0)
    return run("train", "--data.root", root, "--train.run_dir", run_dir, *shape, *course, *more)


def is_clean(text: str) -> bool:
    """Tell whether a terminal obeys nothing in a text but line ends."""
    bad = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return not any(unicodedata.category(char) in bad for char in text.replace("\n", ""))


def files_below(root: Path) -> set[str]:
    return {os.path.join(folder, name) for folder, folders, names in os.walk(root) for name in (*folders, *names)}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder of a class for each name, with two images of hostile names each."""
    root = tmp_path_factory.mktemp("hostile") / "images"
    for number, name in enumerate(NAMES):
        write_image(root / "train" / name / f"{name[:251]}.png", number)
        write_image(root / "train" / name / "2.png", number)
        write_image(root / "val" / name / f"{name[:251]}.png", number)
    return root


@pytest.fixture(scope="module")
def trained(images) -> tuple[Path, set[str]]:
    """The folder of a run on those images, and what stood around it before."""
    before = files_below(images.parent)
    assert len(NAMES) == 40
    assert train(images, images.parent / "run") == 0
    return images.parent / "run", before


def test_train_keeps_hostile_names_in_its_folder(images, trained, capsys):
    folder, before = trained
    outside = files_below(images.parent) - before
    assert all(path == str(folder) or path.startswith(f"{folder}/") for path in outside)
    assert set(os.listdir(images.parent)) == {"images", "run"}
    assert load_model(folder).classes == tuple(sorted(NAMES))
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["root"] == str(images)


def test_evaluate_of_hostile_names_leaves_the_terminal_clean(images, trained, tmp_path, capsys):
    out, picture = tmp_path / "scores.json", tmp_path / "confusion.png"
    capsys.readouterr()
    assert run("evaluate", trained[0], "--data", images, "--json", out, "--confusion", picture) == 0
    printed = capsys.readouterr()
    assert is_clean(printed.out + printed.err)
    assert "\\x1b[41mred" in printed.out
    assert [row["class"] for row in json.loads(out.read_text())["per_class"]] == sorted(NAMES)
    assert sorted(os.listdir(tmp_path)) == ["confusion.png", "scores.json"]


def test_report_and_card_of_hostile_names_hold_them_as_text(images, trained, tmp_path, capsys):
    capsys.readouterr()
    assert run("evaluate", trained[0], "--data", images, "--report", tmp_path / "report") in (0, 3)
    assert is_clean(capsys.readouterr().out)
    assert os.listdir(tmp_path) == ["report"]
    assert os.listdir(tmp_path / "report") == ["index.html"]
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page
    card = (trained[0] / "README.md").read_text(encoding="utf-8")
    assert "<script>" not in card.replace("\\<", "&lt;")
    assert is_clean(card)


def test_predict_by_class_of_hostile_names_stays_in_its_folder(images, trained, tmp_path):
    before = files_below(images.parent)
    assert run("predict", trained[0], images / "val", "--out", tmp_path / "r.csv", "--by_class", tmp_path / "by") == 0
    assert files_below(images.parent) == before
    assert sorted(os.listdir(tmp_path)) == ["by", "r.csv"]
    copies = [path for path in (tmp_path / "by").rglob("*") if path.is_file()]
    assert len(copies) == 40
    assert {path.read_bytes() for path in copies} == {path.read_bytes() for path in (images / "val").rglob("*.png")}


def test_predict_of_hostile_names_leaves_the_terminal_clean(images, trained, capsys, monkeypatch):
    capsys.readouterr()
    assert run("predict", trained[0], images / "val", "--top_k", 40) == 0
    assert is_clean(capsys.readouterr().out)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal: bars, and a table
    assert run("predict", trained[0], images / "val", "--top_k", 40) == 0
    shown = capsys.readouterr().out
    assert "\x1b[41m" not in shown
    assert is_clean(re.sub(r"\x1b\[[0-9;?]*[A-Zhlm]", "", shown).replace("\r", ""))
    assert "[bold]b" in shown


def test_predict_writes_csv_that_a_spreadsheet_does_not_run(images, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(images / "val")  # paths then begin with the hostile names
    folders = sorted(name for name in NAMES if not name.startswith("-"))
    assert run("predict", trained[0], *folders, "--out", tmp_path / "rows.csv", "--top_k", 40) == 0
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    cells = [cell for row in rows for cell in row if not re.fullmatch(r"[\d.e-]+", cell)]
    assert len(rows) == len(folders)
    for cell in cells:
        for part in re.split(r"[;\t\r\n]", cell):
            assert not part.lstrip("\"' ").startswith(("=", "+", "-", "@", "\uff1d")) or part.lstrip('" ')[0] == "'"
    assert "'=cmd|' -C calc'!A0" in cells
    assert sorted(os.listdir(tmp_path)) == ["rows.csv"]


def test_predict_writes_json_lines_with_the_names_as_they_are(images, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(images / "val")
    assert run("predict", trained[0], ".", "--out", tmp_path / "rows.jsonl", "--top_k", 40) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    named = {os.fsencode(name).decode("utf-8", "backslashreplace") for name in NAMES}
    assert {row["path"].split("/")[0] for row in rows} == named
    assert all({row[f"label_{rank}"] for rank in range(1, 41)} == named for row in rows)


def test_labels_of_a_manifest_may_be_paths(tmp_path, capsys):
    """They name no file anywhere."""
    lines = []
    for number, label in enumerate(LABELS):
        for copy in range(3):
            write_image(tmp_path / "images" / f"{number}-{copy}.png", number)
            split = "val" if copy == 2 else "train"
            lines.append(json.dumps({"path": f"images/{number}-{copy}.png", "label": label, "split": split}))
    (tmp_path / "list.jsonl").write_text("\n".join(lines) + "\n")
    before = files_below(tmp_path)
    run_dir = tmp_path / "run"
    assert train(tmp_path / "list.jsonl", run_dir) == 0
    assert run("evaluate", run_dir, "--data", tmp_path / "list.jsonl", "--json", run_dir / "scores.json") == 0
    assert run("predict", run_dir, tmp_path / "images", "--out", run_dir / "rows.csv") == 0
    assert is_clean(capsys.readouterr().out)
    assert all(path.startswith(str(run_dir)) for path in files_below(tmp_path) - before)
    assert load_model(run_dir).classes == tuple(sorted(LABELS))


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "config.yaml", ".lock", "resume", "results.png"])
def test_a_run_folder_with_links_is_refused(color_folder, tmp_path, name, capsys):
    """A folder from elsewhere must not choose which of the user's files is written."""
    own, run_dir = tmp_path / "own", tmp_path / "run"
    own.write_text("mine")
    run_dir.mkdir()
    (run_dir / name).symlink_to(own)
    assert train(color_folder, run_dir) == 2
    assert own.read_text() == "mine"
    error = capsys.readouterr().err
    assert "is a link to" in error or "is in use" in error
    assert error.count("\n") == 1


def test_an_output_replaces_a_link_and_leaves_what_it_leads_to(images, trained, tmp_path):
    own = tmp_path / "own"
    for name in ("rows.csv", "rows.jsonl"):
        own.write_text("mine")
        (tmp_path / name).symlink_to(own)
        (tmp_path / f".{name}.tmp").symlink_to(own)
        assert run("predict", trained[0], images / "val" / "~", "--out", tmp_path / name) == 0
        assert own.read_text() == "mine"
        assert not (tmp_path / name).is_symlink()
    (tmp_path / "scores.json").symlink_to(own)
    assert run("evaluate", trained[0], "--data", images, "--json", tmp_path / "scores.json") == 0
    assert own.read_text() == "mine"
    assert json.loads((tmp_path / "scores.json").read_text())["count"] == 40
