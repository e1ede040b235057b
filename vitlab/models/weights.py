"""Weights from elsewhere, and from networks of another shape, into a network of ours.

Nothing in the network changes before everything has been found to fit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import InputError
from vitlab.layers.position import resample_positions, resample_relative_bias
from vitlab.layers.window_attention import WindowAttention
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.imagegpt_weights import IMAGEGPT_LAYOUTS, bias_names, complete
from vitlab.models.layouts import LAYOUTS, State
from vitlab.models.network import Network
from vitlab.models.sources import Source, read_source
from vitlab.models.timm_network import TimmNetwork

_NESTS = ("state_dict", "model")
_WRAPPERS = ("module.", "_orig_mod.")
# Counts its updates beside the averaged weights in a state of torch's AveragedModel.
_NOT_WEIGHTS = ("n_averaged",)
# Fields of a config in which source and network may differ.
_FREE_FIELDS = frozenset({"num_classes", "image_size", "in_channels", "drop_rate", "drop_path_rate"})
_BIAS_TABLE = "relative_position_bias_table"
_PATCH_KERNEL = "patch_embed.proj.weight"
_STEM_KERNEL = "stem.conv.weight"  # DaViT's, whose windows overlap, so that no resampling says the same


@dataclass(frozen=True)
class WeightsReport:
    """What became of each parameter of the network, and of each entry of the source."""

    loaded: tuple[str, ...]
    """Parameters that took the source's values as they are."""
    resized: tuple[str, ...]
    """Parameters that took them resampled to another grid, window, patch or number of channels."""
    reinitialised: tuple[str, ...]
    """Parameters of the head, fresh because the source knows other classes."""
    ignored: tuple[str, ...]
    """Entries of the source that are no weights, such as an optimizer's state beside them."""
    layout: str
    """Whose names the source used: `vitlab` of a model file, `timm` of any other with the names we share, ..."""
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Preprocess that the source states for its weights; empty where it states none."""
    zeroed: tuple[str, ...] = ()
    """Parameters of an ImageGPT that became 0, because the source's project does without them."""
    kept: tuple[str, ...] = ()
    """What stays as the network had it: an ImageGPT's palette, where the source states none."""

    def summary(self) -> str:
        """Tell it in one line."""
        parts = [f"{len(self.loaded)} parameters loaded from {self.layout} names"]
        parts += [
            f"{what} {', '.join(names)}"
            for what in ("resized", "reinitialised", "zeroed", "kept", "ignored")
            if (names := getattr(self, what))
        ]
        return "; ".join(parts)


def load_weights(model: Network, source: Mapping[str, Any] | str | Path) -> WeightsReport:
    """Load weights into a network by their names, whoever's they are.

    Wrappers' prefixes (`module.`, `_orig_mod.`) are dropped from the front of names. A position table of another grid,
    relative biases of another window and kernels of another patch are resampled; kernels over RGB are summed for grey
    images. A head of another class count, or none, leaves the network with a fresh head. All else must match.

    Args:
        model: the network; changed in place.
        source: a state dict, bare or under `model` or `state_dict`; or a file, folder or name as `read_source` takes.
            Layouts of timm, torchvision, transformers (ViT, ImageGPT), Microsoft (Swin), dingmyu (DaViT), Google (ViT)
            and OpenAI (ImageGPT) are recognised by their names.

    Returns:
        What was done, by the network's parameter names.

    Raises:
        InputError: the file cannot be read or would run code, or names or shapes do not match (the message lists them).
    """
    found = Source(source) if isinstance(source, Mapping) else read_source(source)
    config = found.config
    entries, ignored = _unnest(found.entries)
    state, layout, beside = _convert(_strip_wrappers(entries), model)
    layout = "vitlab" if config else layout
    ignored += beside
    zeroed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    if isinstance(model, ImageGPT):
        surplus, zeroed, kept = complete(state, model)
        ignored += surplus
    ignored += tuple(name for name in _NOT_WEIGHTS if state.pop(name, None) is not None)
    head = _head_names(model)
    own_state = model.state_dict()
    fresh_head = _other_classes(state, own_state, head)
    if fresh_head:
        state = {name: tensor for name, tensor in state.items() if name not in head}
    if isinstance(model, TimmNetwork):
        state, resized = _resample_timm(state, own_state, model)
    else:
        resized = _resample(state, own_state, _grid(model.config_dict()), source_grid=_grid(config or {}))
        resized += _resample_windows(state, model) + _resample_kernel(state, own_state)
    expected = {name: tensor for name, tensor in own_state.items() if not (fresh_head and name in head)}
    _require_match(state, expected, layout, _other_build(model, config))
    if fresh_head:
        model.reset_classifier(model.num_classes)
    model.load_state_dict(state, strict=False)
    return WeightsReport(
        loaded=tuple(name for name in expected if name not in {*resized, *zeroed, *kept}),
        resized=resized,
        reinitialised=tuple(name for name in own_state if name in head) if fresh_head else (),
        ignored=ignored,
        layout=layout,
        preprocess=found.preprocess,
        zeroed=zeroed,
        kept=kept,
    )


