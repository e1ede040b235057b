import pytest
import torch

from vitlab.layers.droppath import DropPath


def test_drop_path_drops_whole_samples_and_scales_the_others():
    torch.manual_seed(0)
    output = DropPath(0.25)(torch.ones(4000, 2, 3))
    per_sample = output.flatten(1)
    assert per_sample.eq(per_sample[:, :1]).all()
    assert sorted(set(per_sample[:, 0].tolist())) == pytest.approx([0.0, 4 / 3])
    assert per_sample[:, 0].eq(0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert output.mean().item() == pytest.approx(1.0, abs=0.03)


def test_drop_path_at_rate_1_drops_all_and_stays_finite():
    branch = torch.ones(8, 2, 3, requires_grad=True)
    output = DropPath(1.0)(branch)
    output.sum().backward()
    assert output.eq(0).all()
    assert branch.grad.eq(0).all()


def test_drop_path_changes_nothing_in_evaluation_or_at_rate_0():
    branch = torch.randn(8, 2, 3)
    assert DropPath(0.9).eval()(branch) is branch
    assert DropPath(0.0).train()(branch) is branch
