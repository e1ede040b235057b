"""From a configuration to the parts of a run: network, data, trainer."""

import copy
import dataclasses
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from vitlab.checks import require
from vitlab.config import DataConfig, RunConfig, TrainConfig, WeightsKind
from vitlab.data.augment import Mixer, TrainTransform
from vitlab.data.cache import Prepare, cached, unchanged
from vitlab.data.datasets import Dataset, Split, fingerprint
from vitlab.data.loader import Loader, Transform
from vitlab.data.palette import fit_palette, palette_quality, uniform_palette
from vitlab.data.palette_file import read_palette
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.data.sample import read_sample, spread
from vitlab.engine.compilation import compile_blocks
from vitlab.engine.device import autocast_dtype
from vitlab.engine.distributed import ALONE, Processes, shard
from vitlab.engine.keeper import Keeper
from vitlab.engine.monitor import Monitor
from vitlab.engine.objectives import build_objective
from vitlab.engine.optim import build_optimizer, build_schedule, freeze
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.trainer import Trainer, TrainingData, count_steps
from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.files import save_model
from vitlab.models.network import Network, PixelNetwork, device_of
from vitlab.models.single_pixels import strides_over_single_pixels
from vitlab.models.sources import read_record
from vitlab.models.weights import load_weights
from vitlab.seeds import derive_seed
from vitlab.text import progress_bar, say

_DEFAULT_NETWORK = "vit_tiny"
_PALETTE_IMAGES = 5000
_PALETTE_MEASURED = 500
# Fields of every network's config that the run's configuration names elsewhere.
_OWN_OPTIONS = {
    "name": "model.name",
    "image_size": "model.image_size",
    "num_classes": "model.num_classes",
    "in_channels": "data.channels",
}


def settle_model(config: RunConfig) -> RunConfig:
    """Name the network, and take from a model file in `model.weights` all fields that the configuration leaves open.

    Only a file of the named network, or of any where none is named, says how it was built. One that cannot be read
    says nothing where a network is named: a run that goes on from its own `config.yaml` does not need it.

    Raises:
        InputError: no network is named, and the weights cannot be read.
    """
    model, record = config.model, None
    if model.weights is not None:
        try:
            record = read_record(model.weights)
        except InputError as error:
            if model.name is None:
                own = None if config.train.run_dir is None else Path(config.train.run_dir) / "config.yaml"
                began = own is not None and own.exists()
                hint = f"; the run that began from it goes on with --config {own}" if began else ""
                raise InputError(f"{error}{hint}") from None
    file = {} if record is None else record["model"]
    name = model.name or file.get("name", _DEFAULT_NETWORK)
    settled = dataclasses.replace(model, name=name)
    if name == file.get("name"):
        fields = dict(file["config"])
        size = fields.pop("image_size")
        fields = {key: value for key, value in fields.items() if key not in _OWN_OPTIONS}
        settled = dataclasses.replace(
            settled, image_size=model.image_size or tuple(size), overrides=fields | dict(model.overrides)
        )
    return dataclasses.replace(config, model=settled)


def build_network(
    config: RunConfig, dataset: Dataset, console: Console, *, fresh: bool
) -> tuple[Network, Mapping[str, Any]]:
    """Build the network; a run that is not fresh takes its weights from a state, and reads no others.

    Returns:
        The network, and what the weights that it starts from state of their preprocessing.
    """
    K = len(dataset.classes)
    if K < 2:
        raise InputError(f"{config.data.root} has only one class, {dataset.classes[0]}: there is nothing to tell apart")
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
        config.model.name or _DEFAULT_NETWORK,
        num_classes=K,
        image_size=config.model.image_size or dataset.native_size,
        in_channels=config.data.channels,
        **config.model.overrides,
    )
    stated: Mapping[str, Any] = {}
    palette_came = False
    if fresh and config.model.weights is not None:
        report = load_weights(network, config.model.weights)
        stated = report.preprocess
        palette_came = "palette" in report.loaded
        say(console, report.summary())
    if not isinstance(network, PixelNetwork):
        require(
            config.model.palette == "auto",
            f"model.palette is for an ImageGPT, and model.name is {network.name}: leave it out",
        )
    elif fresh and not (config.model.palette == "auto" and palette_came):
        require(
            config.model.weights is None or config.model.palette != "auto",
            f"the weights {config.model.weights} hold no palette: give --model.palette FILE.npy, the one that they "
            "were trained with",
        )
        network.set_palette(_find_palette(config, dataset, network, stated, console))
    _check_batches(config, network, len(dataset.splits["train"]))
    freeze(network, config.model.freeze)
    if config.train.grad_checkpointing:
        network.set_grad_checkpointing()
    return network, stated


