"""RandAugment and AutoAugment: published chains of random operations on one image, as torchvision has them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitlab.config import AugmentConfig

_FILL = 128
"""What moves in from outside the image: middle grey, as in the code of RandAugment's authors."""
_STRONGEST = 10.0
_BINS_PER_UNIT = 100  # torchvision takes a strength by the number of its bin


class Policy:
    """A published augmentation policy; what it does to an image is a function of one seed.

    RandAugment applies `policy_ops` of 14 operations, drawn anew each time, at one strength from 0 to 10. At 10 a
    rotation turns by 30 degrees, a shear has the slope 0.3, a translation moves by 150/331 of the side, brightness,
    colour, contrast and sharpness change by the factor 1 ± 0.9, posterize keeps 4 bits and solarize inverts everything.
    At 0 none of these does anything, but that solarize turns pure white black; all but the last two go either way at
    even odds. A `policy_magnitude_std`
    above 0 draws the strength of each operation from a normal distribution and holds it between 0 and 10. timm's
    `rand-m9-mstd0.5-inc1`, of DeiT and Swin, differs: it skips each operation at even odds, has Invert and SolarizeAdd
    in place of Identity, and its posterize keeps four bits fewer.

    AutoAugment applies one of 25 pairs of operations: those found on CIFAR-10 for small images, on ImageNet for others.

    The operations work on Pillow images, as the published ones do; torchvision takes half as long for them as for
    tensors. On greyscale the change of colour does nothing.

    Source: arXiv:1909.13719, sec. 3; arXiv:1805.09501, appendix. Differs: shapes change with bilinear interpolation.
    """

    def __init__(self, augment: AugmentConfig, *, small: bool) -> None:
        """Set a policy up.

        Args:
            augment: names the policy, which is not `none`, and RandAugment's number of operations and strength.
            small: AutoAugment takes the policy found on CIFAR-10.
        """
        from torchvision.transforms import v2

        options = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": _FILL}
        self._is_rand_augment = augment.policy == "randaugment"
        self._magnitude, self._magnitude_std = augment.policy_magnitude, augment.policy_magnitude_std
        self._transform: Any
        if self._is_rand_augment:
            self._num_steps = augment.policy_ops
            num_bins = round(_STRONGEST * _BINS_PER_UNIT) + 1
            self._transform = v2.RandAugment(num_ops=1, num_magnitude_bins=num_bins, **options)
        else:
            self._num_steps = 1
            pairs = v2.AutoAugmentPolicy.CIFAR10 if small else v2.AutoAugmentPolicy.IMAGENET
            self._transform = v2.AutoAugment(pairs, **options)

    def __call__(self, image: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
        """Change one image.

        Args:
            image: uint8 (H, W, C), C 1 or 3; left alone.
            seed: all that the change depends on besides the image.

        Returns:
            uint8 (H, W, C).
        """
        H, W, C = image.shape
        picture = Image.fromarray(image if C == 3 else image[:, :, 0])
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU as well
            for _ in range(self._num_steps):
                if self._is_rand_augment:
                    self._transform.magnitude = round(self._draw_magnitude() * _BINS_PER_UNIT)
                picture = self._transform(picture)
        return np.array(picture).reshape(H, W, C)

    def _draw_magnitude(self) -> float:
        drawn = self._magnitude + self._magnitude_std * float(torch.randn(()))
        return min(max(drawn, 0.0), _STRONGEST)
