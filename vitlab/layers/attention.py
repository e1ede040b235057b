"""Scaled dot-product attention: one pure function for every kind, and its multi-head module.

Legend: `N` queries, `M` keys and values, `d` width of a query and a key, `e` width of a value.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlab.checks import require_multiple

# Of the fused time, with freed memory kept, two products and a softmax took in a ViT's training step .69 to .78 at 577
# keys, .77 to .86 at 785 and .8 at 1,025, in inference .80 to .87. Beyond, the squares add over half to its memory.
_MOST_EXPLICIT_KEYS = 800
# Fused attention leaves out half of a causal square: of its time in an ImageGPT's step .87 at 576 keys, .95 at 1,024.
_MOST_EXPLICIT_CAUSAL_KEYS = 512


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    bias_is_finite: bool = False,
) -> Tensor:
    """Give each query the average of the values, weighted by how well its key matches.

    Tokens are rows here: `softmax(Q K^T / sqrt(d), over the last axis) V`. Papers that write tokens as columns mean the
    same with every matrix transposed: `V softmax(K^T Q / sqrt(d), over the first axis)`, one column a query.

    Args:
        query: `(..., N, d)`.
        key: `(..., M, d)`; M differs from N in cross attention.
        value: `(..., M, e)`.
        bias: added to the scaled scores, broadcast to `(..., N, M)`; -inf hides a key from a query.
        key_padding_mask: bool, True is padding; `(B, M)` where the inputs' first axis is B, or `(M,)`.
        causal: hide what comes after a query; the N queries stand at the last N of the M positions.
        bias_is_finite: the caller's word that no number of the bias is -inf, which saves looking for queries that see
            no key.

    Returns:
        `(..., N, e)` in the values' dtype; a query that sees no key at all gets zeros.

    Source: arXiv:1706.03762, eq. 1. Differs: the query is scaled before the product, in float16 always, so that it does
    not overflow; beside a mask, in other types, the scores are.
    """
    if _explicit_is_faster(query, key, bias, causal=causal):
        weights = attention_weights(
            query,
            key,
            bias=bias,
            key_padding_mask=key_padding_mask,
            causal=causal,
            bias_is_finite=bias_is_finite,
        )
        return weights.to(value.dtype) @ value
    only_causal = causal and bias is None and key_padding_mask is None and query.shape[-2] == key.shape[-2]
    mask = None if only_causal else _score_mask(query, key, bias, key_padding_mask, causal=causal)
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=only_causal)
    if _all_see(query, key, bias, key_padding_mask, causal=causal, bias_is_finite=bias_is_finite):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    mask, sees_nothing = _open_empty_rows(mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).masked_fill(sees_nothing, 0.0)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    bias_is_finite: bool = False,
) -> Tensor:
    """Give the weights `(..., N, M)` by which `attention` averages the values; arguments as there.

    Returns:
        Weights of which each row sums to 1, or to 0 for a query that sees no key.
    """
    mask = _score_mask(query, key, bias, key_padding_mask, causal=causal)
    if mask is None:
        scores: Tensor = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # (..., N, M)
        return scores.softmax(dim=-1)
    query, scale = scale_in_float16(query)
    products = query @ key.transpose(-2, -1)
    if _all_see(query, key, bias, key_padding_mask, causal=causal, bias_is_finite=bias_is_finite):
        return torch.add(mask, products, alpha=scale).softmax(dim=-1)
    mask, sees_nothing = _open_empty_rows(mask)
    return torch.add(mask, products, alpha=scale).softmax(dim=-1).masked_fill(sees_nothing, 0.0)


def scale_in_float16(query: Tensor) -> tuple[Tensor, float]:
    """Scale queries by 1 / sqrt(d) where their products with keys may overflow, and give the factor that these lack.

    The scores are scaled elsewhere: where they are few, or a mask is added anyhow, that saves a copy of the queries.
    """
    scale: float = query.shape[-1] ** -0.5
    return (query * scale, 1.0) if query.dtype == torch.float16 else (query, scale)


def _explicit_is_faster(query: Tensor, key: Tensor, bias: Tensor | None, *, causal: bool) -> bool:
    """Tell whether two matrix products and a softmax beat torch's fused attention.

    They do on a CPU in two cases. In bf16 the fused forward pass takes up to twice and the backward pass two to four
    times as long, up to some hundred tokens. And a bias that is learned has no fused backward pass there: torch falls
    back on products of its own, which take longer. Everywhere else, in fp16 too, the fused kernels are as fast or
    faster, and need less memory.
    """
    learns_bias = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    on_cpu = query.device.type == "cpu"
    return (on_cpu and learns_bias) or not is_fused(key.shape[-2], query.device, query.dtype, causal=causal)


def is_fused(num_keys: int, device: torch.device, dtype: torch.dtype, *, causal: bool) -> bool:
    """Tell whether attention without a learned bias takes torch's fused kernel, which keeps no square of the tokens."""
    most = _MOST_EXPLICIT_CAUSAL_KEYS if causal else _MOST_EXPLICIT_KEYS
    return not (device.type == "cpu" and dtype == torch.bfloat16 and num_keys <= most)


