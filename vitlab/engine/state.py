"""Resume states: all that the next step depends on, in a folder that is complete or not there.

RUN/resume/step-N holds `tensors.safetensors` and `state.json`, which names the SHA-256 of both. A state is written into
a hidden folder beside it, synced and renamed, so a kill leaves no half state under a state's name. One of the same step
gives way as .old-step-N and goes when the new one is on the disk; until then it stands for a step-N that is not there.
Random numbers need no place in it: every stream is a function of the seed and of where in the run it is drawn.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from vitlab.config import WeightsKind
from vitlab.disk import flush
from vitlab.engine.objectives import Objective
from vitlab.errors import InputError, RunError
from vitlab.parsing import parse_json

FORMAT = 2
_NAME = re.compile(r"(?:\.old-)?step-(\d+)")


def step_of(state: Path) -> int:
    """Give the number of optimizer steps that a state's name says, or -1 for another name."""
    match = _NAME.fullmatch(state.name)
    return int(match[1]) if match else -1


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
    best_weights: WeightsKind = "raw"
    """Which weights the best evaluation scored."""
    stale: int = 0
    """Evaluations since then."""

    def start_epoch(self) -> None:
        """Count the epoch as done and clear its sums."""
        self.epoch += 1
        self.batch = self.seen = self.skipped = self.correct = 0
        self.loss_sum = 0.0


