"""What a file means once, and no more than it is long."""

import pytest

from vitlab.cli import parse
from vitlab.errors import InputError
from vitlab.inference.run_pairs import read_config
from vitlab.parsing import check_yaml, parse_json

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))


def test_parse_json_reads_what_json_reads():
    assert parse_json('{"a": [1, 2.5, null, {"b": "\\u00e9"}], "b": true}') == {
        "a": [1, 2.5, None, {"b": "é"}],
        "b": True,
    }
    assert parse_json(b"[]") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "a key stands twice"),
        ('[{"b": {"a": 1, "a": 2}}]', "a key stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 5000, "limit"),
        ("{", "Expecting"),
    ],
)
def test_parse_json_raises_value_error_alone(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 3\nbatch_size: 2\nepochs: 4", "the key epochs stands twice in one section, again on line 3"),
        ("train: {epochs: 3, epochs: 3}", "the key epochs stands twice"),
        ("a: [{b: 1}, {c: 1, c: 2}]", "the key c stands twice"),
        ("'a': 1\n\"a\": 2", "the key a stands twice"),
        (BOMB, "unfolds into more than 100,000 values"),
        ("a: &a [*a]", "refers to itself"),
        ("a: &a {b: *a}", "refers to itself"),
        ("[" * 60, "nested more than 50 deep"),
        ("- " * 60 + "x", "nested more than 50 deep"),
        ("x" * (2**20 + 1), "1,048,577 characters"),
    ],
)
def test_check_yaml_refuses_what_means_two_things_or_grows(text, message):
    with pytest.raises(InputError, match=message):
        check_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "train: {epochs: 3}\noptim: {epochs: 3}", "a: &a {b: 1}\nc: *a\nd: *a", "- {a: 1}\n- {a: 1}", "5"),
        *("a: &a {b: 1}\nc: {<<: *a, b: 2}", "{a: 1}\n: :", "? [a]\n: 1", "no yaml: ["),
    ],
)
def test_check_yaml_passes_what_a_reader_reads_or_refuses_itself(text):
    check_yaml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {epochs: 3}\ntrain: {epochs: 4}\n", "the key train stands twice"),
        ("train:\n  epochs: 3\n  epochs: 4\n", "the key epochs stands twice"),
        (BOMB, "unfolds into more than"),
        ("model: " + "[" * 90 + "]" * 90, "nested more than 50 deep"),
    ],
)
def test_cli_refuses_such_a_configuration_in_one_line(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    for arguments in (["train", "--config", str(path)], ["train", "--train", str(path)]):
        with pytest.raises(InputError, match=message) as caught:
            parse(arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=message):
        read_config(tmp_path)


def test_cli_refuses_what_is_nested_without_end(tmp_path):
    (tmp_path / "config.yaml").write_text("model: " + "[" * 200_000)
    with pytest.raises(InputError, match="nesting depth"):
        parse(["train", "--config", str(tmp_path / "config.yaml")])
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path)


def test_cli_still_reads_values_files_and_references(tmp_path):
    (tmp_path / "config.yaml").write_text("optim: &o {lr: 1e-3}\ntrain: {epochs: 7, seeds: [1, 2]}\n")
    line = ["--model.overrides", "{depth: 3, pool: mean}", "--data.root", "x", "--optim.betas", "0.9", "0.95"]
    _, config = parse(["train", "--config", str(tmp_path / "config.yaml"), *line])
    assert (config.optim.lr, config.train.epochs, config.train.seeds) == (1e-3, 7, (1, 2))
    assert (config.model.overrides, config.optim.betas) == ({"depth": 3, "pool": "mean"}, (0.9, 0.95))


@pytest.mark.parametrize(
    "option",
    [
        *("--train.accumulate=100000000000000000000", "--train.accumulate=1e20", "--train.batch_size=1000000000000"),
        *("--train.epochs=1000000000000", "--model.image_size=1000000", "--model.num_classes=1000000000000"),
        *("--data.workers=1000000000", "--augment.crop_padding=1000000000", "--augment.repeats=1000000000000"),
        *("--augment.policy_ops=1000000000000", "--monitor.drawings=1000000", "--optim.lr=.nan", "--optim.lr=.inf"),
        *("--train.batch_size=-1", "--train.batch_size=true", "--train.batch_size=x"),
    ],
)
def test_cli_refuses_absurd_numbers_before_anything_is_read(option):
    field = option.partition("=")[0].removeprefix("--")
    with pytest.raises(InputError, match=rf"^(--)?{field} is [^\n]*: give [^\n]*$"):
        parse(["train", "--data.root", "nowhere", option])
