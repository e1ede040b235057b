import itertools

import pytest
import torch
from einops import rearrange
from timm.models.swin_transformer import SwinTransformerBlock, get_relative_position_index

from vitlab.layers.windows import (
    join_heads,
    pad_to_multiple,
    partition,
    partition_heads,
    relative_index,
    reverse,
    shift_mask,
)


def test_partition_cuts_row_by_row_within_and_between_windows():
    grid = torch.arange(2 * 4 * 6).view(2, 4, 6, 1)
    windows = partition(grid, (2, 3))
    assert windows.shape == (8, 6, 1)
    assert windows[0, :, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert windows[1, :, 0].tolist() == [3, 4, 5, 9, 10, 11]
    assert windows[2, :, 0].tolist() == [12, 13, 14, 18, 19, 20]
    assert windows[4, :, 0].tolist() == [24, 25, 26, 30, 31, 32], "the second image's first"


@pytest.mark.parametrize("window", [(2, 3), (3, 2), (1, 4), (6, 12), (6, 1)])
def test_reverse_undoes_partition(window):
    grid = torch.randn(3, 6, 12, 5)
    assert torch.equal(reverse(partition(grid, window), window, (6, 12)), grid)


@pytest.mark.parametrize("window", [(2, 3), (6, 4), (1, 1)])
def test_partition_heads_cuts_what_partition_cuts_and_join_heads_undoes_it(window):
    qkv = torch.randn(2, 6, 12, 3 * 8)
    heads = partition_heads(qkv, window, 2)
    expected = rearrange(partition(qkv, window), "v n (three h d) -> three v h n d", three=3, h=2)
    assert torch.equal(heads, expected)
    for part, joined in zip(heads, qkv.chunk(3, dim=-1), strict=True):
        assert torch.equal(join_heads(part, window, (6, 12)), joined)


def test_partition_of_one_window_copies_nothing():
    grid = torch.randn(3, 4, 5, 2)
    windows = partition(grid, (4, 5))
    assert windows.data_ptr() == grid.data_ptr()
    assert reverse(windows, (4, 5), (4, 5)).data_ptr() == grid.data_ptr()


@pytest.mark.parametrize(("size", "padded"), [((4, 9), (6, 12)), ((5, 8), (6, 8)), ((6, 7), (6, 8)), ((1, 1), (3, 4))])
def test_pad_to_multiple_appends_zeros_below_and_right(size, padded):
    grid = torch.randn(2, *size, 3)
    result = pad_to_multiple(grid, (3, 4))
    assert result.shape == (2, *padded, 3)
    assert torch.equal(result[:, : size[0], : size[1]], grid)
    assert result.count_nonzero() == grid.numel()


def test_pad_to_multiple_leaves_whole_windows_alone():
    grid = torch.randn(2, 6, 8, 3)
    assert pad_to_multiple(grid, (3, 4)) is grid


def test_relative_index_of_window_7_has_the_known_corners():
    index = relative_index((7, 7))
    assert index.dtype == torch.int64
    assert [index[0, 0].item(), index[0, 48].item(), index[48, 0].item()] == [84, 0, 168]


@pytest.mark.parametrize("window", [(7, 7), (3, 5), (1, 4), (4, 1)])
def test_relative_index_numbers_each_offset_once(window):
    height, width = window
    index = relative_index(window)
    tokens = list(itertools.product(range(height), range(width)))
    offsets = list(itertools.product(range(-height + 1, height), range(-width + 1, width)))
    for query, (y, x) in enumerate(tokens):
        for key, (other_y, other_x) in enumerate(tokens):
            assert index[query, key] == offsets.index((y - other_y, x - other_x))
    assert torch.equal(index, get_relative_position_index(*window))


@pytest.mark.parametrize(
    ("grid_size", "window", "shift"),
    [((4, 6), (2, 3), (1, 1)), ((6, 12), (3, 4), (2, 3)), ((3, 8), (3, 4), (0, 2)), ((9, 4), (3, 4), (1, 0))],
)
def test_shift_mask_separates_what_only_the_roll_brought_together(grid_size, window, shift):
    """Two tokens of a rolled window may meet where they still are as far apart in the grid before the roll."""
    H, W = grid_size
    rows, columns = torch.arange(H).roll(-shift[0]), torch.arange(W).roll(-shift[1])
    place = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)[None]
    rolled = torch.stack(torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij"), dim=-1)[None]
    before, after = (partition(grid, window) for grid in (place, rolled))
    distances = [tokens[:, :, None] - tokens[:, None] for tokens in (before, after)]
    together = distances[0].eq(distances[1]).all(dim=-1)
    mask = shift_mask(grid_size, window, shift)
    assert torch.equal(mask, torch.where(together, 0.0, -100.0))
    assert not together.all()


@pytest.mark.parametrize("grid_size", [(28, 28), (30, 22), (8, 50), (5, 22), (16, 7)])
def test_shift_mask_equals_timm(grid_size):
    peer = SwinTransformerBlock(8, grid_size, num_heads=2, window_size=7, shift_size=3)
    padded = [-(-length // window) * window for length, window in zip(grid_size, peer.window_size, strict=True)]
    assert torch.equal(shift_mask(tuple(padded), peer.window_size, peer.shift_size), peer.attn_mask)


def test_shift_mask_of_no_shift_is_none():
    assert shift_mask((4, 6), (2, 3), (0, 0)) is None
