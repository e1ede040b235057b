"""What `vitlab sample` and `vitlab complete` do: draw images with a model file, and lay them out in a picture."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray

from vitlab.checks import require
from vitlab.data.datasets import files_split
from vitlab.data.images import ImageError, list_images
from vitlab.data.preprocess import Preprocess
from vitlab.data.sample import read_sample
from vitlab.disk import replacing
from vitlab.engine.device import resolve_device
from vitlab.engine.figures import image_grid, save_image
from vitlab.errors import InputError
from vitlab.inference.decoder import require_decodable
from vitlab.inference.sampling import beam_search, complete, sample
from vitlab.models.files import ModelFile, load_model
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import Network
from vitlab.pixel_options import CompleteOptions, SampleOptions

if TYPE_CHECKING:
    from rich.progress import Progress

_GREY = 128
_COMPLETIONS = 2
_Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Drawing:
    """What a command drew."""

    count: int
    """Images that were drawn."""
    errors: tuple[ImageError, ...] = ()
    """Images that could not be read."""


def draw_samples(options: SampleOptions, *, progress: "Progress | None" = None) -> Drawing:
    """Draw images from nothing, or find the likeliest by a beam, and write them as a grid.

    Args:
        options: the model file, how many, how, and where the picture goes.
        progress: a bar to add a task to.

    Raises:
        InputError: the model file is no causal ImageGPT's, or a number is out of its range.
    """
    model = load_model(options.checkpoint, device=resolve_device(options.device))
    network = _drawing_network(model, options.checkpoint)
    num_pixels = math.prod(network.image_size)
    captions = None
    if options.beam:
        bar = _Bar(progress, "searching", num_pixels)
        beams = beam_search(network, width=options.beam, precision=options.precision, on_step=bar.advance)
        tokens = beams.tokens[: options.count]
        captions = [f"{value:.1f} nats" for value in beams.log_probabilities.tolist()[: options.count]]
    else:
        tokens = sample(
            network,
            count=options.count,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            precision=options.precision,
            batch_size=options.batch_size,
            on_step=_Bar(progress, "drawing", options.count * num_pixels).advance,
        )
    images = network.decode(tokens).cpu().numpy()
    save_image(Path(options.out), image_grid(images, captions))
    _write_array(options.npy, rearrange(images, "b c h w -> b h w c"))
    return Drawing(len(images))


def complete_images(options: CompleteOptions, *, progress: "Progress | None" = None) -> Drawing:
    """Draw the lower part of images anew, and write a row for each: given pixels, completions, original.

    Args:
        options: the model file, the images, how many completions, how, and where the picture goes.
        progress: a bar to add tasks to.

    Raises:
        InputError: the model file is no causal ImageGPT's, a number is out of its range, or no image can be read.
    """
    inputs = {Path(path).resolve() for path in list_images(options.images)[0]}
    require(Path(options.out).resolve() not in inputs, f"--out {options.out} is one of the images: give another file")
    model = load_model(options.checkpoint, device=resolve_device(options.device))
    network = _drawing_network(model, options.checkpoint)
    originals, names, errors = _read(model, options.images, progress)
    B, num_pixels = len(originals), math.prod(network.image_size)
    num_given = round(options.keep * num_pixels)
    device = network.palette.device
    tokens = network.encode(model.preprocess.normalize(torch.from_numpy(originals).to(device)))
    drawn = complete(
        network,
        tokens[:, :num_given],
        count=options.count,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        precision=options.precision,
        batch_size=options.batch_size,
        on_step=_Bar(progress, "completing", B * options.count * (num_pixels - num_given)).advance,
    )
    completions = network.decode(rearrange(drawn, "b count n -> (b count) n")).cpu().numpy()
    completions = rearrange(completions, "(b count) c h w -> b count c h w", count=options.count)
    save_image(
        Path(options.out), _rows_of(originals, names, completions, network.decode(tokens).cpu().numpy(), num_given)
    )
    _write_array(options.npy, rearrange(completions, "b count c h w -> b count h w c"))
    return Drawing(B * options.count, errors)


def _drawing_network(model: ModelFile, path: str) -> ImageGPT:
    """Give the network of a model file whose colours were trained."""
    network = require_decodable(model.network.float())
    require(
        model.objective.get("name") != "classification",
        f"{path} was trained for classes alone and knows no colours: train with --objective.name next_pixel or joint",
    )
    return network


def draw_progress(
    network: Network,
    preprocess: Preprocess,
    originals: _Images,
    *,
    count: int,
    on_step: Callable[[int], object] = lambda pixels: None,
) -> tuple[_Images, _Images]:
    """Draw what shows how far training has come: `count` samples, and two completions of the lower half of images.

    Args:
        network: a causal ImageGPT.
        preprocess: the model's own.
        originals: uint8 `(B, C, H, W)`, the same at each call.
        count: samples, drawn with the same random numbers at each call.
        on_step: called at each pixel; what it raises ends the drawing.

    Returns:
        Both grids, RGB uint8 `(H', W', 3)`.
    """
    gpt = require_decodable(network)
    num_given = math.prod(gpt.image_size) // 2
    tokens = gpt.encode(preprocess.normalize(torch.from_numpy(originals).to(gpt.palette.device)))
    samples = gpt.decode(sample(gpt, count=count, on_step=on_step)).cpu().numpy()
    drawn = rearrange(
        complete(gpt, tokens[:, :num_given], count=_COMPLETIONS, on_step=on_step), "b count n -> (b count) n"
    )
    completions = rearrange(gpt.decode(drawn).cpu().numpy(), "(b count) c h w -> b count c h w", count=_COMPLETIONS)
    names = ["given"] * len(originals)
    return image_grid(samples), _rows_of(originals, names, completions, gpt.decode(tokens).cpu().numpy(), num_given)


def _rows_of(originals: _Images, names: Sequence[str], completions: _Images, seen: _Images, num_given: int) -> _Images:
    """Lay out a row for each image: what was given of what the network saw, the completions, the original."""
    _, count, _, H, W = completions.shape
    is_given = (np.arange(H * W) < num_given).reshape(H, W)
    given = np.where(is_given, seen, np.uint8(_GREY))
    tiles = np.concatenate([given[:, None], completions, originals[:, None]], axis=1)
    others = [*(f"completion {i + 1}" for i in range(count)), "original"]
    captions = [caption for name in names for caption in (name, *others)]
    return image_grid(rearrange(tiles, "b k c h w -> (b k) c h w"), captions, columns=count + 2)


def _read(
    model: ModelFile, paths: Sequence[str], progress: "Progress | None"
) -> tuple[_Images, list[str], tuple[ImageError, ...]]:
    """Read images with the model file's own preprocessing: uint8 `(B, C, H, W)`, their names, and what failed."""
    split = files_split(list_images(paths)[0])
    bar = _Bar(progress, "reading", len(split))
    images, errors = read_sample(
        split,
        model.preprocess,
        max_images=len(split),
        seed=0,
        workers=0,
        on_error="skip",
        on_images=bar.show,
    )
    if not len(images):
        raise InputError(f"{errors[0]}: give an image that can be read")
    failed = {error.path for error in errors}
    names = [Path(path).name for path in split.paths if path not in failed]
    return np.ascontiguousarray(rearrange(images, "b h w c -> b c h w")), names, errors


class _Bar:
    """A task of a progress bar, or nothing where there is no bar."""

    def __init__(self, progress: "Progress | None", description: str, total: int) -> None:
        self.progress = progress
        self.task = None if progress is None else progress.add_task(description, total=total)

    def advance(self, steps: int) -> None:
        """Move on by some steps."""
        if self.progress is not None and self.task is not None:
            self.progress.advance(self.task, steps)

    def show(self, done: int, total: int) -> None:
        """Show so many steps as done."""
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=done, total=total)


def _write_array(path: str | None, images: _Images) -> None:
    if path is None:
        return
    buffer = io.BytesIO()  # into a file numpy says of a full disk how many numbers did not fit
    np.save(buffer, np.ascontiguousarray(images))
    with replacing(Path(path)) as aside:
        aside.write_bytes(buffer.getbuffer())