def capture(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: Progress | None,
    ema: Objective | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Give what a state holds.

    Returns:
        The tensors under unique names, live ones and not copies, and a record of plain JSON values.
    """
    tensors = {f"model.{name}": tensor for name, tensor in objective.state_dict().items()}
    if ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in ema.state_dict().items()}
    state = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    packed = _pack({"state": state["state"], "groups": groups}, "optimizer", tensors)
    return tensors, {"progress": progress and asdict(progress), "optimizer": packed, "scaler": scaler.state_dict()}


def restore(
    tensors: dict[str, Tensor],
    record: dict[str, Any],
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    ema: Objective | None = None,
) -> Progress:
    """Put a state's values into freshly built parts; the inverse of `capture`.

    Returns:
        The progress that the state records.

    Raises:
        InputError: the values do not fit; the parts are then of no use.
    """
    try:
        return _restore(tensors, record, objective, optimizer, scaler, ema)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"the state does not fit the run: {str(error).splitlines()[0]}; start anew") from error


def _restore(
    tensors: dict[str, Tensor],
    record: dict[str, Any],
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    ema: Objective | None,
) -> Progress:
    objective.load_state_dict(_under("model.", tensors))
    if ema is not None:
        ema.load_state_dict(_under("ema.", tensors))
    packed = _unpack(record["optimizer"], tensors)
    fresh = optimizer.state_dict()["param_groups"]
    groups = [{**old, **new} for old, new in zip(fresh, packed["groups"], strict=True)]
    optimizer.load_state_dict({"state": packed["state"], "param_groups": groups})
    scaler.load_state_dict(record["scaler"])
    progress = Progress(**record["progress"])
    if progress.best_rank is not None:
        progress.best_rank = (progress.best_rank[0], progress.best_rank[1])
    return progress


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Turn nested values into JSON, with each tensor in `tensors` and its name in its place.

    Optimizers nest as they like: some keep a step count in a group, some lists of tensors in a parameter's state.
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"the optimizer keeps a {type(value).__name__} ({name}), which no state can hold: use another")


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def save_state(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write a state as the folder `path`; one that is there already is replaced.

    Raises:
        RunError: it cannot be written; the states before it are whole.
    """
    aside = path.with_name(f".new-{path.name}")
    try:
        with naming_unwritten(path):
            begin_state(path, aside)
            contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, aside / "tensors.safetensors")
            finish_state(path, aside, {"tensors": digest_of(aside / "tensors.safetensors")}, record)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def naming_unwritten(path: Path) -> Iterator[None]:
    """Say in one line that a state cannot be written, and why.

    Raises:
        RunError: something within failed.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"cannot write the state {path}: {reason}; the states before it are whole") from error


def begin_state(path: Path, aside: Path) -> None:
    """Make an empty folder `aside` for the tensors of the state `path`, beside its place.

    Raises:
        OSError: it cannot be made.
    """
    if not path.parent.is_dir():
        path.parent.mkdir()
        flush(path.parent.parent)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()


def finish_state(path: Path, aside: Path, digests: dict[str, Any], record: dict[str, Any]) -> None:
    """Add the record to a folder with a state's tensors, and put it in the state's place once it is on the disk.

    Args:
        path: the state; one that is there already is replaced.
        aside: the folder, beside it.
        digests: SHA-256 of the tensors' file under `tensors`, or of several by their names under `shards`.
        record: as of `capture`.

    Raises:
        OSError: it cannot be written.
    """
    old = path.with_name(f".old-{path.name}")
    content = {"format": FORMAT, "sha256": {**digests, "record": _digest(record)}, "record": record}
    (aside / "state.json").write_bytes(_to_json(content))
    for written in (*sorted(aside.iterdir()), aside):
        flush(written)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    aside.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def digest_of(path: Path) -> str:
    """Give the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state's tensors and record; the tensors are whole, whoever wrote them.

    Raises:
        InputError: the state is incomplete, damaged or of a newer format.
    """
    with _whole_or_refused(path):
        content = _read_content(path)
        if "shards" in content["sha256"]:
            from vitlab.engine.shards import load_whole

            _check_shards(path, content)
            return load_whole(path), content["record"]
        data = (path / "tensors.safetensors").read_bytes()
        _check(path, "tensors", hashlib.sha256(data).hexdigest(), content["sha256"]["tensors"])
        return load(data), content["record"]


def read_record(path: Path) -> dict[str, Any]:
    """Read a state's record alone, and make sure that its tensors are whole.

    Raises:
        InputError: as `load_state`.
    """
    with _whole_or_refused(path):
        content = _read_content(path)
        if "shards" in content["sha256"]:
            _check_shards(path, content)
        else:
            _check(path, "tensors", digest_of(path / "tensors.safetensors"), content["sha256"]["tensors"])
        record: dict[str, Any] = content["record"]
        return record


@contextmanager
def _whole_or_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError, SafetensorError) as error:
        raise InputError(f"state {path} is incomplete or damaged: {error}") from error


def _read_content(path: Path) -> dict[str, Any]:
    if odd := [file.name for file in path.iterdir() if not file.is_file()]:  # a pipe or a device would never end
        raise InputError(f"state {path} is damaged: {odd[0]} is no regular file")
    written = (path / "state.json").read_bytes()
    content: dict[str, Any] = parse_json(written.decode())
    if content["format"] != FORMAT:
        raise InputError(f"state {path} has format {content['format']}, and this vitlab goes on from {FORMAT} alone")
    _check(path, "record", _digest(content["record"]), content["sha256"]["record"])
    if written != _to_json(content):  # 1E-5 reads as 1e-5, and still a bit has flipped
        raise InputError(f"state {path} is damaged: its state.json is not as it was written")
    return content


def _check_shards(path: Path, content: dict[str, Any]) -> None:
    shards = content["sha256"]["shards"]
    there = sorted(file.name for file in path.glob("*.safetensors"))
    if there != sorted(shards):
        raise InputError(
            f"state {path} is damaged: it holds {', '.join(there)} in place of {', '.join(sorted(shards))}"
        )
    for name, digest in shards.items():
        _check(path, name, digest_of(path / name), digest)


def _check(path: Path, part: str, found: str, recorded: str) -> None:
    if found != recorded:
        raise InputError(f"state {path} is damaged: its {part} does not have the recorded SHA-256")


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def list_states(folder: Path) -> list[Path]:
    """Give the states in a folder, the newest first; folders still being written do not count."""
    if not folder.is_dir():
        return []
    # Of one step the last by name: .old-step-N only where step-N is not there.
    states = {step_of(path): path for path in sorted(folder.iterdir()) if step_of(path) >= 0}
    return [states[step] for step in sorted(states, reverse=True)]


def drop_old_states(folder: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` states, and what a killed process left half written."""
    states = list_states(folder)
    for path in {*states, *folder.glob(".*step-*")} - set(states[:keep]):
        shutil.rmtree(path, ignore_errors=True)


def differing_tensors(made: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[tuple[str, float]]:
    """Name the tensors whose bits differ with the largest absolute difference in each, the largest first.

    It is infinite for a tensor that only one side has, or that has another shape or dtype.
    """
    differing = []
    for name in sorted(made.keys() | wanted.keys()):
        ours, theirs = made.get(name), wanted.get(name)
        if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            differing.append((name, float("inf")))
        elif _bits(ours) != _bits(theirs):
            differing.append((name, (ours.cpu().double() - theirs.cpu().double()).abs().max().item()))
    return sorted(differing, key=lambda item: -item[1])


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
