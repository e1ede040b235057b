"""Which runs are compared: two folders, two files, or the same seeds of two folders."""

import pytest

from vitlab.errors import InputError
from vitlab.inference.run_pairs import pair_up, read_config


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A single run, two folders of seeds and an empty one, as relative paths."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "a/seed-1", "a/seed-2", "a/seed-10", "b/seed-10", "b/seed-2", "b/seed-3", "c/seed-7"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "best.safetensors").touch()
    for name in ("b/seed-1", "empty"):  # a run that saved nothing yet
        (tmp_path / name).mkdir()
    return tmp_path


def test_pair_up_pairs_runs_and_files_as_they_are(folders):
    pairs, left_out = pair_up("one", "one/best.safetensors")
    assert {name: tuple(map(str, paths)) for name, paths in pairs.items()} == {"": ("one", "one/best.safetensors")}
    assert left_out == ()


def test_pair_up_pairs_seeds_in_order_and_names_the_others(folders):
    pairs, left_out = pair_up("a", "b")
    assert [(name, *map(str, paths)) for name, paths in pairs.items()] == [
        ("seed-2", "a/seed-2", "b/seed-2"),
        ("seed-10", "a/seed-10", "b/seed-10"),
    ]
    assert left_out == ("seed-1 has a model file in a alone", "seed-3 has a model file in b alone")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            "one",
            "a",
            "^one is one run and a a folder of several seeds: give two runs, such as a/seed-N, or two folders",
        ),
        ("a", "one", "^one is one run and a a folder"),
        ("a", "c", r"^a has seed-1, seed-10, seed-2 and c has seed-7: train both with some of the same train\.seeds"),
        ("a", "empty", "^empty holds no best.safetensors"),
        ("nowhere", "one", "^no such file or run folder: nowhere"),
        ("nowhere", "a", "^no such file or run folder: nowhere"),
    ],
)
def test_pair_up_says_what_cannot_be_paired(folders, a, b, message):
    with pytest.raises(InputError, match=message):
        pair_up(a, b)


@pytest.mark.parametrize("text", ["a: [1,\n", "- 1\n", ""])
def test_read_config_names_a_file_it_cannot_read(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml cannot be read \(.*\): restore it, or give the model files"):
        read_config(tmp_path)
