"""What a run trains, and on what: the sections model, data and augment; frozen dataclasses, checked when built.

The docstring of a field is its help text. Imports the standard library only, so that the command line starts at once.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from vitlab.checks import (
    is_number,
    require,
    require_at_most,
    require_channel_statistics,
    require_fractions,
    require_not_negative,
    require_positive,
    require_shares,
    require_values,
)

LARGEST_SIDE = 8192
"""Pixels; images of more would fill the memory."""

MOST = 2**24
"""Of what a run has many of."""

PIXELS_ALONE = ("next_pixel", "masked_pixel")
"""Objectives that train no class logits."""

ResizeMode = Literal["crop", "squash", "pad"]
Interpolation = Literal["bilinear", "bicubic"]
Schedule = Literal["cosine", "linear", "step", "constant"]
WeightsKind = Literal["raw", "ema"]
"""The trained weights, or their moving average."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network is trained."""

    name: str | None = None
    """A name that `vitlab models` lists, or timm/NAME for any network of timm; default: the network of `model.weights`
    where that is a model file of vitlab, else vit_tiny."""
    image_size: int | tuple[int, int] | None = None
    """Side of the square input in pixels, or (height, width); default: the network's native size."""
    num_classes: int | None = None
    """Number of classes; default: as many as the training folder holds, and another number is an error."""
    weights: str | None = None
    """Model file, run folder, other projects' checkpoint, or timm/NAME (fetched where it is not on this machine yet) to
    start from; default: fresh weights. Of a model file the fields that `overrides` does not name come along too."""
    palette: str = "auto"
    """Colours of an ImageGPT: `auto` takes those of the weights that it starts from, and fits others to the training
    images; `uniform`; or a .npy file as `vitlab palette` writes it."""
    freeze: Literal["none", "backbone"] | int = "none"
    """What is not trained: `none`, `backbone` for all but the head, or N for all but the last N blocks and the head."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the architecture's config; on the line `--model.overrides.depth 6`. All: num_heads, mlp_ratio,
    drop_rate, drop_path_rate; all but ImageGPT: qkv_bias. ViT: patch_size, embed_dim, depth, pool (cls, mean), norm
    (pre, post), pos_embed (learned, sincos). Swin: patch_size, window_size, embed_dim, depths. DaViT: stem_stride,
    window_size, embed_dims, depths. ImageGPT: num_colors, embed_dim, depth, bias, causal."""

    def __post_init__(self) -> None:
        require_values(self, section="model")
        sides = self.image_size if isinstance(self.image_size, tuple) else (self.image_size,)
        require(
            all(side is None or 0 < side <= LARGEST_SIDE for side in sides),
            f"model.image_size is {self.image_size}: give a side or [height, width] of 1 to {LARGEST_SIDE} pixels",
        )
        require_positive(self, "num_classes", section="model")
        require_at_most(self, "num_classes", most=MOST, section="model")
        require(
            isinstance(self.freeze, str) or self.freeze > 0,
            f"model.freeze is {self.freeze}: give none, backbone, or how many of the last blocks to train",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the images are, and how they become tensors."""

    root: str = "digits"
    """Folder of images, of CIFAR batches or of IDX files, a .csv or .jsonl manifest, or the built-in `digits`."""
    val_fraction: float = 0.1
    """Share of the training images, stratified and seeded, that validates where there is no validation split."""
    val_seed: int = 0
    """Seed of that cut; train.seed does not change it, so that runs of several seeds validate on the same images."""
    sampling: Literal["shuffled", "balanced"] = "shuffled"
    """`shuffled`: every training image once an epoch. `balanced`: as many draws, every class equally often."""
    channels: Literal[1, 3] = 3
    """3 for RGB, 1 for greyscale."""
    workers: int | None = None
    """Loader processes; default: one less than the cores, at most 8. The result does not depend on it."""
    on_error: Literal["stop", "skip"] = "stop"
    """At an unreadable image: `stop` ends the run and names it, `skip` counts it, lists it and goes on without it."""
    cache: Literal["none", "memory", "disk"] = "none"
    """Keep decoded and resized images in memory, or in one memory-mapped file that later runs find again."""
    cache_dir: str | None = None
    """Folder of the cache files; default: vitlab in the user's cache folder."""
    resize_mode: ResizeMode | None = None
    """Evaluation: `crop` the centre, `squash` to the size, or `pad` to the aspect ratio with the mean colour. Of this
    and the next four fields the default is what `model.weights` states, where it does; else crop."""
    crop_fraction: float | None = None
    """Evaluation with `crop`: side of the crop over the shorter side of the resized image; else 0.9."""
    interpolation: Interpolation | None = None
    """Resampling filter of evaluation and training; else bicubic."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel in [0, 1] that is subtracted; else ImageNet's, and 0.5 for greyscale."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel that is divided by; else ImageNet's, and 0.25 for greyscale."""
    hash_contents: bool = False
    """Read every file for the data set's fingerprint, so that a changed pixel is noticed where name and size stay."""
    allow_empty_classes: bool = False
    """Keep a class folder without images as a class instead of stopping."""
    download: bool = False
    """Fetch `cifar10` or `cifar100` into data.root with torchvision where it is not there yet; never without asking."""

    def __post_init__(self) -> None:
        require_values(self, section="data")
        require(bool(self.root), "data.root is empty: give a folder of images, or `digits`")
        require(
            0.0 < self.val_fraction < 1.0, f"data.val_fraction is {self.val_fraction}: give a number between 0 and 1"
        )
        if self.crop_fraction is not None:
            require_shares(self, "crop_fraction", section="data")
        require_not_negative(self, "workers", "val_seed", section="data")
        require_at_most(self, "workers", most=1024, section="data")
        require_channel_statistics(self, section="data", may_lack=True)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes to training images; evaluation sees none of them."""

    crop: Literal["auto", "resized", "padded", "none"] = "auto"
    """Random resized crop, or a crop out of a reflected border; `auto`: padded up to 64 pixels, resized above."""
    crop_min_scale: float = 0.25
    """Resized crop: the smallest share of the image's area."""
    crop_padding: int = 4
    """Padded crop: width of the border in pixels."""
    hflip: float = 0.5
    """Probability of a left-right flip."""
    policy: Literal["none", "randaugment", "autoaugment"] = "none"
    """Published chains of random operations on colour and shape, after crop and flip."""
    policy_ops: int = 2
    """RandAugment: operations on each image."""
    policy_magnitude: float = 9.0
    """RandAugment: strength on the paper's scale, 0 to 10."""
    policy_magnitude_std: float = 0.0
    """RandAugment: standard deviation of the strength from operation to operation; DeiT and Swin have 0.5."""
    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation, from 0 to 1."""
    erasing: float = 0.0
    """Probability of filling a random rectangle with noise."""
    mixup: float = 0.0
    """Beta parameter of mixup; 0 leaves it out."""
    cutmix: float = 0.0
    """Beta parameter of cutmix; 0 leaves it out. With both, each batch takes one of them at even odds."""
    unmixed_epochs: int = 0
    """Last epochs that train without mixup and cutmix."""
    repeats: int = 1
    """Views of an image in a batch, each augmented anew; an epoch has as many views as images, so fewer images."""

    def __post_init__(self) -> None:
        require_values(self, section="augment")
        require_fractions(self, "hflip", "color_jitter", "erasing", section="augment")
        require_positive(self, "repeats", "policy_ops", section="augment")
        require_at_most(self, "repeats", "policy_ops", "crop_padding", most=1024, section="augment")
        require_shares(self, "crop_min_scale", section="augment")
        require_not_negative(
            self, "crop_padding", "mixup", "cutmix", "unmixed_epochs", "policy_magnitude_std", section="augment"
        )
        require(
            is_number(self.policy_magnitude) and 0 <= self.policy_magnitude <= 10,
            f"augment.policy_magnitude is {self.policy_magnitude}: give a number from 0 to 10",
        )
