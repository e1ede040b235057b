"""Attention within the windows of a grid, which may be shifted by half a window.

Legend as in `windows.py`: a grid is `(B, H, W, D)`; a window is (height, width) in tokens; `N` tokens of one window;
`V` windows of one grid; `h` heads.
"""

import torch
from torch import Tensor, nn

from vitlab.layers.attention import AttentionProjections, attention, in_product_dtype
from vitlab.layers.position import relative_bias
from vitlab.layers.windows import join_heads, pad_to_multiple, partition_heads, relative_index, shift_mask


class WindowAttention(AttentionProjections):
    """Let every token attend to the tokens of its window, with a learned bias for each head and offset.

    Shifted windows are those of a grid that was rolled up and to the left: a mask keeps apart what the roll alone
    brought together, and the result is rolled back. A grid that is not whole windows is continued by zeros after the
    roll. These take part as keys whose content is the layers' biases, and in shifted windows the mask counts them as
    part of the grid, so that there tokens of opposite borders may meet. This is timm's way, kept for equal results;
    where windows divide the grid, as at the published sizes, none of it occurs.

    Source: arXiv:2103.14030, sec. 3.2. Differs: the padding, see above.
    """

    relative_position_index: Tensor
    """Rows of the bias table for (query, key), `(N, N)`."""
    mask: Tensor | None
    """What shifted windows add to the scores, `(V, N, N)`."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: tuple[int, int],
        window_size: tuple[int, int],
        shifted: bool,
        qkv_bias: bool,
        drop_rate: float,
    ) -> None:
        """Build the layer for one size of grid.

        Args:
            dim: width D of the tokens, a multiple of num_heads.
            num_heads: heads.
            grid_size: (H, W) of the grid, in tokens.
            window_size: (height, width) of a window; along an axis where the grid is no larger, the window is the grid.
            shifted: whether windows lie half a window further down and to the right, but not along such an axis.
            qkv_bias: whether queries, keys and values have a bias.
            drop_rate: dropout after the output projection.
        """
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, drop_rate=drop_rate)
        (H, W), (height, width) = grid_size, window_size
        self.window = (min(height, H), min(width, W))
        self.shift = (height // 2 if shifted and height < H else 0, width // 2 if shifted and width < W else 0)
        self.padded_size = (H + -H % self.window[0], W + -W % self.window[1])
        num_offsets = (2 * self.window[0] - 1) * (2 * self.window[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(num_offsets, num_heads))
        self.fill_buffers()

    def fill_buffers(self) -> None:
        """Compute what is no weight: the index of offsets and the mask."""
        device = self.relative_position_bias_table.device
        index, mask = relative_index(self.window), shift_mask(self.padded_size, self.window, self.shift)
        self.register_buffer("relative_position_index", index.to(device), persistent=False)
        self.register_buffer("mask", None if mask is None else mask.to(device), persistent=False)

    def forward(self, grid: Tensor) -> Tensor:
        """Map a grid `(B, H, W, D)` to the same shape."""
        _, H, W, _ = grid.shape
        down, right = self.shift
        grid = in_product_dtype(grid)
        if self.mask is not None:
            grid = grid.roll((-down, -right), (1, 2))
        heads = self._attend(self.qkv(pad_to_multiple(grid, self.window)))
        mixed: Tensor = self.proj_drop(self.proj(join_heads(heads, self.window, self.padded_size)))[:, :H, :W]
        return mixed if self.mask is None else mixed.roll((down, right), (1, 2))

    def score_bias(self) -> Tensor:
        """Give what is added to the scores, `(V, h, N, N)`; of windows that are not shifted `(1, h, N, N)`."""
        bias = relative_bias(self.relative_position_bias_table, self.relative_position_index)[None]
        return bias if self.mask is None else bias + self.mask[:, None]

    def _attend(self, qkv: Tensor) -> Tensor:
        """Give what the heads of all windows find, `(B * V, h, N, d)`, of queries, keys and values `(B, H, W, 3 D)`.

        The windows of an image, where each has its own mask, become heads: so bias and mask, the same for every image,
        are added without a copy for each.
        """
        windows = partition_heads(qkv, self.window, self.num_heads)  # (3, B * V, h, N, d)
        bias = self.score_bias().flatten(0, 1)
        query, key, value = windows.reshape(3, -1, len(bias), *windows.shape[3:])
        heads = attention(query, key, value, bias=bias, bias_is_finite=True)
        return heads.reshape(windows.shape[1:])
