import pytest
import torch

from vitlab.layers.norm import RMSNorm


def test_rms_norm_gives_the_values_worked_by_hand():
    norm = RMSNorm(2, eps=0.5).double()
    norm.weight.data.copy_(torch.tensor([1.0, -2.0]))
    # mean squares (9 + 16) / 2 = 12.5 and 0, roots sqrt(13) and sqrt(.5)
    output = norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[3.0, -8.0], [0.0, 0.0]], dtype=torch.float64) / 13**0.5
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_computes_in_float32_and_gives_the_dtype_back(dtype, autocast):
    """The squares of 300 do not fit float16, and a bfloat16 gain would round."""
    norm = RMSNorm(64)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data.copy_(1 + 0.1 * torch.randn(64, generator=generator))
    tokens = (300 + torch.randn(3, 5, 64, generator=generator)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = norm(tokens)
    wide = tokens.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert output.dtype == dtype
    assert torch.equal(output, exact.to(dtype))
    assert torch.equal(norm.to(torch.float32)(tokens.float()).to(dtype), output)


def test_rms_norm_takes_low_precision_gains():
    norm = RMSNorm(8).bfloat16()
    tokens = torch.randn(2, 8)
    assert norm(tokens).dtype == torch.float32
    torch.testing.assert_close(norm(tokens), RMSNorm(8)(tokens), rtol=0, atol=0)
