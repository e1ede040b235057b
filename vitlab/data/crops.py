"""Random crops and flips of training images, drawn before an image is read so that it is read no larger than needed."""

import math
import random
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from vitlab.config import Interpolation
from vitlab.data.resize import resize_torch

_RATIO = (3 / 4, 4 / 3)
_TRIES = 10
_SCALES = (8, 4, 2)


@dataclass(frozen=True)
class Box:
    """Rows and columns of an image."""

    top: int
    left: int
    height: int
    width: int

    def at(self, scale: int) -> "Box":
        """Give the pixels that hold the box in an image that is so many times as small."""
        top, left = self.top // scale, self.left // scale
        bottom, right = -(-(self.top + self.height) // scale), -(-(self.left + self.width) // scale)
        return Box(top, left, bottom - top, right - left)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A crop and a left-right flip, functions of one seed."""

    crop: Literal["resized", "padded", "none"]
    """A box of random size and shape brought to the network's size; one of that size out of a mirrored border; none."""
    size: tuple[int, int]
    """(height, width) of what a crop gives."""
    min_scale: float
    """Resized crop: the smallest share of the image's area."""
    padding: int
    """Padded crop: width of the border in pixels."""
    hflip: float
    """Probability of the flip."""
    interpolation: Interpolation
    """Filter of the resized crop."""

    def draw(self, height: int, width: int, generator: random.Random) -> tuple[Box, int]:
        """Draw the box of a resized crop.

        Returns:
            The box, and by how much the image may be smaller with the crop still as large as its result: 1, 2, 4 or 8.
            The box ends at whole pixels of the smaller image, whether or not it is read like that.
        """
        box = draw_box(height, width, self.min_scale, generator)
        fits = (s for s in _SCALES if box.height >= s * self.size[0] and box.width >= s * self.size[1])
        scale = next(fits, 1)
        small = box.at(scale)
        top, left = small.top * scale, small.left * scale
        return Box(top, left, min(small.height * scale, height - top), min(small.width * scale, width - left)), scale

    def change(
        self, image: NDArray[np.uint8], generator: random.Random, full_size: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        """Crop and flip an image.

        Args:
            image: uint8 (H, W, C), left alone; for a padded crop of the network's size.
            generator: draws; in the state in which `draw` had it.
            full_size: (height, width) of an image that was read at 1/2, 1/4 or 1/8; its own otherwise.

        Returns:
            uint8 (h, w, C), contiguous; possibly the image itself.
        """
        H, W, C = image.shape
        if self.crop == "resized":
            height, width = full_size or (H, W)
            scale = next(s for s in (1, *reversed(_SCALES)) if (-(-height // s), -(-width // s)) == (H, W))
            box = self.draw(height, width, generator)[0].at(scale)
            part = image[box.top : box.top + box.height, box.left : box.left + box.width]
            part = cv2.copyTo(part, None).reshape(part.shape)  # numpy would take twice as long
            image = resize_torch(part, *self.size, self.interpolation)
        elif self.crop == "padded" and self.padding > 0:
            p = self.padding
            bordered = cv2.copyMakeBorder(image, p, p, p, p, cv2.BORDER_REFLECT_101)
            top, left = (int(generator.random() * (2 * p + 1)) for _ in "yx")
            image = bordered.reshape(H + 2 * p, W + 2 * p, C)[top : top + H, left : left + W]
        if generator.random() < self.hflip:
            image = cv2.flip(image, 1).reshape(image.shape)
        return np.ascontiguousarray(image)


def draw_box(height: int, width: int, min_scale: float, generator: random.Random) -> Box:
    """Draw a box: its share of the area uniform, its ratio log-uniform from 3/4 to 4/3, its place uniform.

    Where ten draws do not fit, it is the largest box of those ratios, in the centre.

    Source: torchvision's RandomResizedCrop.
    """
    for _ in range(_TRIES):
        area = height * width * generator.uniform(min_scale, 1.0)
        ratio = math.exp(generator.uniform(*map(math.log, _RATIO)))
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(generator.random() * (height - h + 1)), int(generator.random() * (width - w + 1)), h, w)
    h, w = min(height, round(width / _RATIO[0])), min(width, round(height * _RATIO[1]))
    return Box((height - h) // 2, (width - w) // 2, h, w)
