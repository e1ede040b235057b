"""Parameter groups, the optimizer and the learning rate of each step."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from vitlab.checks import require
from vitlab.config import OptimConfig, Schedule
from vitlab.engine.parallel import whole
from vitlab.errors import InputError, unknown_name
from vitlab.models.network import Network

_RIGHT_ON_SHARDS = ("lamb", "lars")
"""Optimizers that ask for norms of whole parameters alone, which a sharded tensor gives."""


def lr_at(
    step: int,
    *,
    total_steps: int,
    lr: float,
    warmup_steps: int = 0,
    schedule: Schedule = "cosine",
    min_lr: float = 0.0,
    decay_at: tuple[float, ...] = (),
    decay_factor: float = 0.1,
) -> float:
    """Give the learning rate of an optimizer step.

    Warm-up rises linearly and its last step runs at `lr`; a cosine or a line falls from there, without a second step
    at `lr`, to `min_lr` at the last step. So of ten steps with a warm-up of three, the third runs at `lr` and the
    tenth at `min_lr`. Under `step` the rate stays, but falls after each share of the run in `decay_at`.

    Args:
        step: number of steps done before, from 0 to total_steps - 1.
        total_steps: optimizer steps of the whole run, warm-up included.
        lr: the highest rate.
        warmup_steps: how many of the steps warm up.
        schedule: the course after warm-up.
        min_lr: the rate of the last step under `cosine` and `linear`, the lowest under `step`.
        decay_at: shares of `total_steps`, for `step`.
        decay_factor: what `step` multiplies the rate by at each of them.

    Source: arXiv:1608.03983, eq. 5, without restarts.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    if schedule == "step":
        falls = sum(step >= share * total_steps for share in decay_at)
        return max(lr * decay_factor**falls, min_lr)
    peak = max(warmup_steps - 1, 0)
    done = min((step - peak) / max(total_steps - 1 - peak, 1), 1.0)
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_lr + (lr - min_lr) * left


def build_schedule(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Fix everything of `lr_at` but the step; without `warmup_steps` a twentieth of the run warms up."""
    warmup_steps = total_steps // 20 if config.warmup_steps is None else config.warmup_steps
    if warmup_steps >= total_steps and config.warmup_steps:
        raise InputError(
            f"optim.warmup_steps {warmup_steps} leaves nothing of the run's {total_steps} steps: "
            f"give less than {total_steps}, or train longer"
        )
    return partial(
        lr_at,
        total_steps=total_steps,
        lr=config.lr,
        warmup_steps=warmup_steps,
        schedule=config.schedule,
        min_lr=config.min_lr,
        decay_at=config.decay_at,
        decay_factor=config.decay_factor,
    )


def freeze(network: Network, what: Literal["none", "backbone"] | int) -> None:
    """Stop training a part of a network.

    Args:
        network: its parameters are marked in place; an objective keeps what is frozen in evaluation mode.
        what: `backbone` for all but the classifier; N for all but the last N blocks and what comes after them, where
            the network's own `group_matcher` says what comes after what.

    Raises:
        InputError: the network has fewer blocks.
    """
    if what == "none":
        return
    from timm.models import group_parameters

    trained = {id(parameter) for parameter in network.get_classifier().parameters()}
    if isinstance(what, int):
        blocks = network.repeated_blocks()
        require(
            what <= len(blocks), f"model.freeze {what} asks for more blocks than the network's {len(blocks)}: give less"
        )
        depths = {
            name: depth for depth, names in group_parameters(network, network.group_matcher()).items() for name in names
        }
        first = {id(parameter) for parameter in blocks[-what].parameters()}
        lowest = min(depths[name] for name, parameter in network.named_parameters() if id(parameter) in first)
        before = {id(parameter) for block in blocks[:-what] for parameter in block.parameters()}
        after = {id(parameter) for name, parameter in network.named_parameters() if depths[name] >= lowest}
        trained |= after - before
    for parameter in network.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def parameter_groups(
    network: Network, *, weight_decay: float, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Sort the trainable parameters into groups by decay and, with `layer_decay`, by depth.

    Biases, norms and whatever the network names in `no_weight_decay` (tokens, position and bias tables) do not decay.
    With `layer_decay` each group bears an `lr_scale`: 1 for the head, one factor less a block down to the stem.

    Returns:
        Groups for an optimizer; every trainable parameter is in exactly one of them.
    """
    kept = network.no_weight_decay()
    if layer_decay is not None:
        from timm.optim import param_groups_layer_decay

        return list(param_groups_layer_decay(network, weight_decay, no_weight_decay_list=kept, layer_decay=layer_decay))
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (0.0, weight_decay)]
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith(".bias") and name not in kept
            groups[decays]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def build_optimizer(config: OptimConfig, network: Network) -> torch.optim.Optimizer:
    """Build an optimizer over the network's groups; the rate of each step is set by the trainer.

    AdamW is torch's, and a run with it starts sooner: all others are timm's, whose import takes half a second.

    Raises:
        InputError: timm knows no such optimizer, it needs second derivatives, or it does not take the settings.
    """
    if config.name != "adamw":
        _check_name(config.name)
    return _over(
        parameter_groups(network, weight_decay=config.weight_decay, layer_decay=config.layer_decay),
        config,
        lr=config.lr,
    )


