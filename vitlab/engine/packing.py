"""Linear layers whose weights lie in memory as the processor's matrix products want them: faster inference on a CPU.

torch hands its products plain weights, which are cast and laid out anew at each call. Packed once, and with GELU
applied before a product is written to memory, a forward pass takes .78 to .88 of the time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.mlp import Mlp

_DTYPES = (torch.float32, torch.bfloat16)


def has_packed_products() -> bool:
    """Tell whether torch has oneDNN here, and its product with a matrix that lies ready in memory."""
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@contextmanager
def packed(network: nn.Module) -> Iterator[None]:
    """Have a network compute with packed weights for a while, see `pack`."""
    modules = pack(network)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own shows again


def pack(network: nn.Module) -> list[nn.Module]:
    """Have the linear layers of a network compute with packed weights, where that is possible.

    It is on a CPU, in float32 and bf16, without gradients; elsewhere the layers compute as ever. Weights that change
    are packed anew, unless they change behind torch's back (`.data`). It costs the memory of the weights once more, and
    changes the last digits.

    Returns:
        The modules that have a `forward` of their own now; none where a part of the network is compiled.
    """
    modules = list(network.modules())
    if not has_packed_products() or any(module._compiled_call_impl is not None for module in modules):
        return []
    activations: dict[nn.Module, nn.Module] = {
        module.fc1: module.act for module in modules if isinstance(module, Mlp) and _is_exact_gelu(module.act)
    }
    changed: list[nn.Module] = []
    for module in modules:
        if type(module) is nn.Linear and _is_plain(module.weight):
            activation = activations.get(module)
            module.forward = PackedLinear(module, has_gelu=activation is not None)  # type: ignore[assignment, method-assign]
            changed.append(module)
            if activation is not None:
                activation.forward = _same
                changed.append(activation)
    return changed


def _is_exact_gelu(module: nn.Module) -> bool:
    return type(module) is nn.GELU and module.approximate == "none"


def _is_plain(weight: Tensor) -> bool:
    """Tell whether a weight is on a CPU, whole, and tells of its changes."""
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and not weight.is_inference()


def _same(tokens: Tensor) -> Tensor:
    return tokens


class PackedLinear:
    """What a linear layer does, and with `has_gelu` the GELU after it, with weights that are packed when used."""

    def __init__(self, layer: nn.Linear, *, has_gelu: bool = False) -> None:
        self.layer, self.has_gelu = layer, has_gelu
        self._packed: tuple[Tensor, Tensor | None] | None = None
        self._state: object = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what no copy can have."""
        return {**vars(self), "_packed": None, "_state": None}

    def __call__(self, tokens: Tensor) -> Tensor:
        """Map tokens `(..., D)` to `(..., E)`, in the dtype of torch's own product, under autocast too."""
        weight, bias = self.layer.weight, self.layer.bias
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tokens.dtype
        casts = dtype != weight.dtype and not torch.is_autocast_enabled("cpu")  # torch refuses that, with a reason
        if torch.is_grad_enabled() or dtype not in _DTYPES or casts or not tokens.numel() or not _is_plain(weight):
            product = F.linear(tokens, weight, bias)
            return F.gelu(product) if self.has_gelu else product
        state = [dtype, *((each.data_ptr(), each._version) for each in (weight, bias) if each is not None)]
        if state != self._state or self._packed is None:
            rows = tokens.numel() // tokens.shape[-1]
            matrix = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), rows)
            self._packed, self._state = (matrix, None if bias is None else bias.detach().to(dtype)), state
        kind = "gelu" if self.has_gelu else "none"
        mapped: Tensor = torch.ops.mkldnn._linear_pointwise(tokens.to(dtype), *self._packed, kind, [], "none")
        return mapped
