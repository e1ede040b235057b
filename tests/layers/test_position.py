import math

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table_simple

from vitlab.errors import InputError
from vitlab.layers.position import (
    relative_bias,
    resample_positions,
    resample_relative_bias,
    sine_cosine_positions,
)
from vitlab.layers.windows import relative_index


def test_sine_cosine_positions_of_width_8_divide_by_powers_of_ten():
    table = sine_cosine_positions(50, 8)
    for position in (0, 1, 7, 49):
        expected = [wave(position / divisor) for divisor in (1, 10, 100, 1000) for wave in (math.sin, math.cos)]
        torch.testing.assert_close(table[position], torch.tensor(expected), rtol=0, atol=1e-7)


def test_sine_cosine_positions_shift_by_a_rotation():
    """Moving on by k turns each pair of columns by the same angle, wherever it starts."""
    table = sine_cosine_positions(30, 8).double().view(30, 4, 2)
    angle = 5 / torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    sine, cosine = table[:25].unbind(dim=-1)
    turned = torch.stack([sine * angle.cos() + cosine * angle.sin(), cosine * angle.cos() - sine * angle.sin()], dim=-1)
    torch.testing.assert_close(turned, table[5:], rtol=0, atol=1e-6)


def test_sine_cosine_positions_refuse_an_odd_width():
    with pytest.raises(InputError, match="width 7 is odd: use 6 or 8"):
        sine_cosine_positions(4, 7)


@pytest.mark.parametrize("num_prefix", [0, 1, 2])
@pytest.mark.parametrize("new_grid", [(6, 7), (2, 9), (3, 3)], ids=["grow", "both", "shrink"])
def test_resample_positions_equals_timm(new_grid, num_prefix):
    table = torch.randn(1, num_prefix + 4 * 5, 6, generator=torch.Generator().manual_seed(0))
    ours = resample_positions(table, old_grid=(4, 5), new_grid=new_grid, num_prefix=num_prefix)
    peer = resample_abs_pos_embed(table, list(new_grid), [4, 5], num_prefix_tokens=num_prefix)
    torch.testing.assert_close(ours, peer, rtol=0, atol=0)
    torch.testing.assert_close(ours[:, :num_prefix], table[:, :num_prefix], rtol=0, atol=0)


def test_resample_positions_follows_the_image_axes():
    """A table that changes along the width alone still does after the height has grown."""
    rows = torch.arange(5.0).expand(4, 5).reshape(1, 20, 1)
    resampled = resample_positions(rows, old_grid=(4, 5), new_grid=(8, 5), num_prefix=0).view(8, 5)
    torch.testing.assert_close(resampled, torch.arange(5.0).expand(8, 5), rtol=0, atol=1e-5)


def test_resample_positions_leaves_an_equal_grid_and_the_dtype_alone():
    table = torch.randn(1, 13, 6, dtype=torch.float64)
    assert resample_positions(table, old_grid=(3, 4), new_grid=(3, 4)) is table
    assert resample_positions(table, old_grid=(3, 4), new_grid=(6, 4)).dtype == torch.float64


def test_relative_bias_looks_up_each_pair_for_each_head():
    table, index = torch.randn(21, 5), torch.randint(21, (4, 4))
    bias = relative_bias(table, index)
    assert bias.shape == (5, 4, 4)
    assert bias.is_contiguous()
    assert all(
        bias[head, query, key] == table[index[query, key], head] for head, query, key in torch.ones(5, 4, 4).nonzero()
    )


def test_relative_bias_gradient_sums_over_the_pairs_of_an_offset():
    table, index = torch.zeros(15, 3, dtype=torch.float64, requires_grad=True), relative_index((2, 3))
    gradient = torch.randn(3, 6, 6, dtype=torch.float64)
    relative_bias(table, index).backward(gradient)
    expected = torch.stack([gradient[:, index == row].sum(dim=1) for row in range(15)])
    torch.testing.assert_close(table.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_heads", [16, 32])
def test_relative_bias_gradient_repeats_bit_for_bit(num_heads):
    """The gradient of `table[index]`, added in parallel, differed in most of 200 repeats from 16 heads on."""
    table, index = torch.randn(169, num_heads, requires_grad=True), relative_index((7, 7))
    gradient = torch.randn(num_heads, 49, 49)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    gradients = {
        torch.autograd.grad(relative_bias(table, index), table, gradient)[0].numpy().tobytes() for _ in range(50)
    }
    torch.set_num_threads(threads)
    assert len(gradients) == 1


@pytest.mark.parametrize("new_side", [12, 8, 4, 2])
def test_resample_relative_bias_equals_timm(new_side):
    table = torch.randn(169, 3, generator=torch.Generator().manual_seed(0))
    ours = resample_relative_bias(table, old_window=(7, 7), new_window=(new_side, new_side))
    peer = resize_rel_pos_bias_table_simple(table, (new_side, new_side), ((2 * new_side - 1) ** 2, 3))
    torch.testing.assert_close(ours, peer, rtol=0, atol=0)


def test_resample_relative_bias_follows_the_axes_of_a_window():
    """Biases that depend on the horizontal offset alone still do in a higher window; offset 0 keeps its bias."""
    across = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0])
    table = across.expand(3, 5).reshape(15, 1)
    higher = resample_relative_bias(table, old_window=(2, 3), new_window=(5, 3)).view(9, 5)
    torch.testing.assert_close(higher, across.expand(9, 5), rtol=0, atol=1e-5)
    wider = resample_relative_bias(table, old_window=(2, 3), new_window=(2, 6)).view(3, 11)
    torch.testing.assert_close(wider[:, 5], torch.full((3,), 4.0), rtol=0, atol=1e-5)


def test_resample_relative_bias_leaves_an_equal_window_and_the_dtype_alone():
    table = torch.randn(15, 3, dtype=torch.float64)
    assert resample_relative_bias(table, old_window=(2, 3), new_window=(2, 3)) is table
    assert resample_relative_bias(table, old_window=(2, 3), new_window=(4, 3)).dtype == torch.float64
