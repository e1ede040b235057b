"""What the commands other than `train` take; standard library only. The field docstrings are the help texts."""

import re
from dataclasses import dataclass, field
from typing import Literal

from vitlab.errors import InputError
from vitlab.sections import LARGEST_SIDE

ProbeMethod = Literal["linear", "knn"]
_MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Look at every image of a data set and say what is wrong."""

    data: str
    """Folder of images, of CIFAR batches or of IDX files, a .csv or .jsonl manifest, or `digits`."""
    json: str | None = None
    """Write all findings to this file; outside of the data set."""
    report: str | None = None
    """Write a page with pictures, index.html, into this folder; outside of the data set."""
    checkpoint: str | None = None
    """Model file or run folder; with it likely label errors and outliers are looked for, too."""
    workers: int | None = None
    """Processes that decode; default: one a core, at most 9."""
    device: str = "auto"
    """Where the checkpoint computes: `auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        for name, path in (("data", self.data), ("--report", self.report)):
            if path == "":  # an unset variable of the shell, and not the folder where we are
                raise InputError(f"{name} is empty: give a path")
        check_workers(self.workers)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Score a model file on a split."""

    checkpoint: str
    """Model file, or a run folder for its best.safetensors."""
    data: str
    """Folder of images, of CIFAR batches or of IDX files, a .csv or .jsonl manifest, or `digits`."""
    split: Literal["train", "val", "test", "all"] = "val"
    """Which images; `val` of a folder without one is the part that training cut off, `all` is a flat folder whole."""
    json: str | None = None
    """Write all scores to this file, as fractions."""
    confusion: str | None = None
    """Draw the confusion matrix to this PNG file."""
    report: str | None = None
    """Write a page of figures, tables and the worst mistakes, index.html, into this folder; outside of the data set."""
    conformal_level: float = 0.9
    """For the report: how often the sets of classes that it gives are to hold the true one."""
    on_error: Literal["stop", "skip"] = "stop"
    """At an unreadable image: `stop`, or `skip` it, list it and end with exit code 3."""
    batch_size: int = 64
    """Images at a time; the scores do not depend on it."""
    workers: int | None = None
    """Loader processes; default: one less than the cores, at most 8."""
    device: str = "auto"
    """`auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)
        check_workers(self.workers)
        if not 0 < self.conformal_level < 1:
            raise InputError(f"--conformal_level is {self.conformal_level}: give a share between 0 and 1, such as 0.9")


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Classify image files and folders of them."""

    checkpoint: str
    """Model file, or a run folder for its best.safetensors."""
    paths: list[str]
    """Image files, and folders that are searched to any depth."""
    out: str | None = None
    """File for the rows: .csv, .jsonl or .parquet; default: a table on the terminal."""
    top_k: int = 5
    """Classes in a row, the likeliest first; at most as many as the model knows."""
    tta: Literal["none", "flip"] = "none"
    """Test-time augmentation; `flip`: the mean of the probabilities of an image and of its mirror image."""
    abstain_below: float | None = None
    """An image whose likeliest class has less than this probability gets no answer: `label_1` stays empty, its
    probabilities and the classes that follow stand. Without it, `label_1` is always the likeliest class."""
    embeddings: str | None = None
    """Write what the network's last layer sees of each image to this .npy file, a row for each of --out."""
    by_class: str | None = None
    """Copy each image into a folder of its likeliest class in this folder, where nothing is overwritten."""
    resume: bool = False
    """Go on where a run of the same command was interrupted, or leave its finished file as it is."""
    batch_size: int = 32
    """Images at a time; the numbers do not depend on it."""
    workers: int | None = None
    """Loader processes; default: one less than the cores, at most 8."""
    device: str = "auto"
    """`auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)
        check_positive("top_k", self.top_k)
        check_paths([self.checkpoint, *self.paths])
        check_workers(self.workers)
        share = self.abstain_below
        if share is not None and not 0 < share <= 1:
            raise InputError(f"--abstain_below is {share}: give a probability above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compare two runs, or two folders of runs of several seeds, on the same images and bit for bit (exit code 4)."""

    run_a: str
    """Run folder, folder of runs as train.seeds makes it, or model file."""
    run_b: str
    """What it is compared with; runs of several seeds are paired by seed."""
    data: str | None = None
    """The images; default: the data that both runs were trained on."""
    split: Literal["train", "val", "test", "all"] | None = None
    """Which images; default: `test`, or `val` where there is no test split."""
    json: str | None = None
    """Write all numbers to this file, as fractions."""
    on_error: Literal["stop", "skip"] = "stop"
    """At an unreadable image: `stop`, or `skip` it in both runs and end with exit code 3."""
    batch_size: int = 64
    """Images at a time; the scores do not depend on it."""
    workers: int | None = None
    """Loader processes; default: one less than the cores, at most 8."""
    device: str = "auto"
    """`auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)
        check_workers(self.workers)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Make a piece of a run again and compare the bits."""

    state: str
    """RUN/resume/step-N: the steps up to the next kept state; or RUN/crash-N: the step that failed."""
    data: str | None = None
    """Where the images lie now; default: where they lay then."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """See how well the features of each layer of a network tell the classes of a data set apart."""

    checkpoint: str
    """Model file, or a run folder for its best.safetensors."""
    data: str
    """Folder of images, of CIFAR batches or of IDX files, a .csv or .jsonl manifest, or `digits`. Its classes may be
    others than the model's."""
    method: ProbeMethod = "linear"
    """`linear`: logistic regression; `knn`: a vote of the nearest training images."""
    layers: list[str] = field(default_factory=list)
    """Numbers of layers, the first is 1, or `all`; default: all. Validation chooses among them."""
    max_images: int = 10_000
    """Training images, of each class its share; logistic regression takes time and memory with them."""
    seed: int = 0
    """Seed of the training images that are drawn."""
    json: str | None = None
    """Write all numbers to this file, as fractions."""
    plot: str | None = None
    """Draw the validation scores of the layers to this PNG file."""
    on_error: Literal["stop", "skip"] = "stop"
    """At an unreadable image: `stop`, or `skip` it, list it and end with exit code 3."""
    batch_size: int = 64
    """Images at a time; the features do not depend on it beyond 1e-5."""
    workers: int | None = None
    """Loader processes; default: one less than the cores, at most 8."""
    device: str = "auto"
    """`auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        check_positive("max_images", self.max_images)
        check_positive("batch_size", self.batch_size)
        check_workers(self.workers)
        self.layer_numbers()

    def layer_numbers(self) -> list[int]:
        """Give the numbers of the layers, ascending; none stands for all."""
        return _layer_numbers(self.layers)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Show what a network looks at in images."""

    checkpoint: str
    """Model file, or a run folder for its best.safetensors."""
    images: list[str]
    """Image files, and folders that are searched to any depth."""
    out: str
    """Folder for the pictures (.png) and their values (.npz), new or empty."""
    class_: str | None = None
    """Show what speaks for this class; default: for the likeliest of each image."""
    layers: list[str] = field(default_factory=list)
    """Numbers of blocks whose attention is shown, the first is 1, or `all`; default: the last of each kind and size."""
    batch_size: int = 8
    """Images at a time; the numbers do not depend on it beyond 1e-5."""
    workers: int | None = None
    """Loader processes; default: one less than the cores, at most 8."""
    device: str = "auto"
    """`auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)
        check_workers(self.workers)
        check_paths([self.checkpoint, *self.images])
        self.layer_numbers()

    def layer_numbers(self) -> list[int] | None:
        """Give the numbers of the blocks, ascending; none stands for all, None for the default."""
        return _layer_numbers(self.layers) if self.layers else None


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """List the networks that can be trained, or propose some for a size of image."""

    json: bool = False
    """Print JSON instead of a table or lines."""
    image_size: list[str] = field(default_factory=list)
    """Propose a network of each architecture for images of these sizes, each a side or HEIGHTxWIDTH in pixels."""

    def __post_init__(self) -> None:
        self.sizes()

    def sizes(self) -> list[tuple[int, int]]:
        """Give each of image_size as (height, width)."""
        return [read_size(size) for size in self.image_size]


def read_size(text: str) -> tuple[int, int]:
    """Read `224` or `192x224`.

    Raises:
        InputError: it is neither.
    """
    sides = [int(side) for side in text.split("x")] if re.fullmatch("[0-9]{1,5}(x[0-9]{1,5})?", text) else [0]
    if min(sides) < 1 or max(sides) > LARGEST_SIDE:
        example = "such as 224, or 192x224 (height x width)"
        raise InputError(f"--image_size is {text}: give sides of 1 to {LARGEST_SIDE} pixels, {example}")
    return sides[0], sides[-1]


def _layer_numbers(layers: list[str]) -> list[int]:
    if layers in ([], ["all"]):
        return []
    if not all(re.fullmatch("0*[1-9][0-9]{0,5}", layer) for layer in layers):
        raise InputError(f"--layers is {' '.join(layers)}: give numbers from 1 on, such as 3 6 9, or all")
    return sorted(set(map(int, layers)))


def check_workers(workers: int | None) -> None:
    """Raise InputError for a number of loader processes below 0, or so large that starting them ends no more."""
    if workers is not None and workers < 0:
        raise InputError(f"--workers is {workers}: give 0 or more")
    if workers is not None and workers > _MOST_WORKERS:
        raise InputError(f"--workers is {workers}: give at most {_MOST_WORKERS:,}")


def check_paths(paths: list[str]) -> None:
    """Raise InputError for an empty text, such as of a shell's unset variable, which would be the current folder."""
    if "" in paths:
        raise InputError("a path is empty: give image files or folders, and . for the current folder")


def check_positive(name: str, value: int) -> None:
    """Raise InputError for a number below 1."""
    if value < 1:
        raise InputError(f"--{name} is {value}: give 1 or more")
