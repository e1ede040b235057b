"""Resume states: complete or not there, and damage is noticed."""

import json

import pytest
import torch
from torch import nn

from vitlab.engine.state import Progress, capture, drop_old_states, list_states, load_state, restore, save_state
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
