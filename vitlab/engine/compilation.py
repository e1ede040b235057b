"""Compilation of the repeated blocks of a network."""

import functools
import logging
import shutil
from collections.abc import Callable
from typing import Any

import torch

from vitlab.errors import InputError
from vitlab.models.network import Network

# A Swin has eight kinds of blocks, each for training, for evaluation and for a last batch that is smaller.
_MOST_SIZES = 64


def compile_blocks(
    network: Network,
    *,
    backend: str | Callable[..., Any] = "inductor",
    find: Callable[[str], str | None] = shutil.which,
) -> None:
    """Compile in place each block of `compiled_blocks`; alike ones share the code, which is what keeps the wait short.

    Raises:
        InputError: the network is on a CPU, and there is no C++ compiler.
    """
    if next(network.parameters()).device.type == "cpu" and not any(map(find, ("c++", "g++", "clang++"))):
        raise InputError("train.compile needs a C++ compiler on this device, and none is installed: leave it out")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no GPU to miss
    for module in network.modules():
        kind: Any = type(module)
        if kind.__name__ == "DropPath":  # ours, and timm's
            module.__class__ = _outside_graphs(kind)
    # Blocks of a pyramid differ in size from stage to stage, and torch fails to make code for any size of a DaViT's.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SIZES)
    for block in network.compiled_blocks():
        block.compile(backend=backend, dynamic=False)


@functools.cache
def _outside_graphs(kind: Any) -> Any:
    """Derive the class whose forward runs as plain Python between the compiled parts.

    Each block has a drop rate of its own, a number that would become part of the code, so that six blocks would be
    compiled six times. It is a class, and not a method of the instance, so that a copy of the network draws for itself.
    """
    disable: Callable[..., Any] = torch.compiler.disable
    return type(kind.__name__, (kind,), {"forward": disable(kind.forward)})
