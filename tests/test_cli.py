"""The command line: one line for a user's mistake, fast, without torch."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from docstring_parser import parse_from_object

from vitlab import commands
from vitlab.__main__ import main
from vitlab.cli import COMMANDS, parse
from vitlab.config import RunConfig
from vitlab.models import published
from vitlab.models.catalog import list_models
from vitlab.models.proposals import propose

NO_SECTIONS = "no YAML with sections of fields, such as `optim: {lr: 0.001}`"


def fails(capsys, *arguments: str) -> str:
    """Run a command line that must end with exit code 2 and one line; give the line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "unknown command trian: did you mean train?"),
        (["train", "--train.epoch", "3"], "unknown option --train.epoch: did you mean --train.epochs?"),
        (["train", "--train.epochs", "x"], "--train.epochs is x: give a whole number"),
        (["train", "--train.epochs", "2.5"], "--train.epochs is 2.5: give a whole number"),
        (["train", "--train.precision", "fp1"], "--train.precision is fp1: give one of auto, fp32, bf16, fp16"),
        (["train", "--train.epochs", "0"], "train.epochs is 0: give more than 0"),
        (["train", "--data.val_fraction", "3"], "data.val_fraction is 3.0: give a number between 0 and 1"),
        (["train", "--optim.lr", "nan"], "--optim.lr is nan: give a number"),
        (["train", "--optim.lr", "-1"], "optim.lr is -1.0: give more than 0"),
        (["train", "--optim.betas", "0.9", "1.0"], "optim.betas is (0.9, 1.0): give two numbers from 0 to below 1"),
        (["train", "--data.channels", "4"], "--data.channels is 4: give one of 1, 3"),
        (
            ["train", "--data.root", "x", "--data.channels", "1", "--data.mean", "0.5", "0.5", "0.5"],
            "data.mean has 3 values for data.channels 1",
        ),
        (["train", "--model.image_size", "3x3"], "--model.image_size is 3x3: give a whole number or [int, int]"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml does not exist: give a YAML file"),
        (["train", "--config", "/"], "--config / is no file: give a YAML file"),
        (
            ["train", "--config", ""],
            "--config: no YAML with sections of fields, such as `optim: {lr: 0.001}`: it is empty",
        ),
        (["train", "--config", "it's.yaml"], "it's.yaml does not exist: give a YAML file"),
        (["train", "--config"], "--config stands without a value: give one behind it"),
        (["train", "photos"], "unknown argument photos: did you mean --data.root photos?"),
        (["train", "/my-photos"], "unknown argument /my-photos: did you mean --data.root /my-photos?"),
        (["train", "/my photos"], "unknown argument /my photos: did you mean --data.root FOLDER?"),
        (["train", "configs/a.yaml"], "unknown argument configs/a.yaml: did you mean --config configs/a.yaml?"),
        (["train", "it's", "--train.epochs", "3"], "unknown argument it's: did you mean --data.root it's?"),
        (["train", "--grad-clip", "3"], "unknown option --grad-clip: "),
        (["palette", "~/photos"], "unknown argument ~/photos: did you mean --data ~/photos?"),
        (["train", "--optim.lrr=3"], "unknown option --optim.lrr: did you mean --optim.lr?"),
        (["train", "--data", "photos"], "did you mean --data.root photos?"),
        (["evaluate"], "missing checkpoint, --data"),
        (["evaluate", "x", "--data", "y", "--split", "tst"], "--split is tst: give one of train, val, test, all"),
        (["predict", "x"], "missing paths"),
        (["predict", "x", "y", "--top_k", "0"], "--top_k is 0: give 1 or more"),
        (["predict", "x", "y", "--workers", "1025"], "--workers is 1025: give at most 1,024"),
        (["predict", "x", ""], "a path is empty: give image files or folders"),
        (["explain", "", "y", "--out", "z"], "a path is empty: give image files or folders"),
        (["models", "--image_size", "0"], "--image_size is 0: give sides of 1 to 8192 pixels, such as 224"),
        (["models", "--image_size", "32", "32x"], "--image_size is 32x: give sides"),
        (["models", "--image_size", "a"], "--image_size is a: give sides"),
        (["models", "--image_size", "-5"], "--image_size is -5: give sides"),
        (["models", "--image_size", "8x8x8"], "--image_size is 8x8x8: give sides"),
        (["models", "--image_size", "9000"], "--image_size is 9000: give sides"),
        (["models", "--image_size"], "--image_size stands without a value: give one behind it"),
    ],
)
def test_cli_gives_one_line_for_a_mistake(capsys, arguments, expected):
    assert expected in fails(capsys, *arguments)


