"""What a run saves, and when: model files, resume states, and the state on a signal or where images fail."""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from vitlab.config import WeightsKind
from vitlab.data.loader import Batch
from vitlab.engine.device import describe_machine, is_out_of_memory, memory_advice
from vitlab.engine.distributed import is_launched, is_main_process, of_all
from vitlab.engine.evaluator import Scores
from vitlab.engine.objectives import Objective
from vitlab.engine.optim import gradient_norms
from vitlab.engine.parallel import whole_state
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.state import capture, drop_old_states, list_states, load_state, restore, save_state
from vitlab.engine.state_writer import StateWriter
from vitlab.engine.tensorboard import EVENTS_NAME
from vitlab.errors import InputError, Interrupted, NonFinite, PeerLost, RunError
from vitlab.models.network import Network

if TYPE_CHECKING:
    from vitlab.engine.trainer import Trainer


_T = TypeVar("_T")


class SaveModel(Protocol):
    """Writes a model file; knows the run's classes, preprocessing and data."""

    def __call__(
        self,
        path: Path,
        network: Network,
        *,
        state: Mapping[str, Tensor],
        metrics: dict[str, Any],
        weights: WeightsKind,
        temperature: float,
    ) -> None:
        """Write a network's weights, which `state` holds whole, to `path`."""


