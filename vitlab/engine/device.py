"""Which device runs, and in which precision."""

import math
import platform
import time
from typing import Any, Literal

import numpy as np
import PIL
import torch

from vitlab.config import TrainConfig
from vitlab.errors import InputError

_RATE_SIDE = 1024

Precision = Literal["auto", "fp32", "bf16", "fp16"]


def resolve_device(name: str) -> torch.device:
    """Give the device of a name; `auto` takes a GPU where there is one.

    Raises:
        InputError: the name is no device, or this machine lacks it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"no device is called {name}: give auto, cpu, cuda, cuda:0 or mps") from None
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = available.get(device.type, 0)
    if (device.index or 0) >= count:
        raise InputError(f"device {name} is not on this machine ({count} of type {device.type}): use auto or cpu")
    return device


def describe_machine() -> dict[str, Any]:
    """Give what the last bits of a computation depend on: threads, the processor's instructions, versions, the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
        "gpu": gpu,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error of torch means that the device, or this machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def memory_advice(config: TrainConfig, *, is_full_precision: bool) -> list[str]:
    """Say what needs less memory: what the run may go on with, and what makes it another run."""
    others = [f"train.batch_size {-(-config.batch_size // 2)} with train.accumulate {2 * config.accumulate}"]
    others = others if config.batch_size > 1 else []
    others += ["train.precision bf16"] if is_full_precision else []
    advice = [] if config.grad_checkpointing else ["train.grad_checkpointing true goes on from there in less memory"]
    return advice + ([f"in another train.run_dir {' or '.join(others)}"] if others else [])


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Give the dtype that training computes in, or None for plain float32.

    `auto` takes bfloat16 where the device has instructions for it (Ampere and newer GPUs; processors with AVX-512
    BF16 or AMX): elsewhere it is emulated and slower than float32.
    """
    if precision == "fp32":
        return None
    if precision == "fp16":
        if device.type == "cpu":
            raise InputError("train.precision fp16 needs a GPU, and the device is cpu: use auto, bf16 or fp32")
        return torch.float16
    return torch.bfloat16 if precision == "bf16" or _computes_in_bf16(device) else None


def _computes_in_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return False


def multiply_add_rate(device: torch.device, dtype: torch.dtype | None) -> float:
    """Measure how many multiply-adds a second the device makes in a large matrix product, in a fraction of a second."""
    side = _RATE_SIDE if device.type == "cpu" else 4 * _RATE_SIDE
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return side**3 / best
