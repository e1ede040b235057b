"""Which shape of each architecture suits a size of image: a few rules, and the reason in words.

Two sizes of network are proposed. Up to 64 pixels it is one of one to two million parameters, which trains from scratch
on a small data set; above, it has the widths of the architecture's named tiny network, and an ImageGPT, which reads
pixel by pixel, would take too long. The side of an image that is not square is here that of a square of its area.

Legend: a grid is (H, W), the tokens or positions of a stage; a stride is the pixels from one to the next in the first
grid, which is Swin's patch size and DaViT's stem stride.
"""

import dataclasses
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.costs import count_macs, count_parameters, training_memory
from vitlab.models.davit import DAVIT_SIZES
from vitlab.models.imagegpt import IMAGEGPT_SIZES, ImageGPTConfig
from vitlab.models.swin import SWIN_SIZES
from vitlab.models.vit import VIT_SIZES

NUM_CLASSES = 10
"""Classes of the head with which a proposal's parameters are counted."""

Size = tuple[int, int]

_SMALL_SIDE = 64
# Tokens of ViT that are aimed at, and the factor by which their number may differ.
_SMALL_TOKENS, _TOKENS, _TOKENS_FACTOR = 64, 196, 4
# Published pyramids start at 56 x 56 with a stride of 4; small images need 16 x 16 for three grids down to 4 x 4.
_STRIDE, _FIRST_SIDE, _SMALL_FIRST_SIDE = 4, 56, 16
_MIN_STAGES, _MAX_STAGES = 2, 4
# Less tells too little: Swin normalises its patches, so that of a single grey pixel only the sign would be left.
_MIN_PATCH = 2
# The last grid's shorter side is from 4 to 7, so far as four stages reach; windows are from 4 to 8, 7 as published.
_MIN_SIDE, _MAX_WINDOW, _WINDOW = 4, 8, 7
# The named networks that proposals change.
_NAMED: Mapping[str, tuple[str, Any]] = {
    "vit": ("vit_tiny", VIT_SIZES["vit_tiny"]),
    "swin": ("swin_tiny", SWIN_SIZES["swin_tiny"]),
    "davit": ("davit_tiny", DAVIT_SIZES["davit_tiny"]),
    "imagegpt": ("imagegpt_small", IMAGEGPT_SIZES["imagegpt_small"]),
}
# Of ViT and ImageGPT for small images.
_SMALL_WIDTHS = {"embed_dim": 128, "depth": 6, "num_heads": 4}
# Images in the training step whose costs are told, and passes forward that it is worth.
_STEP_IMAGES, _STEP_PASSES = 32, 3
# Doubling or halving the stride that a size of image asks for is as bad as so large a share of padding.
_PADDING_FOR_DOUBLE_STRIDE = 0.1


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A network for a size of image, or the reason why there is none."""

    architecture: str
    """vit, swin, davit or imagegpt."""
    image_size: Size
    """(height, width) in pixels."""
    reason: str
    """Why this shape; without a name, why none."""
    name: str | None = None
    """The named network that is changed; None where nothing fits."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """What is changed: fields of its config."""
    parameters: int | None = None
    """Parameters with a head of `NUM_CLASSES`."""
    macs: int | None = None
    """Multiply-adds of one image."""

    def command(self) -> str:
        """Give the line that trains the network, as a shell takes it; FOLDER is to be replaced.

        Raises:
            InputError: there is no network.
        """
        if self.name is None:
            raise InputError(f"no {self.architecture} for images of {describe_size(self.image_size)}: {self.reason}")
        height, width = self.image_size
        size = [str(height)] if height == width else [str(height), str(width)]
        words = ["vitlab", "train", "--data.root", "FOLDER", "--model.name", self.name, "--model.image_size", *size]
        if self.architecture == "imagegpt":
            words += ["--objective.name", "next_pixel"]
        for name, value in self.overrides.items():
            words += [f"--model.overrides.{name}", json.dumps(value, separators=(",", ":"))]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Give all fields and the command as plain JSON values."""
        plain = dataclasses.asdict(self) | {"image_size": list(self.image_size)}
        return plain | {"command": None if self.name is None else self.command()}


def propose(image_size: Size) -> list[Proposal]:
    """Propose a ViT, a Swin transformer, a DaViT and an ImageGPT for images of (height, width) pixels."""
    makers = (_propose_vit, _propose_swin, _propose_davit, _propose_imagegpt)
    return [propose_one(image_size) for propose_one in makers]


def describe_size(size: Sequence[int]) -> str:
    """Write (height, width) as `192x224`."""
    return "x".join(map(str, size))


def _is_small(image_size: Size) -> bool:
    return math.sqrt(math.prod(image_size)) <= _SMALL_SIDE


