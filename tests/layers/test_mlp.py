import math

import pytest
import torch
from timm.layers import Mlp as TimmMlp

from vitlab.layers.mlp import Mlp


def test_mlp_equals_timm_at_random_weights():
    torch.manual_seed(0)
    ours, peer = Mlp(6, 10).double(), TimmMlp(6, 10).double()
    peer.load_state_dict(ours.state_dict())
    tokens = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(tokens), peer(tokens), rtol=0, atol=1e-14)


def test_mlp_takes_the_exact_gelu():
    layer = Mlp(1, 1).double()
    for linear in (layer.fc1, layer.fc2):
        torch.nn.init.ones_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    exact = 2.0 * 0.5 * (1 + math.erf(2.0 / math.sqrt(2)))
    assert layer(torch.tensor([[2.0]], dtype=torch.float64)).item() == pytest.approx(exact, abs=1e-14)


def test_mlp_drops_after_both_layers_while_training():
    torch.manual_seed(0)
    layer = Mlp(6, 10, drop_rate=1.0)
    tokens = torch.randn(2, 5, 6)
    assert layer(tokens).eq(0).all()
    layer.drop2.p = 0.0
    torch.testing.assert_close(layer(tokens), layer.fc2.bias.expand(2, 5, 6), rtol=0, atol=0)
    assert layer.eval()(tokens).ne(0).all()
