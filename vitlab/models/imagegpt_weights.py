"""Other projects' weights of ImageGPT: transformers' and OpenAI's names and shapes, both ways.

Source of the names: the modules of transformers; openai/image-gpt.
"""

import re

import torch
from einops import rearrange
from torch import Tensor

from vitlab.errors import InputError
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.layouts import Layout, State, by_rules

_PALETTE, _COLOR_HEAD = "palette", "color_head.weight"
# Matrices of transformers' Conv1D, which are (in, out).
_CONV1D = re.compile(r"\.(?:c_attn|c_proj|c_fc)\.weight$")


def _from_transformers(state: State) -> State:
    return {
        name: _turned(tensor) if _CONV1D.search(name) else _with_batch(name, tensor) for name, tensor in state.items()
    }


def _to_transformers(state: State) -> State:
    """Undo `_from_transformers`; biases that ours lacks are 0 there, and it keeps its palette elsewhere."""
    theirs: State = {}
    for name, tensor in state.items():
        if name == _PALETTE:
            continue
        theirs[name] = _without_batch(name, tensor)
        if _CONV1D.search(name):
            theirs[name] = _turned(tensor)
            bias = f"{name.removesuffix('weight')}bias"
            theirs[bias] = state.get(bias, tensor.new_zeros(len(tensor)))
    return theirs


def _from_openai(state: State) -> State:
    """Join the start token to the colours and the heads to matrices of torch's orientation."""
    ours = {name: _openai_tensor(name, tensor) for name, tensor in state.items()}
    for prefix in ("model/", ""):
        colors, start = ours.get(f"{prefix}wte"), ours.get(f"{prefix}sos")
        if colors is not None and start is not None and colors.shape[1:] == start.shape:
            ours[f"{prefix}wte"] = torch.cat([colors, ours.pop(f"{prefix}sos")[None]])
    return ours


def _openai_tensor(name: str, tensor: Tensor) -> Tensor:
    if re.search(r"/attn/\w_proj$", name) and tensor.ndim == 3:  # (h, d, D): a head's numbers, from or to tokens
        joined = rearrange(tensor, "h d D -> (h d) D")
        return _turned(joined) if name.endswith("/c_proj") else joined
    if name.endswith("/w"):  # (in, out), with an axis in front of it
        return _turned(tensor.squeeze(0))
    return _with_batch(name, tensor)


def _to_openai(state: State) -> State:
    """Undo `_from_openai` but for the heads, whose number a state does not tell."""
    theirs = {name: _without_batch(name, tensor) for name, tensor in state.items() if name != _PALETTE}
    for name in [name for name in theirs if name.endswith(".bias")]:
        if theirs.pop(name).any():
            raise InputError(f"{name} is not 0, and OpenAI's ImageGPT has no biases: it cannot hold these weights")
    for name, tensor in theirs.items():
        if name.endswith(("/attn/c_proj", "/w")):
            theirs[name] = _turned(tensor)
    theirs["model/wte"], theirs["model/sos"] = theirs["model/wte"][:-1], theirs["model/wte"][-1]
    return theirs


def _turned(matrix: Tensor) -> Tensor:
    """Swap the axes of a matrix; what is none stays, and so does not match."""
    return matrix.T if matrix.ndim == 2 else matrix


def _with_batch(name: str, tensor: Tensor) -> Tensor:
    """Give a table of positions, `(N, D)` elsewhere, the axis that ours has in front."""
    return tensor.unsqueeze(0) if re.search(r"(^|[./])wpe(\.weight)?$", name) else tensor


def _without_batch(name: str, tensor: Tensor) -> Tensor:
    return tensor.squeeze(0) if re.search(r"[./]wpe(\.weight)?$", name) else tensor


