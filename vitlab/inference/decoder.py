"""A causal ImageGPT that draws: it reads one pixel a step, and keeps what later pixels need of the earlier ones.

A step costs one row through each matrix, and attention over the stored keys and values: time grows linearly with the
pixels, but for the attention. On a CPU a step for one image waits for its weights to come from memory, so that fewer
bytes (bf16, int8) are faster; with several images the stored keys and values weigh as much.

Legend: `N` pixels of an image, `V` colours, `h` heads, `d` width of a head, `n` pixels that are read at once.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.engine.device import autocast_dtype
from vitlab.engine.packing import has_packed_products
from vitlab.errors import InputError
from vitlab.layers.attention import attention
from vitlab.layers.norm import RMSNorm
from vitlab.models.imagegpt import Block, ImageGPT
from vitlab.models.network import Network, device_of
from vitlab.pixel_options import DrawPrecision

Linear: TypeAlias = Callable[[Tensor], Tensor]

_QUICK_GELU = 1.702
_LARGEST_INT8 = 127
_LEAST = 1e-30  # of what numbers are divided by
_CHUNK = 128  # pixels


def require_decodable(network: Network) -> ImageGPT:
    """Give the network as what it is, a causal ImageGPT.

    Raises:
        InputError: it is another network, or sees the pixels that it would have to draw.
    """
    if not isinstance(network, ImageGPT):
        raise InputError(f"{network.name} cannot draw images: give an ImageGPT that was trained on next pixels")
    if not network.config.causal:
        raise InputError(
            f"this {network.name} is not causal, it was trained on masked pixels and cannot draw: "
            "give one that was trained on next pixels"
        )
    return network


def resolve_precision(precision: DrawPrecision, device: torch.device) -> DrawPrecision:
    """Give the precision that `auto` means on a device: bf16 where it computes in that by itself, else fp32.

    Raises:
        InputError: int8, and this is not a CPU that torch has int8 matrices for.
    """
    if precision == "auto":
        return "fp32" if autocast_dtype("auto", device) is None else "bf16"
    if precision == "int8" and not (device.type == "cpu" and _has_int8()):
        raise InputError(f"precision int8 needs an x86 processor, and the device is {device}: use auto, bf16 or fp32")
    return precision


def _has_int8() -> bool:
    """Tell whether torch has FBGEMM here, and still the products that `_int8_linear` is made of."""
    names = "linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32"
    has_products = all(hasattr(torch.ops.quantized, name) for name in names)
    return has_products and "fbgemm" in torch.backends.quantized.supported_engines


class Decoder:
    """Gives the colour logits of one pixel after another, for several images at a time.

    Args:
        network: its weights are read now; the decoder keeps copies in its own precision.
        precision: what the blocks' matrices are in. `fp32` is the network's own precision, and the reference. `bf16` is
            just that. `int8` has whole numbers with a scale for each output of a matrix and for each of its input rows,
            so that no image depends on its neighbours (alone, it may differ in the last digits). Keys and values are
            stored in bf16 with both, but in the network's precision on a CPU that does not compute in bf16. The sums
            between the blocks, the normalisation and the colour head stay in the network's precision throughout.

    Raises:
        InputError: the network is no causal ImageGPT, or the device lacks the precision.
    """

    def __init__(self, network: Network, *, precision: DrawPrecision = "fp32") -> None:
        """Convert the weights."""
        self.network = require_decodable(network)
        device = device_of(network)
        self.precision = resolve_precision(precision, device)
        self.num_read = 0
        """Inputs that were read, the start token included: the last logits are of the pixel of this number, less 1."""
        with torch.inference_mode():
            self.blocks = [_DecoderBlock(cast(Block, block), self.precision) for block in self.network.blocks]
            self.norm = _norm(self.network.norm)

    @torch.inference_mode()
    def start(self, given: Tensor) -> Tensor:
        """Forget all images, and read the first pixels of new ones at once.

        Args:
            given: int64 `(B, n)`, n from 0 to N - 1.

        Returns:
            Logits `(B, V)` of the pixel after the given ones.
        """
        self.num_read = 0
        return self._read(F.pad(given, (1, 0), value=self.network.config.num_colors))

    @torch.inference_mode()
    def step(self, colors: Tensor) -> Tensor:
        """Read one more pixel of each image, int64 `(B,)`, and give the logits `(B, V)` of the next."""
        return self._read(colors.unsqueeze(1))

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """Go on with images `rows`, int64 `(B',)`, of those at hand; one may be there several times."""
        for block in self.blocks:
            block.select(rows)

    def _read(self, tokens: Tensor) -> Tensor:
        """Read inputs `(B, n)` after those before, and give the logits `(B, V)` after the last."""
        network, first = self.network, self.num_read
        self.num_read += tokens.shape[1]
        # A caller's autocast would change what the precision promises.
        with torch.autocast(tokens.device.type, enabled=False):
            features = F.embedding(tokens, network.token_embed) + network.pos_embed[:, first : self.num_read]
            for block in self.blocks:
                features = block(features, first)
            logits: Tensor = network.color_head(self.norm(features[:, -1]))
        return logits


class _DecoderBlock:
    """A block's matrices, converted, and the keys and values of the pixels that it has read.

    The factors of the quick GELU are in the matrices on both sides of it, and the queries' in the matrix of these.
    """

    keys: Tensor
    """`(B, h, M, d)`; M grows with the pixels, and the last of them, 0, are not there yet."""
    values: Tensor
    """`(B, h, d, M)`, 0 where no pixel is yet: laid out so that both products with one row go along memory."""

    def __init__(self, block: Block, precision: DrawPrecision) -> None:
        attn, mlp = block.attn, block.mlp
        self.num_heads = attn.num_heads
        weight = attn.qkv.weight
        D = weight.shape[1]
        self.query_factor = (D // self.num_heads) ** -0.5
        factors = torch.cat([weight.new_full((D,), self.query_factor), weight.new_ones(2 * D)])
        self.qkv = _linear(attn.qkv, precision, norm=block.norm1, factor=factors)
        self.proj = _linear(attn.proj, precision)
        self.fc1 = _linear(mlp.fc1, precision, norm=block.norm2, factor=weight.new_tensor(_QUICK_GELU))
        self.fc2 = _linear(mlp.fc2, precision, input_factor=1 / _QUICK_GELU)
        self.dtype = torch.bfloat16 if precision == "bf16" else weight.dtype
        """Of what the matrices give."""
        may_be_bf16 = weight.device.type != "cpu" or autocast_dtype("auto", weight.device) is not None
        self.cache_dtype = torch.bfloat16 if may_be_bf16 and precision != "fp32" else weight.dtype

    def __call__(self, tokens: Tensor, first: int) -> Tensor:
        """Map tokens `(B, n, D)` of pixels first, first + 1, ... to `(B, n, D)`; n is 1 but for the first ones."""
        B, n, D = tokens.shape
        qkv = self.qkv(tokens).to(self.cache_dtype)
        qkv = qkv.view(B, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)  # (3, B, h, n, d)
        self._store(qkv[1], qkv[2], first)
        heads = self._attend(qkv[0], first + n) if first else self._attend_causally(qkv)
        tokens = tokens + self.proj(heads.view(B, n, D))
        return tokens + self.fc2(F.silu(self.fc1(tokens), inplace=True))

    def select(self, rows: Tensor) -> None:
        """Go on with some of the images, several times or not at all."""
        self._keep(self.keys[rows], self.values[rows])

    def _keep(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self._flat_keys, self._flat_values = keys.flatten(0, 1), values.flatten(0, 1)  # (B h, M, d), (B h, d, M)

    def _store(self, key: Tensor, value: Tensor, first: int) -> None:
        """Keep what later pixels need of pixels first, first + 1, ..., and nothing else where these are the first.

        Args:
            key: `(B, h, n, d)`.
            value: `(B, h, n, d)`.
            first: number of pixels that were read before.
        """
        B, h, n, d = key.shape
        last = first + n
        if first == 0 or last > self.keys.shape[2]:
            room = math.ceil(last / _CHUNK) * _CHUNK
            # Not empty: `_attend` multiplies all places, and oneDNN lets a place's NaN into others' at some widths.
            keys, values = key.new_zeros(B, h, room, d), key.new_zeros(B, h, d, room)
            if first:
                keys[:, :, :first], values[..., :first] = self.keys, self.values
            self._keep(keys, values)
        self.keys.narrow(2, first, n).copy_(key)
        self.values.narrow(3, first, n).copy_(value.mT)

    def _attend(self, query: Tensor, num_read: int) -> Tensor:
        """Give what one pixel, `(B, h, 1, d)`, sees of those that were read, itself among them: `(B h, d, 1)`.

        torch's fused attention takes twice as long for one row on a CPU, and its products five times as long where
        the strides of a column are not those of a row on its side. In bf16 oneDNN copies what is a part of the stored
        keys or values, so that all places are multiplied, and those that are not there yet get no weight.
        """
        column = query.flatten(0, 1).mT  # (B h, d, 1)
        is_whole = self.cache_dtype == torch.bfloat16
        n = self.keys.shape[2] if is_whole else num_read
        scores = torch.bmm(self._flat_keys.narrow(1, 0, n), column).mT  # (B h, 1, n)
        if is_whole:
            scores[..., num_read:] = -torch.inf
        return torch.bmm(self._flat_values.narrow(2, 0, n), scores.softmax(dim=2).mT)

    def _attend_causally(self, qkv: Tensor) -> Tensor:
        """Give what the first pixels, `(3, B, h, n, d)`, see of one another: `(B, n, h, d)`."""
        query, key, value = qkv
        return attention(query / self.query_factor, key, value, causal=True).transpose(1, 2).contiguous()


def _norm(layer: RMSNorm) -> Linear:
    """Give what an RMSNorm does to the precision of its gain; on a CPU in fewer steps than torch's own takes."""
    if layer.weight.device.type != "cpu":
        return layer
    (D,) = layer.weight.shape
    gain, eps = layer.weight * D**0.5, layer.weight.new_tensor(layer.eps * D)

    def norm(tokens: Tensor) -> Tensor:
        sums = (tokens * tokens).sum(dim=-1, keepdim=True)
        normalised: Tensor = tokens * sums.add_(eps).rsqrt_() * gain
        return normalised

    return norm


