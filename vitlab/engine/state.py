"""Resume states: all that the next step depends on, in a folder that is complete or not there.

RUN/resume/step-N holds `tensors.safetensors` and `state.json`; the JSON names the SHA-256 of the tensors' file. A state
is written into a hidden folder beside it, synced and renamed, so a kill leaves no half state under a state's name.
Random numbers need no place in it: every stream is a function of the seed and of where in the run it is drawn.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.engine.objectives import Objective
from vitlab.errors import InputError

FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


@dataclass
class Progress:
    """Where in the run the trainer is, and the sums that it has made on the way."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs done."""
    batch: int = 0
    """Micro-batches done of the present epoch."""
    seen: int = 0
    """Images seen in the present epoch."""
    skipped: int = 0
    """Images of the present epoch that could not be read."""
    loss_sum: float = 0.0
    """Sum over those images of the training loss."""
    correct: int = 0
    """Images among them whose likeliest class was the target's."""
    lr: float = 0.0
    """Learning rate of the last step."""
    grad_norm: float = 0.0
    """Norm of the last step's gradient before clipping."""
    best_rank: tuple[float, float] | None = None
    """Rank of the best evaluation so far, as the objective orders scores."""
    best_step: int = 0

    def start_epoch(self) -> None:
        """Count the epoch as done and clear its sums."""
        self.epoch += 1
        self.batch = self.seen = self.skipped = self.correct = 0
        self.loss_sum = 0.0


def capture(
    objective: Objective, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Give the tensors and the JSON record of a state; the tensors are the live ones, not copies."""
    tensors = {f"model.{name}": tensor for name, tensor in objective.state_dict().items()}
    numbers: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    return tensors, {"progress": asdict(progress), "optimizer": numbers, "scaler": scaler.state_dict()}


def restore(
    tensors: dict[str, Tensor],
    record: dict[str, Any],
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> Progress:
    """Put a state's values into freshly built parts; the inverse of `capture`."""
    values: dict[int, dict[str, Any]] = {}
    model: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            model[rest] = tensor
        else:
            index, _, key = rest.partition(".")
            values.setdefault(int(index), {})[key] = tensor
    for name, number in record["optimizer"].items():
        index, _, key = name.partition(".")
        values.setdefault(int(index), {})[key] = number
    objective.load_state_dict(model)
    optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})
    scaler.load_state_dict(record["scaler"])
    progress = Progress(**record["progress"])
    if progress.best_rank is not None:
        progress.best_rank = (progress.best_rank[0], progress.best_rank[1])
    return progress


def save_state(folder: Path, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> Path:
    """Write a state as folder/step-N; one of that name that is there already is replaced."""
    folder.mkdir(exist_ok=True)
    final, aside = folder / f"step-{step}", folder / f".step-{step}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, aside / "tensors.safetensors"
        )
        digest = hashlib.sha256((aside / "tensors.safetensors").read_bytes()).hexdigest()
        text = json.dumps({"format": FORMAT, "sha256": digest, **record}, indent=1)
        (aside / "state.json").write_text(text, encoding="utf-8")
        for path in (aside / "tensors.safetensors", aside / "state.json", aside):
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state's tensors and record.

    Raises:
        InputError: the state is incomplete, damaged or of a newer format.
    """
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if record["format"] > FORMAT:
            raise InputError(f"state {path} has format {record['format']}, newer than {FORMAT}: update vitlab")
        data = (path / "tensors.safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise InputError(f"state {path} is damaged: its tensors do not have the recorded SHA-256")
        return load_file(path / "tensors.safetensors"), record
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"state {path} is incomplete or damaged: {error}") from error


def list_states(folder: Path) -> list[Path]:
    """Give the states in a folder, the newest first; folders still being written do not count."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def drop_old_states(folder: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` states, and what a killed process left half written."""
    for path in list_states(folder)[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
