"""Several processes that train one network together, on one machine or more: started by torchrun, joined here.

A run of one process needs no launcher and none of this: `ALONE` answers as a group of one. Of several, each takes its
slice of every batch, so that the global batch is the same for any number of them; process 0 alone shows and writes.
"""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from vitlab.errors import InputError, PeerLost, RunError, leave_telling

# What one process does while the others wait, such as drawing pictures; a peer that is gone shows at once, not by this.
_PATIENCE = timedelta(hours=2)
_ORPHAN_POLL_S = 1.0
_ORPHAN_SAVES_WITHIN_S = 60.0
_ENDS_TOGETHER_S = 5.0
"""What a process that fails waits for the others to fail of the same, so that one can say it for all."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Processes:
    """A group of processes, and the place of this one in it."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Place among the processes of this machine."""

    @property
    def is_main(self) -> bool:
        """Whether this one shows and writes."""
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """What a loader needs to know: this one's place and their number."""
        return self.rank, self.count

    def gather(self, value: _T) -> list[_T]:
        """Give everybody the value of each process, in their order.

        Raises:
            PeerLost: one of them is gone.
        """
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with naming_lost_peers():
            dist.all_gather_object(values, value)
        return values

    def gather_on_main(self, value: _T) -> list[_T]:
        """Give process 0 the value of each process, in their order, and the others an empty list.

        Raises:
            PeerLost: one of them is gone.
        """
        if self.count == 1:
            return [value]
        values: list[Any] | None = [None] * self.count if self.is_main else None
        with naming_lost_peers():
            dist.gather_object(value, values, dst=0)
        return values or []

    def gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Give everybody some numbers of each process: a row for each; faster than `gather`.

        Raises:
            PeerLost: one of them is gone.
        """
        if self.count == 1:
            return [list(numbers)]
        rows = [torch.zeros(len(numbers), dtype=torch.float64) for _ in range(self.count)]
        with naming_lost_peers():
            dist.all_gather(rows, torch.tensor(numbers, dtype=torch.float64))
        return [row.tolist() for row in rows]

    def sum(self, *numbers: float) -> list[float]:
        """Give everybody the sum of each number over the processes, added in their order."""
        return [sum(column) for column in zip(*self.gather_numbers(*numbers), strict=True)]

    def on_main(self, make: Callable[[], _T]) -> _T:
        """Let process 0 make something and give it to everybody; what it raises is raised by all.

        Raises:
            InputError, RunError: whatever `make` raises.
        """
        if self.count == 1:
            return make()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = make()
            except (InputError, RunError) as error:
                outcome[1] = error
        with naming_lost_peers():
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        made: _T = outcome[0]
        return made

    def main_first(self, make: Callable[[], _T]) -> _T:
        """Let everybody make something, process 0 before the others, who may find on the disk what it wrote there.

        Raises:
            PeerLost: process 0 is gone.
        """
        if self.is_main:
            made = make()
        self.gather_numbers(0)
        return made if self.is_main else make()

    def in_step(self, items: Iterable[_T]) -> Iterator[_T]:
        """Pass on items, of which each process has as many; where one fails to get its own, all fail.

        Raises:
            InputError, RunError: what it failed with.
        """
        if self.count == 1:
            yield from items
            return
        iterator = iter(items)
        while True:
            item, failure = None, None
            try:
                item = next(iterator, None)
            except (InputError, RunError) as error:
                failure = error
            if any(failed for (failed,) in self.gather_numbers(failure is not None)):
                raise next(error for error in self.gather(failure) if error is not None)
            if item is None:
                return
            yield item

    def same_start(self, module: nn.Module) -> None:
        """Give everybody process 0's parameters and buffers: machines of different kinds may have drawn others."""
        if self.count == 1:
            return
        with naming_lost_peers():
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)


ALONE = Processes()


@contextmanager
def launched(device: str) -> Iterator[Processes]:
    """Join the processes that a launcher has started for this run; without a launcher there is one.

    Args:
        device: the run's `train.device`; of GPUs each process takes its own.

    Raises:
        InputError: more processes than GPUs.
        RunError: the others cannot be reached.
    """
    if not (count := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        yield ALONE
        return
    processes = Processes(int(os.environ["RANK"]), count, int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():  # the second of several seeds
        yield processes
        return
    gpus = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if gpus and (there := torch.cuda.device_count()) < (needed := int(os.environ.get("LOCAL_WORLD_SIZE", count))):
        raise InputError(
            f"{needed} processes for {there} GPUs on this machine: start torchrun with --nproc-per-node {there}, or "
            "give --train.device cpu"
        )
    _watch_launcher()
    try:
        if gpus:
            torch.cuda.set_device(processes.local_rank)
        launchers, rank, count = next(rendezvous("env://", timeout=_PATIENCE))
        # The launcher's store outlives a restart, and with it the addresses of processes that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"vitlab/attempt {attempt} of {count}", launchers)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"cannot reach the other processes of this run: {_first_line(error)}") from error
    failure: BaseException | None = None
    try:
        yield processes
        processes.gather_numbers(0)  # none leaves while another still talks to it
    except BaseException as error:
        failure = error
        raise
    finally:
        # What still refers to the group would keep its threads until the interpreter ends, which they do not survive.
        gc.collect()
        dist.destroy_process_group()
        if failure is not None:
            _settle_teller(failure, processes, store)


def _settle_teller(failure: BaseException, processes: Processes, store: Any) -> None:
    """Settle who reports a failure: of those that fail of the same the first, and of a lost peer only who has no cause.

    A launcher ends all processes at the first that ends, so the others are waited for: one that only repeats what
    process 0 is about to say would keep it from saying so.
    """
    keys = [f"failed/{rank}" for rank in range(processes.count)]
    with suppress(RuntimeError):  # the store is gone with the launcher, or with process 0
        lost = isinstance(failure, PeerLost)
        store.set(keys[processes.rank], "" if lost else f"{type(failure).__name__}: {failure}")
        until = time.monotonic() + _ENDS_TOGETHER_S
        with suppress(KeyboardInterrupt):  # the launcher's SIGTERM: another has ended
            while not store.check(keys) and time.monotonic() < until:
                time.sleep(0.05)
        failures = [store.get(key) if store.check([key]) else None for key in keys]
        leave_telling(failure, None if lost and any(failures) else failures.index(failures[processes.rank]))


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Say in one line that a process is gone, whatever the backend says."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"another process of this run has ended: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def is_launched() -> bool:
    """Say whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_main_process() -> bool:
    """Say whether this process is the one that shows and writes, before any group is joined and after it is left."""
    return int(os.environ.get("RANK", "0")) == 0


def restarts_allowed() -> bool:
    """Say whether the launcher starts the run again where a process ends."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def _watch_launcher() -> None:
    """End with the launcher, whose death does not reach the sessions that it keeps its processes in.

    The state is saved first, as at a SIGTERM.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_ORPHAN_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_SAVES_WITHIN_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher watch").start()


def of_all(parts: Sequence[Sequence[_T]]) -> list[_T]:
    """Put the processes' lists into one, in their order."""
    return [item for part in parts for item in part]
