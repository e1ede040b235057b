"""The figures of a report as inline SVG: a confusion matrix, a reliability diagram, a risk-coverage curve.

Colours are the page's CSS variables, so that light and dark need one drawing. Names are escaped.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from vitlab.engine.calibration import ReliabilityBin, RiskCoverage
from vitlab.engine.statistics import wilson_interval
from vitlab.text import printable

MAX_CELLS = 20
"""Classes up to which each cell of a confusion matrix has its count; above, the matrix is a heat map."""
_CELL, _HEAT_SIDE = 36, 640
_MAX_HEAT_PIXELS = 1000
_MAX_NAMES = 40
_NAME_LENGTH = 18
_LETTER = 6.4
"""Width of a letter, about."""
_HEAT_COLOR = (220, 120, 30)  # BGR; seen on white and on black
_MAX_POINTS = 300
_SHOWN_SHARE = 0.3
"""Of the row, above which a cell is dark enough for text in the page's colour."""


def confusion_svg(confusion: NDArray[np.int64], classes: Sequence[str]) -> Markup:
    """Draw a confusion matrix; a cell's colour is its share of the row.

    Args:
        confusion: counts (K, K), rows true, columns predicted. A class without images is a blank row.
        classes: K names. Of more than 20 a cell is a dot without its count, and of more than 40 every n-th is named.
    """
    K = len(classes)
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    side = K * _CELL if K <= MAX_CELLS else _HEAT_SIDE
    places = range(0, K, math.ceil(K / _MAX_NAMES))
    names = [_short(classes[place]) for place in places]
    room = 24 + _LETTER * max(map(len, names))
    parts = [_cells(confusion, shares, classes) if K <= MAX_CELLS else _heat(shares)]
    parts.append(f'<rect class="frame" width="{side}" height="{side}"/>')
    for place, name in zip(places, map(escape, names), strict=True):
        at = (place + 0.5) * side / K
        parts.append(f'<text class="tick" x="-6" y="{at + 4:.1f}" text-anchor="end">{name}</text>')
        turn = f'transform="translate({at + 4:.1f} {side + 10}) rotate(-50)"'
        parts.append(f'<text class="tick" {turn} text-anchor="end">{name}</text>')
    parts.append(f'<text class="axis" x="{side / 2}" y="{side + room}" text-anchor="middle">predicted class</text>')
    turn = f'transform="translate({-room} {side / 2}) rotate(-90)"'
    parts.append(f'<text class="axis" {turn} text-anchor="middle">true class</text>')
    box = (-room - 16, -4, room + side + 24, side + room + 16)
    return _svg(box, f"Confusion matrix of {K} classes", parts)


def _cells(confusion: NDArray[np.int64], shares: NDArray[np.float64], classes: Sequence[str]) -> str:
    """Draw a square for each count above 0, with the count in it and all about it as its title."""
    parts = []
    for row, column in np.argwhere(confusion).tolist():
        count, share = int(confusion[row, column]), float(shares[row, column])
        x, y = column * _CELL, row * _CELL
        true, predicted = (escape(printable(classes[place])) for place in (row, column))
        text = f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k"
        parts.append(
            f"<g><title>{true} taken for {predicted}: {count:,} ({share:.1%})</title>"
            f'<rect class="cell" x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill-opacity="{share**0.5:.2f}"/>'
            f'<text class="count{" on" if share > _SHOWN_SHARE else ""}" x="{x + _CELL / 2}" y="{y + _CELL / 2 + 4}"'
            f' text-anchor="middle">{text}</text></g>'
        )
    return "".join(parts)


def _heat(shares: NDArray[np.float64]) -> str:
    """Put the shares as a small transparent picture, a pixel a cell, or a pixel for several of very many."""
    step = math.ceil(len(shares) / _MAX_HEAT_PIXELS)
    if step > 1:
        starts = np.arange(0, len(shares), step)
        shares = np.maximum.reduceat(np.maximum.reduceat(shares, starts, axis=0), starts, axis=1)
    image = np.empty((*shares.shape, 4), np.uint8)
    image[..., :3] = _HEAT_COLOR
    image[..., 3] = np.rint(255 * np.sqrt(shares))
    _, data = cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 9])
    uri = f"data:image/png;base64,{base64.b64encode(data.tobytes()).decode('ascii')}"
    return f'<image class="heat" width="{_HEAT_SIDE}" height="{_HEAT_SIDE}" href="{uri}"/>'