def _score_mask(
    query: Tensor, key: Tensor, bias: Tensor | None, key_padding_mask: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Join bias, padding and causality in one tensor to add to the scores, no larger than they need together."""
    N, M = query.shape[-2], key.shape[-2]
    mask = None if bias is None else bias.to(query.dtype)
    if mask is not None and 2 < mask.ndim < query.ndim:  # else torch's fused kernels do not take it
        mask = mask.view(*(1,) * (query.ndim - mask.ndim), *mask.shape)
    hidden = None
    if key_padding_mask is not None:
        batch_axes = key_padding_mask.shape[:-1]
        between = (1,) * (query.ndim - key_padding_mask.ndim)
        hidden = key_padding_mask.reshape(*batch_axes, *between, M)  # (B, 1, ..., 1, M)
    if causal:
        future = torch.ones(N, M, dtype=torch.bool, device=query.device).triu(M - N + 1)
        hidden = future if hidden is None else hidden | future
    if hidden is None:
        return mask
    open_scores = query.new_zeros(()) if mask is None else mask
    return torch.where(hidden, query.new_full((), -torch.inf), open_scores)


def _all_see(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    causal: bool,
    bias_is_finite: bool,
) -> bool:
    """Tell whether it is known, without a look at a mask, that every query sees a key: of causality alone, its own."""
    bias_hides_none = bias is None or bias_is_finite
    return bias_hides_none and key_padding_mask is None and not (causal and query.shape[-2] > key.shape[-2])


def _open_empty_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Open the rows of a score mask that hide every key, and tell which they are, `(..., N or 1, 1)`.

    A softmax over nothing but -inf is NaN, in the backward pass too; the caller zeroes these rows afterwards.
    """
    sees_nothing: Tensor = mask.isneginf().all(dim=-1, keepdim=True)
    return mask.masked_fill(sees_nothing, 0.0), sees_nothing


def in_product_dtype(tokens: Tensor) -> Tensor:
    """Cast float32 tokens to what autocast multiplies matrices in: before they are moved about, not after.

    Without autocast, and in every other dtype, the tokens themselves.
    """
    kind = tokens.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return tokens.to(torch.get_autocast_dtype(kind)) if casts and tokens.dtype == torch.float32 else tokens


class AttentionProjections(nn.Module):
    """What every kind of attention with several heads learns.

    Parameters bear timm's names: `qkv` (rows: queries, keys, values, each head by head) and `proj`.
    """

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True, drop_rate: float = 0.0) -> None:
        """Build the projections.

        Args:
            dim: width D of the tokens, a multiple of num_heads.
            num_heads: heads, each of width D / num_heads.
            qkv_bias: whether queries, keys and values have a bias; the output projection always has one.
            drop_rate: dropout after the output projection.

        Raises:
            InputError: the width does not split evenly into heads.
        """
        super().__init__()
        require_multiple("embed_dim", dim, "num_heads", num_heads)
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop_rate)

    def attend(self, qkv: Tensor, num_queries: int | None = None) -> Tensor:
        """Give the projection `(B, N, D)` of what the heads find, of queries, keys and values `(B, N, 3 D)`.

        With `num_queries`, that of the first so many queries alone.
        """
        query, key, value = rearrange(qkv, "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        heads = attention(query[:, :, :num_queries], key, value)
        projected: Tensor = self.proj(rearrange(heads, "b h n d -> b n (h d)"))
        return projected


class MultiHeadAttention(AttentionProjections):
    """Let every token attend to every token, with several heads of their own projections.

    Source: arXiv:1706.03762, sec. 3.2.2.
    """

    def forward(self, tokens: Tensor, num_queries: int | None = None) -> Tensor:
        """Map tokens `(B, N, D)` to `(B, N, D)`, or the first so many of them alone to `(B, num_queries, D)`."""
        mixed: Tensor = self.proj_drop(self.attend(self.qkv(tokens), num_queries))
        return mixed
