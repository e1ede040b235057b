"""The model file: weights and all that is needed to use them, in one safetensors file that never runs code.

The record lies in the file's metadata under the key `vitlab`, a JSON object with `format`, `model` (name, config),
`classes`, `preprocess`, `metrics`, `weights`, `data`, `temperature`, `objective`, `version` and `sha256`: the hash of
the whole file with its own digits as zeros, because a flipped bit in a safetensors file would otherwise load without a
word. Files of earlier versions lack `temperature`, which is then 1, and `objective`, which is then classification;
those versions read newer files and pass over them.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from vitlab import __version__
from vitlab.checks import require
from vitlab.data.preprocess import Preprocess
from vitlab.disk import replacing
from vitlab.errors import InputError, RunError
from vitlab.models.catalog import create_model, list_models
from vitlab.models.network import Network
from vitlab.models.record import RECORD_KEY
from vitlab.models.safetensors_file import (
    FORMAT,
    HEADER_LIMIT_BYTES,
    NO_DIGITS,
    SafetensorsFile,
    damaged,
    read_safetensors,
)
from vitlab.models.size_limits import at_most_tensors
from vitlab.models.timm_network import PREFIX
from vitlab.sections import PIXELS_ALONE

PICKLED_SUFFIXES = (".pth", ".pt", ".bin")
"""Of files of torch, which hold weights alone."""
BUFFER_LIMIT_BYTES = 2**30
"""What a network may compute beside its weights, such as masks of windows, without a file as large."""


@dataclass(frozen=True)
class ModelFile:
    """What a model file holds."""

    network: Network
    """In evaluation mode."""
    classes: tuple[str, ...]
    """Class names in the order of the logits."""
    preprocess: Preprocess
    metrics: dict[str, Any]
    """Scores of these weights, as fractions."""
    weights: Literal["raw", "ema"]
    """Whether these are the trained weights or their moving average."""
    data: dict[str, Any]
    """Fingerprint of the training data."""
    version: str
    """Version of vitlab that wrote the file."""
    temperature: float = 1.0
    """What the logits are divided by before the softmax, so that probabilities are as sure as validation warrants."""
    objective: dict[str, Any] = field(default_factory=dict)
    """What the weights were trained for: the run's `objective` section; empty where the file does not say."""

    @property
    def classifies(self) -> bool:
        """Whether the class logits were trained."""
        return self.objective.get("name") not in PIXELS_ALONE

    def require_classes(self, path: str | os.PathLike[str]) -> None:
        """Raise where the class logits were never trained.

        Raises:
            InputError: the weights were trained for pixels alone.
        """
        name = self.objective.get("name")
        require(
            self.classifies,
            f"{path} was trained for {name} and knows no classes: train from it with --model.weights {path} and "
            "--objective.name joint, or look at its features with vitlab probe",
        )


