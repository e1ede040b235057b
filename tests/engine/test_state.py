"""Resume states: complete or not there, and damage is noticed."""

import dataclasses
import json
import os
import random
import re
import shutil

import pytest
import torch
from torch import nn

from vitlab.config import RunConfig
from vitlab.engine.run_folder import open_run
from vitlab.engine.state import (
    Progress,
    capture,
    differing_tensors,
    drop_old_states,
    list_states,
    load_state,
    restore,
    save_state,
)
from vitlab.errors import InputError, RunError

TENSORS = {"model.a": torch.arange(6.0).view(2, 3), "optimizer.0.step": torch.tensor(3.0)}


def test_state_comes_back_as_it_was(tmp_path):
    path = tmp_path / "resume" / "step-7"
    save_state(path, TENSORS, {"progress": {"step": 7}})
    assert path == tmp_path / "resume" / "step-7"
    tensors, record = load_state(path)
    assert record["progress"] == {"step": 7}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert [child.name for child in (tmp_path / "resume").iterdir()] == ["step-7"]


def test_state_replaces_one_of_the_same_step(tmp_path):
    save_state(tmp_path / "step-7", TENSORS, {"round": 1})
    path = tmp_path / "step-7"
    save_state(path, TENSORS, {"round": 2})
    assert load_state(path)[1]["round"] == 2


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_state_names_damage(tmp_path, name):
    path = tmp_path / "step-1"
    save_state(path, TENSORS, {})
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[:-5])
    with pytest.raises(InputError, match=r"step-1 is (incomplete or )?damaged"):
        load_state(path)
    (path / name).unlink()
    with pytest.raises(InputError, match=r"step-1 is incomplete or damaged"):
        load_state(path)


def test_state_notices_one_flipped_bit_in_its_tensors(tmp_path):
    path = tmp_path / "step-1"
    save_state(path, TENSORS, {})
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-3] ^= 4
    (path / "tensors.safetensors").write_bytes(data)
    with pytest.raises(InputError, match="damaged: its tensors does not have the recorded SHA-256"):
        load_state(path)


