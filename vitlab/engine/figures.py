"""A run's pictures: the curves, the confusion matrix and grids of images, drawn without pyplot's global state."""

import io
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from einops import repeat
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from PIL import Image, ImageDraw, ImageFont

from vitlab.disk import replacing
from vitlab.errors import InputError

Picture = npt.NDArray[np.uint8]

# Okabe and Ito's palette, told apart with any colour vision (https://jfly.uni-koeln.de/color/).
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#666666"

DPI = 120
MAX_POINTS_WITH_MARKERS = 40
MAX_CLASSES_WITH_COUNTS = 20
MAX_CLASS_LABELS = 120
MAX_NAME_LENGTH = 24

MIN_TILE = 96
"""Small images are enlarged by whole factors until their longer side has this many pixels."""
TILE_GAP = 6
CAPTION_HEIGHT = 18


def plot_results(metrics_path: Path, out_png: Path, *, title: str) -> None:
    """Write the picture of `results_figure` to a file."""
    save_image(out_png, pixels(results_figure(metrics_path, title=title)))


def results_figure(metrics_path: Path, *, title: str) -> Figure:
    """Draw loss, top-1, learning rate and speed over the optimizer steps of a run.

    Args:
        metrics_path: `RUN/metrics.jsonl`. Keys that a line lacks, values that are not finite and a last line that was
            cut short leave gaps; where a step was logged twice (a resumed run) the later value holds.
        title: headline, such as the model's and the data's name.

    Returns:
        Four panels, two by two, with the steps as their common axis.

    Raises:
        OSError: metrics_path cannot be read.
    """
    records = _read_records(metrics_path)
    figure = Figure(figsize=(11, 7), dpi=DPI, layout="constrained")
    figure.suptitle(drawable(title, max_length=100), fontsize=13, parse_math=False)
    loss, quality, rate, speed = figure.subplots(2, 2, sharex=True).flat

    _curve(loss, records, "train/loss", color=BLUE, label="training")
    _curve(loss, records, "val/loss", color=VERMILION, label="validation")
    _curve(loss, records, "val_ema/loss", color=GREEN, label="validation, moving average")
    logged = {key for record in records for key in record}
    of_pixels = "val/bits_per_pixel" in logged and "val/top1" not in logged
    finish_panel(loss, title="Loss", unit="nats per pixel" if of_pixels else "nats per image")
    if loss.lines:
        loss.legend(frameon=False)

    key, scale = ("bits_per_pixel", 1.0) if of_pixels else ("top1", 100.0)
    steps, values = _curve(quality, records, f"val/{key}", color=VERMILION, scale=scale, label="weights")
    ema_steps, ema_values = _curve(quality, records, f"val_ema/{key}", color=GREEN, scale=scale, label="moving average")
    if of_pixels:
        finish_panel(quality, title="Colours of validation images", unit="bits per pixel")
    else:
        finish_panel(quality, title="Top-1 accuracy on validation images", unit="%")
        if values:
            _mark_best(quality, steps + ema_steps, values + ema_values)
    if ema_values:
        quality.legend(frameon=False, loc="upper left")

    _, rates = _curve(rate, records, "train/lr", color=GREEN)
    finish_panel(rate, title="Learning rate", unit="per step")
    if rates:
        rate.set_ylim(0, 1.05 * max(rates) or 1)
    rate.yaxis.set_major_formatter("{x:g}")

    _, speeds = _curve(speed, records, "train/images_per_s", color=PURPLE)
    finish_panel(speed, title="Training speed", unit="images/s")
    if speeds:
        speed.set_ylim(0, 1.15 * max(speeds) or 1)

    for axes in (rate, speed):
        axes.set_xlabel("optimizer step")
    return figure


