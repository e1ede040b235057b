"""What a run shows besides its curves: its first lines, its pictures, its last lines."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console

from vitlab.config import RunConfig
from vitlab.data.augment import TrainTransform
from vitlab.data.datasets import Dataset
from vitlab.data.loader import Loader
from vitlab.engine import figures
from vitlab.engine.device import multiply_add_rate
from vitlab.engine.evaluator import Scores, headline
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.trainer import Trainer, TrainingData
from vitlab.inference.check_classes import quick_lines
from vitlab.inference.pictures import draw_progress
from vitlab.layers.attention import is_fused
from vitlab.models.costs import count_macs, count_parameters, training_memory
from vitlab.models.imagegpt import ImageGPT
from vitlab.runs import watching
from vitlab.seeds import derive_seed
from vitlab.text import duration, say

PREVIEW_IMAGES = 16
_FEW_IMAGES = 50


def describe_data(console: Console, dataset: Dataset, root: str) -> None:
    """Say how the images were read, and what a quick check found."""
    for note in (*dataset.notes, *(f"note: {line}" for line in quick_lines(dataset, root))):
        say(console, note)


def describe(console: Console, config: RunConfig, dataset: Dataset, trainer: Trainer) -> None:
    """Say what is trained, on what, and where it goes."""
    network = trainer.objective.network
    parameters = count_parameters(network)
    sizes = ", ".join(f"{name} {len(split)}" for name, split in dataset.splits.items())
    H, W = network.image_size
    precision = "fp32" if trainer.autocast is None else str(trainer.autocast).removeprefix("torch.")
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    frozen = "" if config.model.freeze == "none" else f" ({trained:,} of them trained)"
    say(
        console,
        f"{config.model.name}: {parameters:,} parameters{frozen}, images {H}x{W}, on {trainer.device} in {precision}",
    )
    say(console, f"{config.data.root}: {len(dataset.classes)} classes, images: {sizes}")
    val = len(dataset.splits["val"])
    if val < _FEW_IMAGES:
        say(console, f"note: validation has {val} images, so that one of them is {100 / val:.1f} points of top-1")
    seen = trainer.data.preprocess
    crop = f"crop of {seen.crop_fraction:g}" if seen.resize_mode == "crop" else seen.resize_mode
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (seen.mean, seen.std))
    if isinstance(network, ImageGPT):
        say(console, _growth(network, trainer))
    say(console, f"evaluation: {crop}, {seen.interpolation}, mean {mean}, std {std}")
    say(console, f"run: {trainer.keeper.folder.path}")


def _growth(network: ImageGPT, trainer: Trainer) -> str:
    """Tell what a step takes at this size and at others, whose pixels are the tokens: a line to read before waiting."""
    batch_size, rate = trainer.data.train.batch_size, multiply_add_rate(trainer.device, trainer.autocast)
    parts = []
    for size in (network.image_size, *((side, side) for side in (32, 48, 64))):
        config = dataclasses.replace(network.config, image_size=size)
        dtype = trainer.autocast or torch.float32
        fused = is_fused(math.prod(size), trainer.device, dtype, causal=network.config.causal)
        width = 4 if trainer.autocast is None else 2
        memory = training_memory(config, batch_size=batch_size, bytes_per_value=width, fused_attention=fused)
        with torch.device("meta"):
            macs = count_macs(ImageGPT(config))
        seconds = 3 * macs * batch_size / rate  # the backward pass is two forward passes
        part = f"{size[0]}x{size[1]} {memory / 2**30:.2g} GiB and {seconds:.2g} s"
        parts += [part] if part not in parts else []
    kept = "" if not network.checkpoint_blocks else ", less memory with train.grad_checkpointing"
    return f"a step of {batch_size} images takes about, at the rate of matrix products here: {', '.join(parts)}{kept}"


def preview(config: RunConfig, dataset: Dataset, data: TrainingData) -> Any:
    """Draw the first training images as the network sees them, mixed where the run mixes."""
    loader = Loader(
        dataset.splits["train"],
        TrainTransform(config.augment, data.preprocess),
        batch_size=PREVIEW_IMAGES,
        seed=config.train.seed,
        workers=0,
        shuffle=True,
        repeats=config.augment.repeats,
        balanced=config.data.sampling == "balanced",
        on_error="skip",
    )
    batch = next(iter(loader.epoch(0)))
    names = [data.classes[label] for label in batch.labels.tolist()]
    images = batch.images
    if data.mixer.enabled and len(images):
        torch.manual_seed(derive_seed(config.train.seed, "preview"))
        images, shares = data.mixer(images.float(), batch.labels)
        images = images.round().clamp(0, 255).to(torch.uint8)
        names = [_mixed_name(data.classes, row) for row in shares]
    return figures.image_grid(images.numpy(), names)


def _mixed_name(classes: tuple[str, ...], shares: torch.Tensor) -> str:
    top = shares.topk(min(2, len(shares)))
    named = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    return " + ".join(f"{share:.0%} {classes[index]}" for share, index in named if share > 0)


class _SignalledError(Exception):
    """The run is to end, and its drawings are not worth the wait."""


def show_evaluation(trainer: Trainer, config: RunConfig, dataset: Dataset, scored: list[Scores]) -> None:
    """Show what an evaluation is of: mistakes where classes are scored, drawings where next pixels are."""
    best = next((s for s in scored if s.weights == trainer.progress.best_weights), None)
    if best is not None and best.classifies and trainer.progress.best_step == trainer.progress.step:
        _show_confusion(trainer, best)
        watching.show_best(trainer, config, dataset, best)
    watching.show_network(trainer, config, dataset)
    network, count = trainer.objective.network, config.monitor.drawings
    if not (count and config.objective.generates and isinstance(network, ImageGPT) and network.causal):
        return
    if trainer.wrapped.is_sharded:  # to draw would take every process as long
        return
    split, preprocess = dataset.splits["val"], trainer.data.preprocess
    rows = watching.spread_rows(split, (count + 1) // 2)
    originals = watching.read_rows(split, preprocess, rows).images.contiguous().numpy()
    trainer.objective.eval()
    folder, events, step = trainer.keeper.folder, trainer.monitor.events, trainer.progress.step

    def stop_on_signal(pixels: int) -> None:
        # The evaluation is logged and counted, so that no state may be saved before the end of the epoch.
        if trainer.keeper.signalled:
            raise _SignalledError

    try:
        pictures = draw_progress(network, preprocess, originals, count=count, on_step=stop_on_signal)
    except _SignalledError:
        return
    for path, picture in zip((folder.samples, folder.completions), pictures, strict=True):
        figures.save_image(path, picture)
        if events is not None:
            events.image(step, f"val/{path.stem}", picture)
            events.flush()


def _show_confusion(trainer: Trainer, scores: Scores) -> None:
    """Draw the confusion matrix of an evaluation, as a file and for TensorBoard."""
    picture = figures.confusion_image(scores.confusion.numpy(), scores.classes)
    figures.save_image(trainer.keeper.folder.confusion, picture)
    if trainer.monitor.events is not None:
        trainer.monitor.events.image(trainer.progress.step, "val/confusion", picture)
        trainer.monitor.events.flush()


def conclude(console: Console, folder: RunFolder, best: Mapping[str, Any], seconds: float) -> None:
    """Say what came out, and where it lies."""
    say(
        console,
        f"best: val {headline(best)} ({best['weights']} weights) at epoch {best['epoch']}, {best['count']} images; "
        f"in {duration(seconds)}",
    )
    say(console, f"curves: {folder.results}, or tensorboard --logdir {folder.path}")
    say(console, f"run: {folder.path}")