def _unnest(entries: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Go down to the tensors, and name what lay beside them."""
    beside: tuple[str, ...] = ()
    while nest := next((name for name in _NESTS if isinstance(entries.get(name), Mapping)), None):
        beside += tuple(name for name in entries if name != nest)
        entries = entries[nest]
    entries = {name: _as_tensor(value) for name, value in entries.items()}
    others = [str(name) for name, value in entries.items() if not _is_plain(name, value)]
    if others or not entries:
        held = f"entries that are no named tensors of plain numbers: {_listing(others)}" if others else "no tensors"
        raise InputError(f"the weights hold {held}; give a state dict, bare or under {' or '.join(_NESTS)}")
    return entries, beside


def _as_tensor(value: object) -> object:
    """Turn an array of numpy into a tensor; all else stays."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value


def _is_plain(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    if value.layout != torch.strided or value.is_meta or value.is_complex():
        return False
    return value.nbytes <= value.untyped_storage().nbytes()  # a file may repeat one number to any shape


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


def _convert(state: State, model: Network) -> tuple[State, str, tuple[str, ...]]:
    """Give the state under our names, the layout it had, and what of it is no weight."""
    for layout in (*LAYOUTS, *IMAGEGPT_LAYOUTS):
        if layout.recognises(state):
            extra = bias_names(model) if isinstance(model, ImageGPT) else ()
            ours, ignored = layout.to_ours(state, dict.fromkeys((*model.state_dict(), *extra)))
            return ours, layout.name, ignored
    if isinstance(model, TimmNetwork) and not any(name.startswith("net.") for name in state):
        return {f"net.{name}": tensor for name, tensor in state.items()}, "timm", ()
    return state, "timm", ()


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


def _resample_timm(state: State, own_state: State, model: TimmNetwork) -> tuple[State, tuple[str, ...]]:
    """Have timm fit what it fits for its own weights, and name what has another shape since."""
    fitted = model.adapt(state)
    resized = [name for name in fitted if name in state and fitted[name].shape != state[name].shape]
    return fitted, tuple(name for name in resized if name in own_state)


def _resample_windows(state: State, model: Network) -> tuple[str, ...]:
    """Replace tables of relative biases of other windows; theirs are square, as in all published networks."""
    resized = []
    for path, module in model.named_modules():
        name = f"{path}.{_BIAS_TABLE}"
        if not isinstance(module, WindowAttention) or (table := state.get(name)) is None:
            continue
        own = module.relative_position_bias_table
        side = math.isqrt(len(table))
        if table.shape != own.shape and table.ndim == 2 and side % 2 and side * side == len(table):
            old = ((side + 1) // 2, (side + 1) // 2)
            state[name] = resample_relative_bias(table, old_window=old, new_window=module.window)
            resized.append(name)
    return tuple(resized)


def _resample_kernel(state: State, own_state: State) -> tuple[str, ...]:
    """Replace the kernel over the pixels where the number of channels, or the side of the patches, is another."""
    name = _PATCH_KERNEL if _PATCH_KERNEL in own_state else _STEM_KERNEL
    own, kernel = own_state.get(name), state.get(name)
    if own is None or kernel is None or kernel.shape == own.shape or kernel.ndim != 4 or len(kernel) != len(own):
        return ()
    from timm.layers.patch_embed import resample_patch_embed
    from timm.models import adapt_input_conv

    if kernel.shape[1] == 3 != own.shape[1]:
        kernel = adapt_input_conv(own.shape[1], kernel)
    if kernel.shape[2:] != own.shape[2:] and name == _PATCH_KERNEL:
        kernel = resample_patch_embed(kernel, list(own.shape[2:]))
    state[name] = kernel
    return (name,)


def _grid(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Give the grid of patches, or of pixels where there are no patches, (height, width), of a network's config."""
    if "image_size" not in config:
        return None
    (height, width), (patch_height, patch_width) = config["image_size"], config.get("patch_size", (1, 1))
    return height // patch_height, width // patch_width


def _other_build(model: Network, config: Mapping[str, Any] | None) -> str:
    """Say in which fields a network of ours was built otherwise than the one that takes its weights."""
    own = model.config_dict()
    differing = [name for name in config or {} if name not in _FREE_FIELDS and own.get(name) != (config or {})[name]]
    if not differing:
        return "build it as theirs was built"
    fields = ", ".join(f"{name} {(config or {})[name]} (here {own.get(name)})" for name in differing)
    return f"theirs has {fields}: give the same in model.overrides, or begin from its run with --config RUN/config.yaml"


def _require_match(state: State, expected: State, layout: str, remedy: str) -> None:
    """Raise InputError that lists what is missing, what is left over and what has another shape or no finite values."""
    shapes = [
        f"{name} is {tuple(tensor.shape)} instead of {tuple(expected[name].shape)}"
        for name, tensor in state.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    faults = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": shapes,
        "of whole numbers or not finite": [
            name
            for name, tensor in state.items()
            if name in expected and expected[name].is_floating_point() and not _is_finite(tensor)
        ],
    }
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {_listing(names)}" for fault, names in faults.items() if names)
        raise InputError(f"the weights ({layout} names) do not fit the network: {listed}; {remedy}")


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def _listing(names: list[str]) -> str:
    """List names in a line that can still be read."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