def plot_lr_curve(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggestion: float | None,
    out_png: Path,
) -> None:
    """Draw the loss over the learning rate of a sweep, with the suggested rate where there is one."""
    figure = Figure(figsize=(7, 4.5), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.plot(rates, losses, color=GREY, alpha=0.4, linewidth=1, label="loss of a step")
    axes.plot(rates, smoothed, color=BLUE, linewidth=2, label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion, color=VERMILION, linestyle="--", label=f"steepest fall: {suggestion:.1e}")
    if smoothed:
        axes.set_ylim(0.95 * min(losses), min(1.05 * max(smoothed), 1.6 * smoothed[0]))
    axes.set_xlabel("learning rate")
    axes.legend(frameon=False)
    finish_panel(axes, title="Learning-rate range test", unit="training loss, nats")
    axes.xaxis.set_major_locator(LogLocator())
    save_image(out_png, pixels(figure))


def plot_confusion(confusion: npt.NDArray[np.int64], classes: Sequence[str], out_png: Path) -> None:
    """Write the picture of `confusion_figure` to a file."""
    save_image(out_png, confusion_image(confusion, classes))


def confusion_image(confusion: npt.NDArray[np.int64], classes: Sequence[str]) -> Picture:
    """Give the picture of `confusion_figure` as RGB uint8 `(H, W, 3)`."""
    return pixels(confusion_figure(confusion, classes))


def confusion_figure(confusion: npt.NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix; a cell's colour is its share of the row, its number the count of images.

    Args:
        confusion: counts `(K, K)`, rows true, columns predicted. A class without images is a blank row.
        classes: K names. Above 20 classes the counts are left out, above 120 only every n-th name is written.

    Returns:
        One panel that grows with K, and the scale of its colours.
    """
    K = len(classes)
    assert confusion.shape == (K, K), f"confusion is {confusion.shape} for {K} classes"
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)

    with_counts = K <= MAX_CLASSES_WITH_COUNTS
    side = max(3.5, K * 0.5) if with_counts else min(max(10.5, K * 0.15), 18)
    figure = Figure(figsize=(side + 2.6, side + 1.9), dpi=DPI, layout="compressed")
    axes = figure.add_subplot()
    # The square root lets a confusion of 2 % show beside hits of 90 %.
    picture = axes.imshow(100 * shares, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=100), interpolation="nearest")
    if with_counts:
        _write_counts(axes, confusion, shares)
    _name_classes(axes, classes, size=9 if with_counts else 6.5)

    bar = figure.colorbar(picture, ax=axes, shrink=0.8, pad=0.02, aspect=35, ticks=[0, 1, 5, 10, 25, 50, 100])
    bar.set_label("share of the true class (%)")
    bar.outline.set_visible(False)
    images, right = int(confusion.sum()), int(np.trace(confusion))
    axes.set_title(f"{right:,} of {images:,} images right ({100 * right / max(images, 1):.1f} %)", fontsize=11)
    return figure


def image_grid(images: Picture, captions: Sequence[str] | None = None, *, columns: int | None = None) -> Picture:
    """Lay images out in rows on white, each with its caption below.

    Args:
        images: uint8 `(B, C, H, W)`, C 1 (grey) or 3 (RGB). Small ones are enlarged without smoothing.
        captions: B texts, cut to the width of an image.
        columns: images in a row; default: about a square.

    Returns:
        RGB uint8 `(H', W', 3)`.
    """
    B, C, H, W = images.shape
    assert images.dtype == np.uint8, f"images are {images.dtype}, not uint8"
    assert C in (1, 3), f"images have {C} channels, not 1 or 3"
    assert captions is None or len(captions) == B, f"{len(captions or ())} captions for {B} images"

    zoom = max(1, math.ceil(MIN_TILE / max(H, W)))
    height, width = H * zoom, W * zoom
    tiles = repeat(images, "b c h w -> b (h zh) (w zw) (c rgb)", zh=zoom, zw=zoom, rgb=3 // C)
    columns = max(1, min(B, columns or math.ceil(math.sqrt(B * height / width))))
    num_rows = math.ceil(B / columns)
    row_height = height + TILE_GAP + (CAPTION_HEIGHT if captions else 0)

    canvas = np.full((num_rows * row_height + TILE_GAP, columns * (width + TILE_GAP) + TILE_GAP, 3), 255, np.uint8)
    corners = [(TILE_GAP + i // columns * row_height, TILE_GAP + i % columns * (width + TILE_GAP)) for i in range(B)]
    for tile, (top, left) in zip(tiles, corners, strict=True):
        canvas[top : top + height, left : left + width] = tile
    if captions:
        canvas = _write_captions(canvas, captions, [(left, top + height + 1) for top, left in corners], width=width)
    return canvas


def save_image(path: Path, image: Picture) -> None:
    """Write an RGB picture `(H, W, 3)` whole or not at all.

    Raises:
        InputError: the suffix is neither .png nor .jpg.
    """
    formats = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
    if path.suffix.lower() not in formats:
        raise InputError(f"{path} is no name for a picture: end it in .png or .jpg")
    data = io.BytesIO()
    Image.fromarray(image).save(data, format=formats[path.suffix.lower()], quality=92)
    with replacing(path) as aside:
        aside.write_bytes(data.getbuffer())


def load_image(path: Path) -> Picture:
    """Read what `save_image` wrote."""
    with Image.open(path) as picture:
        return np.array(picture)


def _read_records(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a line that a kill cut short
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _curve(
    axes: Axes, records: list[dict[str, Any]], key: str, *, color: str, label: str = "", scale: float = 1
) -> tuple[list[int], list[float]]:
    """Draw one key's finite points and give their steps and scaled values."""
    points: dict[int, float] = {}
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            points[record["step"]] = value * scale
    steps = sorted(points)
    values = [points[step] for step in steps]
    if steps:
        marker = "o" if len(steps) <= MAX_POINTS_WITH_MARKERS else ""
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.5, linewidth=1.6)
    return steps, values


def _mark_best(axes: Axes, steps: list[int], values: list[float]) -> None:
    best = max(values)
    step = steps[values.index(best)]
    axes.plot([step], [best], marker="*", markersize=15, color=VERMILION, markeredgecolor="white")
    axes.axhline(best, color=VERMILION, linewidth=0.8, linestyle=":")
    axes.text(
        0.98,
        0.04,
        f"best: {best:.2f} % at step {step:,}",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        color=GREY,
    )


def finish_panel(axes: Axes, *, title: str, unit: str) -> None:
    """Name a panel and its values, and say so where nothing is drawn in it."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axes.tick_params(labelbottom=True)
    if not axes.lines:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing logged yet", transform=axes.transAxes, ha="center", va="center", color=GREY)


def _write_counts(axes: Axes, confusion: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]) -> None:
    for (row, column), count in np.ndenumerate(confusion):
        if count:  # zeros left out: the errors stand out
            color = "white" if shares[row, column] > 0.3 else "black"
            text = f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9)


def _name_classes(axes: Axes, classes: Sequence[str], *, size: float) -> None:
    every = math.ceil(len(classes) / MAX_CLASS_LABELS)
    ticks = list(range(0, len(classes), every))
    names = [drawable(classes[tick]) for tick in ticks]
    axes.set_xticks(ticks, names, rotation=90 if len(classes) > 6 else 30, fontsize=size, parse_math=False)
    if len(classes) <= 6:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(ticks, names, fontsize=size, parse_math=False)
    axes.tick_params(length=2)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")


def _write_captions(
    canvas: Picture, captions: Sequence[str], positions: list[tuple[int, int]], *, width: int
) -> Picture:
    picture = Image.fromarray(canvas)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.truetype(_font_path(), size=12)
    for caption, position in zip(captions, positions, strict=True):
        text = drawable(caption, max_length=100)
        whole = text
        while len(text) > 1 and draw.textlength(text, font=font) > width:
            whole = whole[:-1]
            text = whole + "…"
        draw.text(position, text, fill="black", font=font)
    return np.asarray(picture)


def pixels(figure: Figure) -> Picture:
    """Draw a figure as RGB uint8 `(H, W, 3)`."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


@cache
def _font_path() -> str:
    return str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))


@cache
def _font_characters() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_font_path()).get_charmap())


def drawable(text: str, *, max_length: int = MAX_NAME_LENGTH) -> str:
    """Escape the characters that the font lacks or a terminal would obey, and cut a long text in the middle.

    An escape such as U+732B's still tells two classes apart, where a box for each missing character would not.
    """
    shown = "".join(
        character
        if ord(character) in _font_characters() and character.isprintable()
        else character.encode("unicode_escape").decode()
        for character in text
    )
    if len(shown) > max_length:
        head = max_length * 2 // 3
        shown = f"{shown[:head]}…{shown[len(shown) - (max_length - head - 1) :]}"
    return shown
