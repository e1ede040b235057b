"""Random changes to training images, each a function of one seed; mixup and cutmix of whole batches.

Albumentations stays behind this file: its upstream is archived, so what we use of it must be easy to replace.
"""

import math
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from vitlab.config import AugmentConfig
from vitlab.data.policies import Policy
from vitlab.data.preprocess import Preprocess
from vitlab.data.resize import cover_size, resize
from vitlab.seeds import derive_seed

_SMALL_UP_TO = 64  # pixels: in so small images a quarter of the area is too little to tell a class
_CROP_RATIO = (3 / 4, 4 / 3)
_ERASED_SCALE = (0.02, 0.33)
_ERASED_RATIO = (0.3, 3.3)
_ERASING_TRIES = 10


class TrainTransform:
    """A training image, changed at random and brought to the network's size.

    The order is crop, flip, policy, colour, erasing. A resized crop shrinks by area averaging and grows by the record's
    filter. A padded crop brings the image to the network's size as in evaluation, but without the crop fraction's
    margin, and moves it over its mirrored border; an image that has the size already is not resized. Erasing fills a
    rectangle of 2 to 33 % of the image with noise, uniform and independent for each value.

    It is `change` after `prepare`; what stands before anything random can be kept from one epoch to the next. Without
    any augmentation the result is the evaluation's, and albumentations is not imported.
    """

    def __init__(self, augment: AugmentConfig, preprocess: Preprocess) -> None:
        self.preprocess = preprocess
        small = max(preprocess.image_size) <= _SMALL_UP_TO
        self.crop = augment.crop
        if self.crop == "auto":
            self.crop = "padded" if small else "resized"
        self._whole = replace(preprocess, crop_fraction=1.0)
        self._enough = math.ceil(max(preprocess.image_size) / math.sqrt(augment.crop_min_scale))
        self.erasing = augment.erasing
        self._geometry, self._jitter = _build_changes(augment, preprocess, self.crop)
        self._policy = Policy(augment, small=small) if augment.policy != "none" else None

    def __call__(self, image: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
        """Change one image.

        Args:
            image: upright RGB, uint8 (H, W, 3).
            seed: all that the change depends on besides the image.

        Returns:
            uint8 (h, w, C), of the size and channels that the Preprocess record asks for.

        Raises:
            InputError: the array is no RGB image.
        """
        return self.change(self.prepare(image), seed)

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

    def change(self, prepared: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
        """Change a prepared image at random.

        Args:
            prepared: what `prepare` or `shrink_for_cache` gave; left alone.
            seed: all that the change depends on besides the image.

        Returns:
            uint8 (h, w, C); possibly the prepared image itself.
        """
        image = prepared
        state = np.random.Generator(np.random.PCG64(seed)), random.Random(seed)  # of geometry and then of colour
        if self._geometry is not None:
            # Not set_random_seed: that gives every transform the same stream, and two flips would always agree.
            self._geometry.set_random_state(*state)
            image = np.ascontiguousarray(self._geometry(image=image)["image"])
        if self._policy is not None:
            image = self._policy(image, derive_seed(seed, "policy"))
        if self._jitter is not None:
            self._jitter.set_random_state(*state)
            image = np.ascontiguousarray(self._jitter(image=image)["image"])
        if self.erasing > 0:
            generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "erasing")))
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


def _build_changes(augment: AugmentConfig, preprocess: Preprocess, crop: str) -> tuple[Any, Any]:
    """Build crop and flip, and the change of colour; None for what is left out."""
    if crop == "none" and augment.hflip == 0 and augment.color_jitter == 0:
        return None, None
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network for a newer version when imported
    import albumentations as A
    import cv2

    height, width = preprocess.image_size
    steps: list[Any] = []
    if crop == "resized":
        interpolation = cv2.INTER_CUBIC if preprocess.interpolation == "bicubic" else cv2.INTER_LINEAR
        scale = (augment.crop_min_scale, 1.0)
        steps.append(
            A.RandomResizedCrop(
                (height, width), scale, _CROP_RATIO, interpolation=interpolation, area_for_downscale="image"
            )
        )
    elif crop == "padded" and augment.crop_padding > 0:
        border = 2 * augment.crop_padding
        steps.append(A.PadIfNeeded(height + border, width + border, border_mode=cv2.BORDER_REFLECT_101))
        steps.append(A.RandomCrop(height, width))
    if augment.hflip > 0:
        steps.append(A.HorizontalFlip(p=augment.hflip))
    jitter = None
    if (strength := augment.color_jitter) > 0:
        factors = (1 - strength, 1 + strength)
        jitter = A.ColorJitter(factors, factors, factors, hue=(0.0, 0.0), p=1.0)
    return A.Compose(steps), jitter


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
