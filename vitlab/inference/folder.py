r"""Predictions for files and folders: a row an image, sorted by path, as CSV, JSON lines or Parquet.

All three formats have the columns `path`, `error`, `label_1`, `probability_1`, `label_2`, `probability_2`, ..., the
likeliest class first. A row has either an error (why the image could not be read) or labels; the other cells are empty
in CSV and null elsewhere. Probabilities are float32, written with the fewest digits that give them back.

Names are UTF-8; bytes of a file name that are not appear as `\xff`. In CSV a name that a spreadsheet would run as a
formula, one that starts with `=`, `+`, `-`, `@` (or their wide forms), a tab or a line break, is preceded by an
apostrophe, and so is what follows a `;`, a tab or a line break within it in that way; the other formats leave it as is.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from vitlab.data.datasets import files_split
from vitlab.data.images import ImageError, list_images
from vitlab.data.loader import Batch, Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.disk import replacing
from vitlab.engine.distributed import ALONE, Processes
from vitlab.errors import InputError, RunError
from vitlab.inference.predictor import Predictor
from vitlab.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

# What a spreadsheet would run: where a cell begins, and where one would begin that takes ; or tabs to part cells.
_FORMULA = re.compile(r"""(^|[;\t\r\n]["' ]*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])""")
_PARQUET_ROWS = 10_000
"""Rows of a row group: Parquet compresses whole groups, and a group is what memory holds."""


@dataclass(frozen=True)
class Prediction:
    """One image's row."""

    path: str
    labels: tuple[str, ...] = ()
    """The likeliest classes, best first; none where there is an error."""
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    """Why the image could not be read."""


@dataclass(frozen=True)
class Predictions:
    """What `predict_files` did."""

    count: int
    """Images that were classified."""
    errors: tuple[ImageError, ...]
    """Images that could not be read."""
    ignored: int
    """Other files in the folders, and folders that were left out."""
    rows: tuple[Prediction, ...] = ()
    """All rows where no file was asked for."""


def predict_files(
    predictor: Predictor,
    paths: Iterable[str | os.PathLike[str]],
    *,
    out: Path | None = None,
    top_k: int = 5,
    workers: int | None = 0,
    processes: Processes = ALONE,
    progress: "Progress | None" = None,
) -> Predictions:
    """Classify image files and the images in folders; an unreadable one becomes a row with an error.

    The file is written as the rows come, in constant memory, aside, and takes its name when it is whole.

    Args:
        predictor: classifies, in its own batch size.
        paths: files, and folders that are searched to any depth.
        out: `.csv`, `.jsonl` or `.parquet`; its folder is made where it is missing. None gives the rows back.
        top_k: classes in a row, at most as many as the model knows.
        workers: loader processes, which change no row; None leaves the number to the loader.
        processes: those that share the images; process 0 gets and writes all rows, the others give none back.
        progress: a bar to add a task to.

    Raises:
        InputError: a path or the output's suffix is wrong, or there is no image.
        RunError: the file cannot be written.
    """
    if top_k < 1:
        raise InputError(f"top_k is {top_k}: give 1 or more")
    check_out(out)
    images, ignored = list_images(paths)
    split = files_split(images)
    loader = Loader(
        split,
        EvalTransform(predictor.preprocess),
        batch_size=predictor.batch_size,
        workers=workers,
        on_error="skip",
        part=processes.part,
    )
    task = None if progress is None else progress.add_task("predicting", total=len(split))
    top_k = min(top_k, len(predictor.classes))
    count = 0
    errors: list[ImageError] = []
    kept: list[Prediction] = []
    with closing(loader), _writing(out if processes.is_main else None, top_k, kept) as write:
        for batch, probabilities in predictor.predict_batches(processes.in_step(loader.epoch(0))):
            own = _rows(batch, probabilities, split.paths, predictor.classes, top_k), batch.errors
            for rows, failures in processes.gather_on_main(own):
                write(rows)
                count += len(rows) - len(failures)
                errors.extend(failures)
                if progress is not None and task is not None:
                    progress.advance(task, len(rows))
    return Predictions(count, tuple(errors), len(ignored), tuple(kept))


def check_out(out: Path | None) -> None:
    """Check the name of the output before any work is done.

    Raises:
        InputError: the suffix is none of the three, the path is a folder, or Parquet is asked for without pyarrow.
    """
    if out is None:
        return
    if out.suffix.lower() not in _TABLES:
        raise InputError(f"{out} has an unknown suffix for predictions: end it in {', '.join(_TABLES)}")
    if out.is_dir():
        raise InputError(f"{out} is a folder: give a file for the predictions")
    if out.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise InputError(f'{out} needs pyarrow: pip install "vitlab[parquet]", or end it in .csv or .jsonl')


def predictions_table(rows: Iterable[Prediction]) -> "Table":
    """Give rows as a table for a terminal: percent, and nothing in a name that the terminal would obey."""
    from rich.table import Table
    from rich.text import Text

    table = Table("image", "likeliest classes")
    for row in rows:
        table.add_row(Text(printable(row.path)), Text(printable(_content(row)), style="red" if row.error else ""))
    return table


def describe(row: Prediction) -> str:
    """Give a row as a line: `photos/1.jpg: cat 93.1%  dog 5.0%`."""
    return f"{row.path}: {_content(row)}"


def _content(row: Prediction) -> str:
    shares = zip(row.labels, row.probabilities, strict=True)
    return row.error or "  ".join(f"{label} {probability:.1%}" for label, probability in shares)


def _rows(
    batch: Batch, probabilities: NDArray[np.float32], names: Sequence[str], classes: Sequence[str], top_k: int
) -> list[Prediction]:
    """Give a batch's rows by path; as the batches follow the sorted paths, so do all rows."""
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    rows = [Prediction(error.path, error=error.reason) for error in batch.errors]
    for index, order, row in zip(batch.indices.tolist(), best.tolist(), probabilities, strict=True):
        # By way of its shortest text: 0.1, not the 0.10000000149011612 of its double.
        shares = tuple(float(str(row[label])) for label in order)
        rows.append(Prediction(names[index], tuple(classes[label] for label in order), shares))
    return sorted(rows, key=lambda row: row.path)


def _columns(top_k: int) -> list[str]:
    pairs = ((f"label_{rank}", f"probability_{rank}") for rank in range(1, top_k + 1))
    return ["path", "error", *chain.from_iterable(pairs)]


def _cells(row: Prediction, top_k: int) -> list[str | float | None]:
    pairs = ((_text(label), share) for label, share in zip(row.labels, row.probabilities, strict=True))
    cells: list[str | float | None] = [_text(row.path), None if row.error is None else _text(row.error)]
    cells.extend(chain.from_iterable(pairs))
    return cells + [None] * (2 + 2 * top_k - len(cells))


def _text(name: str) -> str:
    """Give a name as valid UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class _Table(Protocol):
    """Writes rows into an open file."""

    def __init__(self, file: BinaryIO, top_k: int) -> None: ...

    def write(self, rows: Sequence[Prediction]) -> None: ...

    def finish(self) -> None:
        """Write what is held back; the file stays open."""


class _CsvTable:
    def __init__(self, file: BinaryIO, top_k: int) -> None:
        self.top_k = top_k
        # csv quotes a line break in a cell only where it is part of the line's end, so that end must hold both kinds.
        self.writer = csv.writer(_LineFeeds(file), lineterminator="\r\n")
        self.writer.writerow(_columns(top_k))

    def write(self, rows: Sequence[Prediction]) -> None:
        for row in rows:
            self.writer.writerow([self._harmless(cell) for cell in _cells(row, self.top_k)])

    def finish(self) -> None:
        pass

    @staticmethod
    def _harmless(cell: str | float | None) -> str | float | None:
        return _FORMULA.sub(r"\1'", cell) if isinstance(cell, str) else cell


class _LineFeeds:
    """Takes a line at a time from `csv.writer` and ends it as Unix does."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write(self, line: str) -> None:
        self.file.write(line.removesuffix("\r\n").encode() + b"\n")


class _JsonLines:
    def __init__(self, file: BinaryIO, top_k: int) -> None:
        self.file, self.top_k, self.columns = file, top_k, _columns(top_k)

    def write(self, rows: Sequence[Prediction]) -> None:
        for row in rows:
            record = dict(zip(self.columns, _cells(row, self.top_k), strict=True))
            self.file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def finish(self) -> None:
        pass


class _ParquetTable:
    def __init__(self, file: BinaryIO, top_k: int) -> None:
        import pyarrow
        import pyarrow.parquet

        types = {"path": pyarrow.string(), "error": pyarrow.string(), "label": pyarrow.string()}
        fields = [(name, types.get(name.partition("_")[0], pyarrow.float32())) for name in _columns(top_k)]
        self.top_k, self.schema, self.table_of = top_k, pyarrow.schema(fields), pyarrow.Table.from_pylist
        self.writer = pyarrow.parquet.ParquetWriter(file, self.schema)
        self.held: list[dict[str, Any]] = []

    def write(self, rows: Sequence[Prediction]) -> None:
        self.held += [dict(zip(self.schema.names, _cells(row, self.top_k), strict=True)) for row in rows]
        if len(self.held) >= _PARQUET_ROWS:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self.writer.close()

    def _flush(self) -> None:
        if self.held:
            self.writer.write_table(self.table_of(self.held, schema=self.schema))
            self.held = []


_TABLES: dict[str, type[_Table]] = {".csv": _CsvTable, ".jsonl": _JsonLines, ".parquet": _ParquetTable}


@contextmanager
def _writing(out: Path | None, top_k: int, kept: list[Prediction]) -> Iterator[Callable[[Sequence[Prediction]], None]]:
    """Yield what to call with rows: it keeps them, or writes them aside to a file that takes its name at the end."""
    if out is None:
        yield kept.extend
        return
    failure: BaseException | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as aside, aside.open("wb") as file:
            table = _TABLES[out.suffix.lower()](file, top_k)

            def write(rows: Sequence[Prediction]) -> None:
                try:
                    table.write(rows)
                except OSError as error:
                    raise _not_written(out, error) from error

            try:
                yield write
            except BaseException as error:
                failure = error
                with suppress(Exception):  # the first failure counts; but Parquet must not outlive its file
                    table.finish()
                with suppress(OSError):  # after a failed write it tries that again
                    file.close()
                raise
            table.finish()
    except OSError as error:
        if error is failure:  # the images', not this file's
            raise
        raise _not_written(out, error) from error


def _not_written(out: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {out}: {error.strerror or error}; an earlier file stays as it was")
