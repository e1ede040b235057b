"""Whatever happens to a run: signals, dead workers, lost images, full disks and memories; it ends in the same bits."""

import dataclasses
import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitlab.__main__ import main
from vitlab.config import TrainConfig
from vitlab.engine import objectives
from vitlab.engine import trainer as trainer_module
from vitlab.engine.device import memory_advice
from vitlab.engine.evaluator import Scores
from vitlab.engine.keeper import Keeper
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.state import differing_tensors, list_states, load_state
from vitlab.engine.tensorboard import EVENTS_NAME, read_events
from vitlab.engine.trainer import Trainer
from vitlab.errors import Interrupted
from vitlab.inference.sameness import compare_bits
from vitlab.models.files import load_model
from vitlab.runs import training
from vitlab.runs.training import run_training

ALL = {
    "augment__mixup": 0.8,
    "augment__cutmix": 1.0,
    "train__accumulate": 2,
    "train__batch_size": 4,
    "train__ema_decay": 0.9,
    "optim__warmup_steps": 2,
}


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Curves and confusion matrices take longer than these runs."""
    monkeypatch.setattr(training, "_plot", lambda trainer: None)
    monkeypatch.setattr(training, "show_evaluation", lambda *_: None)


def assert_same_end(run: Path, other: Path) -> None:
    """Losses, weights, optimizer, moving average, progress and every score are equal to the last bit."""
    same = compare_bits(run, other)
    assert same.identical, same.lines()
    (tensors, record), (others, other_record) = (load_state(list_states(one / "resume")[0]) for one in (run, other))
    assert differing_tensors(tensors, others) == []
    assert record["progress"] == other_record["progress"]
    assert record["optimizer"] == other_record["optimizer"]
    assert logged(run) == logged(other)
    rows, other_rows = (RunFolder(one).read_metrics() for one in (run, other))
    assert [timeless(row) for row in rows] == [timeless(row) for row in other_rows]


def timeless(values: dict) -> dict:
    return {tag: value for tag, value in values.items() if not tag.endswith(("images_per_s", "data_wait"))}


def logged(run: Path) -> list[tuple[int, dict]]:
    """Every point of TensorBoard's curves in the order of the file, without the speeds."""
    events = (event for event, _ in read_events(run / "tensorboard" / EVENTS_NAME))
    points = [(e.step, timeless({v.tag: v.simple_value for v in e.summary.value if v.HasField("simple_value")}))
              for e in events]  # fmt: skip
    return [point for point in points if point[1]]


def after_step(monkeypatch, at: int, act) -> None:
    """Do something each time that a run has made so many steps."""
    make_step = Trainer.train_step

    def step(self, micro_batches):
        report = make_step(self, micro_batches)
        if self.progress.step == at:
            act(self)
        return report

    monkeypatch.setattr(Trainer, "train_step", step)


def send(number: int):
    return lambda *_: os.kill(os.getpid(), number)