def test_cli_names_an_unknown_key_of_a_file(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  epoch: 3\n", encoding="utf-8")
    expected = f"{path}: unknown option --train.epoch: did you mean --train.epochs?"
    assert expected in fails(capsys, "train", "--config", str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {lr: -1}\n", "optim.lr is -1.0: give more than 0"),
        ("optim: {lr: many}\n", "--optim.lr is many: give a number"),
        ("modell: {name: vit_tiny}\n", "unknown option --modell.name: did you mean --model.name?"),
        ("- 1\n", "a configuration has sections of fields, such as `optim: {lr: 0.001}`, and here is - 1"),
        ("optim: {lr: 1}\noptim: {lr: 2}\n", "the key optim stands twice"),
        ("", f"{NO_SECTIONS}: it is empty"),
        ("optim:\n  lr: 1\n name: 2\n", f"{NO_SECTIONS}: line 3, column 2: while parsing a block mapping"),
        ("optim: a: b\n", f"{NO_SECTIONS}: line 1, column 9: mapping values are not allowed"),
    ],
)
def test_cli_names_the_file_of_a_mistake(capsys, tmp_path, text, expected):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("train: {epochs: 2}\n", encoding="utf-8")
    bad.write_text(text, encoding="utf-8")
    for line in (["--config", str(good), "--config", str(bad)], [f"--config={bad}", "--train.seed", "3"]):
        assert fails(capsys, "train", *line).startswith(f"vitlab: {bad}: {expected}")


