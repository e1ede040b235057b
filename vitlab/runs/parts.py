"""From a configuration and a network to the other parts of a run: data and trainer."""

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from torch import Tensor

from vitlab.checks import require
from vitlab.config import DataConfig, RunConfig, TrainConfig, WeightsKind
from vitlab.data.augment import Mixer, TrainTransform
from vitlab.data.cache import Prepare, cached, unchanged
from vitlab.data.datasets import Dataset, Split, fingerprint
from vitlab.data.loader import Loader, Transform
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.engine.compilation import compile_blocks
from vitlab.engine.device import autocast_dtype
from vitlab.engine.distributed import ALONE, Processes
from vitlab.engine.keeper import Keeper
from vitlab.engine.monitor import Monitor
from vitlab.engine.objectives import build_objective
from vitlab.engine.optim import build_optimizer, build_schedule, require_shardable
from vitlab.engine.parallel import batch_norms, shard
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.trainer import Trainer, TrainingData, count_steps
from vitlab.models.files import save_model
from vitlab.models.network import Network, device_of
from vitlab.models.single_pixels import strides_over_single_pixels
from vitlab.text import progress_bar, say


def build_data(
    config: RunConfig, dataset: Dataset, preprocess: Preprocess, console: Console, processes: Processes = ALONE
) -> TrainingData:
    """Build the loaders and what goes with them; fill the cache where the run keeps one."""
    data, batch_size = config.data, config.train.batch_size
    transform = TrainTransform(config.augment, preprocess)
    train_split, val_split = dataset.splits["train"], dataset.splits["val"]
    train_transform: Transform = transform
    val_transform: Transform = EvalTransform(preprocess)
    if data.cache != "none":
        record = preprocess.to_dict()
        scale = config.augment.crop_min_scale
        training = {"use": "train", "crop": transform.crop, "crop_min_scale": scale, **record}

        def fill() -> tuple[Split, Split]:
            return (
                _cached(data, train_split, transform.shrink_for_cache, training, console),
                _cached(data, val_split, preprocess.apply, {"use": "evaluation", **record}, console),
            )

        train_split, val_split = processes.main_first(fill) if data.cache == "disk" else fill()
        train_transform, val_transform = transform.change, unchanged
    train = Loader(
        train_split,
        train_transform,
        batch_size=batch_size,
        seed=config.train.seed,
        workers=data.workers,
        shuffle=True,
        repeats=config.augment.repeats,
        balanced=data.sampling == "balanced",
        on_error=data.on_error,
        part=processes.part,
    )
    val = Loader(
        val_split,
        val_transform,
        batch_size=batch_size,
        workers=data.workers,
        on_error=data.on_error,
        part=processes.part,
    )
    return TrainingData(
        train=train,
        val=val,
        classes=dataset.classes,
        preprocess=preprocess,
        mixer=Mixer(config.augment, len(dataset.classes)),
        unmixed_epochs=config.augment.unmixed_epochs,
    )