def command(config, tmp_path, *more: object) -> list[str]:
    (tmp_path / "c.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return ["train", "--config", str(tmp_path / "c.yaml"), "--train.run_dir", config.train.run_dir, *map(str, more)]


def ends(capsys, line: list[str]) -> tuple[int, str]:
    """Run a command; give its exit code and the one line that it wrote to stderr."""
    capsys.readouterr()
    code = main(line)
    error = capsys.readouterr().err
    assert error.count("\n") <= 1, error
    return code, error


def test_run_resumed_from_any_step_of_two_epochs_ends_in_the_same_bits(tiny_run, tmp_path, monkeypatch):
    whole = run_training(tiny_run(**ALL, train__run_dir=str(tmp_path / "whole")))
    assert [step for step, values in logged(whole) if "train/loss" in values] == list(range(1, 11))
    for at in range(1, 11):
        config = tiny_run(**ALL, train__run_dir=str(tmp_path / f"broken-{at}"))
        with monkeypatch.context() as patch:
            after_step(patch, at, send(signal.SIGTERM))
            with pytest.raises(Interrupted, match=rf"state saved in .*step-{at};"):
                run_training(config)
        assert_same_end(whole, run_training(config))


def test_run_interrupted_after_every_step_ends_in_the_same_bits(tiny_run, tmp_path, monkeypatch):
    whole = run_training(tiny_run(**ALL, train__run_dir=str(tmp_path / "whole")))
    broken = tiny_run(**ALL, train__keep_states=1)
    for at in range(1, 11):
        with monkeypatch.context() as patch:
            after_step(patch, at, send((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)[at % 3]))
            with pytest.raises(Interrupted, match=rf"step-{at};"):
                run_training(broken)
    assert_same_end(whole, run_training(broken))


@pytest.mark.parametrize("batch", [1, 2, 3, 4], ids=["raw", "raw at its end", "averaged", "averaged at its end"])
def test_signal_in_an_evaluation_is_heeded_at_once_and_the_evaluation_made_again(
    tiny_run, tmp_path, monkeypatch, batch
):
    settings = {"train__ema_decay": 0.9, "train__epochs": 3}
    whole = run_training(tiny_run(**settings, train__run_dir=str(tmp_path / "whole")))
    add, batches = Scores.add, []

    def count(self, *arguments):
        add(self, *arguments)
        batches.append(self.weights)
        if len(batches) == 4 + batch:  # of the second evaluation, with two batches for each kind of weights
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Scores, "add", count)
        with pytest.raises(Interrupted, match=r"SIGTERM: state saved in .*step-10;"):
            run_training(tiny_run(**settings))
    assert len(batches) == 4 + batch
    assert [row["step"] for row in RunFolder(tmp_path / "run").read_metrics()] == [5]
    assert_same_end(whole, run_training(tiny_run(**settings)))


