"""Whether two runs are the same to the last bit, and where they part: losses step by step, weights tensor by tensor."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.engine.run_folder import RunFolder
from vitlab.engine.state import differing_tensors
from vitlab.engine.tensorboard import EVENTS_NAME, read_events
from vitlab.errors import InputError
from vitlab.models.files import checkpoint_path
from vitlab.models.safetensors_file import read_safetensors

_LOSS = "train/loss"


@dataclass(frozen=True)
class Losses:
    """The training losses of two runs beside each other."""

    points: int
    """Points that both have logged: of single steps (TensorBoard) and of epochs (metrics.jsonl)."""
    last_steps: tuple[int, int]
    """The last step that each has logged."""
    first_step: int | None = None
    """The first of the common steps whose losses differ; None where none does."""
    values: tuple[float | None, float | None] = (None, None)
    """The losses there, None where one is not finite."""

    @property
    def identical(self) -> bool:
        """Whether both have logged the same losses up to the same step."""
        return self.first_step is None and self.last_steps[0] == self.last_steps[1]

    def line(self) -> str:
        """Describe it in a line."""
        if self.first_step is not None:
            return f"logged losses first part at step {self.first_step}: A {self.values[0]!r}, B {self.values[1]!r}"
        if self.identical:
            return f"losses are identical at all {self.points} points logged, up to step {self.last_steps[0]}"
        return (
            f"losses are identical at all {self.points} common points; A ends at step {self.last_steps[0]}, "
            f"B at {self.last_steps[1]}"
        )


@dataclass(frozen=True)
class Weights:
    """The tensors of two model files beside each other."""

    file: str
    """`best` or `last` of two runs; `the` where one side is a bare file."""
    tensors: int
    """Tensors that each file holds, or the first where they are of other networks."""
    comparable: bool
    """Whether both hold tensors of the same names, shapes and dtypes."""
    differing: int = 0
    """Tensors among them of which a bit differs."""
    largest: float = 0.0
    """The largest absolute difference of a weight."""
    where: str | None = None
    """The tensor that it lies in."""

    @property
    def identical(self) -> bool:
        """Whether every bit is the same."""
        return self.comparable and not self.differing

    def line(self) -> str:
        """Describe it in a line."""
        if not self.comparable:
            return f"{self.file} weights are of other networks, whose tensors have other names or shapes"
        if self.identical:
            return f"{self.file} weights are identical in all {self.tensors} tensors"
        return (
            f"{self.file} weights differ in {self.differing} of {self.tensors} tensors, by up to {self.largest:.3g} "
            f"({self.where})"
        )


@dataclass(frozen=True)
class Sameness:
    """What two runs have in common to the last bit."""

    losses: Losses | None
    """None where a run has no curves beside it, such as a bare model file."""
    weights: tuple[Weights, ...]
    """Of the best and, where both have one, the last model file."""

    @property
    def identical(self) -> bool:
        """Whether neither a loss nor a weight differs."""
        return (self.losses is None or self.losses.identical) and all(one.identical for one in self.weights)

    def lines(self) -> list[str]:
        """Describe it in lines."""
        losses = "losses are not compared, a run has no curves" if self.losses is None else self.losses.line()
        return [losses, *(one.line() for one in self.weights)]

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain JSON values."""
        return {"identical": self.identical, **asdict(self)}


def compare_bits(a: Path, b: Path) -> Sameness:
    """Compare losses and weights of two runs, or weights of two model files.

    Raises:
        InputError: a file is not there or damaged.
    """
    weights = [_compare_weights("best" if a.is_dir() and b.is_dir() else "the", checkpoint_path(a), checkpoint_path(b))]
    last = tuple(RunFolder(run).last for run in (a, b))
    if all(path.is_file() for path in last):
        weights.append(_compare_weights("last", *last))
    return Sameness(_compare_losses(RunFolder(a), RunFolder(b)), tuple(weights))


def _compare_weights(name: str, *paths: Path) -> Weights:
    a, b = (read_safetensors(path).tensors() for path in paths)
    if _layout(a) != _layout(b):
        return Weights(name, len(a), comparable=False)
    differing = differing_tensors(a, b)
    where, largest = differing[0] if differing else (None, 0.0)
    return Weights(name, len(a), comparable=True, differing=len(differing), largest=largest, where=where)


def _layout(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _compare_losses(a: RunFolder, b: RunFolder) -> Losses | None:
    curves = [(_steps(run), _epochs(run)) for run in (a, b)]
    pairs = [(of_a, of_b) for of_a, of_b in zip(*curves, strict=True) if of_a and of_b]
    if not pairs:
        return None
    last_a, last_b = (max(max(curve) for curve in side) for side in zip(*pairs, strict=True))
    points = sum(len(of_a.keys() & of_b.keys()) for of_a, of_b in pairs)
    parted = [
        (step, of_a[step], of_b[step])
        for of_a, of_b in pairs
        for step in of_a.keys() & of_b.keys()
        if of_a[step] != of_b[step]
    ]
    if not parted:
        return Losses(points, (last_a, last_b))
    step, *values = min(parted, key=lambda item: item[0])
    return Losses(points, (last_a, last_b), step, (values[0], values[1]))


def _steps(run: RunFolder) -> dict[int, float]:
    """Read the loss of each step that TensorBoard's events hold."""
    path = run.tensorboard / EVENTS_NAME
    if not path.is_file():
        return {}
    values = ((event.step, value) for event, _ in read_events(path) for value in event.summary.value)
    return {step: value.simple_value for step, value in values if value.tag == _LOSS}


def _epochs(run: RunFolder) -> dict[int, float | None]:
    """Read the loss of each epoch."""
    if not run.metrics.is_file():
        return {}
    try:
        return {row["step"]: row[_LOSS] for row in run.read_metrics()}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run.metrics} is damaged ({error}): restore it, or compare the model files") from error
