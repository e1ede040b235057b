"""The run folder: its paths, where a new one goes, and what in it a command goes on from."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.config import RunConfig
from vitlab.engine.state import list_states, load_state
from vitlab.errors import InputError

# What may differ between a state and the run that goes on from it: none of these alters a weight.
_FREE = ("train.run_dir", "train.resume", "train.checkpoint_every_steps", "data.workers", "monitor.")
# The total length may change; the schedule is then that of the new total from the state's step on.
_LENGTH = ("train.epochs", "train.steps")


class RunFolder:
    """The paths of a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.best = path / "best.safetensors"
        self.last = path / "last.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.resume = path / "resume"
        self.results = path / "results.png"
        self.confusion = path / "confusion.png"
        self.train_batch = path / "train_batch.jpg"

    def refuse_if_used(self) -> None:
        """Raise where something lies here that a run must not overwrite.

        What a run leaves that ended before its first state (configuration, first curves) may be replaced, so that the
        same command simply starts again.

        Raises:
            InputError: the path is a file, or holds a run's results or anything else.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise InputError(f"train.run_dir {self.path} is a file: give a folder")
        beginnings = {self.config, self.metrics, self.tensorboard, self.resume, self.train_batch}
        others = sorted(path.name for path in set(self.path.iterdir()) - beginnings)
        others += [path.name for path in list_states(self.resume)]
        if others:
            raise InputError(
                f"train.run_dir {self.path} is in use (it holds {', '.join(others[:3])}): give another folder; "
                "an existing run is never overwritten"
            )


def fresh_run_dir(parent: Path, stem: str) -> Path:
    """Give parent/stem, or parent/stem-2, -3, ... where that is taken."""
    stem = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "run"
    number = 1
    while (path := parent / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return path


def open_run(config: RunConfig, *, stem: str, say: Callable[[str], None]) -> tuple[RunFolder, Path | None]:
    """Find the folder of a run, and the state that it goes on from.

    Args:
        config: `train.run_dir` and `train.resume` decide.
        stem: name of a new folder under `runs` where none is given.
        say: told in a line what is passed over.

    Returns:
        The folder, not yet made, and a whole state that fits the configuration, or None for a new run.

    Raises:
        InputError: the folder is in use, no state is whole, or the state belongs to another configuration.
    """
    run_dir, resume = config.train.run_dir, config.train.resume
    if resume in ("auto", "never"):
        folder = RunFolder(Path(run_dir) if run_dir else fresh_run_dir(Path("runs"), stem))
        states = list_states(folder.resume) if resume == "auto" else []
        if not states:
            folder.refuse_if_used()
            return folder, None
    else:
        states = _states_at(Path(resume))
        folder = RunFolder(Path(run_dir) if run_dir else states[0].parent.parent)
        if folder.resume.resolve() != states[0].parent.resolve():
            folder.refuse_if_used()
    state, record = _newest_whole(states, say)
    _check_same_run(record["config"], config, state, say)
    return folder, state


def _states_at(path: Path) -> list[Path]:
    if (path / "state.json").is_file():
        return [path]
    states = list_states(path) or list_states(path / "resume")
    if not states:
        raise InputError(f"train.resume {path} holds no state: give a run folder, RUN/resume/step-N, or auto or never")
    return states


def _newest_whole(states: list[Path], say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    for state in states:
        try:
            return state, load_state(state)[1]
        except InputError as error:
            say(f"passed over: {error}")
    raise InputError(f"no state in {states[0].parent} is whole: set train.resume never and give another train.run_dir")


def _check_same_run(before: dict[str, Any], config: RunConfig, state: Path, say: Callable[[str], None]) -> None:
    old, new = flatten(before), flatten(config.to_dict())
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    changed = [key for key in changed if not key.startswith(_FREE)]
    altering = [key for key in changed if key not in _LENGTH]
    if altering:
        lines = "; ".join(f"{key} was {old.get(key)}, is {new.get(key)}" for key in altering)
        raise InputError(
            f"{state} belongs to another configuration ({lines}): set them back, or give another train.run_dir"
        )
    for key in changed:
        say(
            f"{key} was {old.get(key)}, is {new.get(key)}: "
            "from here on the learning rate follows the schedule of the new length"
        )


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give a nested dictionary's leaves under dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
