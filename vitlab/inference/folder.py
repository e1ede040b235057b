"""Predictions for files and folders: a row an image, sorted by path, in constant memory however many there are.

Rows go to a file (`tables.py`) part by part (`resume.py`), their embeddings into an array beside it, copies of the
images into a folder for each class (`by_class.py`).
"""

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlab import __version__
from vitlab.checks import require
from vitlab.data.datasets import files_split
from vitlab.data.images import ImageError, list_images
from vitlab.data.loader import Batch, Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.data.splits import Split
from vitlab.engine.distributed import ALONE, Processes
from vitlab.inference.by_class import ClassFolders
from vitlab.inference.predictor import Predictor
from vitlab.inference.resume import PartFolder
from vitlab.inference.tables import Prediction, build_table, check_out

if TYPE_CHECKING:
    from rich.progress import Progress

_NAMED_ERRORS = 1000
"""So many unreadable images are kept to be named; the rows of a file have all."""

_Rows = tuple[list[Prediction], NDArray[np.float32] | None]
"""Rows of some images by path, and their embeddings in that order, where those are wanted."""


@dataclass(frozen=True)
class Predictions:
    """What `predict_files` did."""

    count: int
    """Images that were classified."""
    errors: tuple[ImageError, ...]
    """Images that could not be read in this call, at most 1,000 of them."""
    ignored: int
    """Other files in the folders, and folders that were left out."""
    rows: tuple[Prediction, ...] = ()
    """All rows where neither a file nor copies were asked for."""
    unreadable: int = 0
    """Images that could not be read."""
    abstained: int = 0
    """Images among those classified that got no label."""
    resumed: int = 0
    """Images among all these that an earlier call had done."""
    copied: int = 0
    """Images of this call that lie in class folders now."""
    remade: int = 0
    """Images that an earlier call had done, and that were done again, as images before them or they have changed."""


