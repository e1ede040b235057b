"""What a network may take: so many tensors while it is built, and no more than the machine's memory."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from vitlab.errors import InputError
from vitlab.models.network import Network

MOST_TENSORS = 100_000
"""The largest published networks have some thousands."""


@contextmanager
def at_most_tensors(most: int) -> Iterator[None]:
    """Stop the building of a network at the first parameter or buffer beyond so many.

    Raises:
        InputError: there were more.
    """
    count = 0

    def register(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal count
        count += tensor is not None
        if count > most:
            raise InputError(f"the network has more than {most:,} parameters and buffers: give fewer blocks")

    hooks = (
        register_module_parameter_registration_hook(register),
        register_module_buffer_registration_hook(register),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def build_within_memory(build: Callable[[], Network]) -> Network:
    """Build a network, unless it would take more than the machine's memory; that is found out without memory.

    Under `with torch.device("meta")` nothing takes memory, and nothing is refused but too many tensors.

    Raises:
        InputError: the network would be too large.
    """
    with at_most_tensors(MOST_TENSORS):
        if torch.get_default_device().type != "meta":
            try:
                with torch.device("meta"):
                    skeleton = build()
            except (RuntimeError, OverflowError) as error:
                raise InputError(f"no network of this shape can be built ({error}): give smaller sizes") from error
            _require_memory(skeleton)
        return build()


def _require_memory(skeleton: Network) -> None:
    needed = sum(tensor.nbytes for tensor in (*skeleton.parameters(), *skeleton.buffers()))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise InputError(
            f"a {skeleton.name} of this shape takes {needed / 2**30:,.0f} GiB, and this machine has "
            f"{memory / 2**30:,.0f}: give a smaller width, depth or image_size"
        )
