"""From a configuration to the parts of a run: network, data, trainer."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from vitlab.config import RunConfig, WeightsKind
from vitlab.data.augment import Mixer, TrainTransform
from vitlab.data.datasets import Dataset, fingerprint
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.engine.keeper import Keeper
from vitlab.engine.monitor import Monitor
from vitlab.engine.objectives import build_objective
from vitlab.engine.optim import build_optimizer, build_schedule, freeze
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.trainer import Trainer, TrainingData, count_steps
from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.files import save_model
from vitlab.models.network import Network
from vitlab.models.weights import load_weights
from vitlab.seeds import derive_seed
from vitlab.text import say

# Fields of every network's config that the run's configuration names elsewhere.
_OWN_OPTIONS = {
    "name": "model.name",
    "image_size": "model.image_size",
    "num_classes": "model.num_classes",
    "in_channels": "data.channels",
}


def build_network(config: RunConfig, dataset: Dataset, console: Console, *, fresh: bool) -> Network:
    """Build the network; a run that is not fresh takes its weights from a state, and reads no others."""
    K = len(dataset.classes)
    for field, option in _OWN_OPTIONS.items():
        if field in config.model.overrides:
            raise InputError(f"model.overrides.{field} has an option of its own: give {option}")
    if config.model.num_classes not in (None, K):
        raise InputError(
            f"model.num_classes is {config.model.num_classes}, and {config.data.root} has {K} classes "
            f"({', '.join(dataset.classes[:5])}{', ...' if K > 5 else ''}): leave it out or give {K}"
        )
    if odd := [key for key in config.model.overrides if not isinstance(key, str)]:
        raise InputError(f"model.overrides has the key {odd[0]!r}: give names of fields, such as depth")
    torch.manual_seed(derive_seed(config.train.seed, "weights"))
    network = create_model(
        config.model.name,
        num_classes=K,
        image_size=config.model.image_size or dataset.native_size,
        in_channels=config.data.channels,
        **config.model.overrides,
    )
    if fresh and config.model.weights is not None:
        say(console, load_weights(network, config.model.weights).summary())
    freeze(network, config.model.freeze)
    if config.train.grad_checkpointing:
        network.set_grad_checkpointing()
    return network


def build_data(config: RunConfig, dataset: Dataset, network: Network) -> TrainingData:
    """Build the loaders and what goes with them."""
    data, batch_size, seed = config.data, config.train.batch_size, config.train.seed
    grey = data.channels == 1
    preprocess = Preprocess(
        image_size=network.image_size,
        resize_mode=data.resize_mode,
        crop_fraction=data.crop_fraction,
        interpolation=data.interpolation,
        mean=data.mean or ((0.5,) if grey else Preprocess.mean),
        std=data.std or ((0.25,) if grey else Preprocess.std),
        channels=data.channels,
    )
    train = Loader(
        dataset.splits["train"],
        TrainTransform(config.augment, preprocess),
        batch_size=batch_size,
        seed=seed,
        workers=data.workers,
        shuffle=True,
        repeats=config.augment.repeats,
        balanced=data.sampling == "balanced",
        on_error=data.on_error,
    )
    val = Loader(
        dataset.splits["val"],
        EvalTransform(preprocess),
        batch_size=batch_size,
        workers=data.workers,
        on_error=data.on_error,
    )
    return TrainingData(
        train=train,
        val=val,
        classes=dataset.classes,
        preprocess=preprocess,
        mixer=Mixer(config.augment, len(dataset.classes)),
        unmixed_epochs=config.augment.unmixed_epochs,
    )


def build_trainer(
    config: RunConfig, dataset: Dataset, network: Network, data: TrainingData, folder: RunFolder, console: Console
) -> Trainer:
    """Put objective, optimizer, schedule, keeper and monitor together around a network."""
    origin = {
        "name": Path(config.data.root).name,
        "val_fraction": config.data.val_fraction,
        "seed": config.data.val_seed,
        "fingerprint": fingerprint(dataset),
    }

    def save(path: Path, network: Network, *, metrics: dict[str, Any], weights: WeightsKind) -> None:
        save_model(
            path,
            network,
            classes=data.classes,
            preprocess=data.preprocess,
            metrics=metrics,
            weights=weights,
            data=origin,
        )

    keeper = Keeper(
        folder,
        run={"config": config.to_dict(), "data": origin["fingerprint"]},
        save_model=save,
        every_steps=config.train.checkpoint_every_steps,
    )
    monitor = Monitor(
        folder.metrics,
        log_every_steps=config.monitor.log_every_steps,
        total_epochs=None if config.train.steps else config.train.epochs,
        console=console,
    )
    class_counts = np.bincount(dataset.splits["train"].labels, minlength=len(data.classes)).tolist()
    trainer = Trainer(
        build_objective(config.objective, network, class_counts=class_counts),
        build_optimizer(config.optim, network),
        build_schedule(config.optim, count_steps(config.train, len(data.train))),
        data=data,
        config=config.train,
        clip_grad=config.optim.clip_grad,
        keeper=keeper,
        monitor=monitor,
    )
    if config.train.compile:  # after the parameter groups and the averaged copy, whose names it must not touch
        compile_blocks(network)
    return trainer


def build_trial(config: RunConfig, trainer: Trainer, monitor: Monitor) -> Trainer:
    """Copy a trainer that stands at its start, so that what the copy learns leaves the original alone."""
    objective = copy.deepcopy(trainer.objective)
    return Trainer(
        objective,
        build_optimizer(config.optim, objective.network),
        trainer.schedule,
        data=trainer.data,
        config=config.train,
        clip_grad=config.optim.clip_grad,
        keeper=trainer.keeper,
        monitor=monitor,
    )


def compile_blocks(network: Network, *, find: Callable[[str], str | None] = shutil.which) -> None:
    """Compile each repeated block in place; alike ones share the code, so that this takes seconds and not minutes.

    Raises:
        InputError: the device is the processor and there is no C++ compiler.
    """
    if next(network.parameters()).device.type == "cpu" and not any(map(find, ("c++", "g++", "clang++"))):
        raise InputError("train.compile needs a C++ compiler on this device, and none is installed: leave it out")
    for block in network.repeated_blocks():
        block.compile()