def predict_files(
    predictor: Predictor,
    paths: Iterable[str | os.PathLike[str]],
    *,
    out: Path | None = None,
    top_k: int = 5,
    abstain_below: float | None = None,
    embeddings: Path | None = None,
    by_class: Path | None = None,
    resume: bool = False,
    workers: int | None = 0,
    processes: Processes = ALONE,
    progress: "Progress | None" = None,
) -> Predictions:
    """Classify image files and the images in folders; an unreadable one becomes a row with an error.

    The file is written part by part, in constant memory, aside, and takes its name when it is whole.

    Args:
        predictor: classifies, in its own batch size.
        paths: files, and folders that are searched to any depth.
        out: `.csv`, `.jsonl` or `.parquet`; its folder is made where it is missing. None gives the rows back.
        top_k: classes in a row, at most as many as the model knows.
        abstain_below: a row whose likeliest class has less than this probability has no first label.
        embeddings: `.npy` for float32 (N, D): the predictor's embeddings, a row for each of `out`, NaN where an image
            could not be read.
        by_class: folder that gets a copy of each labelled image in a folder of its likeliest class.
        resume: skip what an earlier call with the same model and options has left done beside `out`.
        workers: loader processes, which change no row; None leaves the number to the loader.
        processes: those that share the images; process 0 gets and writes all rows, the others give none back.
        progress: a bar to add a task to.

    Raises:
        InputError: a path, a number or an output is wrong, there is no image, or `out` was begun otherwise.
        RunError: a file cannot be written.
        Interrupted: a signal came, and what is done is kept.
    """
    require(top_k >= 1, f"top_k is {top_k}: give 1 or more")
    check_outputs(out=out, embeddings=embeddings, resume=resume)
    given = [Path(path) for path in paths]
    images, ignored = list_images(given)
    split, num_ignored = files_split(images), len(ignored)
    del images, ignored  # of 100,000 images they take more than all that follows
    sink = _Sink(predictor, top_k, abstain_below)
    loader = Loader(
        split,
        EvalTransform(predictor.preprocess),
        batch_size=predictor.batch_size,
        workers=workers,
        on_error="skip",
        part=processes.part,
    )
    with closing(loader), ExitStack() as stack:
        done = processes.on_main(
            lambda: sink.open(stack, split, given, out=out, embeddings=embeddings, by_class=by_class, resume=resume)
        )
        show = _Throughput(progress, total=len(split), done=done)
        for batch in processes.in_step(loader.epoch(0, start_batch=-(-done // loader.batch_size))):
            own = sink.predict(batch, split.paths, embed=embeddings is not None)
            if rows := _joined(processes.gather_on_main(own)):
                sink.take(*rows)
                show.advance(len(rows[0]))
        if sink.parts is not None:
            sink.parts.finish(keep_record=resume)
    return sink.result(done, num_ignored)


def check_outputs(*, out: Path | None, embeddings: Path | None, resume: bool) -> None:
    """Check what is to be written before any work is done.

    Raises:
        InputError: a suffix is wrong, a path is a folder, or what goes with a file of rows is wanted without one.
    """
    check_out(out)
    require(out is not None or not resume, "--resume goes on with a file of rows: give it with --out")
    if embeddings is not None:
        require(out is not None, "--embeddings has a row for each of a file: give that with --out")
        fits = embeddings.suffix.lower() == ".npy" and not embeddings.is_dir()
        require(fits, f"--embeddings is {embeddings}: give a file that ends in .npy")


@dataclass
class _Sink:
    """Makes rows, and on process 0 takes them: into parts of a file, into class folders, or into memory."""

    predictor: Predictor
    top_k: int
    abstain_below: float | None
    parts: PartFolder | None = None
    copies: ClassFolders | None = None
    count: int = 0
    unreadable: int = 0
    abstained: int = 0
    copied: int = 0
    errors: list[ImageError] = field(default_factory=list)
    kept: list[Prediction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.top_k = min(self.top_k, len(self.predictor.classes))

    def open(
        self,
        stack: ExitStack,
        split: Split,
        searched: Sequence[Path],
        *,
        out: Path | None,
        embeddings: Path | None,
        by_class: Path | None,
        resume: bool,
    ) -> int:
        """Open what rows go to until the stack is left, and give the number of images that are done."""
        if by_class is not None:
            self.copies = ClassFolders(by_class, self.predictor.classes, searched)
        if out is None:
            return 0
        with self.predictor.path.open("rb") as file:
            model = hashlib.file_digest(file, "sha256").hexdigest()
        batch_size = self.predictor.batch_size
        made_with = {
            "the model": model,
            "vitlab": __version__,
            "--top_k": self.top_k,
            "--batch_size": batch_size,
            "--tta": self.predictor.tta,
            "--abstain_below": self.abstain_below,
            "--embeddings": None if embeddings is None else str(embeddings),
            "--by_class": None if by_class is None else str(by_class),
        }
        table = build_table(out, self.top_k)
        self.parts = PartFolder(out, table, embeddings=embeddings, made_with=made_with, batch_size=batch_size)
        stack.enter_context(self.parts.opened(split, resume=resume))
        return self.parts.done

    def predict(self, batch: Batch, paths: Sequence[str], *, embed: bool) -> _Rows:
        """Give a batch's rows by path; as the batches follow the sorted paths, so do all rows."""
        probabilities, vectors = (
            self.predictor.embed_batch(batch.images) if embed else (self.predictor.predict_batch(batch.images), None)
        )
        rows = [Prediction(error.path, error=error.reason) for error in batch.errors]
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.top_k]
        for index, order, row in zip(batch.indices.tolist(), best.tolist(), probabilities, strict=True):
            # By way of its shortest text: 0.1, not the 0.10000000149011612 of its double.
            shares = tuple(float(str(row[label])) for label in order)
            abstains = self.abstain_below is not None and shares[0] < self.abstain_below
            labels = tuple(None if abstains and label == order[0] else self.predictor.classes[label] for label in order)
            rows.append(Prediction(paths[index], labels, shares))
        order = sorted(range(len(rows)), key=lambda row: rows[row].path)
        if vectors is not None:
            unread = np.full((len(batch.errors), vectors.shape[1]), np.nan, np.float32)
            vectors = np.concatenate([unread, vectors])[order]
        return [rows[row] for row in order], vectors

    def take(self, rows: list[Prediction], vectors: NDArray[np.float32] | None) -> None:
        """Take the rows of a whole batch."""
        if self.copies is not None:  # before the rows count as done
            self.copied += self.copies.copy(rows)
        failures = [ImageError(row.path, row.error) for row in rows if row.error is not None]
        self.errors += failures[: _NAMED_ERRORS - len(self.errors)]
        if self.parts is not None:
            self.parts.add(rows, vectors)
            return
        self.unreadable += len(failures)
        self.count += len(rows) - len(failures)
        self.abstained += sum(row.abstains for row in rows)
        if self.copies is None:
            self.kept += rows

    def result(self, resumed: int, ignored: int) -> Predictions:
        """Say what was done."""
        if self.parts is not None:
            self.unreadable = sum(part.unreadable for part in self.parts.parts)
            self.abstained = sum(part.abstained for part in self.parts.parts)
            self.count = self.parts.done - self.unreadable
        return Predictions(
            self.count,
            tuple(self.errors),
            ignored,
            tuple(self.kept),
            self.unreadable,
            self.abstained,
            resumed,
            self.copied,
            0 if self.parts is None else self.parts.remade,
        )


def _joined(parts: Sequence[_Rows]) -> _Rows | None:
    """Put what the processes made of a batch into one; None where this one gets nothing."""
    if not parts:
        return None
    vectors = [part for _, part in parts if part is not None]
    return [row for rows, _ in parts for row in rows], np.concatenate(vectors) if vectors else None


class _Throughput:
    """Moves a bar, and shows the images a second of this call."""

    def __init__(self, progress: "Progress | None", *, total: int, done: int) -> None:
        self.progress, self.images, self.began = progress, 0, time.perf_counter()
        self.task = None if progress is None else progress.add_task("predicting", total=total, completed=done)

    def advance(self, images: int) -> None:
        if self.progress is None or self.task is None:
            return
        self.images += images
        speed = self.images / max(time.perf_counter() - self.began, 1e-9)
        self.progress.update(self.task, advance=images, description=f"predicting, {speed:.0f} images/s")
