"""Resizing as Pillow does it: antialiased, one axis after the other, 8 bits between the two."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

from vitlab.config import Interpolation
from vitlab.data.decoders import PIXEL_LIMIT
from vitlab.errors import InputError

_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_TORCH_FROM = 128  # pixels of the shorter side
_SUPPORT = {"bilinear": 1, "bicubic": 2}  # pixels that a filter reaches to each side, of the smaller image


def resize(image: NDArray[np.uint8], height: int, width: int, interpolation: Interpolation) -> NDArray[np.uint8]:
    """Resize an image with an antialiasing filter, axis by axis.

    Which axis goes first shows in the pixels. Pillow took the width first up to version 12; from 13 on the height goes
    first where it shrinks by more than twice as many pixels. That rule holds here whatever Pillow is installed.

    Photographs that shrink go through torch's uint8 kernel, which is three to four times as fast; its 16-bit weights
    move a value by one level now and then, by two in about one of a million under `bicubic`. Small and enlarged images
    take Pillow, which costs the same there, and where torch would miss by two more often.

    Args:
        image: uint8 (H, W, C), C 1 or 3.
        height: rows of the result.
        width: columns of the result.
        interpolation: `bilinear` or `bicubic`.

    Returns:
        uint8 (height, width, C), contiguous; the image itself where it has that size.

    Raises:
        InputError: the result would exceed PIXEL_LIMIT, as a ribbon does on its way to a square crop.
    """
    H, W, _ = image.shape
    if (height, width) == (H, W):
        return image
    if height * width > PIXEL_LIMIT:
        raise InputError(f"a picture of {W}x{H} pixels is too long to be resized to {width}x{height}: use `squash`")
    if _takes_torch(image, height, width):
        return resize_torch(image, height, width, interpolation)
    return _resize_pillow(image, height, width, interpolation)


def _takes_torch(image: NDArray[np.uint8], height: int, width: int) -> bool:
    H, W, _ = image.shape
    return bool(height <= H and width <= W and min(H, W) >= _TORCH_FROM)


def _height_first(image: NDArray[np.uint8], height: int, width: int) -> bool:
    H, W = image.shape[:2]
    return bool(H - height > max(0, 2 * (W - width)))


def resize_torch(image: NDArray[np.uint8], height: int, width: int, interpolation: Interpolation) -> NDArray[np.uint8]:
    """Resize with torch's kernel whatever the sizes; `resize` takes it where that costs no accuracy.

    Args:
        image: uint8 (H, W, C), C 1 or 3.
        height: rows of the result.
        width: columns of the result.
        interpolation: `bilinear` or `bicubic`.

    Returns:
        uint8 (height, width, C), contiguous.
    """
    _, W, _ = image.shape
    if _height_first(image, height, width):
        image = _resize_axis(image, height, W, interpolation)
    return np.ascontiguousarray(_resize_axis(image, height, width, interpolation))  # the width first


def _resize_axis(image: NDArray[np.uint8], height: int, width: int, interpolation: Interpolation) -> NDArray[np.uint8]:
    """Resize by torch alone: one axis, or both and the width first."""
    # Not einops, which takes a tenth of the time here. With the batch axis there before the axes change places, its
    # stride tells torch of channels-last memory, and the result is laid out alike.
    pixels = torch.from_numpy(np.require(image, requirements=("C", "W"))).unsqueeze(0).permute(0, 3, 1, 2)
    pixels = F.interpolate(pixels, (height, width), mode=interpolation, antialias=True)  # (1, C, h, w)
    resized: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1)[0].numpy()  # (h, w, C)
    return resized


def resize_center(
    image: NDArray[np.uint8], resized: tuple[int, int], height: int, width: int, interpolation: Interpolation
) -> NDArray[np.uint8]:
    """Give the centre of a resized image, the same pixels as `crop_center` of `resize`, a fifth faster.

    Args:
        image: uint8 (H, W, C), C 1 or 3.
        resized: (height, width) of the whole resized image.
        height: rows of the centre.
        width: columns of the centre.
        interpolation: `bilinear` or `bicubic`.

    Returns:
        uint8 (height, width, C), contiguous.

    Raises:
        InputError: as `resize`.
    """
    H, _, C = image.shape
    if not _takes_torch(image, *resized) or _height_first(image, *resized):
        return crop_center(resize(image, *resized, interpolation), height, width)
    top, left = _center(resized, height, width)
    step = H / resized[0]
    margin = _SUPPORT[interpolation] * step + 1
    first, last = max(0, math.floor(top * step - margin)), min(H, math.ceil((top + height) * step + margin))
    # The filter's places follow from the whole height: rows that the centre does not see stay in, as any bytes.
    rows = np.empty((H, width, C), dtype=np.uint8)
    rows[first:last] = _resize_axis(image[first:last], last - first, resized[1], interpolation)[:, left : left + width]
    return np.ascontiguousarray(_resize_axis(rows, resized[0], width, interpolation)[top : top + height])


def _resize_pillow(
    image: NDArray[np.uint8], height: int, width: int, interpolation: Interpolation
) -> NDArray[np.uint8]:
    H, W, C = image.shape
    picture = Image.fromarray(image if C == 3 else image[:, :, 0])
    for step in ((W, height) if _height_first(image, height, width) else (width, H), (width, height)):
        picture = picture.resize(step, _PILLOW_FILTERS[interpolation])
    return np.array(picture).reshape(height, width, C)


def cover_size(height: int, width: int, target: tuple[int, int]) -> tuple[int, int]:
    """Give the size at which an image just covers a target, its aspect ratio kept.

    The two roundings are those of timm's evaluation: torchvision's for a square target, its own for others.
    """
    target_height, target_width = target
    if target_height == target_width:
        side, short = target_height, min(height, width)
        return int(side * height / short), int(side * width / short)
    ratio = min(height / target_height, width / target_width)
    return round(height / ratio), round(width / ratio)


def fit_size(height: int, width: int, target: tuple[int, int]) -> tuple[int, int]:
    """Give the size at which an image just fits into a target, its aspect ratio kept; no side falls to 0."""
    ratio = max(height / target[0], width / target[1])
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def crop_center(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Cut the centre out of an image of at least that size, halves rounded to even as torchvision does."""
    H, W, _ = image.shape
    top, left = _center((H, W), height, width)
    return np.ascontiguousarray(image[top : top + height, left : left + width])


def _center(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    return round((size[0] - height) / 2), round((size[1] - width) / 2)


def pad_center(image: NDArray[np.uint8], height: int, width: int, color: list[int]) -> NDArray[np.uint8]:
    """Put an image of at most that size into the centre of a canvas of one colour."""
    H, W, C = image.shape
    top, left = (height - H) // 2, (width - W) // 2
    canvas = np.empty((height, width, C), dtype=np.uint8)
    canvas[:] = color
    canvas[top : top + H, left : left + W] = image
    return canvas


def scaled_target(target: tuple[int, int], crop_fraction: float) -> tuple[int, int]:
    """Give the size that a crop of `crop_fraction` is cut from."""
    return math.floor(target[0] / crop_fraction), math.floor(target[1] / crop_fraction)
