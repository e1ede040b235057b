"""What the commands of an ImageGPT's pixels take; standard library only. The field docstrings are the help texts."""

from dataclasses import dataclass
from typing import Literal

from vitlab.config import ResizeMode
from vitlab.errors import InputError
from vitlab.options import check_positive, check_workers, read_size

DrawPrecision = Literal["auto", "fp32", "bf16", "int8"]
"""What ImageGPT draws in."""


@dataclass(frozen=True, kw_only=True)
class PaletteOptions:
    """Fit a palette for ImageGPT to a data set, and measure it."""

    data: str
    """Folder of images, of CIFAR batches or of IDX files, a .csv or .jsonl manifest, or `digits`."""
    out: str
    """File for the colours, .npy: float32 (colours, channels) in [-1, 1]; a picture .png is put beside it."""
    num_colors: int = 512
    """Colours of the palette."""
    image_size: str | None = None
    """Size that the network sees, a side or HEIGHTxWIDTH in pixels; default: that of CIFAR, IDX or digits, else 32."""
    resize_mode: ResizeMode = "crop"
    """`crop` the centre, `squash` to the size, or `pad` to the aspect ratio with grey."""
    channels: Literal[1, 3] = 3
    """3 for RGB, 1 for greyscale."""
    split: Literal["train", "val", "test"] = "train"
    """What it is fitted on; it is also measured on `val`, or on `train` where it is fitted on that."""
    seed: int = 0
    """Seed of the images and pixels that are drawn, and of the first centres."""
    on_error: Literal["stop", "skip"] = "stop"
    """At an unreadable image: `stop`, or `skip` it, list it and end with exit code 3."""
    workers: int | None = None
    """Loader processes; default: one less than the cores, at most 8. The palette does not depend on it."""

    def __post_init__(self) -> None:
        check_positive("num_colors", self.num_colors)
        check_workers(self.workers)
        self.size()

    def size(self) -> tuple[int, int] | None:
        """Give image_size as (height, width)."""
        return None if self.image_size is None else read_size(self.image_size)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Draw images with a causal ImageGPT."""

    checkpoint: str
    """Model file of an ImageGPT that was trained on next pixels, or a run folder for its best.safetensors."""
    count: int
    """Images to draw; image i is the same whatever the count."""
    out: str
    """File for the picture of all, .png."""
    temperature: float = 1.0
    """0 draws the likeliest colour each time, above 1 makes rare colours more frequent."""
    top_k: int = 0
    """Draw among so many likeliest colours; 0 for all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest colours that have this probability together."""
    beam: int = 0
    """Instead of drawing, search for the likeliest images with so many beginnings at a time; 0 draws.
    A beam takes no temperature, top_k, top_p and seed."""
    seed: int = 0
    """Seed of the draws."""
    npy: str | None = None
    """Write the images to this file, too, .npy: uint8 (count, height, width, channels)."""
    precision: DrawPrecision = "auto"
    """`fp32`, `bf16`, `int8` (fastest for one image, x86 alone), or `auto`: bf16 where the device computes in it."""
    batch_size: int = 8
    """Images at a time."""
    device: str = "auto"
    """`auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        check_positive("count", self.count)
        check_positive("batch_size", self.batch_size)
        if self.beam < 0:
            raise InputError(f"--beam is {self.beam}: give 1 or more, or 0 to draw")
        if 0 < self.beam < self.count:
            raise InputError(
                f"--count is {self.count}, and a beam of {self.beam} finds no more: give fewer, or a wider beam"
            )


@dataclass(frozen=True, kw_only=True)
class CompleteOptions:
    """Draw the lower part of images anew with a causal ImageGPT."""

    checkpoint: str
    """Model file of an ImageGPT that was trained on next pixels, or a run folder for its best.safetensors."""
    images: list[str]
    """Image files, and folders that are searched to any depth."""
    out: str
    """File for the picture, .png: a row an image, with the given pixels, the completions and the original."""
    keep: float = 0.5
    """Share of the pixels that is given, row by row from the top; 0 to 1."""
    count: int = 3
    """Completions of each image."""
    temperature: float = 1.0
    """0 draws the likeliest colour each time, above 1 makes rare colours more frequent."""
    top_k: int = 0
    """Draw among so many likeliest colours; 0 for all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest colours that have this probability together."""
    seed: int = 0
    """Seed of the draws."""
    npy: str | None = None
    """Write the completions to this file, too, .npy: uint8 (images, count, height, width, channels)."""
    precision: DrawPrecision = "auto"
    """`fp32`, `bf16`, `int8` (fastest for one image, x86 alone), or `auto`: bf16 where the device computes in it."""
    batch_size: int = 8
    """Completions at a time."""
    device: str = "auto"
    """`auto`, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        check_positive("count", self.count)
        check_positive("batch_size", self.batch_size)
        if not 0 <= self.keep <= 1:
            raise InputError(f"--keep is {self.keep}: give a number from 0 to 1")
