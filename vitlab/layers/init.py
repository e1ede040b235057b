"""Initial values under their names; which of them a network takes stands in its `init_weights`."""

import math

import torch
from torch import Tensor, nn

# Standard deviation of a standard normal variable that is cut at plus and minus 2.
_STD_CUT_AT_2 = 0.87962566103423978


def xavier_linear(linear: nn.Linear, *, parts: int = 1) -> None:
    """Draw weights uniformly so that outputs vary as much as inputs, forward and backward; the bias becomes 0.

    Args:
        linear: the layer.
        parts: number of maps stacked in its rows, such as 3 for queries, keys and values, each drawn for its own size.

    Source: Glorot and Bengio, 2010, eq. 16.
    """
    fan_out, fan_in = linear.out_features // parts, linear.in_features
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    nn.init.uniform_(linear.weight, -bound, bound)
    _zero_bias(linear)


def lecun_conv(conv: nn.Conv2d) -> None:
    """Draw weights from a normal cut at two standard deviations, of variance 1 / fan-in; the bias becomes 0.

    Source: LeCun et al., 1998, sec. 4.6; the cut and its correction as in JAX's `lecun_normal`.
    """
    std = math.sqrt(1.0 / conv.weight[0].numel()) / _STD_CUT_AT_2
    nn.init.trunc_normal_(conv.weight, std=std, a=-2.0 * std, b=2.0 * std)
    _zero_bias(conv)


def normal_linear(linear: nn.Linear, *, std: float) -> None:
    """Draw weights from a normal; the bias becomes 0."""
    normal_table(linear.weight, std=std)
    _zero_bias(linear)


def zero_linear(linear: nn.Linear) -> None:
    """Set weights and bias to 0."""
    nn.init.zeros_(linear.weight)
    _zero_bias(linear)


def normal_table(table: Tensor, *, std: float) -> None:
    """Draw a table of tokens or positions, or any other tensor, from a normal."""
    if table.is_meta:  # nothing to draw, and torch would import its compiler for it, which takes two seconds
        return
    with torch.no_grad():
        table.normal_(std=std)


def _zero_bias(layer: nn.Linear | nn.Conv2d) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
