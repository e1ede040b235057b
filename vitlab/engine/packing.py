"""Linear layers whose weights lie in memory as the processor's matrix products want them: faster inference on a CPU.

torch hands its products plain weights, which are cast and laid out anew at each call. Packed once, and with GELU
applied before a product is written to memory, a forward pass takes .78 to .88 of the time (docs/performance.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.mlp import Mlp

_Packed: TypeAlias = tuple[list[Any], Tensor, Tensor | None]
"""What was packed (see `PackedLinear._state`), the matrix, the bias."""


def has_packed_products(dtype: torch.dtype) -> bool:
    """Tell whether torch has oneDNN here, and its product with a matrix of a dtype that lies ready in memory."""
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if dtype == torch.bfloat16:
        has_onednn = has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return has_onednn and dtype in (torch.float32, torch.bfloat16) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@contextmanager
def packed(network: nn.Module) -> Iterator[None]:
    """Have a network compute with packed weights for a while, see `pack`; what was packed before stays so."""
    modules = pack(network)
    try:
        yield
    finally:
        for module in modules:
            if isinstance(module, PackedLinear):
                module.unpack()
            else:
                module.__class__ = nn.GELU


def pack(network: nn.Module) -> list[nn.Module]:
    """Have the linear layers of a network compute with packed weights, where that is possible.

    It is on a CPU, in float32 and bf16, without gradients; elsewhere the layers compute as ever. Weights that change
    are packed anew: by what torch notes of changes, and after each pass with gradients, as fused optimizers change
    weights without a note. It costs the memory of the weights once more, and changes the last digits. Counters of
    operations and `torch.jit.trace` do not know the product.

    Returns:
        The modules that are of another class now; none where a part of the network is compiled.
    """
    modules = list(network.modules())
    if not has_packed_products(torch.float32) or any(module._compiled_call_impl is not None for module in modules):
        return []
    changed: list[nn.Module] = []
    for module in modules:
        if isinstance(module, Mlp) and _is_exact_gelu(module.act) and _is_packable(module.fc1):
            module.fc1.__class__, module.act.__class__ = _PackedLinearGelu, _AppliedGelu
            changed += [module.fc1, module.act]
        elif _is_packable(module):
            module.__class__ = PackedLinear
            changed.append(module)
    return changed


def _is_exact_gelu(module: nn.Module) -> bool:
    return type(module) is nn.GELU and module.approximate == "none" and "forward" not in vars(module)


def _is_packable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and _is_plain(module.weight) and "forward" not in vars(module)


def _is_plain(weight: Tensor) -> bool:
    """Tell whether a weight is on a CPU, whole, and tells of its changes."""
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and not weight.is_inference()


class _AppliedGelu(nn.GELU):
    """A GELU that the layer before has applied."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


class PackedLinear(nn.Linear):
    """A linear layer with weights that are packed when they are used."""

    has_gelu = False
    _packed: _Packed | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what no copy can have."""
        return {name: value for name, value in vars(self).items() if name != "_packed"}

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `(..., D)` to `(..., E)`, in the dtype of torch's own product, under autocast too."""
        packed = self._ready(tokens)
        if packed is None:
            product = F.linear(tokens, self.weight, self.bias)
            return F.gelu(product) if self.has_gelu else product
        (dtype, *_), matrix, bias = packed
        kind = "gelu" if self.has_gelu else "none"
        mapped: Tensor = torch.ops.mkldnn._linear_pointwise(tokens.to(dtype), matrix, bias, kind, [], "none")
        return mapped

    def unpack(self) -> None:
        """Become a plain linear layer again."""
        vars(self).pop("_packed", None)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def _ready(self, tokens: Tensor) -> _Packed | None:
        """Give the packed weights for a product with tokens; None where it is torch's own that must be taken."""
        if torch.is_grad_enabled():
            self._packed = None
            return None
        weight, bias = self.weight, self.bias
        casts = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if casts else weight.dtype
        has_double = torch.float64 in (tokens.dtype, weight.dtype)
        is_as_given = casts or tokens.dtype == weight.dtype  # torch refuses other pairs, and says why
        is_fit = is_as_given and tokens.shape[-1] == weight.shape[1] and tokens.numel() and weight.numel()
        if has_double or not is_fit or not _is_plain(weight):
            return None
        packed = self._packed  # once: another thread may put another one there
        state = [dtype, *(note for each in (weight, bias) if each is not None for note in _notes(each))]
        if packed is None or len(packed[0]) != len(state) or not all(map(_is_same, packed[0], state)):
            if not has_packed_products(dtype):
                return None
            rows = tokens.numel() // tokens.shape[-1]
            matrix = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), rows)
            packed = self._packed = (state, matrix, None if bias is None else bias.detach().to(dtype))
        return packed


class _PackedLinearGelu(PackedLinear):
    """A linear layer and the GELU after it."""

    has_gelu = True


def _notes(weight: Tensor) -> tuple[Tensor, int, int]:
    """Give what tells one content of a weight from another: the object, for addresses come again, and torch's count."""
    return weight, weight.data_ptr(), weight._version


def _is_same(before: Any, now: Any) -> bool:
    return before is now if isinstance(now, Tensor) else bool(before == now)
