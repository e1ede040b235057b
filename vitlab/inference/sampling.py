"""Pictures from a causal ImageGPT: drawn colour by colour, completed from their first pixels, or the likeliest of all.

Every image has random numbers of its own, one a pixel, from a seed and the image's number. So an image depends neither
on those that are drawn beside it nor on how many they are, but for the last digits of the logits. Given pixels take
the place of drawn ones.

Legend: `N` pixels of an image, `V` colours, `W` width of the beam.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from vitlab.checks import is_number, require
from vitlab.inference.decoder import Decoder, require_decodable
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import Network, device_of
from vitlab.pixel_options import DrawPrecision
from vitlab.seeds import derive_seed


@dataclass(frozen=True)
class Beams:
    """What `beam_search` found, the likeliest image first."""

    tokens: Tensor
    """int64 (W, N); fewer rows where there are fewer images."""
    log_probabilities: Tensor
    """float64 (W,), in nats, of the pixels that were not given."""


def sample(
    network: Network,
    *,
    count: int,
    given: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    precision: DrawPrecision = "auto",
    batch_size: int = 8,
    on_step: Callable[[int], object] = lambda pixels: None,
) -> Tensor:
    """Draw images pixel by pixel.

    Args:
        network: a causal ImageGPT.
        count: images to draw; image i is the same whatever the count.
        given: the first pixels, int64 `(n,)` for all images or `(count, n)` for each; n from 0 to N.
        temperature: divides the logits; 0 takes the likeliest colour each time, above 1 makes rare ones more frequent.
        top_k: draws among so many likeliest colours; 0 among all.
        top_p: draws among the fewest likeliest colours that have this probability together; 0 takes the likeliest.
        seed: what the random numbers depend on.
        precision: `fp32`, `bf16`, `int8` (x86 processors) or `auto`, as `Decoder` describes them.
        batch_size: images at a time.
        on_step: told after each step how many pixels were drawn in it.

    Returns:
        int64 `(count, N)` on the network's device.

    Raises:
        InputError: another network, or an argument out of its range.
    """
    gpt = require_decodable(network)
    require(type(count) is int and count >= 1, f"count is {count}: give 1 or more images")
    given = _check_given(gpt, given)
    require(
        given.ndim == 1 or len(given) == count,
        f"given has the first pixels of {len(given)} images for a count of {count}: give them once, or for each",
    )
    rows = repeat(given, "n -> b n", b=count) if given.ndim == 1 else given
    choice = ColorChoice(temperature=temperature, top_k=top_k, top_p=top_p)
    shared = (
        given.cpu().numpy().tobytes() if given.ndim == 1 else b""
    )  # given for each, the images have numbers already
    numbers = _random_numbers(seed, count, math.prod(gpt.image_size), given=shared)
    return _draw(gpt, rows, numbers, choice, precision=precision, batch_size=batch_size, on_step=on_step)


def complete(
    network: Network,
    given: Tensor,
    *,
    count: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    precision: DrawPrecision = "auto",
    batch_size: int = 8,
    on_step: Callable[[int], object] = lambda pixels: None,
) -> Tensor:
    """Go on with the first pixels of images, several times each.

    Args:
        network: a causal ImageGPT.
        given: first pixels, int64 `(B, n)`, n from 0 to N.
        count: completions of each image. Their random numbers depend on the given pixels, too, so that those of
            different images have nothing in common.
        temperature: this and what follows are as in `sample`.
        top_k: likeliest colours to draw among; 0 for all.
        top_p: probability of the colours to draw among.
        seed: what the random numbers depend on.
        precision: what the decoder computes in.
        batch_size: completions at a time.
        on_step: told after each step how many pixels were drawn in it.

    Returns:
        int64 `(B, count, N)` on the network's device.

    Raises:
        InputError: as `sample`.
    """
    gpt = require_decodable(network)
    require(type(count) is int and count >= 1, f"count is {count}: give 1 or more completions")
    require(given.ndim == 2, f"given is of shape {tuple(given.shape)}: give (images, first pixels)")
    given = _check_given(gpt, given)
    rows = repeat(given, "b n -> (b count) n", count=count)
    num_pixels, pixels = math.prod(gpt.image_size), given.cpu().numpy()
    draws = [_random_numbers(seed, count, num_pixels, given=row.tobytes()) for row in pixels]
    numbers = torch.cat([torch.empty(0, num_pixels, dtype=torch.float64), *draws])  # of no images none
    choice = ColorChoice(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = _draw(gpt, rows, numbers, choice, precision=precision, batch_size=batch_size, on_step=on_step)
    return rearrange(drawn, "(b count) n -> b count n", count=count)


def beam_search(
    network: Network,
    *,
    width: int,
    given: Tensor | None = None,
    precision: DrawPrecision = "auto",
    on_step: Callable[[int], object] = lambda pixels: None,
) -> Beams:
    """Find likely images: keep the `width` likeliest beginnings at each pixel, and go on with all their colours.

    Width 1 is greedy. A width of V ** (N - 1) leaves nothing out and finds the likeliest image of all.

    Args:
        network: a causal ImageGPT.
        width: W, beginnings that are kept.
        given: the first pixels, int64 `(n,)`, n from 0 to N.
        precision: as in `sample`.
        on_step: told after each step that one pixel was chosen.

    Raises:
        InputError: another network, or an argument out of its range.
    """
    gpt = require_decodable(network)
    require(type(width) is int and width >= 1, f"the width of the beam is {width}: give 1 or more")
    given = _check_given(gpt, given)
    require(given.ndim == 1, f"given is of shape {tuple(given.shape)}: a beam goes on from one image's first pixels")
    N, V = math.prod(gpt.image_size), gpt.config.num_colors
    width = min(width, V ** (N - len(given)))
    tokens = repeat(given, "n -> b n", b=1)
    totals = torch.zeros(1, dtype=torch.float64)
    if len(given) == N:
        return Beams(tokens, totals)
    decoder = Decoder(gpt, precision=precision)
    logits = decoder.start(tokens)
    while True:
        scores = totals[:, None] + logits.cpu().double().log_softmax(dim=-1)  # (W, V)
        best, places = scores.flatten().sort(descending=True, stable=True)  # of equals the lowest colour, as argmax
        totals, places = best[:width], places[:width].to(tokens.device)
        rows, colors = places // V, places % V
        tokens = torch.cat([tokens[rows], colors[:, None]], dim=1)
        on_step(1)
        if tokens.shape[1] == N:
            return Beams(tokens, totals)
        decoder.select(rows)
        logits = decoder.step(colors)


@dataclass(frozen=True, kw_only=True)
class ColorChoice:
    """Which colours may be drawn and how often: the arguments of `sample` of the same names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Raise InputError where a number is out of its range."""
        require(
            is_number(self.temperature) and self.temperature >= 0,
            f"temperature is {self.temperature}: give 0 for the likeliest colours, or up to 1e15",
        )
        is_whole = type(self.top_k) is int
        require(is_whole and self.top_k >= 0, f"top_k is {self.top_k}: give a number of colours, or 0 for all")
        require(is_number(self.top_p) and 0 <= self.top_p <= 1, f"top_p is {self.top_p}: give a number from 0 to 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Give the probabilities, float64 `(B, V)`, by which colours of these logits `(B, V)` are drawn.

        Of equally likely colours those of lower numbers come first.
        """
        _, V = logits.shape
        logits = logits.double()
        differences = logits - logits.amax(dim=-1, keepdim=True)  # so that none overflows, however low the temperature
        if self.temperature == 0 or self.top_k == 1 or self.top_p == 0:
            return F.one_hot(differences.eq(0).int().argmax(dim=-1), V).double()
        probabilities = (differences / self.temperature).softmax(dim=-1)
        if self.top_p == 1 and not 0 < self.top_k < V:
            return probabilities
        order = differences.argsort(dim=-1, descending=True, stable=True)
        ordered = probabilities.gather(-1, order)
        if 0 < self.top_k < V:
            ordered[:, self.top_k :] = 0
            ordered /= ordered.sum(dim=-1, keepdim=True)
        if self.top_p < 1:
            ordered[ordered.cumsum(dim=-1) - ordered >= self.top_p] = 0
        kept = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        return kept / kept.sum(dim=-1, keepdim=True)


