"""From a configuration to the network of a run, with the weights and the colours that it starts from."""

import dataclasses
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from vitlab.checks import require
from vitlab.config import DataConfig, RunConfig
from vitlab.data.datasets import Dataset
from vitlab.data.palette import fit_palette, palette_quality, uniform_palette
from vitlab.data.palette_file import read_palette
from vitlab.data.preprocess import Preprocess
from vitlab.data.sample import read_sample, spread
from vitlab.engine.optim import freeze
from vitlab.engine.parallel import batch_norms
from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.network import Network, PixelNetwork
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
    if (num_images % batch_size == 1 or batch_size == 1) and batch_norms(network):
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
