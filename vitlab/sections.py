"""The sections of a run's configuration: one frozen dataclass each, checked when it is built.

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

_MOST = 2**24
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
        require_at_most(self, "num_classes", most=_MOST, section="model")
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


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised."""

    name: Literal["classification", "next_pixel", "masked_pixel", "joint"] = "classification"
    """`classification`: cross-entropy of the class logits. Of an ImageGPT also `next_pixel`, the colour of each pixel
    from those before it; `masked_pixel`, the colours of hidden pixels (`model.overrides.causal false`); and `joint`,
    classification and one of these, next_pixel where the network is causal."""
    generative_weight: float = 1.0
    """Of `joint`: what the loss of the pixels is multiplied by before it is added to that of the classes."""
    mask_fraction: float = 0.15
    """Of masked pixels: probability that a pixel's colour is to be found."""
    corruption: Literal["zero", "bert"] = "zero"
    """Of masked pixels: such a one is shown as zeros (ImageGPT); or, as in BERT, 80 % of them as a mask, 10 % in a
    random colour, 10 % as they are."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes."""
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"
    """Weight of each class in the loss: none, `balanced` for one over its share of the images, or a list."""

    def __post_init__(self) -> None:
        require_values(self, section="objective")
        require(
            0.0 <= self.label_smoothing < 1.0, f"objective.label_smoothing is {self.label_smoothing}: give 0 to below 1"
        )
        if isinstance(self.class_weights, tuple):
            require_positive(self, "class_weights", section="objective")
        require_positive(self, "generative_weight", section="objective")
        require_shares(self, "mask_fraction", section="objective")
        require(
            self.classifies or (self.label_smoothing == 0 and self.class_weights == "none"),
            f"objective.label_smoothing and class_weights are for classes, and objective.name is {self.name}: "
            "leave them out",
        )

    @property
    def classifies(self) -> bool:
        """Whether class logits are trained."""
        return self.name not in PIXELS_ALONE

    @property
    def generates(self) -> bool:
        """Whether the colours of pixels are trained."""
        return self.name != "classification"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate."""

    name: str = "adamw"
    """An optimizer of timm.optim: adamw, sgd, lamb, lion, ..."""
    lr: float = 5e-4
    """Highest learning rate."""
    weight_decay: float = 0.05
    """Decay of matrices and convolutions; biases, norms, tokens and position tables do not decay."""
    betas: tuple[float, float] | None = None
    """Adam's running averages; default: the optimizer's own."""
    momentum: float = 0.9
    """Momentum of SGD and its kin."""
    layer_decay: float | None = None
    """Factor of the learning rate from each block down to the one below; default: the same rate everywhere."""
    warmup_steps: int | None = None
    """Optimizer steps of linear warm-up; default: a twentieth of the run."""
    schedule: Schedule = "cosine"
    """Course of the learning rate after warm-up."""
    min_lr: float = 0.0
    """Learning rate of the last step under `cosine` and `linear`, and the lowest under `step`."""
    decay_at: tuple[float, ...] = (0.5, 0.75)
    """Schedule `step`: shares of the run after which the rate falls."""
    decay_factor: float = 0.1
    """Schedule `step`: what the rate is multiplied by at each of them."""
    clip_grad: float | None = None
    """Largest norm of the whole gradient; default: no clipping."""

    def __post_init__(self) -> None:
        require_values(self, section="optim")
        require_positive(self, "lr", "clip_grad", section="optim")
        require_not_negative(self, "weight_decay", "warmup_steps", "min_lr", section="optim")
        require(self.min_lr <= self.lr, f"optim.min_lr {self.min_lr} is above optim.lr {self.lr}: give less")
        if self.layer_decay is not None:
            require_shares(self, "layer_decay", section="optim")
        require_shares(self, "decay_factor", section="optim")
        require_fractions(self, "decay_at", section="optim")
        require_fractions(self, "momentum", section="optim")
        require(
            self.betas is None or all(0.0 <= beta < 1.0 for beta in self.betas),
            f"optim.betas is {self.betas}: give numbers from 0 to below 1",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The course of the run."""

    run_dir: str | None = None
    """Folder that the run writes; default: runs/NAME-DATA, numbered if taken. An existing run is never overwritten."""
    epochs: int = 20
    """Passes over the training images."""
    steps: int | None = None
    """Optimizer steps, in place of epochs."""
    batch_size: int = 64
    """Images in a micro-batch, over all processes."""
    accumulate: int = 1
    """Micro-batches to an optimizer step."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes, each holds the whole network (`ddp`), or a share of it, for networks that do not fit
    (`fsdp`)."""
    seed: int = 0
    """Seed of weights, order, augmentation and dropout."""
    device: str = "auto"
    """`auto` (a GPU where there is one), cpu, cuda or cuda:N, mps."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of training; `auto` takes bf16 where the device computes in it. Scores are computed in fp32."""
    ema_decay: float | None = None
    """Decay of a moving average of the weights, such as 0.999; scored beside the weights themselves. Default: none."""
    compile: bool = False
    """Compile the network's repeated block: a wait before the first step, then faster ones on GPUs."""
    grad_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, more time."""
    evaluate_every_epochs: int = 1
    """Epochs between evaluations on the validation split; the last epoch is always evaluated."""
    patience: int | None = None
    """End the run after so many evaluations in a row without a better one; default: never."""
    find_lr: bool = False
    """Before training, try learning rates on a copy, save the curve and a suggestion; the run itself stays the same."""
    seeds: tuple[int, ...] | None = None
    """Make one run for each of these seeds, in run_dir/seed-N, in place of the one of train.seed."""
    checkpoint_every_steps: int | None = None
    """Optimizer steps between resume states, besides the one at the end of each epoch."""
    checkpoint_every_minutes: float | None = None
    """Minutes between resume states, likewise; saving goes on beside the training."""
    keep_states: int = 2
    """Resume states that stay; older ones go."""
    resume: str = "auto"
    """`auto` goes on where run_dir holds a state, `never` starts anew, or the PATH of a state."""

    def __post_init__(self) -> None:
        require_values(self, section="train")
        require_positive(
            self,
            "epochs",
            "steps",
            "batch_size",
            "accumulate",
            "evaluate_every_epochs",
            "checkpoint_every_steps",
            "checkpoint_every_minutes",
            "keep_states",
            "patience",
            section="train",
        )
        require_not_negative(self, "seed", "seeds", section="train")
        require_at_most(self, "batch_size", "accumulate", "epochs", most=_MOST, section="train")
        if self.seeds is not None:
            require(
                len(set(self.seeds)) == len(self.seeds) > 0,
                f"train.seeds is {list(self.seeds)}: give different numbers, one for each run",
            )
        if self.ema_decay is not None:
            require(
                is_number(self.ema_decay) and 0 < self.ema_decay < 1,
                f"train.ema_decay is {self.ema_decay}: give a number between 0 and 1, such as 0.999",
            )


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What is shown and logged."""

    tensorboard: bool = True
    """Write TensorBoard events into RUN/tensorboard."""
    log_every_steps: int = 10
    """Optimizer steps between points of the training curves."""
    drawings: int = 8
    """Images that an ImageGPT of next pixels draws at each evaluation, and half as many that it completes; or 0."""
    histograms: bool = False
    """TensorBoard shows how weights and gradients are spread, at each evaluation and each epoch's last step."""
    embeddings: bool = False
    """TensorBoard's projector shows the features of up to 1,000 validation images, as of the best weights so far."""

    def __post_init__(self) -> None:
        require_values(self, section="monitor")
        require_positive(self, "log_every_steps", section="monitor")
        require_not_negative(self, "drawings", section="monitor")
        require_at_most(self, "drawings", most=1024, section="monitor")
