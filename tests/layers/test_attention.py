import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vitlab.errors import InputError
from vitlab.layers import attention as module
from vitlab.layers.attention import MultiHeadAttention, attention, attention_weights, in_product_dtype

# Three tokens worked by hand: scores of the second query are 0, 1 and 1 over sqrt(2).
QUERY = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
VALUE = torch.tensor([[2, 0], [0, 2], [1, 3]], dtype=torch.float64)
E = math.exp(1 / math.sqrt(2))


def random_inputs(num_queries=5, num_keys=5, dtype=torch.float64, requires_grad=False):
    """Queries and keys of width 8 and values of width 3, for two samples and three heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_queries, 8), (num_keys, 8), (num_keys, 3))
    inputs = [torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(requires_grad) for tensor in inputs]


def mask_cases():
    """Every kind of mask, for five queries and seven keys."""
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    padding[1, :2] = True
    return {
        "full": {},
        "bias": {"bias": bias},
        "padding": {"key_padding_mask": padding},
        "causal": {"causal": True},
        "all": {"bias": bias, "key_padding_mask": padding, "causal": True},
    }


@pytest.fixture(params=[False, True], ids=["fused", "explicit"])
def path(request, monkeypatch):
    """Run the test once with torch's fused attention and once with the products written out."""
    monkeypatch.setattr(module, "_explicit_is_faster", lambda query, key, bias, causal: request.param)


