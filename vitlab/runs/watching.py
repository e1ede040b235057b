"""What TensorBoard shows of a run besides its curves: mistakes, maps of fixed images, spreads, features.

All of it is a function of the weights and the images, so that a resumed run shows what an unbroken one would have.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import cv2
import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray

from vitlab.config import RunConfig
from vitlab.data.datasets import Dataset, Split
from vitlab.data.loader import Batch, Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.engine import figures
from vitlab.engine.evaluator import Scores
from vitlab.engine.objectives import Objective
from vitlab.engine.tensorboard import EventLog, write_embeddings
from vitlab.engine.trainer import Trainer
from vitlab.errors import InputError
from vitlab.inference.attribution import explain_map
from vitlab.inference.overlays import overlay
from vitlab.models.network import Network
from vitlab.text import printable

_MISTAKES, _FIXED, _EMBEDDED = 16, 6, 1000
_EMBEDDED_AT_ONCE = 64
_MAP_SIDE, _DOT_SIDE = 128, 48
_CLASSES_WITH_CURVES = 20
_CURVE_VALUES = 2**22
"""Probabilities that the curve of all classes is made of, at most: every m-th image takes part then."""


def curve_groups(config: RunConfig) -> dict[str, dict[str, tuple[str, ...]]]:
    """Give the charts of the CUSTOM SCALARS tab in groups, of each chart the tags of the curves in it."""
    scores: dict[str, tuple[str, ...]] = {"loss": ("train/loss", "val/loss", "val_ema/loss")}
    if config.objective.classifies:
        names = {"top-1": "top1", "calibration error": "ece", "Brier score": "brier"}
        scores |= {title: (f"val/{key}", f"val_ema/{key}") for title, key in names.items()}
    if config.objective.name != "classification":
        scores["bits per pixel"] = ("val/bits_per_pixel", "val_ema/bits_per_pixel")
    return {
        "scores": scores,
        "optimization": {"learning rate": ("train/lr",), "gradient norm": ("train/grad_norm",)},
        "speed": {"images per second": ("train/images_per_s",), "share of waiting for images": ("train/data_wait",)},
    }


def show_best(trainer: Trainer, config: RunConfig, dataset: Dataset, scores: Scores) -> None:
    """Show what weights are worth that are the best so far: their worst mistakes, precision and recall, features."""
    events, step = trainer.monitor.events, trainer.progress.step
    if events is None:
        return
    split, preprocess = dataset.splits["val"], trainer.data.preprocess
    worst = scores.images.at(scores.images.worst_mistakes(_MISTAKES))
    batch = read_rows(split, preprocess, worst.index)
    if len(batch.labels):
        captions = [
            f"{scores.classes[worst.label[i]]}, not {scores.classes[worst.predicted[i]]} {worst.confidence[i]:.0%}"
            for i in batch.indices.tolist()
        ]
        picture = figures.image_grid(batch.images.contiguous().numpy(), captions)
        events.image(step, "val/mistakes", picture, is_photo=True)
    _show_precision(events, step, scores)
    if config.monitor.embeddings and not trainer.wrapped.is_sharded:
        _show_features(trainer, split, scores)
    events.flush()


def show_network(trainer: Trainer, config: RunConfig, dataset: Dataset) -> None:
    """Show what the weights as they stand look at in a few fixed images, and how they are spread."""
    events, step = trainer.monitor.events, trainer.progress.step
    if events is None or trainer.wrapped.is_sharded:
        return
    if config.objective.classifies:
        split, preprocess = dataset.splits["val"], trainer.data.preprocess
        batch = read_rows(split, preprocess, spread_rows(split, _FIXED))
        with _at_rest(trainer, trainer.objective):
            maps = _maps(trainer.objective.network, preprocess, batch, trainer.device)
        if maps:
            names = [trainer.data.classes[label] for label in batch.labels.tolist()]
            events.image(step, "val/attention", _pairs(batch, maps, names), is_photo=True)
    if config.monitor.histograms:
        for name, parameter in trainer.objective.network.named_parameters():
            events.histogram(step, f"weights/{name}", _plain(parameter))
    events.flush()


def watch_gradients(trainer: Trainer, events: EventLog) -> None:
    """From now on show how the gradients are spread that the optimizer gets at the last step of each epoch."""
    if trainer.wrapped.is_sharded:
        return

    def show(*_: Any) -> None:
        progress = trainer.progress
        done = progress.batch + trainer.config.accumulate
        if done < len(trainer.data.train) and progress.step + 1 < trainer.total_steps:
            return
        for name, parameter in trainer.objective.network.named_parameters():
            if parameter.grad is not None:
                events.histogram(progress.step + 1, f"gradients/{name}", _plain(parameter.grad))

    trainer.optimizer.register_step_pre_hook(show)


def spread_rows(split: Split, count: int) -> NDArray[np.int64]:
    """Choose so many rows of a split, or all, evenly from the first to the last."""
    return np.linspace(0, len(split) - 1, min(len(split), count)).astype(np.int64)


def read_rows(split: Split, preprocess: Preprocess, rows: NDArray[np.int64]) -> Batch:
    """Read some images of a split as evaluation sees them, without those that cannot be read.

    Returns:
        Indices count from the first of `rows`.
    """
    if not len(rows):
        return Batch(torch.empty(0), torch.empty(0), torch.empty(0))
    some = split.subset(split.name, rows)
    with closing(Loader(some, EvalTransform(preprocess), batch_size=len(rows), workers=0, on_error="skip")) as loader:
        return next(iter(loader.epoch(0)))


@contextmanager
def _at_rest(trainer: Trainer, objective: Objective) -> Iterator[None]:
    """Have a network as evaluation has it: without dropout, and not compiled once more."""
    was_training = objective.training
    objective.eval()
    try:
        with torch.compiler.set_stance("force_eager") if trainer.config.compile else nullcontext():
            yield
    finally:
        objective.train(was_training)


def _maps(
    network: Network, preprocess: Preprocess, batch: Batch, device: torch.device
) -> list[NDArray[np.float32]] | None:
    """Map what speaks for the true class, image by image; None where the network or the memory has no room for it."""
    maps: list[NDArray[np.float32]] = []
    try:
        # One at a time: the attention weights of several take much memory.
        for image, label in zip(batch.images, batch.labels, strict=True):
            inputs = preprocess.normalize(image[None].to(device))
            maps.append(explain_map(network, inputs, label[None]).cpu().numpy()[0])
    except (InputError, torch.OutOfMemoryError):
        return None
    return maps


def _pairs(batch: Batch, maps: Sequence[NDArray[np.float32]], names: Sequence[str]) -> figures.Picture:
    """Lay out each image beside its map."""
    tiles = []
    for image, values in zip(_as_rows(batch), maps, strict=True):
        tiles += [_resized(image, _MAP_SIDE), _resized(overlay(image, values), _MAP_SIDE)]
    captions = [caption for name in names for caption in (name, "")]
    grid = np.ascontiguousarray(rearrange(np.stack(tiles), "b h w c -> b c h w"))
    return figures.image_grid(grid, captions, columns=4)


def _show_precision(events: EventLog, step: int, scores: Scores) -> None:
    """Show precision and recall of all decisions together, and of each class where there are few."""
    logits, labels = scores.logits.tensors()
    finite = logits.isfinite().all(dim=1)
    if not finite.any():
        return
    K = len(scores.classes)
    shares = logits[finite].double().softmax(dim=1).numpy()
    truth = labels[finite].numpy()[:, None] == np.arange(K)
    every = max(1, shares.size // _CURVE_VALUES)
    events.precision_recall(step, "val/pr", truth[::every].reshape(-1), shares[::every].reshape(-1))
    for label, name in enumerate(scores.classes if K <= _CLASSES_WITH_CURVES else ()):
        events.precision_recall(step, f"val/pr/{printable(name)}", truth[:, label], shares[:, label])


@torch.inference_mode()
def _show_features(trainer: Trainer, split: Split, scores: Scores) -> None:
    """Put the features that the classifier gets of some images into the projector's files."""
    objective = trainer.averaged if scores.weights == "ema" else trainer.objective
    assert objective is not None, "scores of a moving average that is not kept"
    network, preprocess = objective.network, trainer.data.preprocess
    vectors, names, dots = list[NDArray[np.float32]](), list[tuple[str, str]](), list[figures.Picture]()
    rows = spread_rows(split, _EMBEDDED)
    with _at_rest(trainer, objective):
        for some in np.array_split(rows, math.ceil(len(rows) / _EMBEDDED_AT_ONCE)):
            batch = read_rows(split, preprocess, some)
            if not len(batch.labels):
                continue
            features = network.forward_features(preprocess.normalize(batch.images.to(trainer.device)))
            vectors.append(_plain(network.forward_head(features, pre_logits=True)))
            pairs = zip(batch.labels.tolist(), batch.indices.tolist(), strict=True)
            names += [(scores.classes[label], split.paths[some[index]]) for label, index in pairs]
            dots += [_resized(image, _DOT_SIDE) for image in _as_rows(batch)]
    if vectors:
        folder = trainer.keeper.folder.tensorboard
        write_embeddings(folder, np.concatenate(vectors), names, np.stack(dots))


def _as_rows(batch: Batch) -> figures.Picture:
    """Give the images as uint8 (B, H, W, C)."""
    return rearrange(batch.images, "b c h w -> b h w c").contiguous().numpy()


def _resized(image: figures.Picture, side: int) -> figures.Picture:
    """Give an image (H, W, C) as RGB whose longer side has so many pixels."""
    H, W, _ = image.shape
    scale = side / max(H, W)
    size = max(1, round(W * scale)), max(1, round(H * scale))
    rgb = np.ascontiguousarray(np.broadcast_to(image, (H, W, 3)))
    resized: figures.Picture = cv2.resize(rgb, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST)
    return resized


def _plain(tensor: torch.Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return values
