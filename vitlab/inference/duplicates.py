"""Pictures that are one picture: re-encoded, resized, mirrored or cropped.

Each picture is compared by a perceptual hash of 63 numbers: the lowest frequencies of the cosine transform of its grey
thumbnail, scaled to length 1. The product of two such hashes is their likeness, so that all pairs are a product of
matrices. A mirrored picture only changes signs, and the hash of a part of a picture is a linear map of its thumbnail.

Likeness makes a candidate and nothing more. Of two photographs on one white table the lowest frequencies may agree;
their fine detail does not. So candidates are decoded, aligned, and compared in what is left without their blurred
selves: in 777 photographs of single objects that correlation was below 0.41 for 3,000 of the likest pairs of distinct
pictures and above 0.94 for the three that show one scene twice.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

import cv2
import numpy as np
from einops import rearrange
from numpy.typing import NDArray

SIDE = 32
"""Side of a thumbnail, and of the smallest picture that is compared: below it, strangers look alike."""

CROP_LIMIT = 20_000
"""Largest number of pictures among which crops are looked for: 75 parts of each are compared with all."""

Kind = Literal["near", "mirrored", "crop"]

_ORDER = 8  # frequencies of each axis
_BLOCK = 4096  # thumbnails taken as floats at a time
_MIN_CONTRAST = 4.0  # standard deviation of grey levels
_PRODUCTS = 2**23  # likenesses in memory at a time
_LIKENESS = 0.95
_MOST = {"near": 8, "mirrored": 4, "crop": 4}  # candidates of a picture
_ROUGH_DETAIL = {"near": 0.5, "mirrored": 0.5, "crop": 0.7}  # of thumbnails
_DETAIL_SIDE = 64
_DETAIL = {"near": 0.6, "mirrored": 0.6, "crop": 0.8}
_COARSE_DETAIL = 0.85  # at SIDE, for pictures whose detail was lost
_SHEAR = 0.04  # a crop is moved and scaled; an object that was photographed again is turned, too
_LARGEST_DIFFERENCE = 80  # of 255, at any place of a thumbnail: else a colour or an object is another
_BLUR = 2.0

_Grey = NDArray[np.float32]
_Pixels = TypeVar("_Pixels", NDArray[np.float32], NDArray[np.uint8])


@dataclass(frozen=True)
class View:
    """A part of a picture, in fractions of its height and width, perhaps mirrored."""

    kind: Kind
    top: float = 0.0
    left: float = 0.0
    size: float = 1.0

    def cut(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Give the part of an image (H, W, 3)."""
        H, W = image.shape[:2]
        top, left = round(self.top * H), round(self.left * W)
        part = image[top : top + max(1, round(self.size * H)), left : left + max(1, round(self.size * W))]
        return part[:, ::-1] if self.kind == "mirrored" else part

    def hashes(self, thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Give the hash of this part of each thumbnail (N, 32, 32), float32 (N, 63) of length 1."""
        rows, columns = _waves(self.top, self.size), _waves(self.left, self.size)
        if self.kind == "mirrored":
            columns = columns[:, ::-1]
        waves = np.kron(rows, columns)[1:]  # without the mean, so that brightness does not count
        hashes: NDArray[np.float32] = rearrange(thumbnails, "n h w -> n (h w)").astype(np.float32) @ waves.T
        hashes /= np.maximum(np.linalg.norm(hashes, axis=1, keepdims=True), 1e-6)
        return hashes


WHOLE, MIRRORED = View("near"), View("mirrored")
PARTS = tuple(
    View("crop", down * (1 - size), right * (1 - size), size)
    for size in (0.9, 0.8, 0.7)
    for down in np.linspace(0, 1, 5)
    for right in np.linspace(0, 1, 5)
)


@dataclass(frozen=True)
class Match:
    """Two pictures that are one: `second` shows what a view of `first` shows."""

    first: int
    second: int
    view: View
    likeness: float
    """Cosine of the angle between the hashes."""


class Groups:
    """Sets that grow together (union-find)."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def root(self, item: int) -> int:
        """Give the one that stands for an item's set."""
        while self._parents[item] != item:
            self._parents[item] = item = self._parents[self._parents[item]]
        return item

    def join(self, first: int, second: int) -> None:
        """Unite the sets of two items; the lower root stands for both."""
        low, high = sorted((self.root(first), self.root(second)))
        self._parents[high] = low


def find_matches(
    thumbnails: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    read: Callable[[int], NDArray[np.uint8] | None],
    *,
    threads: int,
    on_progress: Callable[[int, int], None],
) -> list[Match]:
    """Find pictures that are one; of several, so many pairs that they hang together.

    Args:
        thumbnails: grey, uint8 (N, 32, 32).
        sizes: shorter side of each picture in pixels, (N,).
        read: gives picture i as uint8 (H, W, 3), or None where it cannot be read any more; called by threads.
        threads: so many compare at a time.
        on_progress: told the steps done and in all.

    Returns:
        Confirmed pairs; first and second count as the thumbnails do. Pictures under 32 pixels or almost without
        contrast are in none.
    """
    blocks = (thumbnails[start : start + _BLOCK] for start in range(0, len(thumbnails), _BLOCK))  # std takes floats
    contrasts = [block.reshape(len(block), SIDE * SIDE).std(axis=1) for block in blocks]
    rows = np.flatnonzero((sizes >= SIDE) & (np.concatenate([np.zeros(0), *contrasts]) >= _MIN_CONTRAST))
    candidates = list(_candidates(thumbnails[rows], on_progress))
    candidates.sort(key=lambda match: (match.view.kind != "near", match.view.kind == "crop", -match.likeness))
    pending = (Match(int(rows[c.first]), int(rows[c.second]), c.view, c.likeness) for c in candidates)
    groups, matches, done = Groups(len(thumbnails)), [], 0

    def confirm(match: Match) -> bool:
        if not _is_plausible(thumbnails[match.first], thumbnails[match.second], match.view):
            return False
        first, second = read(match.first), read(match.second)
        return first is not None and second is not None and is_same(first, second, match.view)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        while chunk := list(islice(pending, 64)):
            done += len(chunk)
            open_pairs = [match for match in chunk if groups.root(match.first) != groups.root(match.second)]
            for match, holds in zip(open_pairs, pool.map(confirm, open_pairs), strict=True):
                if holds and groups.root(match.first) != groups.root(match.second):
                    groups.join(match.first, match.second)
                    matches.append(match)
            on_progress(done, len(candidates))
    return matches


def is_same(first: NDArray[np.uint8], second: NDArray[np.uint8], view: View) -> bool:
    """Say whether a view of one image (H, W, 3) and another image show the same pixels, whatever their sizes."""
    part = view.cut(first)
    side = min(_DETAIL_SIDE, *part.shape[:2], *second.shape[:2])
    if side < SIDE:
        return False
    a, b = _shrink(part, side), _shrink(second, side)
    shown = np.ones((side, side), dtype=bool)
    if view.kind == "crop":
        warp = _align(_grey(a), _grey(b), steps=50)
        if abs(warp[0, 1]) + abs(warp[1, 0]) > _SHEAR or abs(warp[0, 0] - warp[1, 1]) > _SHEAR:
            return False
        shown = _warped(np.ones((side, side), np.uint8), warp, border=cv2.BORDER_CONSTANT) > 0
        a = _warped(a, warp)
        a[~shown] = b[~shown]
    coarse_a, coarse_b = _shrink(a, SIDE), _shrink(b, SIDE)
    if np.abs(coarse_a.astype(np.int16) - coarse_b).max() > _LARGEST_DIFFERENCE:
        return False
    if side == _DETAIL_SIDE and _detail(_grey(a), _grey(b), shown) >= _DETAIL[view.kind]:
        return True
    return view.kind != "crop" and _detail(_grey(coarse_a), _grey(coarse_b)) >= _COARSE_DETAIL


def thumbnail(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Give an image (H, W, 3) as grey thumbnail, uint8 (32, 32), squashed."""
    grey: NDArray[np.uint8] = cv2.cvtColor(_shrink(image, SIDE), cv2.COLOR_RGB2GRAY)
    return grey


def _waves(start: float, size: float) -> NDArray[np.float32]:
    """Give the mean of each cosine of an interval over each of 32 pixels, (8, 32): outside of it nothing."""
    edges = ((np.arange(SIDE + 1) / SIDE - start) / size).clip(0, 1)
    order = np.arange(1, _ORDER)[:, None]
    integrals = np.concatenate([edges[None], np.sqrt(2) * np.sin(np.pi * order * edges) / (np.pi * order)])
    return np.diff(integrals, axis=1).astype(np.float32)


def _candidates(thumbnails: NDArray[np.uint8], on_progress: Callable[[int, int], None]) -> Iterator[Match]:
    """Give pairs whose hashes are alike, block by block of the first."""
    N = len(thumbnails)
    if not N:
        return
    wholes = np.concatenate([WHOLE.hashes(thumbnails[i : i + _BLOCK]) for i in range(0, N, _BLOCK)])
    views = (WHOLE, MIRRORED, *(PARTS if N <= CROP_LIMIT else ()))
    step = max(1, min(512, _PRODUCTS // N))
    for start in range(0, N, step):
        block = thumbnails[start : start + step]
        best: dict[tuple[int, int], tuple[View, float]] = {}
        for view in views:
            likeness = view.hashes(block) @ wholes.T
            for row, column, value in zip(*_likest(likeness, start, view.kind), strict=True):
                pair = (start + row, column)
                if value > best.get(pair, (view, 0.0))[1]:
                    best[pair] = view, value
        crops = np.zeros(len(block), dtype=np.int64)
        for (first, second), (view, value) in sorted(best.items(), key=lambda item: -item[1][1]):
            if view.kind == "crop":
                crops[first - start] += 1
                if crops[first - start] > _MOST["crop"]:
                    continue
            yield Match(first, second, view, value)
        on_progress(min(start + step, N), N)


def _likest(likeness: NDArray[np.float32], start: int, kind: Kind) -> tuple[list[int], list[int], list[float]]:
    """Give row, column and value of the largest entries of each row.

    The diagonal does not count, nor in a symmetric matrix what lies left of it.
    """
    rows, columns = np.nonzero(likeness >= _LIKENESS)
    keep = columns != rows + start if kind == "crop" else columns > rows + start
    rows, columns = rows[keep], columns[keep]
    values = likeness[rows, columns]
    order = np.lexsort((-values, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    keep = rank < _MOST[kind]
    return rows[keep].tolist(), columns[keep].tolist(), values[keep].tolist()


def _is_plausible(first: NDArray[np.uint8], second: NDArray[np.uint8], view: View) -> bool:
    """Compare thumbnails more closely than hashes do, before pictures are decoded for it."""
    a, b = first.astype(np.float32), second.astype(np.float32)
    if view.kind == "mirrored":
        a = np.ascontiguousarray(a[:, ::-1])
    if view.kind == "crop":
        left, top = (SIDE * edge + (view.size - 1) / 2 for edge in (view.left, view.top))  # of the first pixel's centre
        a = _warped(a, np.array([[view.size, 0, left], [0, view.size, top]], dtype=np.float32))
        a = _warped(a, _align(a, b, steps=30))
    return _detail(a, b) >= _ROUGH_DETAIL[view.kind]


def _align(a: _Grey, b: _Grey, *, steps: int) -> NDArray[np.float32]:
    """Find the affine map that brings `a` onto `b`, as `_warped` takes it; the identity where they do not fit."""
    start = np.eye(2, 3, dtype=np.float32)
    criteria = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, steps, 1e-3)
    try:
        warp: NDArray[np.float32] = cv2.findTransformECC(b, a, start.copy(), cv2.MOTION_AFFINE, criteria, None, 3)[1]
    except cv2.error:  # it does not converge
        return start
    return warp


def _warped(image: _Pixels, warp: NDArray[np.float32], *, border: int = cv2.BORDER_REPLICATE) -> _Pixels:
    H, W = image.shape[:2]
    flags = cv2.INTER_LINEAR + cv2.WARP_INVERSE_MAP
    warped: _Pixels = cv2.warpAffine(image, warp, (W, H), flags=flags, borderMode=border)
    return warped


def _detail(a: _Grey, b: _Grey, shown: NDArray[np.bool_] | None = None) -> float:
    """Correlate what two grey images have beyond their blurred selves, in [-1, 1]."""
    x, y = (image - cv2.GaussianBlur(image, (0, 0), _BLUR) for image in (a, b))
    if shown is not None:
        x, y = x[shown], y[shown]
    return float((x * y).sum() / max(1e-6, float(np.sqrt((x * x).sum() * (y * y).sum()))))


def _shrink(image: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    small: NDArray[np.uint8] = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)
    return small


def _grey(image: NDArray[np.uint8]) -> _Grey:
    grey: _Grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).astype(np.float32)
    return grey
