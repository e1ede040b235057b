"""Predictions that outlive a kill: parts beside the output, and a record of what they are of.

Until `rows.csv` is whole, the hidden folder `.rows.csv.parts` beside it holds

    record.json       what the rows are made with, and of each part how many images it is of, and a hash of them
    part-00000.csv    the rows of the first images, whole and on the disk; part-00001.csv those that follow, ...
    part-00000.npy    their embeddings, where those are wanted

A part ends where a batch does, so that the batches after it, and with them the last digits of their rows, are those of
an unbroken run. A part counts while the files of its images are as they were and lie where they lay; the first one that
is not is made again, and all after it. What the record does not name was being written and counts for nothing.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.checks import require
from vitlab.data.splits import Split
from vitlab.disk import replacing
from vitlab.errors import InputError, Interrupted, RunError
from vitlab.inference.tables import Prediction, Table
from vitlab.parsing import parse_json

_PART_ROWS = 2000
_PART_S = 30.0
"""A part ends after so many rows or seconds, whichever comes first."""


@dataclass(frozen=True)
class Part:
    """What the record says of a part."""

    images: int
    unreadable: int
    abstained: int
    stamp: str
    """Hash of the paths of the images, and of what tells a changed file."""
    sizes: tuple[int, ...]
    """Bytes of its files."""


class PartFolder:
    """The parts of an output that is being made; one process at a time writes them.

    Args:
        out: the file that the rows become in the end.
        table: writes the rows.
        embeddings: the `.npy` that the embeddings become, or None.
        made_with: what alters a row, by the name that a user knows it by; plain JSON values.
        batch_size: images of a batch, at whose end a part may end.
    """

    def __init__(
        self, out: Path, table: Table, *, embeddings: Path | None, made_with: Mapping[str, Any], batch_size: int
    ) -> None:
        self.out, self.table, self.embeddings = out, table, embeddings
        self.made_with, self.batch_size = dict(made_with), batch_size
        self.folder = out.with_name(f".{out.name}.parts")
        self.parts: list[Part] = []
        self.remade = 0
        """Images that were done, and whose rows hold no longer."""
        self.is_finished = False
        """Whether an earlier run has put all together already."""
        self._record = self.folder / "record.json"
        self._held: list[tuple[Sequence[Prediction], NDArray[np.float32] | None]] = []
        self._written_at = time.monotonic()

    @property
    def done(self) -> int:
        """Images whose rows are in a part."""
        return _count(self.parts)

    @contextmanager
    def opened(self, split: Split, *, resume: bool) -> Iterator[None]:
        """Make the folder, or find what is done in it; keep what is done where the body fails, and nothing else.

        Args:
            split: the images, in the order of the rows.
            resume: go on from what is there, in place of beginning anew.

        Raises:
            InputError: the rows were begun with another model or other options, or another process is writing them.
            RunError: the folder cannot be written.
            Interrupted: a signal ended the body; it says how to go on.
        """
        self.split = split
        for path in self._outputs():
            with self._explaining(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not os.access(path.parent, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with self._explaining(self.out):
            lock = self._claim()
        try:
            with self._explaining(self.out):
                self.parts = self._found() if resume else []
                if not self.parts:
                    self._clear()
            with self._keeping():
                yield
        finally:
            os.close(lock)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Write what is held where the body fails; where that is nothing, leave nothing."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError, RunError):  # the first failure counts
                self._flush()
            if not self.parts:
                with suppress(OSError):
                    self._clear()
                    self.folder.rmdir()
                raise
            kept = (
                f"the rows of {self.done:,} of {len(self.split):,} images are kept; "
                "to go on: the same command with --resume"
            )
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"interrupted: {kept}") from None
            if type(error) is RunError:  # what is special about others stays
                raise RunError(f"{error}; {kept}") from error
            raise

    def add(self, rows: Sequence[Prediction], embeddings: NDArray[np.float32] | None) -> None:
        """Take the rows of the next batch, and their embeddings (rows, D); write a part where one is due.

        Raises:
            RunError: it cannot be written.
        """
        self._held.append((rows, embeddings))
        many = sum(len(rows) for rows, _ in self._held) >= _PART_ROWS
        if many or time.monotonic() - self._written_at >= _PART_S:
            self._flush()

    def finish(self, *, keep_record: bool) -> None:
        """Put the parts together, and leave nothing beside the output but, where wanted, the record.

        Args:
            keep_record: so that the same command with `resume` finds all done.

        Raises:
            RunError: the output cannot be written.
        """
        if self.is_finished:
            return
        self._flush()
        if self.embeddings is not None:
            with self._explaining(self.embeddings), replacing(self.embeddings) as aside:
                _join_arrays(aside, self._files(".npy"), self.done)
        with self._explaining(self.out):
            with replacing(self.out) as aside, aside.open("wb") as file:
                self.table.join(file, self._files(self.out.suffix))
            if keep_record:
                self._write_record(self.parts, finished=[path.stat().st_size for path in self._outputs()])
                for path in (*self._files(".npy"), *self._files(self.out.suffix)):
                    path.unlink(missing_ok=True)
            else:
                shutil.rmtree(self.folder)

    def _outputs(self) -> list[Path]:
        return [self.out] if self.embeddings is None else [self.out, self.embeddings]

    def _part_files(self, number: int) -> list[Path]:
        return [self.folder / f"part-{number:05d}{path.suffix}" for path in self._outputs()]

    def _files(self, suffix: str) -> list[Path]:
        return [self.folder / f"part-{number:05d}{suffix}" for number in range(len(self.parts))]

    @contextmanager
    def _explaining(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {error.strerror or error}; an earlier file stays as it was"
            ) from error

    def _claim(self) -> int:
        """Make the folder and keep other processes out of it until what is given back is closed."""
        require(not self.folder.is_symlink(), f"{self.folder} is a link: remove it, or give another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise InputError(f"{self.out} is being written by another process: wait for its end") from None
        return lock

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    def _found(self) -> list[Part]:
        """Give the parts that still hold; none where there is no record, or one that is damaged."""
        try:
            record = parse_json(self._record.read_bytes())
            parts = [Part(**part) for part in record["parts"]]
            if not all(type(n) is int for part in parts for n in (part.images, part.unreadable, part.abstained)):
                return []
            made_with, finished = dict(record["made_with"]), record["finished"]
        except (OSError, ValueError, TypeError, KeyError):
            return []
        altered = [key for key in self.made_with if made_with.get(key) != self.made_with[key]]
        changes = "; ".join(
            f"{key} was {_short(made_with.get(key))}, is {_short(self.made_with[key])}" for key in altered
        )
        require(
            not altered, f"{self.out} was begun otherwise ({changes}): set it back, or leave --resume out to begin anew"
        )
        was_done = _count(parts)
        parts = self._still_whole(parts, finished=finished is not None)
        if finished is not None:
            self.is_finished = _count(parts) == len(self.split) and finished == _sizes(self._outputs())
            parts = parts if self.is_finished else []
        self.remade = was_done - _count(parts)
        return parts

    def _still_whole(self, parts: Sequence[Part], *, finished: bool) -> list[Part]:
        kept: list[Part] = []
        start = 0
        for number, part in enumerate(parts):
            stop = start + part.images
            there = finished or list(part.sizes) == _sizes(self._part_files(number))
            if not there or stop > len(self.split) or part.stamp != self._stamp(start, stop):
                break
            kept.append(part)
            start = stop
        # The last batch of all may have been a smaller one; with more images behind it, it is another batch.
        while kept and start != len(self.split) and start % self.batch_size:
            start -= kept.pop().images
        return kept

    def _stamp(self, start: int, stop: int) -> str:
        """Hash the images from `start` on: their paths as they stand in the rows, and their files' state."""
        images, digest = self.split.subset("part", np.arange(start, stop)), hashlib.sha256()
        for path, stamp in zip(images.paths, images.stamps(), strict=True):
            digest.update(path.encode("utf-8", "surrogateescape") + b"\0" + stamp + b"\0\0")
        return digest.hexdigest()

    def _flush(self) -> None:
        """Write what is held as a part, then name it in the record."""
        held, self._held = self._held, []
        if not held:
            return
        rows = [row for rows, _ in held for row in rows]
        vectors = [array for _, array in held if array is not None]
        files = self._part_files(len(self.parts))
        if self.embeddings is not None:
            with self._explaining(self.embeddings), replacing(files[1]) as aside:
                buffer = io.BytesIO()  # into a file numpy says of a full disk how many numbers did not fit
                np.save(buffer, np.concatenate(vectors), allow_pickle=False)
                aside.write_bytes(buffer.getbuffer())
        with self._explaining(self.out):
            with replacing(files[0]) as aside, aside.open("wb") as file:
                self.table.write(file, rows)
            part = Part(
                images=len(rows),
                unreadable=sum(row.error is not None for row in rows),
                abstained=sum(row.abstains for row in rows),
                stamp=self._stamp(self.done, self.done + len(rows)),
                sizes=tuple(path.stat().st_size for path in files),
            )
            self._write_record([*self.parts, part])
        self.parts.append(part)
        self._written_at = time.monotonic()

    def _write_record(self, parts: Sequence[Part], *, finished: Sequence[int] | None = None) -> None:
        record = {"made_with": self.made_with, "parts": [asdict(part) for part in parts], "finished": finished}
        with replacing(self._record) as aside:
            aside.write_text(json.dumps(record) + "\n", encoding="utf-8")


def _count(parts: Sequence[Part]) -> int:
    return sum(part.images for part in parts)


def _sizes(paths: Sequence[Path]) -> list[int] | None:
    try:
        return [path.stat().st_size for path in paths]
    except OSError:
        return None


def _join_arrays(path: Path, parts: Sequence[Path], count: int) -> None:
    """Write one array of `count` rows out of those in the parts; no more than one of them is in memory."""
    with path.open("wb") as file:
        for number, part in enumerate(parts):
            vectors = np.load(part, allow_pickle=False)
            if number == 0:
                header = {"descr": np.lib.format.dtype_to_descr(vectors.dtype), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, header | {"shape": (count, vectors.shape[1])})
            file.write(vectors.tobytes())


def _short(value: Any) -> str:
    """Write a setting for people: of a hash its first digits."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)