def test_cli_names_no_file_for_a_mistake_of_the_line(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optim: {lr: -1}\n", encoding="utf-8")
    assert str(path) not in fails(capsys, "train", "--config", str(path), "--optim.lr", "-2")


@pytest.mark.parametrize("line", [["models"], ["models", "--json"], ["--help"]])
def test_cli_ends_quietly_where_nobody_reads_on(line):
    """As `cat` does in front of `| head`, whether rich prints or we do."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-m", "vitlab", *line], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("line", [["predict", "--help"], ["train", "--help"], ["train", "--print_config"], ["models"]])
def test_cli_says_where_its_output_cannot_be_written(line):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-m", "vitlab", *line], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "vitlab: No space left on device\n")


@pytest.mark.parametrize("command", ["predict", "evaluate", "explain", "probe"])
@pytest.mark.parametrize("name", ["timm/resnet18", "vit_tiny"])
def test_cli_says_how_a_network_becomes_a_model_file(capsys, tmp_path, command, name):
    rest = {"predict": [str(tmp_path)], "explain": [str(tmp_path), "--out", str(tmp_path / "out")]}
    line = [command, name, *rest.get(command, ["--data", str(tmp_path)])]
    expected = f"{name} is a network's name, and a model file with trained weights is needed: vitlab train --model.name"
    assert expected in fails(capsys, *line)


@pytest.mark.parametrize("command", ["predict", "evaluate", "explain"])
@pytest.mark.parametrize("name", ["weights.pth", "weights.bin", "weights.npz"])
def test_cli_says_what_weights_from_elsewhere_are_good_for(capsys, tmp_path, command, name):
    path = tmp_path / name
    torch.save({"weight": torch.zeros(2)}, path)
    rest = {"predict": [str(tmp_path)], "explain": [str(tmp_path), "--out", str(tmp_path / "out")]}
    line = [command, str(path), *rest.get(command, ["--data", str(tmp_path)])]
    expected = (
        f"{path} is not a model file of vitlab, which knows classes and preprocessing: vitlab train --model.weights"
    )
    assert expected in fails(capsys, *line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {seed: null}\ndata: {root: x}\n", "train.seed is empty"),
        ("data: {on_error: null, root: x}\n", "data.on_error is empty"),
        ("optim: {lr: null}\n", "optim.lr is empty"),
        ("optim:\ndata: {root: x}\n", "configuration cannot be read"),
        ("augment: [1]\n", ""),
        ("data: {root: ''}\n", "data.root is empty"),
        ("train: {seed: " + "9" * 5000 + "}\n", ""),
        ("model: {overrides: &t {depth: *t}}\n", ""),
        ("", ""),
    ],
)
def test_cli_survives_odd_yaml(capsys, tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    assert expected in fails(capsys, "train", "--config", str(path))


def test_cli_survives_a_file_that_is_no_text(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes("data: {root: caf\u00e9}".encode("latin-1"))
    fails(capsys, "train", "--config", str(path))


def test_cli_reports_broken_yaml_in_one_line(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: [1,\n", encoding="utf-8")
    fails(capsys, "train", "--config", str(path))


def test_cli_lets_the_line_win_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {root: photos}\nmodel: {overrides: {depth: 3, embed_dim: 32}}\n", encoding="utf-8")
    _, config = parse(["train", "--config", str(path), "--model.overrides.depth", "6", "--train.epochs", "2"])
    assert config.model.overrides == {"depth": 6, "embed_dim": 32}
    assert (config.data.root, config.train.epochs) == ("photos", 2)


def test_cli_lets_the_line_win_wherever_the_file_stands(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {root: photos}\ntrain: {epochs: 9}\n", encoding="utf-8")
    for line in (["--config", str(path), "--train.epochs", "2"], ["--train.epochs", "2", f"--config={path}"]):
        _, config = parse(["train", *line])
        assert (config.data.root, config.train.epochs) == ("photos", 2)


def test_cli_without_arguments_takes_the_digits_recipe():
    _, plain = parse(["train"])
    _, named = parse(["train", "--config", "configs/digits/vit.yaml"])
    assert plain == named
    assert plain.data.root == "digits"
    assert plain.model.overrides["patch_size"] == 2
    _, other = parse(["train", "--data.root", "photos"])
    assert other == RunConfig(data=type(other.data)(root="photos"))


def test_config_yaml_repeats_the_run(tmp_path):
    _, config = parse(["train", "--train.epochs", "7", "--train.run_dir", "here", "--optim.betas", "[0.9,0.95]"])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    _, again = parse(["train", "--config", str(path), "--train.run_dir", "here"])
    assert again == config
    assert "run_dir" not in config.to_yaml()


@pytest.mark.parametrize("name", COMMANDS)
def test_cli_help_explains_every_option(capsys, name):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options = COMMANDS[name].options
    sections = (
        {field.name: field.default_factory for field in fields(options)} if options is RunConfig else {"": options}
    )
    for section, owner in sections.items():
        for param in parse_from_object(owner).params:
            assert f"{section}.{param.arg_name}".strip("._") in text
            assert " ".join(param.description.split()) in text


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "--train.epoch", "3"], ["evaluate"]])
def test_cli_parses_without_torch(arguments):
    code = (
        "import sys\nfrom vitlab.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'timm', 'albumentations', 'cv2', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_models_lists_names_costs_and_what_is_published(capsys, monkeypatch):
    rows = published.describe_models()
    monkeypatch.setattr(published, "describe_models", lambda: rows)
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert rows[0] == {
        "name": "vit_tiny",
        "parameters": 5717416,
        "macs": 1253683200,
        "image_size": [224, 224],
        "top1_error": 0.278,
        "source": "facebookresearch/deit",
        "weights": "timm/deit_tiny_patch16_224.fb_in1k",
        "nats_per_pixel": None,
    }
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines if "│" in line
    }
    assert list(cells) == list_models()
    assert cells["vit_huge"][:4] == ["632,045,800", "167.295 G", "224x224", "11.45%"]
    assert cells["davit_large"] == ["196,811,752", "102.805 G", "384x384", "-", "-", "-"]
    assert cells["imagegpt_small"] == ["77,083,648", "103.348 G", "32x32", "2.0895 nats", "-", "-"]
    assert cells["imagegpt_large"][3] == "27.4%"
    assert cells["swin_large"][-1] == "timm/swin_large_patch4_window7_224.ms_in22k_ft_in1k"
    assert any("timm/NAME builds any network of timm" in line for line in lines[-2:])


def test_models_proposes_networks_for_sizes(capsys):
    sizes = ["--image_size", "31", "96x160"]
    proposals = [proposal for size in ((31, 31), (96, 160)) for proposal in propose(size)]
    assert main(["models", *sizes, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["architecture"], row["image_size"]) for row in rows] == [
        (name, size) for size in ([31, 31], [96, 160]) for name in ("vit", "swin", "davit", "imagegpt")
    ]
    for row, proposal in zip(rows, proposals, strict=True):
        assert {name: row[name] for name in ("parameters", "macs", "reason")} == {
            name: getattr(proposal, name) for name in ("parameters", "macs", "reason")
        }
    assert rows[5]["overrides"] == {"window_size": [6, 5], "depths": [2, 6, 2], "num_heads": [3, 6, 12]}
    assert main(["models", *sizes]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"vit for 31x31: none\n  {rows[0]['reason']}\n")
    for row in rows[1:-1]:
        assert f"\n  {row['reason']}\n  {row['command']}\n" in text
    assert f"swin for 96x160: {rows[5]['parameters']:,} parameters, {rows[5]['macs'] / 1e9:.3f} G" in text
    assert f"imagegpt for 96x160: none\n  {rows[-1]['reason']}\n" in text


def test_version_describes_the_installation(capsys):
    assert main(["--version"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("vitlab ")
    assert "torch 2." in text


def test_a_full_gpu_is_one_line_and_any_other_fault_a_traceback(capsys, monkeypatch):
    def fail(error):
        def models(options):
            raise error

        monkeypatch.setattr(commands, "models", models)

    fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert main(["models"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "give fewer images at a time" in error
    fail(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["models"])
