"""Weights from elsewhere, and from networks of another shape, into a network of ours.

Nothing in the network changes before everything has been found to fit.
"""

import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import InputError
from vitlab.layers.position import resample_positions
from vitlab.models.files import checkpoint_path, read_safetensors
from vitlab.models.network import Network

State = dict[str, Tensor]

_PICKLED_SUFFIXES = (".pth", ".pt", ".bin")
_NESTS = ("state_dict", "model")
_WRAPPERS = ("module.", "_orig_mod.")
# Counts its updates beside the averaged weights in a state of torch's AveragedModel.
_NOT_WEIGHTS = ("n_averaged",)


@dataclass(frozen=True)
class WeightsReport:
    """What became of each parameter of the network, and of each entry of the source."""

    loaded: tuple[str, ...]
    """Parameters that took the source's values as they are."""
    resized: tuple[str, ...]
    """Parameters that took them resampled to another grid."""
    reinitialised: tuple[str, ...]
    """Parameters of the head, fresh because the source knows other classes."""
    ignored: tuple[str, ...]
    """Entries of the source that are no weights, such as an optimizer's state beside them."""
    layout: str
    """Whose names the source used: `vitlab` of a model file, `timm` of any other with the names we share, ..."""

    def summary(self) -> str:
        """Tell it in one line."""
        parts = [f"{len(self.loaded)} parameters loaded from {self.layout} names"]
        parts += [
            f"{what} {', '.join(names)}"
            for what in ("resized", "reinitialised", "ignored")
            if (names := getattr(self, what))
        ]
        return "; ".join(parts)


def load_weights(model: Network, source: Mapping[str, Any] | str | Path) -> WeightsReport:
    """Load weights into a network by their names, whoever's they are.

    Wrappers' prefixes (`module.`, `_orig_mod.`) are dropped from the front of names. A position table of another grid
    is resampled. A head of another class count, or none, leaves the network with a fresh head. All else must match.

    Args:
        model: the network; changed in place.
        source: a state dict, bare or under `model` or `state_dict`; or a file: a model file of vitlab, a run folder,
            another .safetensors, or a .pth, .pt or .bin of torch, of which only plain tensors are read.

    Returns:
        What was done, by the network's parameter names.

    Raises:
        InputError: the file cannot be read or would run code, or names or shapes do not match (the message lists them).
    """
    found, config = (source, None) if isinstance(source, Mapping) else _read(source)
    entries, ignored = _unnest(found)
    state, layout = _convert(_strip_wrappers(entries))
    layout = "vitlab" if config else layout
    ignored += tuple(name for name in _NOT_WEIGHTS if state.pop(name, None) is not None)
    head = _head_names(model)
    own_state = model.state_dict()
    fresh_head = _other_classes(state, own_state, head)
    if fresh_head:
        state = {name: tensor for name, tensor in state.items() if name not in head}
    resized = _resample(state, own_state, _grid(model.config_dict()), source_grid=_grid(config or {}))
    expected = {name: tensor for name, tensor in own_state.items() if not (fresh_head and name in head)}
    _require_match(state, expected, layout)
    if fresh_head:
        model.reset_classifier(model.num_classes)
    model.load_state_dict(state, strict=False)
    return WeightsReport(
        loaded=tuple(name for name in expected if name not in resized),
        resized=resized,
        reinitialised=tuple(name for name in own_state if name in head) if fresh_head else (),
        ignored=ignored,
        layout=layout,
    )