class Keeper:
    """Saves the best and the last model file after each evaluation, and resume states between.

    Args:
        folder: the run's.
        run: what a state tells of its run: the configuration and the data's fingerprint, with which one that goes on
            from it must agree, and the preprocessing, which it takes over.
        save_model: writes a model file.
        every_steps: optimizer steps between states, besides the one at the end of each epoch.
        every_minutes: minutes after the last state at which the next step saves one.
        keep_states: how many states stay.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        run: dict[str, Any],
        save_model: SaveModel,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_states: int = 2,
    ) -> None:
        self.folder, self.run, self.save_model = folder, run, save_model
        self.every_steps, self.every_minutes = every_steps, every_minutes
        past = (folder.metrics, folder.tensorboard / EVENTS_NAME, folder.tensorboard, folder.path)
        self.writer = StateWriter(folder.resume, keep=keep_states, past=past)
        self._saved_at = time.monotonic()
        self._signal: int | None = None
        self._process = os.getpid()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Save and stop at the next step when SIGINT, SIGTERM or SIGUSR1 comes; a second signal ends at once."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        try:
            before = {number: signal.signal(number, self._note_signal) for number in signals}
        except ValueError:  # Not the main thread: signals belong to whoever runs us.
            with self._writing():
                yield
            return
        try:
            with self._writing():
                yield
        finally:
            # A run that a launcher's signal ends may get more of them, each of which would cut its last words short.
            ending = self.signalled and is_launched()
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if ending else handler)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Wait at the end for a state that is being written; its failure counts where nothing else failed."""
        try:
            yield
        except BaseException:
            with suppress(RunError):
                self.writer.wait()
            raise
        self.writer.wait()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader process so young that it does not ignore signals yet
            return
        if self.signalled and not is_launched():  # a launcher passes on what a process may have got by itself, too
            raise KeyboardInterrupt
        self._signal = number
        name, again = signal.Signals(number).name, "" if is_launched() else "; once more stops at once"
        if is_main_process():
            os.write(2, f"\nvitlab: {name}: finishing the step and saving{again}\n".encode())

    def started(self, trainer: "Trainer") -> None:
        """Save the state of step 0: it tells a run that ended in its first epoch from one that must not be touched."""
        self._save(trainer)
        self.writer.wait()

    def step_ended(self, trainer: "Trainer", *, epoch_ends: bool) -> None:
        """Save a state where one is due; the end of an epoch saves its own after the evaluation.

        Raises:
            Interrupted: a signal came, and the state is saved.
            RunError: a state could not be written.
        """
        self.writer.check()
        self.heed_signal(trainer)
        if not epoch_ends and self._is_due(trainer):
            self._save(trainer)

    @property
    def signalled(self) -> bool:
        """Whether a signal has come that the run has not ended for yet."""
        return self._signal is not None

    def heed_signal(self, trainer: "Trainer") -> None:
        """End where a signal has come to any process; an evaluation that this cuts short is made again later.

        Raises:
            Interrupted: a signal came, and the state is saved.
        """
        if self._signal_came(trainer):
            raise self._interrupted(trainer, self._save(trainer))

    def _signal_came(self, trainer: "Trainer") -> bool:
        signals = [int(row[0]) for row in trainer.processes.gather_numbers(self._signal or 0)]
        agreed = next((number for number in signals if number), None)
        self._signal = self._signal or agreed  # one that comes during the exchange counts at the next
        return agreed is not None

    def fetching(self, trainer: "Trainer", batches: Iterable[_T]) -> Iterator[_T]:
        """Pass batches on, between steps or in an evaluation; keep all steps where one cannot be had.

        Raises:
            Interrupted: a signal came, and the state is saved.
            InputError: an image cannot be read; it names the state.
            RunError: a loader process died; it names the state.
        """
        iterator = trainer.processes.in_step(batches)
        while True:
            self.heed_signal(trainer)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except PeerLost:
                raise
            except (InputError, RunError) as error:
                raise self._with_state(trainer, error) from error
            yield batch

    def _with_state(self, trainer: "Trainer", error: InputError | RunError) -> InputError | RunError:
        if not trainer.progress.step:
            return error
        try:
            state = self._save(trainer)
            self.writer.wait()
            kept = f"the state of step {trainer.progress.step} is saved in {state}"
        except RunError as failure:
            kept = str(failure)
        return (InputError if isinstance(error, InputError) else RunError)(f"{error}; {kept}")

    @contextmanager
    def explaining_memory(self, trainer: "Trainer") -> Iterator[None]:
        """Say at which batch size memory ran out, and what helps.

        Raises:
            RunError: the device has no memory left.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            what = f"memory of {trainer.device} is full at step {trainer.progress.step + 1}"
            advice = memory_advice(trainer.config, is_full_precision=trainer.autocast is None)
            raise RunError(
                f"{what} with train.batch_size {trainer.config.batch_size}: {'; '.join((self.what_is_safe(), *advice))}"
            ) from error

    def _is_due(self, trainer: "Trainer") -> bool:
        if self.every_steps is not None and trainer.progress.step % self.every_steps == 0:
            return True
        if (minutes := self.every_minutes) is None:
            return False
        return trainer.processes.on_main(lambda: time.monotonic() - self._saved_at >= 60 * minutes)

    def epoch_ended(self, trainer: "Trainer") -> None:
        """Save the state with which the next epoch begins."""
        path = self._save(trainer)
        if self._signal_came(trainer) and not trainer.done:
            raise self._interrupted(trainer, path)

    def evaluated(self, trainer: "Trainer", scored: list[tuple[Objective, Scores]]) -> None:
        """Write the last model file and, where scores are the best so far, the best one.

        Args:
            trainer: where the run stands.
            scored: the objective with its scores, then its moving average where there is one. The last file holds
                the weights themselves, the best file whichever scored best.
        """
        progress = trainer.progress
        for objective, scores in scored:
            summary = scores.summary()
            metrics = {"step": progress.step, "epoch": progress.epoch + 1, "split": "val", **summary}
            metrics |= {"per_class": scores.per_class()} if scores.classifies else {}
            rank = objective.rank(summary)
            is_best = progress.best_rank is None or rank > progress.best_rank
            paths = [self.folder.best] if is_best else []
            paths += [self.folder.last] if scores.weights == "raw" else []
            state = whole_state(objective.network, trainer.processes)
            if paths and trainer.processes.is_main:
                temperature = scores.fit_temperature()
                for path in paths:
                    self.save_model(
                        path,
                        objective.network,
                        state=state,
                        metrics=metrics,
                        weights=scores.weights,
                        temperature=temperature,
                    )
            if is_best:
                progress.best_rank, progress.best_step = rank, progress.step
                progress.best_weights = scores.weights
        progress.stale = 0 if progress.best_step == progress.step else progress.stale + 1

    def resume(self, trainer: "Trainer", path: Path) -> list[str]:
        """Put the trainer where a state stands.

        Returns:
            What is another here than where the state was made, and makes the last bits differ.
        """
        parts = trainer.objective, trainer.optimizer, trainer.scaler
        if trainer.wrapped.is_sharded:
            from vitlab.engine.shards import load_shards  # not before: torch's checkpoints take long to import

            tensors, record = load_shards(path, *parts, trainer.processes)
        else:
            tensors, record = load_state(path)
        trainer.progress = restore(tensors, record, *parts, trainer.averaged)
        before, here = record["machine"], self._machine(trainer)
        return [f"{key} was {before.get(key)}, is {here[key]}" for key in here if before.get(key) != here[key]]

    def failed(self, trainer: "Trainer", micro_batches: list[Batch], failure: NonFinite) -> RunError:
        """Keep the step that failed, with the state before it, for `vitlab replay`, and give the error to raise."""
        step = trainer.progress.step
        path = self.folder.path / f"crash-{step + 1}"
        parts = trainer.processes.gather([batch.indices.tolist() for batch in micro_batches])
        crash = {
            "what": str(failure),
            "indices": [of_all(micro_batch) for micro_batch in zip(*parts, strict=True)],
            "gradient_norms": gradient_norms(trainer.objective.network),
        }
        safe = self.what_is_safe()
        try:
            self.writer.wait()
            self._write(trainer, path, *self._snapshot(trainer, crash=crash))
            kept = f"vitlab replay {path} makes it again"
        except RunError as error:
            kept = f"the step could not be kept ({error})"
        return RunError(
            f"{failure}: {safe}. Lower optim.lr, lengthen optim.warmup_steps, or set optim.clip_grad 1; {kept}"
        )

    def what_is_safe(self) -> str:
        """Name what a failure leaves to go on from, once the state that is being written is there."""
        with suppress(RunError):  # then it is not among them
            self.writer.wait()
        kept = [path for path in (self.folder.best, self.folder.last) if path.exists()]
        states = list_states(self.folder.resume)[:1]
        names = ", ".join(str(path) for path in kept + states)
        return f"kept are {names}" if names else "nothing had been saved yet"

    def _interrupted(self, trainer: "Trainer", state: Path) -> Interrupted:
        assert self._signal is not None
        self.writer.wait()
        trainer.processes.gather_numbers(0)  # the first to end takes the others with it
        name, folder = signal.Signals(self._signal).name, self.folder.path
        count = trainer.processes.count
        start = "vitlab" if count == 1 else f"torchrun --nproc-per-node {count} -m vitlab"
        return Interrupted(
            f"{name}: state saved in {state}; to go on: "
            f"{start} train --config {folder}/config.yaml --train.run_dir {folder}"
        )

    def _save(self, trainer: "Trainer") -> Path:
        trainer.monitor.flush()  # a state's past must be on the disk's side of a kill: what goes on adds to it
        step = trainer.progress.step
        path, snapshot = self.folder.resume / f"step-{step}", self._snapshot(trainer)
        if trainer.wrapped.is_sharded:
            self._write(trainer, path, *snapshot)
            if trainer.processes.is_main:
                drop_old_states(self.folder.resume, keep=self.writer.keep)
        elif trainer.processes.is_main:
            self.writer.start(step, *snapshot)
        self._saved_at = time.monotonic()
        return path

    def _write(self, trainer: "Trainer", path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Write a state at once: each process its shards, or process 0 all that it holds whole."""
        if trainer.wrapped.is_sharded:
            from vitlab.engine.shards import save_shards

            save_shards(path, tensors, record, trainer.processes)
        elif trainer.processes.is_main:
            save_state(path, tensors, record)

    def _snapshot(self, trainer: "Trainer", **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give the live tensors and the record of where the trainer stands."""
        tensors, record = capture(
            trainer.objective, trainer.optimizer, trainer.scaler, trainer.progress, trainer.averaged
        )
        return tensors, {**record, "run": self.run, "machine": self._machine(trainer), **more}

    def _machine(self, trainer: "Trainer") -> dict[str, Any]:
        several = {"processes": trainer.processes.count, "parallel": trainer.config.parallel}
        return describe_machine() | (several if trainer.processes.count > 1 else {"processes": 1})