def test_second_signal_ends_at_once(tiny_run, tmp_path, monkeypatch, capsys):
    def twice(trainer):
        send(signal.SIGTERM)()
        send(signal.SIGTERM)()

    with monkeypatch.context() as patch:
        after_step(patch, 7, twice)
        assert main(command(tiny_run(), tmp_path)) == 130
    assert capsys.readouterr().err.endswith("vitlab: interrupted\n")
    assert list_states(tmp_path / "run" / "resume")[0].name == "step-5"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_before_the_first_step_ends_with_130_too(tiny_run, tmp_path, monkeypatch, capsys, number):
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    load, line = training.load_dataset, command(tiny_run(), tmp_path)

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), number)
        return load(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(training, "load_dataset", signalled)
        assert ends(capsys, line) == (130, "vitlab: interrupted\n")
    assert {one: signal.getsignal(one) for one in handlers} == handlers
    assert ends(capsys, line) == (0, "")


def test_process_that_was_just_forked_leaves_signals_to_the_main_one(tmp_path):
    """A loader's worker has the main process's handlers until it sets its own."""
    keeper = Keeper(RunFolder(tmp_path), run={}, save_model=None)
    with keeper.listening():
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(int(keeper._signal is not None))
        assert os.waitpid(pid, 0)[1] == 0


def test_dead_worker_is_one_line_and_no_step_is_lost(tiny_run, tmp_path, monkeypatch, capsys):
    settings = {"train__batch_size": 2, "data__workers": 2}
    whole = run_training(tiny_run(**settings, train__run_dir=str(tmp_path / "whole")))

    def kill_worker(trainer):
        os.kill(trainer.data.train._loader._iterator._workers[0].pid, signal.SIGKILL)

    line = command(tiny_run(**settings), tmp_path)
    with monkeypatch.context() as patch:
        after_step(patch, 23, kill_worker)
        code, error = ends(capsys, line)
    assert code == 1
    newest = list_states(tmp_path / "run" / "resume")[0]
    assert 23 <= int(newest.name.removeprefix("step-")) < 40
    assert "a loader process died" in error
    assert "give fewer workers than 2" in error
    assert error.endswith(f"; the state of {newest.name.replace('-', ' ')} is saved in {newest}\n")
    assert ends(capsys, line) == (0, "")
    assert_same_end(whole, tmp_path / "run")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_image_lost_on_the_way_is_named_and_no_step_is_lost(
    tiny_run, color_folder, tmp_path, monkeypatch, capsys, split, fault
):
    root = shutil.copytree(color_folder, tmp_path / "photos")
    config = tiny_run(data__root=str(root))
    whole = run_training(tiny_run(data__root=str(root), train__run_dir=str(tmp_path / "whole")))
    lost = sorted((root / split).rglob("*.png"))

    def lose(trainer):
        for path in lost:
            path.unlink() if fault == "gone" else path.write_bytes(path.read_bytes()[:100])

    line, last = command(config, tmp_path), {"train": 7, "val": 10}[split]
    with monkeypatch.context() as patch:
        after_step(patch, 7, lose)
        code, error = ends(capsys, line)
    assert code == 2
    assert str(root / split) in error
    assert "repair it, remove it, or set on_error to skip" in error
    assert f"; the state of step {last} is saved in {tmp_path / 'run' / 'resume' / f'step-{last}'}\n" in error
    for path in lost:
        shutil.copy(color_folder / path.relative_to(root), path)
    assert ends(capsys, line) == (0, "")
    assert_same_end(whole, tmp_path / "run")


def test_images_lost_on_the_way_are_skipped_counted_and_listed(tiny_run, color_folder, tmp_path, monkeypatch, capsys):
    root = shutil.copytree(color_folder, tmp_path / "photos")
    lost = [root / "train" / "red" / "001.png", root / "val" / "green" / "002.png", root / "val" / "blue" / "000.png"]
    after_step(monkeypatch, 5, lambda trainer: [path.unlink() for path in lost])
    line = command(tiny_run(data__root=str(root), train__epochs=3), tmp_path, "--data.on_error", "skip")
    assert main(line) == 3
    printed = capsys.readouterr().out
    assert all(printed.count(f"skipped {path}") == 1 for path in lost)
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row.get("train/unreadable", 0) for row in rows] == [0, 1, 1]
    assert [row["val/unreadable"] for row in rows] == [2, 2, 2]
    assert [row["val/count"] for row in rows] == [13, 13, 13]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_disk_that_fails_in_a_background_save_ends_the_run_at_the_next_step(
    tiny_run, tmp_path, monkeypatch, capsys, error
):
    settings = {"train__checkpoint_every_steps": 3}
    whole = run_training(tiny_run(**settings, train__run_dir=str(tmp_path / "whole")))
    mkdir, line, steps = os.mkdir, command(tiny_run(**settings), tmp_path), []

    def fail(path, *args, **kwargs):
        if str(path).endswith((".new-step-6", ".new-step-9")):
            raise OSError(error, os.strerror(error), str(path))
        return mkdir(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", fail)
        after_step(patch, 6, lambda trainer: steps.append(6))
        after_step(patch, 7, lambda trainer: (trainer.keeper.writer._thread.join(), steps.append(7)))
        after_step(patch, 8, lambda trainer: steps.append(8))
        code, printed = ends(capsys, line)
    assert (code, steps) == (1, [6, 7])
    state = tmp_path / "run" / "resume" / "step-6"
    assert f"cannot write the state {state}: {os.strerror(error)}; the states before it are whole" in printed
    assert [path.name for path in list_states(state.parent)] == ["step-5", "step-3"]
    assert ends(capsys, line) == (0, "")
    assert_same_end(whole, tmp_path / "run")


def test_folder_that_takes_no_files_is_refused_in_one_line(tiny_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == ".lock":  # permissions would not stop root
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    code, error = ends(capsys, command(tiny_run(), tmp_path))
    assert code == 2
    assert f"train.run_dir {tmp_path / 'run'} cannot be written (Permission denied): give another folder" in error


def test_folder_in_use_is_refused_in_one_line(tiny_run, tmp_path, capsys):
    with RunFolder(tmp_path / "run").claimed():
        code, error = ends(capsys, command(tiny_run(), tmp_path))
    assert code == 2
    assert "is in use by another run: wait for its end, or give another folder" in error


@pytest.mark.parametrize(
    "fault",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    ],
    ids=["cuda", "cpu"],
)
def test_full_memory_names_the_batch_size_and_what_to_try(tiny_run, tmp_path, monkeypatch, capsys, fault):
    forward = objectives.Classification.forward

    def fail(self, batch):
        fail.calls += self.training
        if fail.calls == 8:
            raise fault
        return forward(self, batch)

    fail.calls = 0
    line = command(tiny_run(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(objectives.Classification, "forward", fail)
        code, error = ends(capsys, line)
    run = tmp_path / "run"
    assert code == 1
    assert error == (
        f"vitlab: memory of cpu is full at step 8 with train.batch_size 8: kept are {run}/best.safetensors, "
        f"{run}/last.safetensors, {run}/resume/step-5; "
        "train.grad_checkpointing true goes on from there in less memory; "
        "in another train.run_dir train.batch_size 4 with train.accumulate 2 or train.precision bf16\n"
    )
    assert ends(capsys, [*line, "--train.grad_checkpointing", "true"]) == (0, "")


def test_memory_advice_names_only_what_is_left_to_try():
    smallest = TrainConfig(batch_size=1, accumulate=6, grad_checkpointing=True)
    assert memory_advice(smallest, is_full_precision=False) == []
    advice = memory_advice(dataclasses.replace(smallest, batch_size=5), is_full_precision=False)
    assert advice == ["in another train.run_dir train.batch_size 3 with train.accumulate 12"]


def test_image_that_is_lost_with_the_disk_full_is_still_named(tiny_run, color_folder, tmp_path, monkeypatch, capsys):
    root, mkdir = shutil.copytree(color_folder, tmp_path / "photos"), os.mkdir

    def fail(path, *args, **kwargs):
        if str(path).endswith(".new-step-7"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", fail)
    after_step(monkeypatch, 7, lambda trainer: shutil.rmtree(root / "train"))
    code, error = ends(capsys, command(tiny_run(data__root=str(root)), tmp_path))
    assert code == 2
    assert f"{root}/train/" in error
    assert "step-7: No space left on device; the states before it are whole\n" in error


def test_other_faults_are_not_taken_for_full_memory(tiny_run, monkeypatch):
    def fail(self, batch):
        raise RuntimeError("a bug")

    monkeypatch.setattr(objectives.Classification, "forward", fail)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        run_training(tiny_run())


def test_best_score_and_the_count_of_worse_ones_outlive_interruptions(tiny_run, tmp_path, monkeypatch):
    """The loss falls with every epoch and is ranked upside down, so that the first evaluation stays the best."""
    monkeypatch.setattr(objectives.Classification, "rank", lambda self, summary: (summary["loss"], 0.0))
    settings = {"train__epochs": 9, "train__patience": 4}
    whole = run_training(tiny_run(**settings, train__run_dir=str(tmp_path / "whole")))
    assert load_state(whole / "resume" / "step-25")[1]["progress"]["stale"] == 4
    for at in (8, 15, 18):
        with monkeypatch.context() as patch:
            after_step(patch, at, send(signal.SIGINT))
            with pytest.raises(Interrupted):
                run_training(tiny_run(**settings))
        assert load_model(tmp_path / "run").metrics["step"] == 5
    run = run_training(tiny_run(**settings))
    assert load_model(run).metrics["step"] == 5
    assert_same_end(whole, run)


def test_the_command_of_a_finished_run_ends_well_and_changes_nothing(tiny_run, tmp_path, capsys):
    line = command(tiny_run(), tmp_path)
    assert ends(capsys, line) == (0, "")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, error = ends(capsys, line)
    assert code == 0
    assert "step-10 is finished: give another train.run_dir for a new one, or more train.epochs to go on" in error
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_what_a_kill_left_of_a_model_file_neither_blocks_the_run_nor_stays(tiny_run, tmp_path, monkeypatch):
    """Safetensors writes under a name like .tmpAbC123 and renames; killed there, the file stays."""
    evaluated = trainer_module.Trainer.evaluate

    def killed(self):
        (self.keeper.folder.path / ".tmpAbC123").write_bytes(b"half")
        (self.keeper.folder.path / ".best.safetensors.tmp").write_bytes(b"")
        raise KeyboardInterrupt

    for at in (5, 10):
        with monkeypatch.context() as patch:
            patch.setattr(
                Trainer, "evaluate", lambda self, at=at: killed(self) if self.progress.step == at else evaluated(self)
            )
            with pytest.raises(KeyboardInterrupt):
                run_training(tiny_run())
    run = run_training(tiny_run())
    assert not [path.name for path in run.iterdir() if "tmp" in path.name]
    assert load_file(run / "best.safetensors")


def test_a_run_killed_while_it_wrote_its_configuration_starts_again(tiny_run, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", ".config.yaml.tmp"):
        (run / name).touch()
    assert run_training(tiny_run(train__epochs=1)) == run
    assert not (run / ".config.yaml.tmp").exists()
