"""The picture of a probe: how well each layer tells classes apart."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vitlab.engine.figures import (
    BLUE,
    DPI,
    MAX_POINTS_WITH_MARKERS,
    VERMILION,
    drawable,
    finish_panel,
    pixels,
    save_image,
)
from vitlab.engine.statistics import Interval


def plot_probe(
    layers: Sequence[int],
    val_top1: Sequence[float],
    intervals: Sequence[Interval],
    *,
    chosen: int,
    test_top1: float | None,
    title: str,
    out_png: Path,
) -> None:
    """Write the picture of `probe_figure` to a file."""
    figure = probe_figure(layers, val_top1, intervals, chosen=chosen, test_top1=test_top1, title=title)
    save_image(out_png, pixels(figure))


def probe_figure(
    layers: Sequence[int],
    val_top1: Sequence[float],
    intervals: Sequence[Interval],
    *,
    chosen: int,
    test_top1: float | None,
    title: str,
) -> Figure:
    """Draw validation top-1 over the layers with its intervals, a star on the chosen layer, and its test score.

    Args:
        layers: their numbers, ascending.
        val_top1: share of validation images that are right, of each layer's best classifier.
        intervals: of these shares.
        chosen: number of the chosen layer.
        test_top1: share of test images that the chosen classifier gets right; None where there are none.
        title: headline, such as the model's and the data's name.
    """
    figure = Figure(figsize=(7, 4.5), dpi=DPI, layout="constrained")
    figure.suptitle(drawable(title, max_length=75), fontsize=12, parse_math=False)
    axes = figure.subplots()
    percents = [100 * share for share in val_top1]
    low, high = zip(*[(100 * low, 100 * high) for low, high in intervals], strict=True)
    axes.fill_between(layers, low, high, color=BLUE, alpha=0.15, linewidth=0, label="95 % interval")
    marker = "o" if len(layers) <= MAX_POINTS_WITH_MARKERS else ""
    axes.plot(layers, percents, color=BLUE, marker=marker, markersize=3.5, linewidth=1.6, label="validation images")
    best = percents[list(layers).index(chosen)]
    star = f"chosen: layer {chosen}, {best:.2f} %"
    axes.plot([chosen], [best], "*", markersize=15, color=VERMILION, markeredgecolor="white", label=star)
    if test_top1 is not None:
        label = f"test images: {test_top1:.2%}".replace("%", " %")
        axes.plot([chosen], [100 * test_top1], "D", markersize=6, color="none", markeredgecolor=VERMILION, label=label)
    axes.legend(frameon=False, loc="best")
    axes.set_xlabel("layer")
    finish_panel(axes, title="Top-1 accuracy on the features of each layer", unit="%")
    return figure
