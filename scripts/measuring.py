"""What the benchmarks share: subjects timed in turns, and the rows of figures that come of it."""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from vitlab.allocator import keep_freed_memory

_Name = TypeVar("_Name")
_Figure = TypeVar("_Figure")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison."""

    work: str
    subject: str
    """The network's name, or what is read."""
    precision: str
    mode: str
    device: str
    unit: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    """How many times better ours is: more of a rate, less of seconds or MiB. The median of the rounds' ratios."""
    spread: tuple[float, float]
    """The smallest and the largest of them."""
    share: float | None = None
    """Ours over the processor's rate of matrix products, as that of the multiply-adds."""
    note: str = ""
    """What more there is to say, such as which of the peer's settings was its best."""


def in_turns(
    subjects: Mapping[_Name, Callable[[], _Figure]], *, rounds: int, uncounted: int = 1
) -> dict[_Name, list[_Figure]]:
    """Measure every subject once a round, after rounds that do not count; the same place in two lists is one round."""
    figures: dict[_Name, list[_Figure]] = {name: [] for name in subjects}
    for turn in range(uncounted + rounds):
        for name, measure in subjects.items():
            figure = measure()
            if turn >= uncounted:
                figures[name].append(figure)
    return figures


@contextmanager
def subjects_in_processes(script: str, names: Sequence[str]) -> Iterator[dict[str, "Subject"]]:
    """Give each subject of a script a process of its own, ready to measure."""
    subjects = {name: Subject(script, name) for name in names}
    try:
        for subject in subjects.values():
            subject.wait_until_ready()  # one that still loads would take time from what is measured
        yield subjects
    finally:
        for subject in subjects.values():
            subject.close()


class Subject:
    """A subject in a process of its own, whose memory is its own too: ours keeps what it frees, as our commands do."""

    def __init__(self, script: str, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_until_ready(self) -> None:
        """Wait until it has loaded what it needs.

        Raises:
            RuntimeError: it has not.
        """
        if (said := self._line()) != "ready\n":
            raise RuntimeError(f"{self._process.args!r} said {said!r} in place of ready")

    def measure(self, job: Mapping[str, object]) -> float:
        """Have it measure a job once; the first time it prepares it.

        Raises:
            RuntimeError: it gave no figure.
        """
        said = ""
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            said = self._line()
            return float(said)
        except (BrokenPipeError, ValueError):
            raise RuntimeError(f"{self._process.args!r} said {said!r} of {job}") from None

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def serve(name: str, prepare: Callable[..., Callable[[], float]]) -> None:
    """Be the process of a `Subject`: measure what standard input asks for until it ends.

    Args:
        name: of the subject.
        prepare: takes the fields of a job by name, and gives what measures it once.
    """
    if name == "vitlab":
        keep_freed_memory()
    print("ready", flush=True)
    last, measure = "", None
    for line in sys.stdin:
        if measure is None or line != last:
            measure = None  # its memory goes first
            gc.collect()
            torch.cuda.empty_cache()
            last, measure = line, prepare(**json.loads(line))
        print(measure(), flush=True)


def ratios_of(ours: Sequence[float], theirs: Sequence[float], *, unit: str) -> list[float]:
    """Give how many times better ours is, round by round."""
    return [a / b if is_rate(unit) else b / a for a, b in zip(ours, theirs, strict=True)]


def is_rate(unit: str) -> bool:
    """Say whether more is better, as of images/s per core, and not of seconds or MiB."""
    return "/s" in unit


def compare(
    figures: Mapping[str, Sequence[float]],
    peers: Mapping[str, Sequence[str]],
    *,
    unit: str,
    note: str = "",
    **columns: str | float | None,
) -> list[Row]:
    """Give a row for each peer, with the best of the peer's own settings.

    Args:
        figures: of every subject, round by round; ours is `vitlab`.
        peers: what a peer is called, and which subjects are its settings.
        unit: of the figures.
        note: what more there is to say; which setting was the peer's best follows it.
        columns: the other fields of the rows.
    """
    choose = max if is_rate(unit) else min
    rows = []
    for peer, settings in peers.items():
        known = [name for name in settings if name in figures]
        if not known:
            continue
        best = choose(known, key=lambda name: median(figures[name]))
        ratios = ratios_of(figures["vitlab"], figures[best], unit=unit)
        ours, theirs = median(figures["vitlab"]), median(figures[best])
        notes = [note, best if len(settings) > 1 else ""]
        fields = {"unit": unit, "peer": peer, "ours": ours, "theirs": theirs} | columns
        fields |= {"ratio": median(ratios), "spread": (min(ratios), max(ratios))}
        fields["note"] = ", ".join(filter(None, notes))
        rows.append(Row(**fields))  # type: ignore[arg-type]
    return rows


def write_rows(rows: Sequence[Row], path: Path | None) -> None:
    """Write rows as JSON to a file, or to the terminal."""
    text = json.dumps([asdict(row) for row in rows], indent=1)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")


def rate(work: Callable[[], object], count: int, device: torch.device, *, least_s: float = 0.0) -> float:
    """Give how many things a second a piece of work of `count` things does, repeated until `least_s` have passed."""
    repeats = 0
    began = time.perf_counter()
    while repeats == 0 or time.perf_counter() - began < least_s:
        work()
        repeats += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return repeats * count / (time.perf_counter() - began)


def matrix_rate(device: torch.device, dtype: torch.dtype, *, side: int = 2048, repeats: int = 5) -> float:
    """Give the multiply-adds a second of a product of two square matrices, the best of some."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    products = [rate(lambda: left @ right, side**3, device, least_s=0.1) for _ in range(repeats)]
    return max(products)
