"""The Preprocess record: how an image becomes the tensor that a network was trained on."""

from dataclasses import dataclass

from vitlab.config import Interpolation, ResizeMode


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How evaluation, prediction and training turn an upright image into a tensor; it travels with the model file."""

    image_size: tuple[int, int]
    """(height, width) in pixels."""
    resize_mode: ResizeMode = "crop"
    crop_fraction: float = 0.9
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    channels: int = 3
