"""What a run shows while it runs: console, metrics.jsonl and TensorBoard."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vitlab.data.images import ImageError
from vitlab.engine import state
from vitlab.engine.evaluator import Scores, headline
from vitlab.engine.tensorboard import EventLog
from vitlab.text import duration, say

# The first part of the tags of an evaluation, by the weights that it scored.
_PARTS = {"raw": "val", "ema": "val_ema"}


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a training step gave."""

    loss: float
    """Mean over the step's images, in nats."""
    lr: float
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    images: int
    data_wait: float = 0.0
    """Share of the step's time that went into waiting for images."""
    duration_s: float = 0.0


class Monitor:
    """Shows and logs a run.

    On a terminal a bar moves and each epoch leaves a line; elsewhere there are only the lines, without control codes.

    Args:
        metrics_path: the run's metrics.jsonl; lines are added.
        log_every_steps: optimizer steps between points of the training curves.
        total_epochs: for the lines; None where the run is counted in steps.
        console: where to print.
        classifies: whether there is an accuracy to show.
    """

    def __init__(
        self,
        metrics_path: Path,
        *,
        log_every_steps: int,
        total_epochs: int | None,
        console: Console,
        classifies: bool = True,
    ) -> None:
        self.metrics_path, self.log_every_steps = metrics_path, log_every_steps
        self.total_epochs, self.console, self.classifies = total_epochs, console, classifies
        self.events: EventLog | None = None
        """The run's TensorBoard events; whoever opens the run sets and closes them."""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._file: TextIO | None = None
        self._total_steps, self._began, self._began_step = 0, 0.0, 0
        self._named: set[str] = set()
        self._clear_epoch()

    @contextmanager
    def running(self, progress: state.Progress, total_steps: int) -> Iterator[None]:
        """Open the files and the bar for a run that stands at `progress`; close them whatever happens."""
        self._total_steps, self._began, self._began_step = total_steps, time.perf_counter(), progress.step
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        with self.metrics_path.open("a", encoding="utf-8") as self._file, bar as self._bar:
            self._task = bar.add_task("training", total=total_steps, completed=progress.step, figures="")
            yield

    def step(self, progress: state.Progress, report: StepReport) -> None:
        """Move the bar and, where one is due, log a point of the training curves."""
        self._images += report.images
        self._seconds += report.duration_s
        self._wait += report.data_wait * report.duration_s
        if self._bar is not None and self._task is not None:
            accuracy = f"acc {progress.correct / max(progress.seen, 1):.1%}  " if self.classifies else ""
            speed = self._images / max(self._seconds, 1e-9)
            figures = f"loss {report.loss:.3f}  {accuracy}{speed:.0f} images/s"
            self._bar.update(self._task, completed=progress.step, figures=figures)
        if self.events is not None and progress.step % self.log_every_steps == 0:
            speed = report.images / max(report.duration_s, 1e-9)
            self.events.scalars(
                progress.step,
                {
                    "train/loss": report.loss,
                    "train/lr": report.lr,
                    "train/grad_norm": report.grad_norm,
                    "train/images_per_s": speed,
                    "train/data_wait": report.data_wait,
                },
            )

    @contextmanager
    def evaluating(self, num_images: int) -> Iterator[Callable[[int], None]]:
        """Show a second bar for an evaluation; yields what to call with the number of images done."""
        if self._bar is None:
            yield lambda images: None
            return
        bar, task = self._bar, self._bar.add_task("validation", total=num_images, figures="")
        try:
            yield lambda images: bar.advance(task, images)
        finally:
            bar.remove_task(task)

    def epoch(self, progress: state.Progress, scored: list[Scores]) -> None:
        """Print the line of an epoch, log it and write everything out.

        Args:
            progress: where the run stands.
            scored: what the epoch's evaluation gave; empty where none was due. Scores of averaged weights are logged
                under `val_ema/`.
        """
        seen = max(progress.seen, 1)
        row: dict[str, Any] = {
            "step": progress.step,
            "epoch": progress.epoch + 1,
            "train/loss": progress.loss_sum / seen,
            **({"train/accuracy": progress.correct / seen} if self.classifies else {}),
            "train/lr": progress.lr,
            "train/grad_norm": progress.grad_norm,
            "train/images_per_s": self._images / max(self._seconds, 1e-9),
            "train/data_wait": self._wait / max(self._seconds, 1e-9),
        }
        if progress.skipped:
            row["train/unreadable"] = progress.skipped
        val = {f"{_PARTS[s.weights]}/{key}": value for s in scored for key, value in s.summary().items()}
        if scored and scored[0].errors:
            self.unreadable(scored[0].errors)
            row["val/unreadable"] = len(scored[0].errors)
        self._write(row | val)
        if self.events is not None:
            numbers = {tag: value for tag, value in val.items() if isinstance(value, float)}
            self.events.scalars(progress.step, numbers)
            self.events.flush()
        say(self.console, self._line(progress, row, scored))
        self._clear_epoch()

    def flush(self) -> None:
        """Hand the points of the curves to the operating system."""
        if self.events is not None:
            self.events.flush()

    def unreadable(self, errors: Iterable[ImageError]) -> None:
        """Name images that could not be read and were left out, each file once a run."""
        for error in errors:
            if error.path not in self._named:
                self._named.add(error.path)
                say(self.console, f"skipped {error}")

    def _line(self, progress: state.Progress, row: dict[str, Any], scored: list[Scores]) -> str:
        of = "" if self.total_epochs is None else f"/{self.total_epochs}"
        parts = [
            f"epoch {row['epoch']}{of}",
            f"step {row['step']}/{self._total_steps}",
            f"train loss {row['train/loss']:.4f}"
            + (f" accuracy {row['train/accuracy']:.2%}" if self.classifies else ""),
        ]
        for scores in scored:
            is_best = progress.best_step == progress.step and progress.best_weights == scores.weights
            name = _PARTS[scores.weights].replace("_", " ")
            parts.append(f"{name} {headline(scores.summary())}{' (best)' if is_best else ''}")
        if unreadable := row.get("train/unreadable", 0) + row.get("val/unreadable", 0):
            parts.append(f"{unreadable} images skipped")
        parts.append(f"{row['train/images_per_s']:.0f} images/s")
        if progress.step < self._total_steps:
            left = (time.perf_counter() - self._began) / max(progress.step - self._began_step, 1)
            parts.append(f"{duration(left * (self._total_steps - progress.step))} left")
        return "  ".join(parts)

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def _clear_epoch(self) -> None:
        self._images, self._seconds, self._wait = 0, 0.0, 0.0
