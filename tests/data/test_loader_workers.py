"""Processes that read for a loader: how they start, are lost, and end."""

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from vitlab.data import loader as module
from vitlab.errors import RunError


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads signal masks from /proc, which Linux has")
def test_loader_holds_signals_back_from_workers_from_their_birth(make_loader, monkeypatch):
    """Between the fork and `_init_worker` a signal to the group would end a worker, and the run with it."""
    monkeypatch.setattr(module, "_init_worker", lambda worker: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    loader = make_loader(workers=1)
    next(loader.epoch(0))
    pid = loader._loader._iterator._workers[0].pid
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    blocked = int(status["SigBlk"], 16)
    assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask, "the main process hears them again"
    loader.close()


def test_loader_shows_a_lost_worker_as_one_line(make_loader, array_split):
    loader = make_loader(array_split(400), batch_size=1, workers=1)
    before = signal.getsignal(signal.SIGCHLD)
    batches = loader.epoch(0)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) == before
    os.kill(loader._loader._iterator._workers[0].pid, signal.SIGBUS)
    with pytest.raises(RunError, match=r"shared memory .* fewer workers than 1") as caught:
        list(batches)
    assert "\n" not in str(caught.value)
    assert len(list(loader.epoch(1))) == 400  # new workers take over, should the caller go on


def test_loader_ends_where_a_batch_cannot_be_handed_over(make_loader):
    """A full /dev/shm, and this limit, meet the worker's sending thread, which Python has print it and go on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(RunError, match=r"shared memory .* fewer workers than 1"):
            list(make_loader(batch_size=8, workers=1).epoch(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_loader_that_cannot_start_all_workers_leaves_none(make_loader, monkeypatch):
    started, start = [], multiprocessing.Process.start

    def fail_at_the_second(process):
        if started:
            raise OSError(28, "No space left on device")
        started.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", fail_at_the_second)
    with pytest.raises(RunError, match=r"cannot be started \(No space left on device\): give fewer workers than 2"):
        next(make_loader(workers=2).epoch(0))
    gc.collect()  # what torch would leave as an error of its own
    started[0].join(10)
    assert started[0].exitcode == 0


def test_loader_ends_its_workers_in_order(make_loader, array_split):
    """A killed one may leave a batch in shared memory."""
    loader = make_loader(array_split(200), batch_size=2, workers=2)
    for batches_read in (1, 3):
        batches = loader.epoch(0)
        for _ in range(batches_read):
            next(batches)
        workers = loader._loader._iterator._workers
        loader.close()
        assert [worker.exitcode for worker in workers] == [0, 0]


def test_loader_says_why_it_cannot_start(make_loader, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.multiprocessing, "Queue", fail)
    with pytest.raises(RunError, match=r"cannot be started \(No space left on device\): give fewer workers than 2"):
        next(make_loader(workers=2).epoch(0))


def test_loader_does_not_wait_for_a_lock_that_a_lost_worker_held(make_loader):
    """A worker looks at torch's event between batches, under a lock that stays taken if it dies there."""
    loader = make_loader(workers=1)
    batches = loader.epoch(0)
    next(batches)
    iterator = loader._loader._iterator
    iterator._workers_done_event._cond.acquire()
    iterator._workers[0].kill()
    caught = []

    def go_on():
        try:
            list(batches)
        except RunError as error:
            caught.append(error)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(30)
    assert caught


def test_loader_does_not_wait_for_a_worker_that_does_not_end(make_loader, monkeypatch):
    def init(worker):
        init_worker(worker)
        threading.Thread(target=time.sleep, args=(100,)).start()

    init_worker = module._init_worker
    monkeypatch.setattr(module, "_init_worker", init)
    monkeypatch.setattr(module, "_END_S", 0.2)
    loader = make_loader(workers=1)
    next(loader.epoch(0))
    worker = loader._loader._iterator._workers[0]
    loader.close()
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL


def test_loader_passes_on_an_error_inside_a_worker(make_loader):
    class BrokenTransform:
        def __call__(self, image, seed):
            raise EOFError("a mistake of the transform")

    for workers in (0, 1):
        with pytest.raises(EOFError, match="a mistake of the transform"):
            list(make_loader(transform=BrokenTransform(), workers=workers).epoch(0))


def test_loader_workers_leave_signals_to_the_main_process(make_loader, array_split):
    loader = make_loader(array_split(200), batch_size=2, workers=1)
    batches = loader.epoch(0)
    next(batches)
    worker = loader._loader._iterator._workers[0]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(worker.pid, number)
    assert len(list(batches)) == 99
    loader.close()
    assert not worker.is_alive()
    assert len(list(loader.epoch(1))) == 100  # a closed loader starts again


OPEN = """
import multiprocessing, os, sys, signal
import numpy as np
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.data.splits import ArraySplit
images = np.zeros((900, 8, 8, 3), np.uint8)
split = ArraySplit(name="train", labels=np.zeros(900, int), paths=["p"] * 900, images=images)
loader = Loader(split, EvalTransform(Preprocess(image_size=(8, 8))), batch_size=8, workers=1)
batches = loader.epoch(0)
"""
LEAVE = """
next(batches)
print(loader._loader._iterator._workers[0].pid, flush=True)
if sys.argv[1] == "exit":
    sys.exit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVE_A_CHILD = """
def child():
    next(batches)
    sys.exit(3)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(20)
print(process.exitcode)
process.kill()
"""


def run_python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_loader_does_not_hold_up_a_child_of_multiprocessing():
    done = run_python(OPEN + LEAVE_A_CHILD)
    assert done.stdout == "3\n", done.stderr


def test_loader_leaves_no_folder_behind(tmp_path):
    done = run_python(OPEN + LEAVE, "exit", env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 3, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", -signal.SIGKILL)])
def test_loader_workers_end_with_the_main_process(how, code):
    done = run_python(OPEN + LEAVE, how)
    assert done.returncode == code, done.stderr
    pid, deadline = int(done.stdout), time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and open_state(pid) != "Z":
        assert time.monotonic() < deadline, "the worker outlived the main process"
        time.sleep(0.05)


def open_state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"
