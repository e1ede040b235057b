"""The Preprocess record: how an image becomes the tensor that a network was trained on."""

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image

from vitlab.checks import require_channel_statistics, require_shares
from vitlab.config import Interpolation, ResizeMode
from vitlab.data.resize import cover_size, fit_size, pad_center, resize, resize_center, scaled_target
from vitlab.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How evaluation, prediction and training turn an upright image into a tensor; it travels with the model file."""

    image_size: tuple[int, int]
    """(height, width) in pixels."""
    resize_mode: ResizeMode = "crop"
    """`crop` the centre, `squash` to the size, or `pad` to the aspect ratio with the mean colour."""
    crop_fraction: float = 0.9
    """With `crop`: side of the crop over the shorter side of the resized image. `squash` and `pad` show all of it."""
    interpolation: Interpolation = "bicubic"
    """Antialiasing filter of the resize."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Mean of each channel in [0, 1] that is subtracted."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel that is divided by."""
    channels: int = 3
    """3 for RGB, 1 for greyscale (ITU-R 601 luma, taken before the resize)."""

    def __post_init__(self) -> None:
        size = self.image_size
        if not (isinstance(size, tuple) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)):
            raise InputError(f"image_size is {size!r}: give (height, width) of more than 0 pixels")
        for name, choices in (("resize_mode", get_args(ResizeMode)), ("interpolation", get_args(Interpolation))):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(choices)}")
        require_shares(self, "crop_fraction")
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise InputError(f"channels is {self.channels!r}: images have 3 (RGB) or 1 (greyscale)")
        require_channel_statistics(self)

    def apply(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bring an image to the network's size and channels; the same pixels wherever it is called.

        Args:
            image: upright RGB, uint8 (H, W, 3), as `read_image` gives.

        Returns:
            uint8 (height, width, channels), contiguous.

        Raises:
            InputError: the array is something else.
        """
        image = self.to_channels(image)
        H, W, _ = image.shape
        height, width = self.image_size
        if self.resize_mode == "squash":
            return resize(image, height, width, self.interpolation)
        if self.resize_mode == "pad":
            image = resize(image, *fit_size(H, W, self.image_size), self.interpolation)
            return pad_center(image, height, width, [min(max(round(255 * value), 0), 255) for value in self.mean])
        covered = cover_size(H, W, scaled_target(self.image_size, self.crop_fraction))
        return resize_center(image, covered, height, width, self.interpolation)

    def to_channels(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Check that an array is an RGB image, and take its luma where the network sees greyscale.

        Args:
            image: uint8 (H, W, 3).

        Returns:
            uint8 (H, W, channels).

        Raises:
            InputError: another type or shape.
        """
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise InputError(f"an image is {image.dtype} {image.shape}: give RGB as uint8 (height, width, 3)")
        if self.channels == 3:
            return image
        return np.array(Image.fromarray(image).convert("L"))[:, :, None]

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Turn pixels into the network's input, on the device where they are.

        Args:
            images: uint8 (B, C, h, w), in any memory format, which is kept.

        Returns:
            float32 (B, C, h, w): pixels in [0, 1], less the mean, over the standard deviation.

        Raises:
            InputError: another type or number of channels.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != self.channels:
            raise InputError(
                f"images are {images.dtype} {tuple(images.shape)}: give uint8 (batch, {self.channels}, height, width)"
            )
        _, C, _, W = images.shape
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=images.device) for values in (self.mean, self.std)
        )
        if not images.is_contiguous(memory_format=torch.channels_last):
            mean, std = (rearrange(values, "c -> c 1 1") for values in (mean, std))
            return images.float().div_(255).sub_(mean).div_(std)
        # A row at a time: loops over the three channels alone would take a third longer.
        rows = rearrange(images, "b c h w -> b h (w c)").float().div_(255).sub_(mean.repeat(W)).div_(std.repeat(W))
        return rearrange(rows, "b h (w c) -> b c h w", c=C)

    def to_dict(self) -> dict[str, Any]:
        """Give the record as JSON holds it."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Preprocess":
        """Rebuild a record from `to_dict`.

        Raises:
            InputError: a key is missing or unknown, or a value is out of range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if record.keys() != names:
            missing, unknown = sorted(names - record.keys()), sorted(record.keys() - names)
            raise InputError(
                f"a preprocess record lacks {missing} and has the unknown {unknown}: it needs {sorted(names)}"
            )
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
        return cls(**values)


@dataclass(frozen=True)
class EvalTransform:
    """What a Loader applies in evaluation: the Preprocess record alone, whatever the seed."""

    preprocess: Preprocess

    def __call__(self, image: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
        """Apply the record to uint8 (H, W, 3); gives uint8 (h, w, C)."""
        return self.preprocess.apply(image)