def _network(architecture: str, image_size: Size, reason: str, **shape: Any) -> Proposal:
    """Propose the named tiny network with this shape: only what differs is changed. Counts it without data."""
    name, named = _NAMED[architecture]
    overrides = {field: value for field, value in shape.items() if value != getattr(named, field)}
    with torch.device("meta"):
        network = create_model(name, num_classes=NUM_CLASSES, image_size=image_size, **overrides)
    return Proposal(
        architecture=architecture,
        image_size=image_size,
        reason=reason,
        name=name,
        overrides=overrides,
        parameters=count_parameters(network),
        macs=count_macs(network),
    )


def _propose_vit(image_size: Size) -> Proposal:
    """Take the square patch that divides both sides and comes nearest to the number of tokens aimed at."""
    target = _target(image_size)
    patches = [patch for patch in range(_MIN_PATCH, min(image_size) + 1) if math.gcd(*image_size) % patch == 0]
    fitting = [patch for patch in patches if _fits(image_size, patch)]
    if not fitting:
        listed = ", ".join(f"{patch} ({_tokens(image_size, patch)} tokens)" for patch in patches) or "none"
        reason = (
            f"of patches of {_MIN_PATCH} pixels and more {listed} divide the image, and {target // _TOKENS_FACTOR} to "
            f"{target * _TOKENS_FACTOR} tokens are wanted: resize to {describe_size(_near(image_size))}"
        )
        return Proposal(architecture="vit", image_size=image_size, reason=reason)
    patch = min(fitting, key=lambda patch: abs(math.log2(_tokens(image_size, patch) / target)))
    grid = (image_size[0] // patch, image_size[1] // patch)
    tokens = f"{math.prod(grid)} tokens, nearest to {target}"
    reason = f"grid {describe_size(grid)}; patch {patch} divides the image and makes {tokens}"
    widths = _SMALL_WIDTHS if _is_small(image_size) else {}
    return _network("vit", image_size, reason, patch_size=patch, **widths)


def _target(image_size: Size) -> int:
    return _SMALL_TOKENS if _is_small(image_size) else _TOKENS


def _tokens(image_size: Size, patch: int) -> int:
    return math.prod(image_size) // patch**2


def _fits(image_size: Size, patch: int) -> bool:
    target = _target(image_size)
    return target / _TOKENS_FACTOR <= _tokens(image_size, patch) <= target * _TOKENS_FACTOR


def _near(image_size: Size) -> Size:
    """Give the size nearest to this one for which a patch fits."""
    sides = [max(side, _MIN_SIDE * _MIN_PATCH) for side in image_size]
    patches = range(_MIN_PATCH, max(sides) + 1)
    sizes = [(patch, [max(1, round(side / patch)) * patch for side in sides]) for patch in patches]
    fitting = [(height, width) for patch, (height, width) in sizes if _fits((height, width), patch)]
    return min(fitting, key=lambda size: sum(abs(new - old) for new, old in zip(size, image_size, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _Pyramid:
    """The grids of a network's stages, each half of the one before, and the windows that cut them."""

    stride: int
    grids: tuple[Size, ...]
    window: Size
    padding: float
    """Share of all windows' positions that lies beyond the image, over all grids."""

    def describe(self) -> str:
        """Name the grids, and say how well the windows fit."""
        whole = sum(H % self.window[0] == W % self.window[1] == 0 for H, W in self.grids)
        divides = "all" if whole == len(self.grids) else f"{whole} of {len(self.grids)}"
        height, width = self.window
        window = f"window {height if height == width else describe_size(self.window)} divides {divides}"
        waste = f", {self.padding:.1%} of its positions are padding" if self.padding else ""
        return f"grids {', '.join(map(describe_size, self.grids))}; {window}{waste}"


def _propose_swin(image_size: Size) -> Proposal:
    pyramid = _best_pyramid(image_size, range(_MIN_PATCH, 9))
    if pyramid is None:
        return _no_pyramid("swin", image_size, stride=_MIN_PATCH)
    widths, heads = _widths(image_size, len(pyramid.grids))
    return _network(
        "swin",
        image_size,
        pyramid.describe(),
        patch_size=pyramid.stride,
        window_size=_side_or_pair(pyramid.window),
        embed_dim=widths[0],
        depths=(2,) * (len(widths) - 2) + (4 if _is_small(image_size) else 6, 2),
        num_heads=heads,
    )


def _propose_davit(image_size: Size) -> Proposal:
    pyramid = _best_pyramid(image_size, range(1, 8))  # the stem maps squares of 7 x 7
    if pyramid is None:
        return _no_pyramid("davit", image_size, stride=1)
    widths, heads = _widths(image_size, len(pyramid.grids))
    return _network(
        "davit",
        image_size,
        pyramid.describe(),
        stem_stride=pyramid.stride,
        window_size=_side_or_pair(pyramid.window),
        embed_dims=widths,
        depths=(1,) * (len(widths) - 2) + (2 if _is_small(image_size) else 3, 1),
        num_heads=heads,
    )


def _propose_imagegpt(image_size: Size) -> Proposal:
    """Take the small width, unless the row of pixels is too long: attention's work grows with its square."""
    pixels, most = math.prod(image_size), _SMALL_SIDE**2
    if not _is_small(image_size):
        scale = math.sqrt(most / pixels)
        short = max(1, int(min(image_size) * scale))
        long = min(int(max(image_size) * scale), most // short)
        near = (short, long) if image_size[0] <= image_size[1] else (long, short)
        reason = f"a row of {pixels:,} pixels is longer than {most:,}: resize to {describe_size(near)} or less"
        return Proposal(architecture="imagegpt", image_size=image_size, reason=reason)
    proposal = _network("imagegpt", image_size, f"a row of {pixels:,} pixels", **_SMALL_WIDTHS)
    config = ImageGPTConfig(image_size=image_size, num_classes=NUM_CLASSES, **proposal.overrides)
    memory = training_memory(config, batch_size=_STEP_IMAGES)
    macs = _STEP_PASSES * _STEP_IMAGES * (proposal.macs or 0)
    step = f"a training step of {_STEP_IMAGES} images takes about {memory / 2**30:.1f} GiB in float32"
    return dataclasses.replace(proposal, reason=f"{proposal.reason}; {step} and {macs / 1e9:,.0f} G multiply-adds")


def _widths(image_size: Size, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give the width and the heads of each stage: small ones end at 192, others start at 96 as the named networks."""
    if _is_small(image_size):
        widths = tuple(192 // 2**stage for stage in reversed(range(stages)))
        return widths, tuple(width // 24 for width in widths)
    return tuple(96 * 2**stage for stage in range(stages)), tuple(3 * 2**stage for stage in range(stages))


def _side_or_pair(window: Size) -> int | Size:
    height, width = window
    return height if height == width else window


def _no_pyramid(architecture: str, image_size: Size, *, stride: int) -> Proposal:
    least = stride * _MIN_SIDE * 2 ** (_MIN_STAGES - 1)
    patches = f" of patches of {stride} pixels" if stride > 1 else ""
    reason = (
        f"the image is too small for two stages with grids down to {_MIN_SIDE}x{_MIN_SIDE}{patches}: "
        f"resize to {describe_size([max(least, side) for side in image_size])}"
    )
    return Proposal(architecture=architecture, image_size=image_size, reason=reason)


def _best_pyramid(image_size: Size, strides: Iterable[int]) -> _Pyramid | None:
    """Take the stride with little padding that is near to the one which the size asks for; None where none fits."""
    side = math.sqrt(math.prod(image_size))
    ideal = min(side / _SMALL_FIRST_SIDE, max(_STRIDE, side / _FIRST_SIDE))

    def badness(pyramid: _Pyramid) -> float:
        return pyramid.padding + _PADDING_FOR_DOUBLE_STRIDE * abs(math.log2(pyramid.stride / ideal))

    return min(_pyramids(image_size, strides), key=badness, default=None)


def _pyramids(image_size: Size, strides: Iterable[int]) -> Iterator[_Pyramid]:
    """Give the pyramid of each stride that has at least two stages whose grids are no smaller than 4 x 4."""
    for stride in strides:
        height, width = image_size
        grids = [(math.ceil(height / stride), math.ceil(width / stride))]
        while min(grids[-1]) >= 2 * _MIN_SIDE and len(grids) < _MAX_STAGES:
            H, W = grids[-1]
            grids.append((math.ceil(H / 2), math.ceil(W / 2)))
        if min(grids[-1]) < _MIN_SIDE or len(grids) < _MIN_STAGES:
            continue
        rows, columns = zip(*grids, strict=True)
        window = (_best_window(rows), _best_window(columns))
        covered = sum(_whole(H, window[0]) * _whole(W, window[1]) for H, W in grids)
        real = sum(height * width / (stride * 2**stage) ** 2 for stage in range(len(grids)))
        yield _Pyramid(stride=stride, grids=tuple(grids), window=window, padding=1 - real / covered)


def _best_window(sides: Sequence[int]) -> int:
    """Give the side of a window that pads the stages' grids least along an axis; of equally good ones that near 7."""
    windows = range(_MIN_SIDE, min(_MAX_WINDOW, sides[-1]) + 1)
    return min(windows, key=lambda window: (sum(_whole(side, window) for side in sides), abs(window - _WINDOW)))


def _whole(side: int, window: int) -> int:
    """Round a side up to whole windows."""
    return math.ceil(side / window) * window
