"""Memory that was freed and is wanted again at once, as in every step of training on a processor."""

import ctypes
import os
from collections.abc import Callable

# glibc's malloc.h; a user who has set either is obeyed.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
_TUNABLES = ("malloc.trim_threshold", "malloc.mmap_max", "malloc.mmap_threshold")


def keep_freed_memory() -> bool:
    """Have glibc keep what this process frees, for its next tensors, until the process ends.

    glibc gives large blocks back to the system as soon as they are free. A training step then gets all its activations
    anew, page by page, and the system clears each page: 2 to 14 % of a step's time on a processor.
    The most memory that a process holds grows by up to a tenth, by gaps between what it keeps.

    Returns:
        Whether it does now: not with another C library, nor where the environment or GLIBC_TUNABLES sets this already.
        An allocator that was preloaded is not noticed, and goes its own way.

    Source: mallopt(3).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _SETTINGS) or any(name in tunables for name in _TUNABLES):
        return False
    mallopt = _function("mallopt")
    return mallopt is not None and all(
        mallopt(name, value) for name, value in ((_M_TRIM_THRESHOLD, -1), (_M_MMAP_MAX, 0))
    )


def return_freed_memory() -> None:
    """Give the system what this process keeps and does not use, as before a fork: a child would hold on to it."""
    if malloc_trim := _function("malloc_trim"):
        malloc_trim(0)


def _function(name: str) -> Callable[..., int] | None:
    """Give a function of the C library, where there is such a one."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