@pytest.mark.usefixtures("path")
def test_attention_gives_the_values_worked_by_hand():
    exact = torch.tensor([(2 + E) / (1 + 2 * E), 5 * E / (1 + 2 * E)], dtype=torch.float64)
    output = attention(QUERY, QUERY, VALUE)
    assert output[1].tolist() == pytest.approx([0.797, 2.006], abs=5e-4)
    torch.testing.assert_close(output[1], exact, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_attention_causal_gives_the_values_worked_by_hand():
    exact = torch.tensor([2 / (1 + E), 2 * E / (1 + E)], dtype=torch.float64)
    output = attention(QUERY, QUERY, VALUE, causal=True)
    assert output[1].tolist() == pytest.approx([0.660, 1.340], abs=5e-4)
    torch.testing.assert_close(output[1], exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(output[0], VALUE[0], rtol=0, atol=0)


def test_attention_weights_are_those_worked_by_hand():
    full = attention_weights(QUERY, QUERY)[1]
    assert full.tolist() == pytest.approx([0.198, 0.401, 0.401], abs=5e-4)
    torch.testing.assert_close(full, torch.tensor([1, E, E], dtype=torch.float64) / (1 + 2 * E), rtol=0, atol=1e-12)
    causal = attention_weights(QUERY, QUERY, causal=True)[1]
    assert causal.tolist() == pytest.approx([0.330, 0.670, 0.0], abs=5e-4)
    assert causal[2] == 0
    torch.testing.assert_close(causal[0], torch.tensor(1 / (1 + E), dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", mask_cases())
def test_attention_equals_a_loop_over_tokens(kind):
    masks = mask_cases()[kind]
    query, key, value = random_inputs(5, 7)
    bias = masks.get("bias", torch.zeros(3, 5, 7))
    padding = masks.get("key_padding_mask", torch.zeros(2, 7, dtype=torch.bool))
    output = attention(query, key, value, **masks)
    for b in range(2):
        for h in range(3):
            for n in range(5):
                last_seen = n + 2 if masks.get("causal") else 6
                seen = [m for m in range(7) if not padding[b, m] and m <= last_seen]
                scores = [float(query[b, h, n] @ key[b, h, m]) / math.sqrt(8) + float(bias[h, n, m]) for m in seen]
                total = sum(map(math.exp, scores))
                average = sum(math.exp(score) / total * value[b, h, m] for score, m in zip(scores, seen, strict=True))
                torch.testing.assert_close(output[b, h, n], average, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", mask_cases())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.03)])
def test_attention_paths_agree_in_values_and_gradients(kind, dtype, tolerance, monkeypatch):
    results = []
    for explicit in (False, True):
        monkeypatch.setattr(module, "_explicit_is_faster", lambda *given, causal, explicit=explicit: explicit)
        inputs = random_inputs(5, 7, dtype, requires_grad=True)
        output = attention(*inputs, **mask_cases()[kind])
        output.square().sum().backward()
        results.append([output, *(tensor.grad for tensor in inputs)])
        assert output.dtype == dtype
    for fused, explicit in zip(*results, strict=True):
        torch.testing.assert_close(fused, explicit, rtol=tolerance, atol=tolerance)


def test_attention_takes_the_explicit_path_on_a_cpu_in_bf16_and_where_a_bias_is_learned():
    learned = torch.zeros(3, 5, 7, requires_grad=True)
    for dtype, bias, num_keys, causal, expected in [
        (torch.bfloat16, None, 800, False, True),
        (torch.bfloat16, None, 801, False, False),
        (torch.bfloat16, None, 512, True, True),
        (torch.bfloat16, None, 513, True, False),
        (torch.float16, None, 7, False, False),
        (torch.float32, None, 7, False, False),
        (torch.float32, learned.detach(), 7, False, False),
        (torch.float32, learned, 7, False, True),
    ]:
        query, key, _ = random_inputs(5, num_keys, dtype=dtype)
        assert module._explicit_is_faster(query, key, bias, causal=causal) is expected
    with torch.no_grad():
        assert not module._explicit_is_faster(*random_inputs(5, 7)[:2], learned, causal=False)


@pytest.mark.parametrize("bias_shape", [(5, 7), (3, 5, 7), (1, 5, 7), (2, 3, 5, 7)])
def test_attention_gives_the_fused_kernel_a_bias_that_it_takes(bias_shape):
    """Of three axes beside queries of four, torch falls back on products that take three times as long."""
    called = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            called.append(operation)
            return operation(*args, **(kwargs or {}))

    query, key, _ = random_inputs(5, 7)
    with torch.no_grad(), Recorder():
        attention(query, key, key, bias=torch.zeros(bias_shape, dtype=query.dtype), bias_is_finite=True)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in called


@pytest.mark.usefixtures("path")
def test_attention_row_and_column_conventions_agree():
    query, key, value = (tensor[0, 0] for tensor in random_inputs(5, 7))
    queries, keys, values = query.T, key.T, value.T
    columns = values @ (keys.T @ queries / math.sqrt(8)).softmax(dim=0)
    torch.testing.assert_close(attention(query, key, value), columns.T, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_attention_permuted_inputs_permute_the_outputs():
    query, key, value = random_inputs()
    order = torch.tensor([3, 0, 4, 1, 2])
    output = attention(query, key, value)
    permuted = attention(*(tensor[:, :, order] for tensor in (query, key, value)))
    torch.testing.assert_close(permuted, output[:, :, order], rtol=0, atol=1e-12)
    keys_alone = attention(query, key[:, :, order], value[:, :, order])
    torch.testing.assert_close(keys_alone, output, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_attention_padded_keys_change_nothing():
    query, key, value = random_inputs(5, 7)
    padding = torch.tensor([False] * 4 + [True] * 3).expand(2, 7)
    padded_value = value.clone()
    padded_value[:, :, 4:] = 1e6
    output = attention(query, key, padded_value, key_padding_mask=padding)
    torch.testing.assert_close(output, attention(query, key[:, :, :4], value[:, :, :4]), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_attention_takes_padding_without_a_batch_axis():
    padding = torch.tensor([False, False, True])
    output = attention(QUERY, QUERY, VALUE, key_padding_mask=padding)
    torch.testing.assert_close(output, attention(QUERY, QUERY[:2], VALUE[:2]), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_attention_causal_continues_where_cached_keys_end():
    query, key, value = random_inputs(7, 7)
    whole = attention(query, key, value, causal=True)
    continued = attention(query[:, :, 4:], key, value, causal=True)
    torch.testing.assert_close(continued, whole[:, :, 4:], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("hidden_by", ["padding", "bias"])
def test_attention_gives_zeros_and_finite_gradients_where_no_key_is_seen(hidden_by):
    query, key, value = random_inputs(5, 7, requires_grad=True)
    if hidden_by == "padding":
        masks = {"key_padding_mask": torch.tensor([[True] * 7, [False] * 7])}
    else:
        masks = {"bias": torch.tensor([-torch.inf, 0.0], dtype=torch.float64).view(2, 1, 1, 1).expand(2, 1, 5, 7)}
    output = attention(query, key, value, **masks)
    assert output[0].eq(0).all()
    torch.testing.assert_close(output[1], attention(query, key, value)[1], rtol=0, atol=1e-12)
    output.sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad.isfinite().all()
        assert tensor.grad[0].eq(0).all()
        assert tensor.grad[1].ne(0).any()


@pytest.mark.usefixtures("path")
def test_attention_of_large_float16_values_is_finite():
    """Scores of 40 * 40 * 64 overflow float16; the scaled query's 12,800 do not."""
    query = torch.full((1, 1, 5, 64), 40.0, dtype=torch.float16)
    weights = attention_weights(query, query, bias=torch.zeros(5, 5))
    torch.testing.assert_close(weights, torch.full_like(weights, 0.2))
    for masks in ({}, {"causal": True}, {"key_padding_mask": torch.tensor([[False] * 3 + [True] * 2])}):
        torch.testing.assert_close(attention(query, query, query, **masks), query)


def test_multi_head_attention_equals_torch_with_its_weights():
    torch.manual_seed(0)
    ours = MultiHeadAttention(12, 3).double()
    peer = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    state = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    peer.load_state_dict(state | {"out_proj.weight": ours.proj.weight, "out_proj.bias": ours.proj.bias})
    tokens = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(tokens), peer(tokens, tokens, tokens)[0], rtol=0, atol=1e-12)


def test_multi_head_attention_drops_only_while_training():
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 3, qkv_bias=False, drop_rate=0.5)
    tokens = torch.randn(4, 50, 12)
    assert layer.qkv.bias is None
    assert layer(tokens).eq(0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert layer.eval()(tokens).ne(0).all()


def test_multi_head_attention_names_widths_that_fit():
    with pytest.raises(InputError, match=r"^embed_dim 100 is not a multiple of num_heads 3: use 99 or 102$"):
        MultiHeadAttention(100, 3)
    with pytest.raises(InputError, match=r"^embed_dim 2 is not a multiple of num_heads 3: use 3$"):
        MultiHeadAttention(2, 3)


def test_attention_under_autocast_keeps_the_values_dtype():
    query, key, value = random_inputs(5, 7, torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = [F.linear(tensor, torch.eye(tensor.shape[-1])) for tensor in (query, key, value)]
        output = attention(*half, bias=torch.zeros(5, 7))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), attention(query, key, value), rtol=0.03, atol=0.03)


@pytest.mark.usefixtures("path")
def test_attention_of_a_finite_bias_is_the_same_with_and_without_the_word_that_it_is():
    query, key, value = random_inputs(5, 7)
    bias = mask_cases()["bias"]["bias"]
    for masks in ({"bias": bias}, {"bias": bias, "causal": True}, {"bias": bias - 100.0}):
        expected = attention(query, key, value, **masks)
        assert torch.equal(attention(query, key, value, **masks, bias_is_finite=True), expected)


def test_attention_causal_gives_zeros_before_the_first_key():
    """Nine queries at the last nine of seven positions: the first two stand before all."""
    query, key, value = random_inputs(9, 7)
    assert attention(query, key, value, causal=True)[:, :, :2].eq(0).all()


def test_in_product_dtype_casts_float32_under_autocast_alone():
    tokens = torch.ones(2, 3)
    assert in_product_dtype(tokens) is tokens
    with torch.autocast("cpu", torch.bfloat16):
        assert in_product_dtype(tokens).dtype == torch.bfloat16
        assert in_product_dtype(tokens.double()).dtype == torch.float64
