"""A causal ImageGPT that draws: it reads one pixel a step, and keeps what later pixels need of the earlier ones.

A step costs one row through each matrix, and attention over the stored keys and values: time grows linearly with the
pixels, but for the attention. On a CPU a step takes as long as its weights take to come from memory, so that half the
bytes (bf16) or a quarter (int8) are nearly twice or four times as fast.

Legend: `N` pixels of an image, `V` colours, `h` heads, `d` width of a head, `n` pixels that are read at once.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.engine.device import autocast_dtype
from vitlab.errors import InputError
from vitlab.layers.attention import attention
from vitlab.models.imagegpt import Block, ImageGPT
from vitlab.models.network import Network, device_of
from vitlab.options import DrawPrecision

Linear: TypeAlias = Callable[[Tensor], Tensor]

_QUICK_GELU = 1.702
_LARGEST_INT8 = 127


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
    if precision == "int8" and not (device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines):
        raise InputError(f"precision int8 needs an x86 processor, and the device is {device}: use auto, bf16 or fp32")
    return precision


class Decoder:
    """Gives the colour logits of one pixel after another, for several images at a time.

    Args:
        network: its weights are read now; the decoder keeps copies in its own precision.
        precision: what the blocks' matrices are in. `fp32` is the network's own precision, and the reference. `bf16`
            also stores keys and values so. `int8` has whole numbers with a scale for each output of a matrix and for
            each of its input rows, so that no image depends on its neighbours. The sums between the blocks, the
            normalisation and the colour head stay in the network's precision throughout.
        batch_size: most images at a time; memory for their keys and values is taken now.

    Raises:
        InputError: the network is no causal ImageGPT, or the device lacks the precision.
    """

    def __init__(self, network: Network, *, precision: DrawPrecision = "fp32", batch_size: int = 1) -> None:
        """Convert the weights and set the memory aside."""
        self.network = require_decodable(network)
        device = device_of(network)
        self.precision = resolve_precision(precision, device)
        self.batch_size = batch_size
        config, N = self.network.config, math.prod(self.network.image_size)
        dtype = torch.bfloat16 if self.precision == "bf16" else self.network.pos_embed.dtype
        shape = 2, batch_size, config.num_heads, N, config.embed_dim // config.num_heads
        with torch.inference_mode():
            self.blocks = [
                _DecoderBlock(block, self.precision, torch.zeros(shape, dtype=dtype, device=device))
                for block in self.network.blocks
                if isinstance(block, Block)
            ]
        self.num_read = 0
        """Inputs that were read, the start token included; the logits are those of the pixel of that number less 1."""

    @torch.inference_mode()
    def start(self, given: Tensor) -> Tensor:
        """Forget all images, and read the first pixels of new ones at once.

        Args:
            given: int64 `(B, n)`, B up to batch_size, n from 0 to N - 1.

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
        """Go on with images `rows`, int64 `(B,)`, of those at hand; one may be there several times."""
        for block in self.blocks:
            stored = block.cache[:, :, :, : self.num_read]
            stored[:, : len(rows)] = stored[:, rows]

    def _read(self, tokens: Tensor) -> Tensor:
        """Read inputs `(B, n)` after those before, and give the logits `(B, V)` after the last."""
        network, first = self.network, self.num_read
        self.num_read += tokens.shape[1]
        # A caller's autocast would change what the precision promises.
        with torch.autocast(tokens.device.type, enabled=False):
            features = F.embedding(tokens, network.token_embed) + network.pos_embed[:, first : self.num_read]
            for block in self.blocks:
                features = block(features, first)
            logits: Tensor = network.color_head(network.norm(features[:, -1]))
        return logits


class _DecoderBlock:
    """A block's matrices, converted, and the keys and values of the pixels that it has read: `(2, B, h, N, d)`.

    The factors of the quick GELU are in the matrices on both sides of it.
    """

    def __init__(self, block: Block, precision: DrawPrecision, cache: Tensor) -> None:
        attn, mlp = block.attn, block.mlp
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv = _linear(attn.qkv, precision)
        self.proj = _linear(attn.proj, precision)
        self.fc1 = _linear(mlp.fc1, precision, weight_factor=_QUICK_GELU, bias_factor=_QUICK_GELU)
        self.fc2 = _linear(mlp.fc2, precision, weight_factor=1 / _QUICK_GELU)
        self.cache = cache
        self.compute_dtype = cache.dtype

    def __call__(self, tokens: Tensor, first: int) -> Tensor:
        """Map tokens `(B, n, D)` of pixels first, first + 1, ... to `(B, n, D)`."""
        B, n, D = tokens.shape
        _, _, h, _, d = self.cache.shape
        qkv = self.qkv(self.norm1(tokens).to(self.compute_dtype))
        qkv = qkv.view(B, n, 3, h, d).permute(2, 0, 3, 1, 4)  # (3, B, h, n, d)
        self.cache[:, :B, :, first : first + n] = qkv[1:]
        keys, values = self.cache[:, :B, :, : first + n]
        heads = _attend(qkv[0], keys, values)
        tokens = tokens + self.proj(heads.transpose(1, 2).reshape(B, n, D))
        hidden = self.fc1(self.norm2(tokens).to(self.compute_dtype))
        return tokens + self.fc2(F.silu(hidden, inplace=True))


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Give `attention` of the last n of so many pixels, each of them and those before it."""
    n, d = query.shape[-2:]
    if n == 1 and query.device.type == "cpu" and query.dtype == torch.bfloat16:
        # torch's fused attention takes 3 times as long for one row in bf16, and so does query @ keys.mT.
        weights: Tensor = (keys @ (query * d**-0.5).mT).softmax(dim=-2)  # (B, h, N, 1)
        return weights.mT @ values
    return attention(query, keys, values, causal=n > 1)


def _linear(
    layer: nn.Linear, precision: DrawPrecision, *, weight_factor: float = 1.0, bias_factor: float = 1.0
) -> Linear:
    """Convert a linear layer, its weight and bias multiplied by numbers, to the fastest form that torch has for it."""
    weight = layer.weight * weight_factor
    bias = None if layer.bias is None else layer.bias * bias_factor
    if precision == "int8":
        return _int8_linear(weight, bias)
    if precision == "bf16":
        weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
    packs = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    if packs and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return lambda rows: F.linear(rows, weight, bias)


def _int8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Round each row of a matrix, and each row that it is multiplied with, to 8 bits of the row's largest number.

    The products are added up as whole numbers, exactly. Without VNNI instructions a sum of two of them must fit 16
    bits, which leaves 7 bits for the input.
    """
    scales = weight.double().abs().amax(dim=1).clamp_min(1e-30) / _LARGEST_INT8
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    rounded = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
    with _fbgemm():
        packed = torch.ops.quantized.linear_prepack(rounded, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    capabilities = torch.cpu.get_capabilities()
    largest = _LARGEST_INT8 if capabilities.get("avx512_vnni") or capabilities.get("avx_vnni") else 63

    def linear(rows: Tensor) -> Tensor:
        sizes = torch.linalg.vector_norm(rows, math.inf, dim=-1, keepdim=True).clamp_min_(1e-30)
        product: Tensor = multiply(rows / sizes, 1 / largest, largest + 1, packed)
        return product.mul_(sizes) if bias is None else torch.addcmul(bias, product, sizes)

    return linear


@contextmanager
def _fbgemm() -> Iterator[None]:
    """Have torch pack int8 matrices for FBGEMM."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
