import math

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from vitlab.errors import InputError
from vitlab.layers.position import resample_positions, sine_cosine_positions


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
