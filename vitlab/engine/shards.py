"""Resume states of a sharded run: every process writes its own share, and any number of processes reads them.

RUN/resume/step-N holds safetensors files in the layout of torch.distributed.checkpoint, one from each process, and
`state.json` as any other state, which names the SHA-256 of them all. What a run of one process saved is read alike, and
the other way round.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vitlab.engine.distributed import Processes
from vitlab.engine.objectives import Objective
from vitlab.engine.parallel import is_sharded
from vitlab.engine.state import begin_state, capture, digest_of, finish_state, naming_unwritten, read_record
from vitlab.errors import InputError, RunError


def save_shards(path: Path, tensors: dict[str, Tensor], record: dict[str, Any], processes: Processes) -> None:
    """Write a state as the folder `path`, each process its share; every process has to call, with the same path.

    Raises:
        RunError: it cannot be written; the states before it are whole.
    """
    aside = path.with_name(f".new-{path.name}")

    def begin() -> None:
        with naming_unwritten(path):
            begin_state(path, aside)

    def finish() -> None:
        with naming_unwritten(path):
            shards = {file.name: digest_of(file) for file in sorted(aside.glob("*.safetensors"))}
            finish_state(path, aside, {"shards": shards}, record)

    processes.on_main(begin)
    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True))
    except Exception as error:  # whatever a process met, torch raises as one error of its own on all of them
        raise RunError(f"cannot write the state {path}: {error}; the states before it are whole") from error
    processes.on_main(finish)


def load_shards(
    path: Path,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    processes: Processes,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what this process holds of a state, sharded as its parameters are; every process has to call.

    Raises:
        InputError: the state is incomplete or damaged.
    """
    record = processes.on_main(lambda: read_record(path))
    own, _ = capture(objective, optimizer, scaler, progress=None)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {name: _room(name, entry, own, parameters) for name, entry in _stored(path).items()}
    try:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    except Exception as error:  # see above
        raise InputError(f"state {path} is incomplete or damaged: {error}") from error
    return tensors, record


def load_whole(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a state that several processes wrote, whole, in one process."""
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in _stored(path).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return tensors


def _stored(path: Path) -> dict[str, TensorStorageMetadata]:
    """Give size and dtype of each tensor of a state."""
    entries = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _room(name: str, stored: TensorStorageMetadata, own: Mapping[str, Tensor], parameters: list[Tensor]) -> Tensor:
    """Make the tensor that a stored one is read into: sharded as the parameter that it is, or is about."""
    like = own.get(name)
    if like is None and (number := name.removeprefix("optimizer.state.").partition(".")[0]).isdigit():
        like = parameters[int(number)] if int(number) < len(parameters) else None
    if like is not None and is_sharded(like) and like.shape == stored.size:
        return torch.empty_like(like, dtype=stored.properties.dtype)
    return torch.empty(stored.size, dtype=stored.properties.dtype)
