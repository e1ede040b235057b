"""Predictions for files and folders: a row an image, sorted by path, as CSV, JSON lines or Parquet.

All three formats have the columns `path`, `error`, `label_1`, `probability_1`, `label_2`, `probability_2`, ..., the
likeliest class first. A row has either an error (why the image could not be read) or labels; the other cells are empty
in CSV and null elsewhere. Probabilities are float32, written with the fewest digits that give them back.

Names are UTF-8; bytes of a file name that are not appear as `\\xff`. In CSV a name that a spreadsheet would run as a
formula, one that starts with `=`, `+`, `-`, `@`, a tab or a line break, is preceded by an apostrophe; the other
formats leave it as it is.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from vitlab.data.datasets import files_split
from vitlab.data.images import ImageError, list_images
from vitlab.data.loader import Batch, Loader
from vitlab.errors import InputError, RunError
from vitlab.inference.predictor import Predictor
from vitlab.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

FORMATS = (".csv", ".jsonl", ".parquet")
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
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
        progress: a bar to add a task to.

    Raises:
        InputError: a path or the output's suffix is wrong, or there is no image.
        RunError: the file cannot be written.
    """
    if top_k < 1:
        raise InputError(f"top_k is {top_k}: give 1 or more")
    check_out(out)
    images, ignored = list_images(paths)
    loader = Loader(
        files_split(images),
        EvalTransform(predictor.preprocess),
        batch_size=predictor.batch_size,
        workers=workers,
        on_error="skip",
    )
    task = None if progress is None else progress.add_task("predicting", total=len(images))
    count, errors, kept = 0, [], []
    top_k = min(top_k, len(predictor.classes))
    with loader, _open_sink(out, kept, top_k) as sink:
        for batch, probabilities in predictor.predict_batches(loader.epoch(0)):
            sink.write(_rows(batch, probabilities, images, predictor.classes, top_k))
            count += len(probabilities)
            errors.extend(batch.errors)
            if progress is not None and task is not None:
                progress.advance(task, len(probabilities) + len(batch.errors))
    return Predictions(count, tuple(errors), len(ignored), tuple(kept))