def _draw(
    network: ImageGPT,
    given: Tensor,
    numbers: Tensor,
    choice: ColorChoice,
    *,
    precision: DrawPrecision,
    batch_size: int,
    on_step: Callable[[int], object],
) -> Tensor:
    """Go on with first pixels `(B, n)` to whole images `(B, N)`; the random numbers are `(B, N)` in [0, 1)."""
    require(type(batch_size) is int and batch_size >= 1, f"batch_size is {batch_size}: give 1 or more")
    (B, n), (_, N) = given.shape, numbers.shape
    if n == N or B == 0:
        return F.pad(given, (0, N - n))
    decoder = Decoder(network, precision=precision)
    drawn = []
    for batch, batch_numbers in zip(torch.split(given, batch_size), torch.split(numbers, batch_size), strict=True):
        columns = [*batch.unbind(dim=1)]
        logits = decoder.start(batch)
        while True:
            columns.append(_pick(choice.probabilities(logits.cpu()), batch_numbers[:, len(columns)]).to(given.device))
            on_step(len(batch))
            if len(columns) == N:
                break
            logits = decoder.step(columns[-1])
        drawn.append(torch.stack(columns, dim=1))
    return torch.cat(drawn)


def _pick(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Give the colour `(B,)` at which the sum of the probabilities `(B, V)` so far passes a number in [0, 1), `(B,)`.

    A colour of probability 0 adds nothing, so that it passes none.
    """
    sums = probabilities.cumsum(dim=-1)
    return (sums <= numbers[:, None] * sums[:, -1:]).sum(dim=-1)


def _random_numbers(seed: int, count: int, num_pixels: int, *, given: bytes = b"") -> Tensor:
    """Draw a number in [0, 1) for each pixel of each image, float64 `(count, N)`, from the image's own generator."""
    place = (given.hex(),) if given else ()
    seeds = [derive_seed(seed, "sample", image, *place) for image in range(count)]
    rows = [
        torch.rand(num_pixels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds
    ]
    return torch.stack(rows)


def _check_given(network: ImageGPT, given: Tensor | None) -> Tensor:
    """Give first pixels `(n,)` or `(B, n)` on the network's device; none where None is given."""
    device = device_of(network)
    if given is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    N, V = math.prod(network.image_size), network.config.num_colors
    require(given.dtype == torch.int64, f"given is {given.dtype}: give int64 tokens, as the network's encode does")
    require(
        given.ndim in (1, 2) and given.shape[-1] <= N,
        f"given is of shape {tuple(given.shape)}: give up to {N} first pixels, (pixels,) or (images, pixels)",
    )
    lowest, highest = (int(bound) for bound in given.aminmax()) if given.numel() else (0, 0)
    require(
        lowest >= 0 and highest < V,
        f"given has tokens from {lowest} to {highest}, the palette has colours 0 to {V - 1}: encode the images with it",
    )
    return given.to(device)
