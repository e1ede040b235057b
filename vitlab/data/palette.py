"""A palette turns pixels into colour numbers and back: encode, decode, make, measure.

Its colours are float32 (K, C) in [-1, 1], as a network sees pixels that are normalised by mean .5 and deviation .5; C
is 3 for RGB and 1 for grey. A token is a colour's index.

Source: Chen et al., Generative Pretraining from Pixels (ICML 2020), sec. 3.2: k-means over (R, G, B) with k = 512. How
the pixels were drawn is unpublished.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from vitlab.checks import require
from vitlab.seeds import derive_seed

MAX_COLORS = 65_536
MAX_FITTED_PIXELS = 200_000
"""Pixels that k-means sees: on CIFAR-10 more of them gain less than .1 dB."""

_MAX_ROUNDS = 20
_CHUNK = 2**20  # distances at a time: these stay in a CPU's cache
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@torch.no_grad()
def encode(pixels: Tensor, palette: Tensor) -> Tensor:
    """Give each pixel its nearest colour by squared Euclidean distance, of equally near ones the lowest index.

    The tokens are those of a computation all in float64: float32 finds the nearest colour, and where another is so near
    that rounding may hide which comes first, float64 decides. No step is a matrix product, so that neither autocast nor
    TF32 reaches it. Memory is bounded: pixels go in chunks.

    Args:
        pixels: float (..., C) of any precision and memory format, usually in [-1, 1].
        palette: float32 (K, C) on the same device.

    Returns:
        int64 (...), from 0 to K - 1. A pixel that is not a number gets 0.
    """
    K, C = palette.shape
    chunks = torch.split(pixels.reshape(-1, C), max(1, _CHUNK // K))
    return torch.cat([_nearest(chunk, palette) for chunk in chunks]).reshape(pixels.shape[:-1])


def _nearest(pixels: Tensor, palette: Tensor) -> Tensor:
    """Encode pixels (N, C): of a colour c, |c|^2 - 2 p c is as high as its distance, less the pixel's own |p|^2."""
    N, C = pixels.shape
    rounded, colors = pixels.float(), palette.float()
    norms = colors.square().sum(dim=1)
    scores = norms.repeat(N, 1)  # (N, K)
    for values, factors in zip(rounded.T.contiguous(), (-2 * colors).T.contiguous(), strict=True):
        scores.addcmul_(values.unsqueeze(1), factors)
    best, tokens = scores.min(dim=1)
    second = scores.scatter_(1, tokens.unsqueeze(1), torch.inf).amin(dim=1)
    # Rounding moves a score by at most 3 (C + 1) half units in the last place of |p|^2 + |c|^2, and there are two.
    size = rounded.square().sum(dim=1) + norms.max()
    slack = 4 * (C + 1) * torch.finfo(torch.float32).eps * size + 1e-36  # where float32 has no smaller numbers
    unsure = (~(second - best > slack)).nonzero().squeeze(1)  # not `<=`: what is not finite is unsure, too
    place = "cpu" if pixels.device.type == "mps" else pixels.device  # Apple's GPUs have no float64
    differences = pixels[unsure].to(place).double().unsqueeze(1) - palette.to(place).double()
    tokens[unsure] = differences.square().sum(dim=-1).argmin(dim=1).to(tokens.device)
    return tokens


def decode(tokens: Tensor, palette: Tensor) -> Tensor:
    """Give tokens their colours as pixels: rint(127.5 (c + 1)), halves to even, within 0 to 255.

    Args:
        tokens: int64 (...), from 0 to K - 1.
        palette: float32 (K, C) on the same device.

    Returns:
        uint8 (..., C).
    """
    return (127.5 * (palette.float() + 1)).round().clamp(0, 255).to(torch.uint8)[tokens]


