"""Resume states written beside the training: copied at once, written in a thread, one at a time."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.disk import flush
from vitlab.engine.state import drop_old_states, save_state
from vitlab.errors import RunError


class StateWriter:
    """Saves states while training goes on; training waits for the copy alone, or for a write that is not done yet.

    Args:
        folder: where the states lie.
        keep: how many of them stay, the newest.
        past: files and folders that tell of the steps before a state; they reach the disk before it does.
        save: writes a state; `state.save_state` unless a test stands in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        past: Sequence[Path] = (),
        save: Callable[[Path, dict[str, Tensor], dict[str, Any]], None] = save_state,
    ) -> None:
        self.folder, self.keep, self.past, self._save = folder, keep, past, save
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Copy a state and begin to write it; one that is still being written is waited for.

        Args:
            step: optimizer steps done.
            tensors: live ones; they may change as soon as this returns.
            record: plain JSON values, the caller's no more.

        Raises:
            RunError: the write before this one failed.
        """
        self.wait()
        self._copies = {name: _copy(tensor, self._copies.get(name)) for name, tensor in tensors.items()}
        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=self._write, args=(step, self._copies, record), name="state writer")
        self._thread.start()

    def check(self) -> None:
        """Raise what a write that has ended failed with; a write that goes on is left alone.

        Raises:
            RunError: the state could not be written.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the write that goes on, and raise what it failed with.

        Raises:
            RunError: the state could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        try:
            self._flush_past()
            self._save(self.folder / f"step-{step}", tensors, record)
            drop_old_states(self.folder, keep=self.keep)
        except BaseException as error:  # raised again where training sees it
            self._error = error

    def _flush_past(self) -> None:
        for path in self.past:
            try:
                flush(path)
            except FileNotFoundError:  # nothing is logged yet, or not there
                continue
            except OSError as error:
                raise RunError(f"cannot write {path}: {error.strerror}; the states before it are whole") from error


def _copy(tensor: Tensor, into: Tensor | None) -> Tensor:
    """Copy a tensor to the CPU, into the copy of the last time where it fits: fresh memory costs more than the copy."""
    tensor = tensor.detach()
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
    return into.copy_(tensor)
