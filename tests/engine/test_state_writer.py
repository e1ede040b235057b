"""States written beside the training: what is saved is what was there, and failures are not lost."""

import threading

import pytest
import torch

from vitlab.engine.state import list_states, load_state, save_state
from vitlab.engine.state_writer import StateWriter
from vitlab.errors import RunError


def test_tensors_changed_after_the_start_do_not_reach_the_file(tmp_path):
    go = threading.Event()

    def slow(*args):
        go.wait(10)
        return save_state(*args)

    weights = torch.arange(6.0).reshape(2, 3)
    writer = StateWriter(tmp_path, keep=2, save=slow)
    writer.start(1, {"w": weights}, {"step": 1})
    weights += 100
    go.set()
    writer.wait()
    tensors, record = load_state(tmp_path / "step-1")
    assert torch.equal(tensors["w"], torch.arange(6.0).reshape(2, 3))
    assert record == {"step": 1}


def test_one_write_at_a_time_and_the_next_waits(tmp_path):
    running, most = [], []

    def noted(path, tensors, record):
        running.append(path)
        most.append(len(running))
        save_state(path, tensors, record)
        running.remove(path)

    writer = StateWriter(tmp_path, keep=10, save=noted)
    for step in range(8):
        writer.start(step, {"w": torch.full((1000,), float(step))}, {"step": step})
    writer.wait()
    assert max(most) == 1
    for path in list_states(tmp_path):
        tensors, record = load_state(path)
        assert tensors["w"].unique().tolist() == [record["step"]]


def test_only_the_newest_states_stay(tmp_path):
    writer = StateWriter(tmp_path, keep=3)
    for step in (1, 2, 5, 9, 12):
        writer.start(step, {"w": torch.zeros(2)}, {})
    writer.wait()
    assert [path.name for path in list_states(tmp_path)] == ["step-12", "step-9", "step-5"]


@pytest.mark.parametrize("surfaces", ["check", "wait", "start"])
def test_failed_write_surfaces_once(tmp_path, surfaces):
    def full(*args):
        raise RunError("cannot write the state: No space left on device")

    writer = StateWriter(tmp_path, keep=2, save=full)
    writer.start(1, {"w": torch.zeros(2)}, {})
    writer._thread.join()
    calls = {"check": writer.check, "wait": writer.wait, "start": lambda: writer.start(2, {"w": torch.zeros(2)}, {})}
    with pytest.raises(RunError, match="No space left"):
        calls[surfaces]()
    writer.check()
    assert list_states(tmp_path) == []


def test_check_does_not_wait(tmp_path):
    go = threading.Event()

    def slow(*args):
        go.wait(10)
        return save_state(*args)

    writer = StateWriter(tmp_path, keep=2, save=slow)
    writer.start(1, {"w": torch.zeros(2)}, {})
    writer.check()
    assert list_states(tmp_path) == []
    go.set()
    writer.wait()
    assert len(list_states(tmp_path)) == 1


def test_strided_and_changed_shapes_are_copied_whole(tmp_path):
    writer = StateWriter(tmp_path, keep=2)
    image = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    for step, tensor in enumerate((image, image[:, :1], image.half())):
        writer.start(step, {"w": tensor}, {})
        writer.wait()
        assert torch.equal(load_state(tmp_path / f"step-{step}")[0]["w"], tensor)