def _read(source: str | Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Give a file's entries, and from a model file of vitlab the config of its network."""
    path = checkpoint_path(source)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        file = read_safetensors(path)
        return file.tensors(), file.record["model"]["config"] if file.record else None
    if suffix in _PICKLED_SUFFIXES:
        return _read_pickled(path), None
    raise InputError(f"{path} is no weights file: give a run folder, .safetensors, {', '.join(_PICKLED_SUFFIXES)}")


def _read_pickled(path: Path) -> Mapping[str, Any]:
    """Open a file of torch.save without running any code that it carries."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of odd pickle protocols: the error below says it better
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it wants to run {wanted[1]}" if wanted else "it is damaged, or holds more than tensors"
        raise InputError(
            f"{path} was not opened: {what}; where you trust it, save its plain state dict again, best as .safetensors"
        ) from error
    except Exception as error:  # damaged pickles make torch raise nearly anything
        raise InputError(f"{path} is damaged, or not a file of torch.save: take another copy") from error
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds a {type(content).__name__}: give a file with a state dict of named tensors")
    return content


def _unnest(entries: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Go down to the tensors, and name what lay beside them."""
    beside: tuple[str, ...] = ()
    while nest := next((name for name in _NESTS if isinstance(entries.get(name), Mapping)), None):
        beside += tuple(name for name in entries if name != nest)
        entries = entries[nest]
    others = [str(name) for name, value in entries.items() if not isinstance(value, Tensor)]
    if others or not entries:
        held = f"entries that are no tensors: {_listing(others)}" if others else "no tensors"
        raise InputError(f"the weights hold {held}; give a state dict, bare or under {' or '.join(_NESTS)}")
    return entries, beside


def _strip_wrappers(entries: Mapping[str, Tensor]) -> State:
    """Drop the prefixes of DataParallel, DistributedDataParallel and torch.compile, however they are nested."""
    stripped: State = {}
    for name, tensor in entries.items():
        bare = name
        while bare.startswith(_WRAPPERS):
            bare = bare.split(".", 1)[1]
        if bare in stripped:
            raise InputError(f"the weights hold {bare} twice, with and without a wrapper's prefix: keep one of them")
        stripped[bare] = tensor
    return stripped


_TORCHVISION_VIT = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"^(blocks\.\d+)\.ln_([12])\.", r"\1.norm\2."),
    (r"^(blocks\.\d+)\.self_attention\.in_proj_", r"\1.attn.qkv."),
    (r"^(blocks\.\d+)\.self_attention\.out_proj\.", r"\1.attn.proj."),
    (r"^(blocks\.\d+)\.mlp\.(?:0|linear_1)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.mlp\.(?:3|linear_2)\.", r"\1.mlp.fc2."),
)


def _from_torchvision_vit(state: State) -> State:
    """Rename torchvision's VisionTransformer; `linear_1` and `linear_2` are its own names of before 2022."""
    return {_rename(name, _TORCHVISION_VIT): tensor for name, tensor in state.items()}


def _rename(name: str, patterns: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


# Each foreign layout: its name, names of which all give it away, and the way to ours. timm's names are ours.
_LAYOUTS: tuple[tuple[str, frozenset[str], Callable[[State], State]], ...] = (
    ("torchvision", frozenset({"class_token", "conv_proj.weight"}), _from_torchvision_vit),
)


def _convert(state: State) -> tuple[State, str]:
    for layout, marks, convert in _LAYOUTS:
        if marks <= state.keys():
            return convert(state), layout
    return state, "timm"


def _head_names(model: Network) -> set[str]:
    head = model.get_classifier()
    prefix = next(name for name, module in model.named_modules() if module is head)
    return {f"{prefix}.{name}" for name in head.state_dict()}


def _other_classes(state: State, own_state: State, head: set[str]) -> bool:
    """Tell whether the source's head is absent, or differs from the network's in the number of classes alone."""
    if not head & state.keys():
        return True
    shapes = [(state[name].shape, own_state[name].shape) for name in head if name in state]
    return any(theirs != own for theirs, own in shapes) and all(theirs[1:] == own[1:] for theirs, own in shapes)


def _resample(
    state: State, own_state: State, grid: tuple[int, int] | None, *, source_grid: tuple[int, int] | None
) -> tuple[str, ...]:
    """Replace a position table of another grid in the state by one of the network's, and name it.

    A bare state dict does not tell its grid: one with as many rows is taken to have the same, another to be square.
    """
    table, own = state.get("pos_embed"), own_state.get("pos_embed")
    if table is None or own is None or grid is None or table.ndim != own.ndim or table.shape[-1] != own.shape[-1]:
        return ()
    num_prefix = own.shape[1] - math.prod(grid)
    num_patches = table.shape[1] - num_prefix
    if source_grid is None:
        side = math.isqrt(max(num_patches, 0))
        source_grid = grid if table.shape == own.shape else (side, side)
    if source_grid == grid or math.prod(source_grid) != num_patches:
        return ()
    state["pos_embed"] = resample_positions(table, old_grid=source_grid, new_grid=grid, num_prefix=num_prefix)
    return ("pos_embed",)


def _grid(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Give the grid of patches, (height, width), of a network's config; None where it has none."""
    if "image_size" not in config or "patch_size" not in config:
        return None
    (height, width), (patch_height, patch_width) = config["image_size"], config["patch_size"]
    return height // patch_height, width // patch_width


def _require_match(state: State, expected: State, layout: str) -> None:
    """Raise InputError that lists what is missing, what is left over and what has another shape."""
    shapes = [
        f"{name} is {tuple(tensor.shape)} instead of {tuple(expected[name].shape)}"
        for name, tensor in state.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    faults = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": shapes,
    }
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {_listing(names)}" for fault, names in faults.items() if names)
        raise InputError(f"the weights ({layout} names) do not fit the network: {listed}; build it as theirs was built")


def _listing(names: list[str]) -> str:
    """List names in a line that can still be read."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
