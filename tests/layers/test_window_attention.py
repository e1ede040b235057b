import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vitlab.layers.window_attention import WindowAttention


@pytest.fixture
def build():
    """A function that builds a random layer in float64."""

    def build_one(dim, num_heads, **options):
        torch.manual_seed(0)
        layer = WindowAttention(dim, num_heads, **({"qkv_bias": True, "drop_rate": 0.0} | options)).double()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        return layer

    return build_one


def reach(layer, grid_size):
    """Tell for each token which tokens' outputs change with it: `(H W, H W)`, changed token first."""
    H, W = grid_size
    dim = layer.qkv.in_features
    grid = torch.randn(1, H, W, dim, dtype=torch.float64)
    changes = torch.eye(H * W, dtype=torch.float64).view(-1, H, W, 1)
    with torch.no_grad():
        moved = layer(grid + changes) - layer(grid)
    return moved.abs().amax(dim=-1).flatten(1) > 1e-9


def shares_cell(cells):
    """Tell which pairs of tokens have the same cell, for cells of rows and of columns."""
    rows, columns = map(torch.tensor, cells)
    cell = (1000 * rows[:, None] + columns).flatten()
    return cell[:, None] == cell


@pytest.mark.parametrize("grid_size", [(6, 12), (9, 8), (12, 16)])
def test_window_attention_shifted_reaches_just_the_shifted_window(build, grid_size):
    """Window borders lie half a window, 1 row and 2 columns, from the grid's border."""
    layer = build(4, 2, grid_size=grid_size, window_size=(3, 4), shifted=True)
    H, W = grid_size
    cells = [(row + 2) // 3 for row in range(H)], [(column + 2) // 4 for column in range(W)]
    assert torch.equal(reach(layer, grid_size), shares_cell(cells))


@pytest.mark.parametrize("grid_size", [(6, 12), (7, 10), (4, 5), (2, 9), (3, 3)])
def test_window_attention_not_shifted_reaches_just_the_window(build, grid_size):
    layer = build(4, 2, grid_size=grid_size, window_size=(3, 4), shifted=False)
    H, W = grid_size
    cells = [row // 3 for row in range(H)], [column // 4 for column in range(W)]
    assert torch.equal(reach(layer, grid_size), shares_cell(cells))


@pytest.mark.parametrize(
    ("grid_size", "rows", "columns"),
    [
        ((7, 12), [2, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]),
        ((8, 10), [2, 0, 0, 0, 1, 1, 1, 2], [3, 3, 0, 0, 0, 0, 1, 1, 1, 1]),
        ((8, 11), [2, 0, 0, 0, 1, 1, 1, 2], [2, 3, 0, 0, 0, 0, 1, 1, 1, 1, 2]),
    ],
    ids=["a row over", "a row short", "a column short"],
)
def test_window_attention_shifted_reaches_across_the_seam_as_in_timm_where_it_pads(build, grid_size, rows, columns):
    """Padding comes after the roll and the mask counts it as grid, so the first rows may join the last ones."""
    layer = build(4, 2, grid_size=grid_size, window_size=(3, 4), shifted=True)
    assert torch.equal(reach(layer, grid_size), shares_cell((rows, columns)))


@pytest.mark.parametrize(
    ("grid_size", "window", "shift"),
    [
        ((9, 10), (3, 4), (1, 2)),
        ((3, 10), (3, 4), (0, 2)),
        ((2, 10), (2, 4), (0, 2)),
        ((5, 4), (3, 4), (1, 0)),
        ((3, 1), (3, 1), (0, 0)),
    ],
)
def test_window_attention_shrinks_to_a_smaller_grid_and_then_does_not_shift(build, grid_size, window, shift):
    layer = build(4, 2, grid_size=grid_size, window_size=(3, 4), shifted=True)
    assert (layer.window, layer.shift) == (window, shift)
    assert layer.relative_position_bias_table.shape == ((2 * window[0] - 1) * (2 * window[1] - 1), 2)
    assert (layer.mask is None) == (shift == (0, 0))


def test_window_attention_equals_a_loop_over_pairs(build):
    """One window: softmax of scaled products and biases by offset, head by head."""
    layer = build(6, 2, grid_size=(3, 2), window_size=(3, 2), shifted=False)
    grid = torch.randn(2, 3, 2, 6, dtype=torch.float64)
    places = list(itertools.product(range(3), range(2)))
    table = layer.relative_position_bias_table.view(5, 3, 2)
    query, key, value = layer.qkv(grid.view(2, 6, 6)).chunk(3, dim=-1)
    mixed = torch.zeros(2, 6, 6, dtype=torch.float64)
    for image, head, (row, place) in itertools.product(range(2), range(2), enumerate(places)):
        part = slice(3 * head, 3 * head + 3)
        scores = [
            query[image, row, part] @ key[image, column, part] / 3**0.5
            + table[place[0] - other[0] + 2, place[1] - other[1] + 1, head]
            for column, other in enumerate(places)
        ]
        mixed[image, row, part] = torch.stack(scores).softmax(0) @ value[image, :, part]
    expected = layer.proj(mixed).view(2, 3, 2, 6)
    torch.testing.assert_close(layer(grid), expected, rtol=0, atol=1e-12)


def test_window_attention_lets_padding_take_part_as_keys_of_biases_alone(build):
    layer = build(4, 1, grid_size=(1, 3), window_size=(1, 2), shifted=False)
    grid = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    query, _, _ = layer.qkv(grid[0, 0, 2]).chunk(3)
    last = torch.stack([layer.qkv(grid[0, 0, 2]), layer.qkv.bias])
    _, keys, values = last.chunk(3, dim=-1)
    scores = keys @ query / 2 + layer.relative_position_bias_table[[1, 0], 0]
    expected = layer.proj(scores.softmax(0) @ values)
    torch.testing.assert_close(layer(grid)[0, 0, 2], expected, rtol=0, atol=1e-12)


def test_window_attention_repeats_its_gradients_bit_for_bit(build):
    """With two threads and 32 heads, where adding in parallel shows."""
    layer = build(32, 32, grid_size=(7, 14), window_size=(7, 7), shifted=True).float()
    grid = torch.randn(1, 7, 14, 32)
    gradients = set()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for _ in range(4):
        layer.zero_grad()
        layer(grid).square().sum().backward()
        gradients.add(b"".join(parameter.grad.numpy().tobytes() for parameter in layer.parameters()))
    torch.set_num_threads(threads)
    assert len(gradients) == 1


def test_window_attention_drops_after_the_projection(build):
    layer = build(4, 2, grid_size=(4, 4), window_size=(2, 2), shifted=True, drop_rate=1.0)
    grid = torch.randn(1, 4, 4, 4, dtype=torch.float64)
    assert layer(grid).eq(0).all()
    assert layer.eval()(grid).ne(0).any()


def test_window_attention_state_is_its_parameters(build):
    layer = build(4, 2, grid_size=(6, 8), window_size=(3, 4), shifted=True)
    assert layer.state_dict().keys() == dict(layer.named_parameters()).keys()
    assert {name for name, _ in layer.named_buffers()} == {"relative_position_index", "mask"}


def test_window_attention_masks_in_half_precision_too(build):
    layer = build(8, 2, grid_size=(6, 8), window_size=(3, 4), shifted=True)
    grid = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    expected = layer(grid)
    outputs = layer.bfloat16()(grid.bfloat16()).double()
    assert F.mse_loss(outputs, expected) < 1e-3 * expected.var()
