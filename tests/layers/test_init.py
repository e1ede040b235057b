import math

import pytest
import torch
from torch import nn

from vitlab.layers import init


def test_xavier_linear_fills_the_bound_of_each_part():
    torch.manual_seed(0)
    linear = nn.Linear(100, 300)
    init.xavier_linear(linear, parts=3)
    bound = math.sqrt(6 / (100 + 100))
    assert linear.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert linear.bias.eq(0).all()
    init.xavier_linear(linear)
    assert linear.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (100 + 300)), rel=1e-3)


def test_lecun_conv_has_the_variance_of_its_fan_in_and_no_tails():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 400, kernel_size=(4, 5))
    init.lecun_conv(conv)
    std = math.sqrt(1 / (3 * 4 * 5))
    assert conv.weight.std().item() == pytest.approx(std, rel=0.02)
    assert 2.2 * std < conv.weight.abs().max().item() <= 2 * std / 0.879
    assert conv.bias.eq(0).all()


def test_normal_linear_draws_weights_and_zeroes_the_bias():
    torch.manual_seed(0)
    linear = nn.Linear(100, 300)
    init.normal_linear(linear, std=0.3)
    assert linear.weight.std().item() == pytest.approx(0.3, rel=0.02)
    assert linear.bias.eq(0).all()


def test_zero_linear_and_normal_table_do_as_they_say():
    torch.manual_seed(0)
    linear = nn.Linear(5, 4)
    init.zero_linear(linear)
    assert linear(torch.randn(2, 5)).eq(0).all()
    table = nn.Parameter(torch.empty(1, 200, 100))
    init.normal_table(table, std=0.02)
    assert table.std().item() == pytest.approx(0.02, rel=0.02)
    assert table.requires_grad


def test_normal_table_draws_nothing_on_the_meta_device(monkeypatch):
    """torch would import its compiler for that, two seconds before the first prediction."""
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *_, **__: pytest.fail("drew on the meta device"))
    init.normal_table(torch.empty(2, 3, device="meta"), std=0.02)