def _cached(
    config: DataConfig, split: Split, prepare: Prepare, preparation: Mapping[str, Any], console: Console
) -> Split:
    assert config.cache != "none"
    with progress_bar(console) as progress:
        task = progress.add_task(f"caching {split.name}", total=len(split))
        return cached(
            split,
            prepare,
            preparation=preparation,
            mode=config.cache,
            folder=None if config.cache_dir is None else Path(config.cache_dir).expanduser(),
            workers=config.workers,
            say=lambda line: say(console, line),
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def build_trainer(
    config: RunConfig,
    dataset: Dataset,
    network: Network,
    data: TrainingData,
    folder: RunFolder,
    console: Console,
    processes: Processes = ALONE,
) -> Trainer:
    """Put objective, optimizer, schedule, keeper and monitor together around a network."""
    origin = {
        "name": Path(config.data.root).name,
        "val_fraction": config.data.val_fraction,
        "seed": config.data.val_seed,
        "fingerprint": fingerprint(dataset, contents=config.data.hash_contents),
    }

    def save(
        path: Path,
        network: Network,
        *,
        state: Mapping[str, Tensor],
        metrics: dict[str, Any],
        weights: WeightsKind,
        temperature: float,
    ) -> None:
        save_model(
            path,
            network,
            state=state,
            classes=data.classes,
            preprocess=data.preprocess,
            metrics=metrics,
            weights=weights,
            temperature=temperature,
            objective=dataclasses.asdict(config.objective),
            data=origin,
        )

    keeper = Keeper(
        folder,
        run={
            "config": config.to_dict(),
            "data": origin["fingerprint"],
            "preprocess": data.preprocess.to_dict(),
        },
        save_model=save,
        every_steps=config.train.checkpoint_every_steps,
        every_minutes=config.train.checkpoint_every_minutes,
        keep_states=config.train.keep_states,
    )
    monitor = Monitor(
        folder.metrics if processes.is_main else Path(os.devnull),
        log_every_steps=config.monitor.log_every_steps,
        total_epochs=None if config.train.steps else config.train.epochs,
        console=console,
        classifies=config.objective.classifies,
    )
    train_config = _safe_precision(config.train, network, console)
    class_counts = np.bincount(dataset.splits["train"].labels, minlength=len(data.classes)).tolist()
    objective = build_objective(config.objective, network, class_counts=class_counts)
    require(
        any(parameter.requires_grad for parameter in network.parameters()),
        f"model.freeze {config.model.freeze} leaves nothing to train for {config.objective.name}: free some blocks",
    )
    if processes.count > 1:
        _check_parallel(config, network, processes)
        processes.same_start(objective)
        if config.train.parallel == "fsdp":  # before the optimizer, which is to hold the shards
            shard(objective, network, device_of(network))
    trainer = Trainer(
        objective,
        build_optimizer(config.optim, network),
        build_schedule(config.optim, count_steps(config.train, len(data.train))),
        data=data,
        config=train_config,
        clip_grad=config.optim.clip_grad,
        keeper=keeper,
        monitor=monitor,
        processes=processes,
    )
    if config.train.compile:  # after the parameter groups and the averaged copy, whose names it must not touch
        compile_blocks(network)
    return trainer


def _check_parallel(config: RunConfig, network: Network, processes: Processes) -> None:
    """Raise InputError where several processes cannot do what is asked."""
    require(
        not config.train.find_lr, "train.find_lr tries rates in one process: leave it out, or start without torchrun"
    )
    sharded = config.train.parallel == "fsdp"
    require(
        not sharded or config.train.ema_decay is None,
        f"train.ema_decay {config.train.ema_decay} needs the whole network on each process, and train.parallel fsdp "
        "shards it: leave one of them out",
    )
    batch_size, needed = config.train.batch_size, 2 * processes.count
    require(
        batch_size >= needed or not batch_norms(network),
        f"train.batch_size {batch_size} gives some of {processes.count} processes one image or none, and "
        f"{config.model.name} normalises over batches: give {needed} or more",
    )
    if sharded:
        require_shardable(config.optim)


def _safe_precision(config: TrainConfig, network: Network, console: Console) -> TrainConfig:
    """Take float32 in place of bf16 where torch's gradients would be wrong."""
    device = device_of(network)
    if device.type != "cpu" or autocast_dtype(config.precision, device) is None:
        return config
    if not (layers := strides_over_single_pixels(network)):
        return config
    reason = f"torch's bf16 gradients of {layers[0]}, which sees a single pixel, are wrong on a CPU"
    require(config.precision == "auto", f"{reason}: give --train.precision fp32, or larger images")
    say(console, f"precision: fp32, since {reason}")
    return dataclasses.replace(config, precision="fp32")


def build_trial(config: RunConfig, trainer: Trainer, monitor: Monitor) -> Trainer:
    """Copy a trainer that stands at its start, so that what the copy learns leaves the original alone."""
    objective = copy.deepcopy(trainer.objective)
    return Trainer(
        objective,
        build_optimizer(config.optim, objective.network),
        trainer.schedule,
        data=trainer.data,
        config=dataclasses.replace(trainer.config, ema_decay=None),
        clip_grad=config.optim.clip_grad,
        keeper=trainer.keeper,
        monitor=monitor,
    )