_TRANSFORMERS = Layout(
    name="transformers",
    marks=frozenset({"wte.weight", "wpe.weight", "h.0.attn.c_attn.weight"}),
    rename=by_rules(
        (r"^token_embed$", "transformer.wte.weight"),
        (r"^pos_embed$", "transformer.wpe.weight"),
        (r"^norm\.", "transformer.ln_f."),
        (r"^color_head\.", "lm_head."),
        (r"^head\.", "score."),
        (r"^blocks\.(\d+)\.norm([12])\.", r"transformer.h.\1.ln_\2."),
        (r"^blocks\.(\d+)\.attn\.qkv\.", r"transformer.h.\1.attn.c_attn."),
        (r"^blocks\.(\d+)\.attn\.proj\.", r"transformer.h.\1.attn.c_proj."),
        (r"^blocks\.(\d+)\.mlp\.fc1\.", r"transformer.h.\1.mlp.c_fc."),
        (r"^blocks\.(\d+)\.mlp\.fc2\.", r"transformer.h.\1.mlp.c_proj."),
    ),
    prefix="transformer.",
    ignored=r"\.attn\.(bias|masked_bias)$",  # the causal mask, in files of before 5
    to_torch=_from_transformers,
    from_torch=_to_transformers,
)
_OPENAI = Layout(
    name="openai",
    marks=frozenset({"wte", "wpe", "sos", "h0/attn/q_proj"}),
    rename=by_rules(
        (r"^token_embed$", "model/wte"),
        (r"^pos_embed$", "model/wpe"),
        (r"^norm\.weight$", "model/ln_f/g"),
        (r"^color_head\.weight$", "model/wtet"),
        (r"^head\.weight$", "model/clf/wclf"),
        (r"^blocks\.(\d+)\.norm([12])\.weight$", r"model/h\1/ln_\2/g"),
        (r"^blocks\.(\d+)\.attn\.qkv\.weight$", r"model/h\1/attn/QKV_proj"),
        (r"^blocks\.(\d+)\.attn\.proj\.weight$", r"model/h\1/attn/c_proj"),
        (r"^blocks\.(\d+)\.mlp\.fc1\.weight$", r"model/h\1/mlp/c_fc/w"),
        (r"^blocks\.(\d+)\.mlp\.fc2\.weight$", r"model/h\1/mlp/c_proj/w"),
    ),
    qkv=("q", "k", "v"),
    prefix="model/",
    ignored=r"(?i)/adam|^global_step|^beta\d_power",
    to_torch=_from_openai,
    from_torch=_to_openai,
)
IMAGEGPT_LAYOUTS = (_TRANSFORMERS, _OPENAI)


def to_transformers(network: ImageGPT) -> State:
    """Give the weights as transformers names and turns them, both heads: biases that the network lacks are 0."""
    return _TRANSFORMERS.from_ours(network.state_dict())


def to_openai(network: ImageGPT) -> State:
    """Give the weights as OpenAI names and shapes them, both heads.

    Raises:
        InputError: a bias is not 0, which they have no place for.
    """
    heads = network.config.num_heads
    return {
        name: rearrange(tensor, "(h d) D -> h d D", h=heads) if re.search(r"/attn/\w_proj$", name) else tensor
        for name, tensor in _OPENAI.from_ours(network.state_dict()).items()
    }


def bias_names(network: ImageGPT) -> tuple[str, ...]:
    """Name the biases that the network has, or would have with `bias=True`."""
    matrices = r"(blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.fc[12]))\.weight"
    found = (re.fullmatch(matrices, name) for name in network.state_dict())
    return tuple(f"{match[1]}.bias" for match in found if match)


def complete(state: State, network: ImageGPT) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Even out what the projects' networks have or lack beside the rest.

    Args:
        state: weights under our names; changed in place.
        network: the one that is to take them.

    Returns:
        Names of entries left out (biases of 0 that the network has no place for), of parameters filled with 0 (biases
        where the state has none at all, the colour head of a mere classifier), and of those that the network keeps (the
        palette, which other projects hold elsewhere).

    Raises:
        InputError: biases that are not 0, for a network without.
    """
    own = network.state_dict()
    biases = bias_names(network)
    surplus = [name for name in biases if name in state and name not in own]
    if telling := [name for name in surplus if state[name].any()]:
        raise InputError(
            f"the weights hold {len(telling)} biases that are not 0, such as {telling[0]}, and the network has none: "
            "build it with bias true (model.overrides.bias)"
        )
    for name in surplus:
        del state[name]
    lacking = [] if any(name in state for name in biases) else [name for name in biases if name in own]
    lacking += [] if _COLOR_HEAD in state else [_COLOR_HEAD]
    state |= {name: torch.zeros_like(own[name]) for name in lacking}
    kept = () if _PALETTE in state else (_PALETTE,)
    state |= {name: own[name].clone() for name in kept}
    return tuple(surplus), tuple(lacking), kept