def _check_name(name: str) -> None:
    from timm.optim import get_optimizer_info, list_optimizers

    names = [name for name in list_optimizers() if not get_optimizer_info(name).second_order]
    if name not in names:
        raise unknown_name("optim.name", name, names)


def _over(groups: list[dict[str, Any]], config: OptimConfig, *, lr: float) -> torch.optim.Optimizer:
    betas = {} if config.betas is None else {"betas": config.betas}
    try:
        optimizer = _create(groups, config, lr=lr, **betas)
    except Exception as error:  # each optimizer has its own way to refuse a setting or a machine
        raise InputError(f"optim.name {config.name} cannot be built here: {error}") from error
    if betas and "betas" not in optimizer.defaults:
        raise InputError(f"optim.betas is {config.betas}, and optim.name {config.name} has none: leave it out")
    return optimizer


def _create(
    groups: list[dict[str, Any]], config: OptimConfig, *, lr: float, **betas: tuple[float, ...]
) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, **betas}
    if config.name == "adamw":
        return _AdamW(groups, fused=True, **options)  # one pass over memory in place of a dozen
    from timm.optim import create_optimizer_v2, get_optimizer_class

    known = inspect.signature(get_optimizer_class(config.name, bind_defaults=False)).parameters
    fused = {"fused": True} if "fused" in known else {}
    created: torch.optim.Optimizer = create_optimizer_v2(
        groups, opt=config.name, momentum=config.momentum, **options, **fused
    )
    return created


class _AdamW(torch.optim.AdamW):
    """Torch's AdamW without the marks on its methods that keep torch's compiler out.

    Nothing compiles a step of ours, and the first marked method to be called imports that compiler: over a second.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def require_shardable(config: OptimConfig) -> None:
    """Raise InputError where an optimizer makes other steps of the rows of a matrix than of the matrix whole.

    Some look at all of it (its factors, its singular values), and what they make of shards is something else, or never
    ends.
    """
    if config.name in _RIGHT_ON_SHARDS:
        return
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = (torch.randn(32, 24, generator=generator) for _ in range(4))
    gradients = [gradient * torch.logspace(-3, 1, 32)[:, None] for gradient in gradients]  # no part is like another
    gradients[0][16:] = 0.0
    ends = []
    for count in (1, 2):
        parts = [nn.Parameter(part.clone()) for part in matrix.chunk(count)]
        optimizer = _over([{"params": parts, "weight_decay": 0.1}], config, lr=0.01)
        for gradient in gradients:
            for part, share in zip(parts, gradient.chunk(count), strict=True):
                part.grad = share.clone()
            optimizer.step()
        ends.append(torch.cat([part.detach() for part in parts]))
    require(
        torch.allclose(ends[0], ends[1], rtol=0, atol=1e-6),
        f"optim.name {config.name} makes other steps of sharded parameters than of whole ones: take adamw, or "
        "train.parallel ddp",
    )


def build_ema(module: nn.Module, decay: float) -> Any:
    """Build a moving average of a module's weights, timm's, whose `module` is the averaged copy.

    Its warm-up makes the decay of update n the lower of `decay` and 1 - n^(-2/3): the average begins at the weights
    of the first update, forgets fast at first, and no short run is stuck with its initial weights.
    """
    from timm.utils import ModelEmaV3

    return ModelEmaV3(module, decay=decay, use_warmup=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the step's rate, scaled in each group by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def gradient_norms(network: Network) -> dict[str, float | str]:
    """Give the norm of the gradient of each block, and of what lies outside blocks; text where it is not finite."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    parts = {f"block {number}": list(block.parameters()) for number, block in enumerate(network.repeated_blocks())}
    inside = {id(parameter) for parameters in parts.values() for parameter in parameters}
    for parameter in network.parameters():
        if id(parameter) not in inside:
            parts.setdefault(names[id(parameter)].split(".")[0], []).append(parameter)
    norms: dict[str, float | str] = {}
    for name, parameters in parts.items():
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])).item()
        norms[name] = norm if math.isfinite(norm) else str(norm)
    return norms