def _linear(
    layer: nn.Linear,
    precision: DrawPrecision,
    *,
    norm: RMSNorm | None = None,
    factor: Tensor | None = None,
    input_factor: float = 1.0,
) -> Linear:
    """Convert a linear layer to the fastest form that torch has for it.

    Args:
        layer: its weight and bias.
        precision: of the product.
        norm: what is applied to the input first.
        factor: of each output, `()` or one number for each.
        input_factor: of the input.
    """
    factor = layer.weight.new_ones(()) if factor is None else factor
    weight = layer.weight * input_factor * factor.view(-1, 1)
    bias = None if layer.bias is None else layer.bias * factor
    if precision == "int8":
        return _int8_linear(weight, bias, norm)
    if precision == "bf16":
        weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
    multiply = _product(weight, bias)
    normalise = None if norm is None else _norm(norm)
    return lambda rows: multiply((rows if normalise is None else normalise(rows)).to(weight.dtype))


def _product(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.device.type == "cpu" and has_packed_products(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return lambda rows: F.linear(rows, weight, bias)


def _int8_linear(weight: Tensor, bias: Tensor | None, norm: RMSNorm | None) -> Linear:
    """Round each row of a matrix, and each row that it is multiplied with, to 8 bits of the row's largest number.

    The products are added up as whole numbers, exactly. Without VNNI instructions a sum of two of them must fit 16
    bits, which leaves 7 bits for the input. What a norm divides a row by is applied to the products. A single row takes
    the same steps with plain numbers in place of tensors of one, in half the calls.
    """
    scales = weight.double().abs().amax(dim=1).clamp_min(_LEAST) / _LARGEST_INT8
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    with _fbgemm():
        rounded = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(rounded, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    capabilities = torch.cpu.get_capabilities()
    largest = _LARGEST_INT8 if capabilities.get("avx512_vnni") or capabilities.get("avx_vnni") else 63
    D = weight.shape[1]
    if norm is not None:
        gain, least = norm.weight * D**0.5, norm.weight.new_tensor((norm.eps * D) ** 0.5)

    def of_several(rows: Tensor) -> Tensor:
        factors = None
        if norm is not None:
            factors = torch.hypot(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), least).reciprocal_()
            rows = rows * gain
        sizes = rows.abs().amax(dim=-1, keepdim=True).clamp_min_(_LEAST)
        product: Tensor = multiply(rows / sizes, 1 / largest, largest + 1, packed)
        sizes = sizes if factors is None else sizes.mul_(factors)
        return product.mul_(sizes) if bias is None else torch.addcmul(bias, product, sizes)

    def of_one(row: Tensor) -> Tensor:
        factor = 1.0
        if norm is not None:
            flat = row.view(-1)
            factor = (torch.dot(flat, flat).item() + norm.eps * D) ** -0.5
            row = row * gain
        low, high = torch.aminmax(row)
        size = max(high.item(), -low.item(), _LEAST)
        product: Tensor = multiply(row, size / largest, largest + 1, packed)
        return product.mul_(factor) if bias is None else torch.add(bias, product, alpha=factor)

    return lambda rows: of_one(rows.float()) if rows.numel() == D else of_several(rows.float())


@contextmanager
def _fbgemm() -> Iterator[None]:
    """Have torch pack int8 matrices for FBGEMM, without the warning that their type is to go.

    FBGEMM takes them as that type alone, and torch's other int8 products are several times slower on a row or two.
    """
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.backends.quantized.engine = before
