"""Random changes to training images, each a function of one seed; mixup and cutmix of whole batches.

Albumentations, for changes of colour, stays behind this file: its upstream is archived, so what we use of it must be
easy to replace.
"""

import math
import os
import random
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from vitlab.config import AugmentConfig
from vitlab.data.crops import Geometry
from vitlab.data.policies import Policy
from vitlab.data.preprocess import Preprocess
from vitlab.data.resize import cover_size, resize
from vitlab.seeds import derive_seed

_SMALL_UP_TO = 64  # pixels: in so small images a quarter of the area is too little to tell a class
_ERASED_SCALE = (0.02, 0.33)
_ERASED_RATIO = (0.3, 3.3)
_ERASING_TRIES = 10


class TrainTransform:
    """A training image, changed at random and brought to the network's size.

    The order is crop, flip, policy, colour, erasing. A resized crop is brought to its size by the record's antialiased
    filter; where it shrinks to half or less, a JPEG file may be read at a half, a quarter or an eighth (`shrink`). A
    padded crop brings the image to the network's size as in evaluation, but without the crop fraction's margin, and
    moves it over its mirrored border; an image that has the size already is not resized. Erasing fills a rectangle of 2
    to 33 % of the image with noise, uniform and independent for each value.

    It is `change` after `prepare`; what stands before anything random can be kept from one epoch to the next. Without
    any augmentation the result is the evaluation's, and albumentations is not imported.
    """

    def __init__(self, augment: AugmentConfig, preprocess: Preprocess) -> None:
        self.preprocess = preprocess
        small = max(preprocess.image_size) <= _SMALL_UP_TO
        auto: Literal["resized", "padded"] = "padded" if small else "resized"
        self.crop = auto if augment.crop == "auto" else augment.crop
        self._whole = replace(preprocess, crop_fraction=1.0)
        self._enough = math.ceil(max(preprocess.image_size) / math.sqrt(augment.crop_min_scale))
        self.erasing = augment.erasing
        self._geometry = Geometry(
            crop=self.crop,
            size=preprocess.image_size,
            min_scale=augment.crop_min_scale,
            padding=augment.crop_padding,
            hflip=augment.hflip,
            interpolation=preprocess.interpolation,
        )
        self._jitter = _build_jitter(augment.color_jitter) if augment.color_jitter > 0 else None
        self._policy = Policy(augment, small=small) if augment.policy != "none" else None

    def shrink(self, height: int, width: int, seed: int) -> int:
        """Tell by how much an image of that size may be smaller for the change of that seed: 1, 2, 4 or 8."""
        return self._geometry.draw(height, width, random.Random(seed))[1] if self.crop == "resized" else 1

    def __call__(
        self, image: NDArray[np.uint8], seed: int, full_size: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        """Change one image.

        Args:
            image: upright RGB, uint8 (H, W, 3).
            seed: all that the change depends on besides the image.
            full_size: (height, width) of the whole image, where `shrink` let it be smaller.

        Returns:
            uint8 (h, w, C), of the size and channels that the Preprocess record asks for.

        Raises:
            InputError: the array is no RGB image.
        """
        return self.change(self.prepare(image), seed, full_size)

    def prepare(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Do what is the same in every epoch: the channels, and the resize unless the crop is a random part.

        Args:
            image: upright RGB, uint8 (H, W, 3).

        Returns:
            uint8 (H, W, C) for a resized crop, (h, w, C) for the others; possibly the image itself.

        Raises:
            InputError: the array is no RGB image.
        """
        if self.crop == "resized":
            return self.preprocess.to_channels(image)
        if self.crop == "padded":
            return self._whole.apply(image)
        return self.preprocess.apply(image)

    def shrink_for_cache(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Prepare an image, and where the crop is resized shrink it to as many pixels as the smallest crop needs.

        The shorter side is then the network's longer one over the root of `crop_min_scale`: the smallest square crop
        has the network's size. The same seed cuts another box than out of the image itself, as boxes are drawn in whole
        pixels.

        Args:
            image: upright RGB, uint8 (H, W, 3).

        Returns:
            uint8 (H', W', C) for `change`.

        Raises:
            InputError: the array is no RGB image.
        """
        prepared = self.prepare(image)
        H, W, _ = prepared.shape
        if self.crop != "resized" or min(H, W) <= self._enough:
            return prepared
        return resize(prepared, *cover_size(H, W, (self._enough, self._enough)), self.preprocess.interpolation)

    def change(
        self, prepared: NDArray[np.uint8], seed: int, full_size: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        """Change a prepared image at random.

        Args:
            prepared: what `prepare` or `shrink_for_cache` gave; left alone.
            seed: all that the change depends on besides the image.
            full_size: (height, width) of the whole image, where `shrink` let it be smaller.

        Returns:
            uint8 (h, w, C); possibly the prepared image itself.
        """
        image = self._geometry.change(prepared, random.Random(seed), full_size)
        if self._policy is not None:
            image = self._policy(image, derive_seed(seed, "policy"))
        if self._jitter is not None:
            # Not set_random_seed: that gives every transform of albumentations the same stream.
            self._jitter.set_random_state(
                _generator(derive_seed(seed, "jitter")), random.Random(derive_seed(seed, "jitter"))
            )
            image = np.ascontiguousarray(self._jitter(image=image)["image"])
        if self.erasing > 0:
            generator = _generator(derive_seed(seed, "erasing"))
            if generator.random() < self.erasing:
                image = erase(image, generator)
        return image


def erase(image: NDArray[np.uint8], generator: np.random.Generator) -> NDArray[np.uint8]:
    """Fill a random rectangle of an image with noise.

    Not albumentations' own: where no rectangle fits, as in elongated images, it raises a TypeError. Here an image in
    which none of ten draws fits stays as it is.

    Args:
        image: uint8 (H, W, C), left alone.
        generator: draws area, ratio, place and noise.

    Returns:
        uint8 (H, W, C).

    Source: arXiv:1708.04896, algorithm 1.
    """
    H, W, C = image.shape
    for _ in range(_ERASING_TRIES):
        area = H * W * generator.uniform(*_ERASED_SCALE)
        ratio = math.exp(generator.uniform(math.log(_ERASED_RATIO[0]), math.log(_ERASED_RATIO[1])))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < height <= H and 0 < width <= W:
            top, left = generator.integers(H - height + 1), generator.integers(W - width + 1)
            erased = image.copy()
            noise = generator.integers(0, 256, (height, width, C), dtype=np.uint8)
            erased[top : top + height, left : left + width] = noise
            return erased
    return image


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _build_jitter(strength: float) -> Any:
    """Build the change of colour."""
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network for a newer version when imported
    import albumentations as A

    factors = (1 - strength, 1 + strength)
    return A.ColorJitter(factors, factors, factors, hue=(0.0, 0.0), p=1.0)


class Mixer:
    """Mixup and cutmix of a batch, as torchvision has them; with both, each batch takes one at even odds.

    Each image is mixed with its predecessor in the batch, so that odd batches and single images work. All that is
    random comes from torch's global generator on the CPU, which the trainer seeds for each micro-batch.
    """

    def __init__(self, augment: AugmentConfig, num_classes: int) -> None:
        self.num_classes = num_classes
        self.enabled = augment.mixup > 0 or augment.cutmix > 0
        self._mix: Any = None
        if not self.enabled:
            return
        from torchvision.transforms import v2

        mixers: list[Any] = []
        if augment.mixup > 0:
            mixers.append(v2.MixUp(alpha=augment.mixup, num_classes=num_classes))
        if augment.cutmix > 0:
            mixers.append(v2.CutMix(alpha=augment.cutmix, num_classes=num_classes))
        self._mix = v2.RandomChoice(mixers) if len(mixers) > 1 else mixers[0]

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a batch.

        Args:
            images: normalised, float (B, C, H, W).
            labels: int64 (B,).

        Returns:
            Images of the same shape, and soft labels, float32 (B, K), whose rows sum to 1.
        """
        if not self.enabled:
            return images, F.one_hot(labels, self.num_classes).float()
        mixed, soft = self._mix(images, labels)
        return mixed, soft