def checkpoint_path(path: str | Path) -> Path:
    """Find the file that a path means: the file itself, or the `best.safetensors` of a run folder.

    Raises:
        InputError: there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        best = path / "best.safetensors"
        if not best.is_file():
            if seeds := sorted(path.parent.name for path in path.glob("seed-*/best.safetensors")):
                raise InputError(f"{path} holds runs of several seeds: give one of them, such as {path / seeds[0]}")
            raise InputError(
                f"{path} holds no best.safetensors: give a model file, or the folder of a run that saved one"
            )
        return best
    if not path.is_file():
        raise InputError(f"no such file or run folder: {path}")
    return path


def save_model(
    path: str | Path,
    network: Network,
    *,
    state: Mapping[str, Tensor] | None = None,
    classes: Sequence[str],
    preprocess: Preprocess,
    metrics: Mapping[str, Any],
    weights: Literal["raw", "ema"] = "raw",
    data: Mapping[str, Any],
    temperature: float = 1.0,
    objective: Mapping[str, Any] | None = None,
) -> None:
    """Write a model file; at every moment `path` is the old file or the new one, whole.

    Args:
        path: the file, in a folder that exists.
        network: its weights and config are saved.
        state: its weights, whole, where it holds a share of them alone.
        classes: names in the order of the logits.
        preprocess: how images become the network's input.
        metrics: scores of these weights, plain JSON values.
        weights: whether the network holds the trained weights or their moving average.
        data: fingerprint of the training data, plain JSON values.
        temperature: what the logits are divided by before the softmax, above 0; it is not in the weights.
        objective: what the weights were trained for, the fields of an ObjectiveConfig.

    Raises:
        RunError: the file cannot be written, or a weight is not finite; what was at `path` is still there.
    """
    path = Path(path)
    assert len(classes) == network.num_classes, f"{len(classes)} class names for {network.num_classes} logits"
    assert 0 < temperature < math.inf, f"temperature {temperature}"
    tensors = _plain_tensors(network.state_dict() if state is None else state, path)
    record = {
        "format": FORMAT,
        "model": {"name": network.name, "config": network.config_dict()},
        "classes": list(classes),
        "preprocess": preprocess.to_dict(),
        "metrics": dict(metrics),
        "weights": weights,
        "data": dict(data),
        "temperature": temperature,
        "objective": dict(objective or {}),
        "version": __version__,
        "sha256": NO_DIGITS,  # last, so that these digits are the header's last row of zeros
    }
    try:
        with replacing(path) as aside:
            safetensors.torch.save_file(tensors, aside, metadata={RECORD_KEY: _to_json(record)})
            _write_hash(aside, path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"cannot write {path}: {reason}; an earlier file stays as it was") from error


def load_model(path: str | Path, *, device: str | torch.device = "cpu") -> ModelFile:
    """Read a model file, or the best one of a run folder.

    Args:
        path: the file or folder.
        device: where the network goes, wherever it was trained.

    Raises:
        InputError: there is no such file, it is not a model file of vitlab, it is damaged, or a newer vitlab wrote it.
    """
    if not Path(path).exists() and (str(path).startswith(PREFIX) or str(path) in list_models()):
        raise InputError(
            f"{path} is a network's name, and a model file with trained weights is needed: vitlab train --model.name "
            f"{path} writes one"
        )
    place = checkpoint_path(path)
    is_foreign = place.suffix.lower() in (*PICKLED_SUFFIXES, ".npz")
    file = None if is_foreign else read_safetensors(place)
    if file is None or file.record is None:
        raise InputError(
            f"{place} is not a model file of vitlab, which knows classes and preprocessing: vitlab train "
            f"--model.weights {place} makes one from such weights"
        )
    record = file.record
    try:
        model = ModelFile(
            network=_build(file, record["model"]).to(device).eval(),
            classes=tuple(record["classes"]),
            preprocess=Preprocess.from_dict(record["preprocess"]),
            metrics=dict(record["metrics"]),
            weights=record["weights"],
            data=dict(record["data"]),
            version=record["version"],
            temperature=float(record.get("temperature", 1.0)),
            objective=dict(record.get("objective", {})),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise damaged(file.path, f"its record is not as it should be ({error})") from error
    if len(model.classes) != model.network.num_classes:
        raise damaged(file.path, f"it names {len(model.classes)} classes for {model.network.num_classes} logits")
    return model


def _build(file: SafetensorsFile, model: dict[str, Any]) -> Network:
    """Build the network that the record names, with the file's weights; compare shapes before any memory is taken."""
    try:
        with torch.device("meta"), at_most_tensors(4 * len(file.shapes) + 100):  # some are registered more than once
            skeleton = create_model(model["name"], **model["config"])
        weights = skeleton.state_dict()
    except Exception as error:  # in timm, strange values of a config raise nearly anything
        raise damaged(file.path, f"its config builds no network ({error})") from error
    if file.shapes != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
        raise damaged(file.path, "its weights do not fit its config")
    if (beside := sum(buffer.nbytes for buffer in skeleton.buffers())) > max(BUFFER_LIMIT_BYTES, len(file.content)):
        raise damaged(file.path, f"beside its weights, its config builds tables of {beside:,} bytes")
    tensors = file.tensors()
    for name, tensor in tensors.items():
        if tensor.dtype != weights[name].dtype or not tensor.isfinite().all():
            raise damaged(file.path, f"{name} holds {tensor.dtype} or values that are not finite")
    with torch.random.fork_rng(devices=[]):  # the fresh weights are overwritten: their draws must not shift a run's
        network = create_model(model["name"], **model["config"])
    network.load_state_dict(tensors)
    return network


def _plain_tensors(state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Copy the weights: safetensors takes no tensors that share memory or lie in channels-last order."""
    tensors = {}
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise RunError(
                f"{path} not written: {name} holds values that are not finite; an earlier file stays as it was"
            )
        tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return tensors


def _to_json(record: dict[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a class folder whose name is not UTF-8 holds surrogates, which JSON can only escape
        text = json.dumps(record, allow_nan=False)
    return text


def _write_hash(aside: Path, path: Path) -> None:
    """Put the hash of a file that will be `path` in the place of the zeros in its header."""
    with aside.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        if len(header) > HEADER_LIMIT_BYTES:
            raise RunError(f"{path} not written: its header would take {len(header):,} of {HEADER_LIMIT_BYTES:,} bytes")
        file.seek(0)
        digits = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(8 + header.rindex(NO_DIGITS.encode()))
        file.write(digits.encode())
