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
from vitlab.data.preprocess import Preprocess
from vitlab.seeds import derive_seed

_PADDED_UP_TO = 64  # pixels: below, a random crop to a quarter of the area leaves too little to tell a class
_CROP_RATIO = (3 / 4, 4 / 3)
_ERASED_SCALE = (0.02, 0.33)
_ERASED_RATIO = (0.3, 3.3)
_ERASING_TRIES = 10


class TrainTransform:
    """A training image, changed at random and brought to the network's size.

    The order is crop, flip, colour, erasing. A resized crop shrinks by area averaging and grows by the record's
    filter. A padded crop brings the image to the network's size as in evaluation, but without the crop fraction's
    margin, and moves it over its mirrored border; an image that has the size already is not resized. Erasing fills a
    rectangle of 2 to 33 % of the image with noise, uniform and independent for each value.

    Without any augmentation the result is the evaluation's, and albumentations is not imported.
    """

    def __init__(self, augment: AugmentConfig, preprocess: Preprocess) -> None:
        self.preprocess = preprocess
        crop = augment.crop
        if crop == "auto":
            crop = "padded" if max(preprocess.image_size) <= _PADDED_UP_TO else "resized"
        self.crop = crop
        self._whole = replace(preprocess, crop_fraction=1.0)
        self.erasing = augment.erasing
        changes = crop != "none" or augment.hflip > 0 or augment.color_jitter > 0
        self._compose = _build_compose(augment, preprocess, crop) if changes else None

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
        if self.crop == "resized":
            image = self.preprocess.to_channels(image)
        elif self.crop == "padded":
            image = self._whole.apply(image)
        else:
            image = self.preprocess.apply(image)
        if self._compose is not None:
            # Not set_random_seed: that gives every transform the same stream, and two flips would always agree.
            self._compose.set_random_state(np.random.Generator(np.random.PCG64(seed)), random.Random(seed))
            image = np.ascontiguousarray(self._compose(image=image)["image"])
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


def _build_compose(augment: AugmentConfig, preprocess: Preprocess, crop: str) -> Any:
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
    if (strength := augment.color_jitter) > 0:
        factors = (1 - strength, 1 + strength)
        steps.append(A.ColorJitter(factors, factors, factors, hue=(0.0, 0.0), p=1.0))
    return A.Compose(steps)


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
