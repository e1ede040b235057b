r"""Rows of predictions as CSV, JSON lines or Parquet: written part by part, then put together.

All three have the columns `path`, `error`, `label_1`, `probability_1`, `label_2`, `probability_2`, ..., the likeliest
class first. A row has an error (why the image could not be read), or labels and probabilities, of which `label_1` alone
is missing where the network abstains; cells without a value are empty in CSV and null elsewhere. Probabilities are
float32, written with the fewest digits that give them back.

Names are UTF-8; bytes of a file name that are not appear as `\xff`. In CSV a name that a spreadsheet would run as a
formula, one that starts with `=`, `+`, `-`, `@` (or their wide forms), a tab or a line break, is preceded by an
apostrophe, and so is what follows a `;`, a tab or a line break within it in that way; the other formats leave it as is.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from vitlab.errors import InputError
from vitlab.text import printable

if TYPE_CHECKING:
    from rich.table import Table as ScreenTable

# What a spreadsheet would run: where a cell begins, and where one would begin that takes ; or tabs to part cells.
_FORMULA = re.compile(r"""(^|[;\t\r\n]["' ]*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])""")
_GROUP_ROWS = 10_000
"""Rows of a row group: Parquet compresses whole groups, and a group is what memory holds."""


@dataclass(frozen=True)
class Prediction:
    """One image's row."""

    path: str
    labels: tuple[str | None, ...] = ()
    """The likeliest classes, best first; where the network abstains the first, its answer, is None."""
    probabilities: tuple[float, ...] = ()
    """Of those classes, the first where the network abstains, too."""
    error: str | None = None
    """Why the image could not be read."""

    @property
    def abstains(self) -> bool:
        """Whether the likeliest class was not likely enough to be named."""
        return bool(self.labels) and self.labels[0] is None


class Table(Protocol):
    """Writes rows in one format; what it writes as parts it puts together later."""

    def __init__(self, top_k: int) -> None: ...

    def write(self, file: BinaryIO, rows: Sequence[Prediction]) -> None:
        """Write a part."""

    def join(self, file: BinaryIO, parts: Iterable[Path]) -> None:
        """Write the whole file out of its parts, in constant memory."""


def build_table(out: Path, top_k: int) -> Table:
    """Give what writes the format that the name of the output stands for, with so many classes in a row.

    Raises:
        InputError: the suffix is none of the three, the path is a folder, or Parquet is asked for without pyarrow.
    """
    check_out(out)
    return _TABLES[out.suffix.lower()](top_k)


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


def predictions_table(rows: Iterable[Prediction]) -> "ScreenTable":
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
    names = ("abstains, the likeliest class has" if label is None else label for label in row.labels)
    return row.error or "  ".join(f"{name} {share:.1%}" for name, share in zip(names, row.probabilities, strict=True))


def _columns(top_k: int) -> list[str]:
    pairs = ((f"label_{rank}", f"probability_{rank}") for rank in range(1, top_k + 1))
    return ["path", "error", *chain.from_iterable(pairs)]


def _cells(row: Prediction, top_k: int) -> list[str | float | None]:
    labels = [None if label is None else _text(label) for label in row.labels]
    cells: list[str | float | None] = [_text(row.path), None if row.error is None else _text(row.error)]
    cells.extend(chain.from_iterable(zip(labels, row.probabilities, strict=True)))
    return cells + [None] * (2 + 2 * top_k - len(cells))


def _text(name: str) -> str:
    """Give a name as valid UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class _CsvTable:
    def __init__(self, top_k: int) -> None:
        self.top_k = top_k

    def write(self, file: BinaryIO, rows: Sequence[Prediction]) -> None:
        writer = self._writer(file)
        for row in rows:
            writer.writerow([self._harmless(cell) for cell in _cells(row, self.top_k)])

    def join(self, file: BinaryIO, parts: Iterable[Path]) -> None:
        self._writer(file).writerow(_columns(self.top_k))
        _append(file, parts)

    @staticmethod
    def _writer(file: BinaryIO) -> Any:
        # csv quotes a line break in a cell only where it is part of the line's end, so that end must hold both kinds.
        return csv.writer(_LineFeeds(file), lineterminator="\r\n")

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
    def __init__(self, top_k: int) -> None:
        self.top_k, self.columns = top_k, _columns(top_k)

    def write(self, file: BinaryIO, rows: Sequence[Prediction]) -> None:
        for row in rows:
            record = dict(zip(self.columns, _cells(row, self.top_k), strict=True))
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def join(self, file: BinaryIO, parts: Iterable[Path]) -> None:
        _append(file, parts)


def _append(file: BinaryIO, parts: Iterable[Path]) -> None:
    for part in parts:
        with part.open("rb") as source:
            shutil.copyfileobj(source, file)


class _ParquetTable:
    def __init__(self, top_k: int) -> None:
        import pyarrow

        types = {"path": pyarrow.string(), "error": pyarrow.string(), "label": pyarrow.string()}
        fields = [(name, types.get(name.partition("_")[0], pyarrow.float32())) for name in _columns(top_k)]
        self.top_k, self.schema = top_k, pyarrow.schema(fields)

    def write(self, file: BinaryIO, rows: Sequence[Prediction]) -> None:
        import pyarrow
        import pyarrow.parquet

        records = [dict(zip(self.schema.names, _cells(row, self.top_k), strict=True)) for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records, schema=self.schema), file)

    def join(self, file: BinaryIO, parts: Iterable[Path]) -> None:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetWriter(file, self.schema) as writer:
            for group in self._groups(parts):
                writer.write_table(group, row_group_size=_GROUP_ROWS)

    @staticmethod
    def _groups(parts: Iterable[Path]) -> Iterator[Any]:
        """Give the rows of the parts in tables of `_GROUP_ROWS`, the last of what is left."""
        import pyarrow
        import pyarrow.parquet

        held = None
        for part in parts:
            # Not memory-mapped, and in one thread: what the pool keeps would look like growth.
            table = pyarrow.parquet.read_table(part, use_threads=False)
            held = table if held is None else pyarrow.concat_tables([held, table])
            while len(held) >= _GROUP_ROWS:
                yield held.slice(0, _GROUP_ROWS)
                held = held.slice(_GROUP_ROWS)
        if held is not None and len(held):
            yield held


_TABLES: dict[str, type[Table]] = {".csv": _CsvTable, ".jsonl": _JsonLines, ".parquet": _ParquetTable}
