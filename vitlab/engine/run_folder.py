"""The run folder: its paths, where a new one goes, and what in it a command goes on from."""

import errno
import fcntl
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from vitlab.config import RunConfig
from vitlab.data.preprocess import Preprocess
from vitlab.data.splits import may_be_same
from vitlab.disk import flush
from vitlab.engine.state import list_states, load_state, step_of
from vitlab.errors import InputError

# What may differ between a state and the run that goes on from it: none of these alters a weight.
_FREE = (
    "train.run_dir",
    "train.resume",
    "train.seeds",
    "train.find_lr",
    "data.cache_dir",
    "train.checkpoint_every_steps",
    "train.checkpoint_every_minutes",
    "train.keep_states",
    "train.grad_checkpointing",
    "train.parallel",
    "data.download",
    "data.hash_contents",
    "data.root",  # where the images lie; the fingerprint tells whether they are the same
    "data.on_error",
    "data.workers",
    "monitor.",
)
# The total length may change; the schedule is then that of the new total from the state's step on.
_LENGTH = ("train.epochs", "train.steps", "train.patience")
_NAMED_CHANGES = 3
"""So many settings that differ are named."""


class RunFolder:
    """The paths of a run folder."""

    def __init__(self, path: Path, *, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._made = made
        self.config = path / "config.yaml"
        self.best = path / "best.safetensors"
        self.last = path / "last.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.resume = path / "resume"
        self.lock = path / ".lock"
        self.results = path / "results.png"
        self.confusion = path / "confusion.png"
        self.samples = path / "samples.png"
        self.completions = path / "completions.png"
        self.train_batch = path / "train_batch.jpg"
        self.lr_json = path / "lr_finder.json"
        self.lr_plot = path / "lr_finder.png"
        self.card = path / "README.md"

    def read_metrics(self) -> list[dict[str, Any]]:
        """Give the lines of metrics.jsonl."""
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Make the folder and keep other runs out of it; one that nothing was written into goes again.

        Raises:
            InputError: another run is in the folder, it holds links, or nothing can be written there.
        """
        self._refuse_links()
        made = self._made or tuple(path for path in (self.path, self.path.parent) if not path.exists())
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for path in made:
                with suppress(PermissionError):  # a folder in which one may write, but not list what is there
                    flush(path.parent)
            lock = self.lock.open("a")
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise InputError(
                f"train.run_dir {self.path} cannot be written ({error.strerror}): give another folder"
            ) from error
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"train.run_dir {self.path} is in use by another run: wait for its end, or give another folder"
                ) from None
            for path in self._half_written():
                path.unlink(missing_ok=True)
            try:
                yield
            finally:
                if self.path.exists() and [path.name for path in self.path.iterdir()] == [self.lock.name]:
                    self.lock.unlink()
                    for path in made:
                        with suppress(OSError):  # somebody else has put something there
                            path.rmdir()

    def _refuse_links(self) -> None:
        """Raise InputError where a file of the run is a link: a folder from elsewhere must not choose what is written.

        The folder itself may be one, which its owner gave.
        """
        links = [path for path in vars(self).values() if isinstance(path, Path) and path != self.path]
        for path in links:
            if path.is_symlink():
                raise InputError(f"{path} is a link to {path.readlink()}: put what it stands for in its place")

    def _half_written(self) -> list[Path]:
        """Find what a killed process left of a file that it was writing: ours, and those that safetensors renames."""
        own = {f".{path.name}.tmp" for path in vars(self).values() if isinstance(path, Path)}
        return [path for path in self.path.iterdir() if path.name in own or re.fullmatch(r"\.tmp\w{6}", path.name)]

    def refuse_if_used(self) -> None:
        """Raise where something lies here that a run must not overwrite.

        What a run leaves that ended in its first epoch, before its first state after step 0, may be replaced, so that
        the same command simply starts again.

        Raises:
            InputError: the path is a file, or holds a run's results or anything else.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise InputError(f"train.run_dir {self.path} is a file: give a folder")
        states = list_states(self.resume)
        names = {path.name for path in self.path.iterdir()} - {path.name for path in self._half_written()}
        if [step_of(state) for state in states] == [0]:
            names -= {path.name for path in vars(self).values() if isinstance(path, Path)}
        elif self.lock.name in names and not states:  # ended while it was being set up
            names -= {path.name for path in (self.lock, self.config, self.train_batch)}
            names -= {path.name for path in (self.resume,) if not any(path.glob("[!.]*"))}
        if names:
            raise InputError(
                f"train.run_dir {self.path} is in use (it holds {', '.join(sorted(names)[:3])}): give another folder; "
                "an existing run is never overwritten"
            )


def fresh_run_folder(parent: Path, stem: str) -> RunFolder:
    """Make parent/stem, or parent/stem-2, -3, ... where that is taken; runs started together get one each."""
    stem = _file_name(stem)
    made_parent = () if parent.exists() else (parent,)
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            break
    return RunFolder(path, made=(path, *made_parent))


@dataclass(frozen=True)
class Start:
    """Where a run begins: in a folder, anew or from a state."""

    folder: RunFolder
    state: Path | None = None
    in_place: bool = True
    """Whether the state lies in the folder, so that the run goes on where it was."""
    preprocess: Preprocess | None = None
    """The state's run's, which may have come with the weights that it began from."""


def open_run(config: RunConfig, data: dict[str, Any], *, stem: str, say: Callable[[str], None]) -> Start:
    """Find the folder of a run, and the state that it goes on from.

    Args:
        config: `train.run_dir` and `train.resume` decide.
        data: fingerprint of the data set.
        stem: name of a new folder under `runs` where none is given.
        say: told in a line what is passed over.

    Returns:
        The folder, which is made where it was not named, and a whole state that fits configuration and data; no state
        for a new run.

    Raises:
        InputError: the folder is in use, no state is whole, or the state belongs to another configuration or data.
    """
    run_dir, resume = config.train.run_dir, config.train.resume
    chosen = resume not in ("auto", "never")
    if chosen:
        states = _states_at(Path(resume))
        folder = RunFolder(Path(run_dir) if run_dir else states[0].parent.parent)
    else:
        _refuse_inside(Path(run_dir or "runs"), config.data.root)
        folder = RunFolder(Path(run_dir)) if run_dir else fresh_run_folder(Path("runs"), stem)
        if not run_dir and folder.path.name != _file_name(stem):
            say(f"new run {folder.path}; to go on with an earlier one, give it as train.run_dir")
        states = [state for state in list_states(folder.resume) if step_of(state) > 0] if resume == "auto" else []
    in_place = bool(states) and folder.resume.resolve() == states[0].parent.resolve()
    if not in_place:
        folder.refuse_if_used()
    if not states:
        return Start(folder)
    state, record = _newest_whole(states, say)
    _check_same_run(record["run"]["config"], config, state, say)
    if not may_be_same(record["run"]["data"], data):
        raise InputError(
            f"the images of {config.data.root} are not those of {state} ({_difference(record['run']['data'], data)}): "
            "restore them, or give another train.run_dir"
        )
    return Start(folder, state, in_place, Preprocess.from_dict(record["run"]["preprocess"]))


def _refuse_inside(folder: Path, root: str) -> None:
    if root != "digits" and folder.resolve().is_relative_to(Path(root).resolve()):
        raise InputError(
            f"train.run_dir {folder} lies inside data.root {root}, where its pictures would count as images: "
            "give a folder elsewhere"
        )


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
            record = load_state(state)[1]
            require_run(state, record)
            return state, record
        except InputError as error:
            say(f"passed over: {error}")
    raise InputError(f"no state in {states[0].parent} is whole: start anew in another train.run_dir")


def require_run(state: Path, record: dict[str, Any]) -> None:
    """Raise InputError where a state does not say which run it is of; a whole one from elsewhere may hold anything."""
    run = record.get("run")
    parts = [run.get(part, 0) for part in ("config", "data", "preprocess")] if isinstance(run, dict) else []
    if [type(part) for part in parts] != [dict] * 3 or not isinstance(parts[1].get("counts"), dict):
        raise InputError(f"state {state} does not say which run it is of: take another")


def _check_same_run(before: dict[str, Any], config: RunConfig, state: Path, say: Callable[[str], None]) -> None:
    # A field that vitlab has learnt since the state was saved had its default then.
    old, new = flatten(RunConfig().to_dict()) | flatten(before), flatten(config.to_dict())
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    changed = [key for key in changed if not key.startswith(_FREE)]
    altering = [key for key in changed if key not in _LENGTH]
    if altering:
        lines = "; ".join(f"{key} was {old.get(key)}, is {new.get(key)}" for key in altering[:_NAMED_CHANGES])
        own, more = state.parent.parent / "config.yaml", len(altering) - _NAMED_CHANGES
        others, back = (f"; and {more} more", f" (--config {own} has them all)") if more > 0 else ("", "")
        raise InputError(
            f"{state} belongs to another configuration ({lines}{others}): "
            f"set them back{back}, or give another train.run_dir"
        )
    for key in changed:
        say(
            f"{key} was {old.get(key)}, is {new.get(key)}: "
            "from here on learning rate and unmixed epochs are those of the new length"
        )


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Say in what two fingerprints differ."""
    had, has = (", ".join(f"{name} {count}" for name, count in one["counts"].items()) for one in (before, now))
    if had != has:
        return f"it had {had}, here are {has}"
    what = "contents" if all(before[key] == now[key] for key in ("classes", "sha256")) else "names, sizes or classes"
    return f"as many, {has}, but their {what} differ"


def _file_name(stem: str) -> str:
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "run"


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give a nested dictionary's leaves under dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