def uniform_palette(num_colors: int, channels: int = 3) -> Tensor:
    """Give colours that are spread evenly, whatever the images.

    n levels of a channel cut [-1, 1] into n equal parts and lie in their middle: (2 i + 1) / n - 1. Of RGB a power of
    two shares its bits among the channels, green first, then red, then blue: 512 colours have 8 levels of each, 256
    have 8, 8 and 4. Blue varies fastest, red slowest. Any other number, and one channel, give so many greys.

    Args:
        num_colors: K, from 1 to MAX_COLORS.
        channels: C, 3 or 1.

    Returns:
        float32 (K, C).

    Raises:
        InputError: another number of colours or channels.
    """
    _check_palette_shape(num_colors, channels)
    if channels == 1 or num_colors & (num_colors - 1):
        return _levels(num_colors).unsqueeze(1).repeat(1, channels)
    bits = num_colors.bit_length() - 1
    green, red, blue = ((bits + missing) // 3 for missing in (2, 1, 0))
    return torch.cartesian_prod(*(_levels(2**share) for share in (red, green, blue)))


def _levels(count: int) -> Tensor:
    return (2 * torch.arange(count, dtype=torch.float64) + 1).div(count).sub(1).float()


def _check_palette_shape(num_colors: int, channels: int) -> None:
    require(0 < num_colors <= MAX_COLORS, f"num_colors is {num_colors}: give 1 to {MAX_COLORS:,}")
    require(channels in (1, 3), f"channels is {channels}: colours have 3 (RGB) or 1 (grey)")


def fit_palette(images: NDArray[np.uint8], num_colors: int, *, seed: int) -> Tensor:
    """Fit colours to the pixels of images by k-means: a k-means++ start, then Lloyd's rounds.

    As many pixels of each image are drawn by the seed as make MAX_FITTED_PIXELS in all. A centre that is left without
    pixels moves to the pixel that is served worst (scikit-learn does both). Pixels of no more than num_colors different
    colours get exactly these; the rest of the palette is then filled with colours of `uniform_palette`, so that it
    always has num_colors different ones.

    Args:
        images: uint8 (N, H, W, C), C 3 or 1, at the size that a network will see.
        num_colors: K, from 1 to MAX_COLORS.
        seed: what the draw and the start depend on; the same seed gives the same bits on a machine.

    Returns:
        float32 (K, C) in [-1, 1], from dark to light.

    Raises:
        InputError: no images, or another number of colours or channels.
    """
    N, _, _, C = images.shape
    _check_palette_shape(num_colors, C)
    require(N > 0, "no image could be read to fit a palette to")
    sample = _draw_pixels(images, np.random.default_rng(derive_seed(seed, "palette pixels")))
    colors, counts = np.unique(sample, axis=0, return_counts=True)
    points = to_unit(colors).numpy()  # (distinct colours, C)
    if len(points) <= num_colors:
        return _by_luminance(_fill_up(points, num_colors))
    return _by_luminance(_cluster(points, counts, num_colors, derive_seed(seed, "palette start") % 2**32))


def to_unit(images: NDArray[np.uint8]) -> Tensor:
    """Turn pixels (...) from 0 to 255 into float32 in [-1, 1], to the bit as a network of mean and std .5 sees them."""
    return torch.from_numpy(images).float().div_(255).sub_(0.5).div_(0.5)


def _draw_pixels(images: NDArray[np.uint8], generator: np.random.Generator) -> NDArray[np.uint8]:
    """Draw pixels (M, C), equally many of each image; all of them where there are few."""
    pixels = rearrange(images, "n h w c -> n (h w) c")
    N, P, C = pixels.shape
    per_image = math.ceil(MAX_FITTED_PIXELS / N)
    if per_image < P:
        pixels = np.take_along_axis(pixels, generator.integers(0, P, (N, per_image, 1)), axis=1)
    return pixels.reshape(-1, C)


def _fill_up(colors: NDArray[np.float32], num_colors: int) -> NDArray[np.float32]:
    """Add evenly spread colours to those of pixels (n, C) up to num_colors.

    None is there twice: no pixel v has a level of `uniform_palette`, 2 v / 255 = (2 i + 1) / n having no solution.
    """
    chosen = np.linspace(0, num_colors - 1, num_colors - len(colors)).astype(np.int64)
    return np.concatenate([colors, uniform_palette(num_colors, colors.shape[1]).numpy()[chosen]])


def _cluster(points: NDArray[np.float32], counts: NDArray[np.int64], k: int, seed: int) -> NDArray[np.float32]:
    """Find k centres (k, C) of different points, each of which counts so often."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    kmeans = KMeans(k, n_init=1, max_iter=_MAX_ROUNDS, random_state=seed)
    # One thread: several add up their sums in the order in which they end.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that rounding made two centres one, which costs a colour and no more
        centers: NDArray[np.float64] = kmeans.fit(points.astype(np.float64), sample_weight=counts).cluster_centers_
    return centers.clip(-1, 1).astype(np.float32)


def _by_luminance(colors: NDArray[np.float32]) -> Tensor:
    luminance = colors @ np.array(_LUMA) if colors.shape[1] == 3 else colors[:, 0]
    return torch.from_numpy(colors[np.argsort(luminance, kind="stable")])


@dataclass(frozen=True, kw_only=True)
class PaletteQuality:
    """How well a palette serves images."""

    psnr_db: float
    """Peak signal-to-noise ratio of the decoded images over all pixels and channels; infinite where none changes."""
    colors_used: int
    """Colours that are the nearest of at least one pixel."""
    num_colors: int
    """Colours of the palette."""
    entropy_nats: float
    """Entropy of a token: the loss of a model that knows how frequent each colour is, and no more."""
    num_images: int

    def describe(self) -> str:
        """Say it all in one phrase."""
        used = f"{self.colors_used:,} of {self.num_colors:,} colours used"
        return f"{self.describe_psnr()}, {used}, {self.entropy_nats:.3f} nats a pixel, images: {self.num_images:,}"

    def describe_psnr(self) -> str:
        """Say how near the pixels come."""
        return f"{self.psnr_db:.2f} dB" if math.isfinite(self.psnr_db) else "exact"


def palette_quality(images: NDArray[np.uint8], palette: Tensor) -> PaletteQuality:
    """Measure a palette on images.

    Args:
        images: uint8 (N, H, W, C).
        palette: float32 (K, C), on the CPU.

    Raises:
        InputError: there are no images.
    """
    require(len(images) > 0, "no image could be read to measure the palette on")
    squares = 0
    counts = np.zeros(len(palette), dtype=np.int64)
    for image in images:  # one at a time: the float copy of all would be four times as large
        tokens = encode(to_unit(image), palette)
        counts += np.bincount(tokens.flatten().numpy(), minlength=len(palette))
        differences = decode(tokens, palette).numpy().astype(np.int64) - image
        squares += int((differences**2).sum())
    shares = counts[counts > 0] / counts.sum()
    return PaletteQuality(
        psnr_db=10 * math.log10(255**2 * images.size / squares) if squares else math.inf,
        colors_used=len(shares),
        num_colors=len(palette),
        entropy_nats=float((shares * np.log(1 / shares)).sum()),
        num_images=len(images),
    )
