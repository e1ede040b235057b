"""How a run trains: the sections objective, optim, train and monitor; frozen dataclasses, checked when they are built.

The docstring of a field is its help text. Imports the standard library only, so that the command line starts at once.
"""

from dataclasses import dataclass
from typing import Literal

from vitlab.checks import (
    is_number,
    require,
    require_at_most,
    require_fractions,
    require_not_negative,
    require_positive,
    require_shares,
    require_values,
)
from vitlab.sections import MOST, PIXELS_ALONE, Schedule


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
            self.betas is None or (len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)),
            f"optim.betas is {self.betas}: give two numbers from 0 to below 1",
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
    (`fsdp`, without TensorBoard's attention, histograms and embeddings, and without drawings)."""
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
        require_at_most(self, "batch_size", "accumulate", "epochs", most=MOST, section="train")
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
    """TensorBoard shows how weights and gradients are spread, at each evaluation and each epoch's last step; not under
    `train.parallel fsdp`."""
    embeddings: bool = False
    """TensorBoard's projector shows the features of up to 1,000 validation images, as of the best weights so far; not
    under `train.parallel fsdp`."""

    def __post_init__(self) -> None:
        require_values(self, section="monitor")
        require_positive(self, "log_every_steps", section="monitor")
        require_not_negative(self, "drawings", section="monitor")
        require_at_most(self, "drawings", most=1024, section="monitor")