def _find_palette(
    config: RunConfig, dataset: Dataset, network: Network, stated: Mapping[str, Any], console: Console
) -> Tensor:
    """Read the colours that the configuration names, or fit them to training images."""
    V = network.config_dict()["num_colors"]
    if config.model.palette == "uniform":
        return uniform_palette(V, network.in_channels)
    if config.model.palette != "auto":
        palette, note = read_palette(Path(config.model.palette))
        say(console, f"palette: {config.model.palette}" + (f" ({note})" if note else ""))
        return palette
    with progress_bar(console) as progress:
        task = progress.add_task("reading images for the palette", total=None)
        images, _ = read_sample(
            dataset.splits["train"],
            build_preprocess(config.data, network, stated),
            max_images=_PALETTE_IMAGES,
            seed=config.train.seed,
            workers=config.data.workers,
            on_error=config.data.on_error,
            on_images=lambda done, total: progress.update(task, completed=done, total=total),
        )
    palette = fit_palette(images, V, seed=config.train.seed)
    quality = palette_quality(spread(images, _PALETTE_MEASURED), palette)
    say(console, f"palette fitted to training images: {quality.describe()}")
    return palette


def _check_batches(config: RunConfig, network: Network, num_images: int) -> None:
    """Raise InputError where a batch of one image would meet a norm over the batch, which has no variance there."""
    batch_size = config.train.batch_size
    if num_images % batch_size == 1 or batch_size == 1:
        norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if norms:
            better = next(size for size in count(batch_size + 1) if num_images % size != 1)
            raise InputError(
                f"train.batch_size {batch_size} leaves a batch of one of {num_images} training images, and "
                f"{config.model.name} normalises over batches: give {better}"
            )


def build_preprocess(config: DataConfig, network: Network, stated: Mapping[str, Any]) -> Preprocess:
    """Settle how images become tensors: as configured, else as the weights state it, else as Preprocess has it."""
    grey = {"mean": (0.5,), "std": (0.25,)} if config.channels == 1 else {}
    # Statistics of RGB say nothing of grey images, nor the other way round.
    fitting = {name: v for name, v in stated.items() if name not in ("mean", "std") or len(v) == config.channels}
    given = {name: getattr(config, name) for name in ("resize_mode", "crop_fraction", "interpolation", "mean", "std")}
    settled = grey | fitting | {name: value for name, value in given.items() if value is not None}
    settled = {name: tuple(value) if isinstance(value, list) else value for name, value in settled.items()}
    if network.pixel_statistics is not None:
        for name, needed in zip(("mean", "std"), network.pixel_statistics, strict=True):
            values = (needed,) * config.channels
            if given[name] not in (None, values):
                raise InputError(f"{network.name} reads colours with data.{name} {needed:g}: leave the field out")
            settled[name] = values
    return Preprocess(image_size=network.image_size, channels=config.channels, **settled)


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
        # What one process has written to the disk the others find there.
        for turn in (True, False) if data.cache == "disk" else (processes.is_main,):
            if turn == processes.is_main:
                train_split = _cached(data, train_split, transform.shrink_for_cache, training, console)
                val_split = _cached(data, val_split, preprocess.apply, {"use": "evaluation", **record}, console)
            processes.gather_numbers(0)
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
        "fingerprint": fingerprint(dataset),
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
        _check_parallel(config)
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


def _check_parallel(config: RunConfig) -> None:
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