def test_state_notices_one_changed_digit_in_its_record(tmp_path):
    path = tmp_path / "step-1"
    save_state(path, TENSORS, {"progress": {"step": 8, "loss_sum": 0.1}})
    text = (path / "state.json").read_text()
    for old, new in (('"step": 8', '"step": 9'), ("0.1", "0.3"), ('"step"', '"stEp"')):
        (path / "state.json").write_text(text.replace(old, new))
        with pytest.raises(InputError, match="damaged: its record does not have the recorded SHA-256"):
            load_state(path)
    (path / "state.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="incomplete or damaged"):
        load_state(path)


def test_state_of_a_newer_format_says_so(tmp_path):
    path = tmp_path / "step-1"
    save_state(path, TENSORS, {})
    record = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(InputError, match="has format 99, and this vitlab goes on from 2 alone"):
        load_state(path)


def test_a_failed_save_leaves_nothing_under_a_states_name(tmp_path):
    with pytest.raises(TypeError):
        save_state(tmp_path / "step-1", TENSORS, {"not json": object()})
    assert list(tmp_path.iterdir()) == []


def test_states_are_listed_newest_first_and_dropped_oldest_first(tmp_path):
    for step in (9, 100, 20):
        save_state(tmp_path / f"step-{step}", TENSORS, {})
    (tmp_path / ".step-200.1").mkdir()
    assert [path.name for path in list_states(tmp_path)] == ["step-100", "step-20", "step-9"]
    drop_old_states(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100", "step-20"]


def test_state_holds_whatever_an_optimizer_keeps(tmp_path):
    """Numbers in a group, tensors in a group, lists of tensors and None in a parameter's state."""
    network = nn.Linear(2, 1)

    class Odd(torch.optim.SGD):
        pass

    def build():
        objective = nn.ModuleDict({"network": network})
        return objective, Odd(objective.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)

    objective, optimizer, scaler = build()
    optimizer.param_groups[0]["step"] = torch.tensor(7.0)
    optimizer.param_groups[0]["count"] = 7
    kept = {"Q": [torch.ones(2), (torch.zeros(1), None)], "seen": True}
    optimizer.state[network.weight] = kept
    tensors, record = capture(objective, optimizer, scaler, Progress(step=7, best_rank=(0.5, -1.0)))
    save_state(tmp_path / "step-7", tensors, record)
    tensors, record = load_state(tmp_path / "step-7")
    objective, optimizer, scaler = build()
    progress = restore(tensors, record, objective, optimizer, scaler)
    assert progress == Progress(step=7, best_rank=(0.5, -1.0))
    assert (optimizer.param_groups[0]["step"], optimizer.param_groups[0]["count"]) == (torch.tensor(7.0), 7)
    state = optimizer.state[network.weight]
    assert state["seen"] is True
    assert torch.equal(state["Q"][0], torch.ones(2))
    assert torch.equal(state["Q"][1][0], torch.zeros(1))
    assert state["Q"][1][1] is None


def test_state_that_cannot_be_written_says_what_is_whole(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot write the state .*file/step-3: .*; the states before it are whole"):
        save_state(tmp_path / "file" / "step-3", TENSORS, {})


@pytest.fixture(scope="module")
def damaged(finished_run, tmp_path_factory):
    """Give the files of a run's newest state, step-30, and a function that goes on from the run after changing one.

    The state before is step-25.
    """
    run = shutil.copytree(finished_run, tmp_path_factory.mktemp("damage") / "run")
    state = run / "resume" / "step-30"
    told = load_state(state)[1]["run"]
    config = RunConfig.from_dict(told["config"])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=str(run)))
    whole = {path.name: path.read_bytes() for path in state.iterdir()}

    def go_on(name, content):
        (state / name).write_bytes(content)
        lines = []
        try:
            return open_run(config, told["data"], stem="x", say=lines.append).state, lines
        finally:
            (state / name).write_bytes(whole[name])

    return whole, go_on


def assert_noticed(found, lines):
    assert found.name == "step-25"
    assert re.match(r"passed over: state \S+/resume/step-30 (is|has) .*(damaged|format \d+)", lines[0])
    assert len(lines) == 1


def test_whole_state_is_the_one_that_a_run_goes_on_from(damaged):
    whole, go_on = damaged
    found, lines = go_on("state.json", whole["state.json"])
    assert found.name == "step-30"
    assert lines == []


@pytest.mark.parametrize("share", range(4))
def test_every_flipped_bit_is_noticed_and_the_state_before_is_used(damaged, share):
    """2,000 flips in four shares: a third each in the JSON, in the header of the tensors and in their values."""
    whole, go_on = damaged
    generator = random.Random(share)
    header = 8 + int.from_bytes(whole["tensors.safetensors"][:8], "little")
    places = {
        "json": ("state.json", 0, len(whole["state.json"])),
        "header": ("tensors.safetensors", 0, header),
        "values": ("tensors.safetensors", header, len(whole["tensors.safetensors"])),
    }
    for number in range(500):
        name, low, high = list(places.values())[number % 3]
        content = bytearray(whole[name])
        content[generator.randrange(low, high)] ^= 1 << generator.randrange(8)
        assert_noticed(*go_on(name, bytes(content)))


def test_every_truncation_is_noticed_and_the_state_before_is_used(damaged):
    whole, go_on = damaged
    generator = random.Random(9)
    for number in range(256):
        name = ("state.json", "tensors.safetensors")[number % 2]
        end = number // 2 if number < 32 else generator.randrange(len(whole[name]))
        assert_noticed(*go_on(name, whole[name][:end]))


def test_a_number_written_otherwise_is_damage_too(tmp_path):
    path = tmp_path / "step-1"
    save_state(path, TENSORS, {"lr": 1e-5})
    content = (path / "state.json").read_bytes()
    assert b"1e-05" in content
    (path / "state.json").write_bytes(content.replace(b"1e-05", b"1E-05"))
    with pytest.raises(InputError, match=r"step-1 is damaged: its state\.json is not as it was written"):
        load_state(path)


def test_state_set_aside_stands_for_its_step_until_the_new_one_is_there(tmp_path):
    save_state(tmp_path / "step-7", TENSORS, {"round": 1})
    (tmp_path / "step-7").rename(tmp_path / ".old-step-7")  # a kill came between two renames
    assert list_states(tmp_path) == [tmp_path / ".old-step-7"]
    assert load_state(list_states(tmp_path)[0])[1] == {"round": 1}
    save_state(tmp_path / "step-5", TENSORS, {})
    drop_old_states(tmp_path, keep=1)
    assert list_states(tmp_path) == [tmp_path / ".old-step-7"]
    save_state(tmp_path / "step-7", TENSORS, {"round": 2})
    assert list_states(tmp_path) == [tmp_path / "step-7"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_differing_tensors_names_what_differs_the_largest_first():
    tensors = {name: torch.zeros(2, 3) for name in "abcd"}
    others = {"a": torch.zeros(2, 3), "b": torch.full((2, 3), -0.5), "c": torch.full((2, 3), 2.0), "e": torch.zeros(1)}
    assert differing_tensors(tensors, others) == [("d", torch.inf), ("e", torch.inf), ("c", 2.0), ("b", 0.5)]
    assert differing_tensors({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}) == [("a", 0.0)]
    assert differing_tensors({"a": torch.tensor(0.0)}, {"a": torch.tensor(0)}) == [("a", torch.inf)]
    nan = {"a": torch.tensor([torch.nan, 1.0]).bfloat16()}
    assert differing_tensors(nan, {"a": nan["a"].clone()}) == []


def test_state_from_elsewhere_is_refused_in_one_line(tmp_path):
    """A whole state may still hold anything: its writer knows how to make the hashes."""
    path = tmp_path / "step-1"
    network = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tensors, record = capture(network, optimizer, scaler, Progress())
    groups = record["optimizer"]["dict"][1][1]
    hostile = [
        ({"model.weight": torch.zeros(3, 3)}, record),
        ({}, record),
        (tensors, record | {"optimizer": {"dict": [["state", {"tensor": "none"}], ["groups", groups]]}}),
        (tensors, record | {"optimizer": {"a": [], "b": []}}),
        (tensors, record | {"optimizer": [1]}),
        (tensors, record | {"progress": {"step": 1, "new": 2}}),
        (tensors, record | {"progress": {"best_rank": []}}),
        (tensors, {}),
    ]
    for values, said in hostile:
        save_state(path, values, said)
        with pytest.raises(InputError, match="the state does not fit the run") as caught:
            restore(*load_state(path), network, optimizer, scaler)
        assert "\n" not in str(caught.value)


def test_load_state_reads_regular_files_alone(tmp_path):
    """A pipe would be waited for, and a device would never end."""
    for name in ("tensors.safetensors", "state.json"):
        path = tmp_path / f"{name}-gone" / "step-1"
        save_state(path, TENSORS, {})
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(InputError, match="is no regular file"):
            load_state(path)


def test_load_state_refuses_a_key_that_stands_twice(tmp_path):
    path = tmp_path / "step-1"
    save_state(path, TENSORS, {"a": 1})
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"a": 1', '"a": 1, "a": 1'))
    with pytest.raises(InputError, match="damaged: a key stands twice"):
        load_state(path)