def reliability_svg(series: Mapping[str, Sequence[ReliabilityBin]]) -> Markup:
    """Draw how often a network is right over how sure it is, with 95 % intervals; the diagonal is what should be.

    Args:
        series: bins by what they are of, the main ones last.
    """
    axes = _Axes("confidence", "accuracy")
    parts = [axes.frame(), axes.line([(0, 0), (1, 1)], "ideal")]
    for name, bins in series.items():
        kind = "main" if name == list(series)[-1] else "other"
        most = max((bin.count for bin in bins), default=1)
        parts.append(axes.line([(bin.confidence, bin.accuracy) for bin in bins], kind))
        for bin in bins:
            radius = 2 + 4 * math.sqrt(bin.count / most)
            x, (low, high) = axes.x(bin.confidence), wilson_interval(bin.correct, bin.count)
            whisker = f'<path class="{kind} whisker" d="M{x:.1f} {axes.y(low):.1f}V{axes.y(high):.1f}"/>'
            about = f"{name}: {bin.count:,} images, {bin.confidence:.1%} sure, {bin.accuracy:.1%} right"
            dot = f'<circle class="{kind} dot" cx="{x:.1f}" cy="{axes.y(bin.accuracy):.1f}" r="{radius:.1f}"/>'
            parts.append(f"<g><title>{escape(about)}</title>{whisker if kind == 'main' else ''}{dot}</g>")
    return _svg(axes.box, "Reliability diagram: accuracy over confidence", parts)


def risk_coverage_svg(curve: RiskCoverage, chosen: int | None) -> Markup:
    """Draw the share of mistakes over the share of images that are answered.

    Args:
        curve: the points.
        chosen: the row of the threshold to mark.
    """
    axes = _Axes("coverage: share of images answered", "mistakes among them", y_top=_round_up(float(curve.risk.max())))
    M = len(curve.risk)
    rows = np.unique(np.linspace(0, M - 1, min(M, _MAX_POINTS)).round().astype(np.int64))
    points = list(zip(curve.coverage[rows].tolist(), curve.risk[rows].tolist(), strict=True))
    parts = [axes.frame(), axes.line(points, "main")]
    if chosen is not None:
        x, y = axes.x(float(curve.coverage[chosen])), axes.y(float(curve.risk[chosen]))
        parts.append(f'<path class="ideal" d="M{x:.1f} {axes.y(0):.1f}V{y:.1f}H{axes.x(0):.1f}"/>')
        about = f"threshold {curve.threshold[chosen]:.3f}"
        parts.append(f'<circle class="main dot" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{about}</title></circle>')
    return _svg(axes.box, "Risk-coverage curve: mistakes over the share of images answered", parts)


@dataclass(frozen=True)
class _Axes:
    """A panel of shares, 0 to 1 to the right and 0 to `y_top` upwards."""

    x_label: str
    y_label: str
    y_top: float = 1.0

    width, height = 380, 290
    box = (-64, -10, 470, 350)

    def x(self, value: float) -> float:
        """Give a value's place from the left."""
        return value * self.width

    def y(self, value: float) -> float:
        """Give a value's place from the top."""
        return self.height * (1 - value / self.y_top)

    def frame(self) -> str:
        """Draw grid, ticks in percent and names."""
        parts = []
        for part in range(6):
            x, y = self.x(part / 5), self.y(self.y_top * part / 5)
            parts.append(f'<path class="grid" d="M{x:.1f} 0V{self.height}M0 {y:.1f}H{self.width}"/>')
            percents = f"{20 * part} %", f"{20 * self.y_top * part:.4g} %"
            below = f'x="{x:.1f}" y="{self.height + 18}" text-anchor="middle"'
            parts.append(f'<text class="tick" {below}>{percents[0]}</text>')
            parts.append(f'<text class="tick" x="-8" y="{y + 4:.1f}" text-anchor="end">{percents[1]}</text>')
        middle = f'x="{self.width / 2}" y="{self.height + 42}" text-anchor="middle"'
        turn = f'transform="translate(-50 {self.height / 2}) rotate(-90)" text-anchor="middle"'
        parts.append(f'<text class="axis" {middle}>{escape(self.x_label)}</text>')
        parts.append(f'<text class="axis" {turn}>{escape(self.y_label)}</text>')
        return "".join(parts)

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> str:
        """Join points."""
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        return f'<path class="{kind} line" d="M{path}"/>'


def _round_up(value: float) -> float:
    """Give a plain number that is no less, at most 1; fifths of it are plain numbers, too."""
    if value <= 0:
        return 0.01
    power = 10.0 ** math.floor(math.log10(value))
    return float(
        min(1.0, next(power * factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if power * factor >= value))
    )


def _short(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= _NAME_LENGTH else f"{shown[: _NAME_LENGTH - 6]}…{shown[-5:]}"


def _svg(box: tuple[float, float, float, float], about: str, parts: Sequence[str]) -> Markup:
    view = " ".join(f"{number:g}" for number in box)
    style = f"width:{box[2]:g}px"
    # All parts are drawn above from numbers and from names that `escape` has been over.
    return Markup(
        f'<svg role="img" viewBox="{view}" style="{style}"><title>{escape(about)}</title>{"".join(parts)}</svg>'
    )
