"""ImageGPT: the pixels of an image as a row of palette colours, equal blocks of attention and MLP, two linear heads.

One head gives each pixel's colour from the pixels before it (or around it), the other the class of the image. Tokens
are colour numbers, pixel by pixel and row by row. Parameters bear the names that our other networks and timm have, not
transformers' own: those stand for matrices of the other orientation, some of them square, and a file under the same
names would load here without a word and be wrong. `imagegpt_weights.py` converts both ways.

Legend: `N` pixels of an image, `V` colours of the palette.

Source: Chen et al., Generative Pretraining from Pixels, ICML 2020; openai/image-gpt.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlab.checks import require, require_fractions, require_multiple, require_positive
from vitlab.data import palette as colors
from vitlab.errors import InputError
from vitlab.layers import init
from vitlab.layers.attention import attention
from vitlab.layers.droppath import DropPath
from vitlab.layers.norm import RMSNorm
from vitlab.layers.patch import check_images, to_pair
from vitlab.models.fields import conform_fields
from vitlab.models.network import BlockNetwork


@dataclass(frozen=True, kw_only=True)
class ImageGPTConfig:
    """The shape of an ImageGPT; the defaults are the small one at 32 x 32 pixels."""

    image_size: int | tuple[int, int] = 32
    """Side, or (height, width), of the images in pixels; each pixel is a token."""
    in_channels: int = 3
    """Channels of the images and of the palette: 3 or 1."""
    num_classes: int = 1000
    """Number of class logits."""
    num_colors: int = 512
    """Colours of the palette."""
    embed_dim: int = 512
    """Width of a token."""
    depth: int = 24
    """Number of blocks."""
    num_heads: int = 8
    """Attention heads in a block; divides the width."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer over the width of a token, rounded down."""
    bias: bool = False
    """Whether the linear layers of the blocks have biases: false is OpenAI's layout, true transformers'."""
    causal: bool = True
    """Whether a pixel sees those before it alone (next-pixel training, drawing), or all (masked-pixel training)."""
    drop_rate: float = 0.0
    """Dropout after the positions and after every linear layer of a block except qkv."""
    drop_path_rate: float = 0.0
    """Probability of dropping the last block's branches for a sample; falls linearly to 0 at the first block."""

    def __post_init__(self) -> None:
        conform_fields(self)
        require_positive(self, "image_size", "in_channels", "num_classes", "num_colors")
        require_positive(self, "embed_dim", "depth", "num_heads", "mlp_ratio")
        require_fractions(self, "drop_rate", "drop_path_rate")
        require(self.in_channels in (1, 3), f"in_channels is {self.in_channels}: give 3 (RGB) or 1 (greyscale)")
        require_multiple("embed_dim", self.embed_dim, "num_heads", self.num_heads)


IMAGEGPT_SIZES = {
    "imagegpt_small": ImageGPTConfig(),
    "imagegpt_medium": ImageGPTConfig(embed_dim=1024, depth=36),
    "imagegpt_large": ImageGPTConfig(embed_dim=1536, depth=48, num_heads=16),
    # Its heads were never published. 16 are as many as the large one's, 192 wide.
    "imagegpt_xlarge": ImageGPTConfig(embed_dim=3072, depth=60, num_heads=16),
}


class PixelAttention(nn.Module):
    """Let every pixel attend to itself and the pixels before it, or to all, with several heads.

    `qkv` has rows for queries, keys and values, each head by head.
    """

    def __init__(self, config: ImageGPTConfig) -> None:
        """Build the projections."""
        super().__init__()
        dim = config.embed_dim
        self.num_heads = config.num_heads
        self.causal = config.causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.bias)
        self.proj = nn.Linear(dim, dim, bias=config.bias)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `(B, N, D)` to `(B, N, D)`."""
        query, key, value = rearrange(self.qkv(tokens), "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        heads = attention(query, key, value, causal=self.causal)
        mixed: Tensor = self.proj_drop(self.proj(rearrange(heads, "b h n d -> b n (h d)")))
        return mixed


class QuickGeluMlp(nn.Module):
    """Widen each token, pass it through x * sigmoid(1.702 x), and narrow it again; dropout after both layers.

    The activation differs from the exact GELU by up to .02, so published weights need it.

    Source: arXiv:1606.08415, sec. 2; openai/image-gpt.
    """

    def __init__(self, config: ImageGPTConfig) -> None:
        """Build the layers."""
        super().__init__()
        dim = config.embed_dim
        hidden_dim = int(dim * config.mlp_ratio)
        self.fc1 = nn.Linear(dim, hidden_dim, bias=config.bias)
        self.drop1 = nn.Dropout(config.drop_rate)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=config.bias)
        self.drop2 = nn.Dropout(config.drop_rate)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `(..., D)` to `(..., D)`."""
        # silu(x) = x * sigmoid(x) keeps one tensor for the backward pass where the product written out keeps two.
        hidden = F.silu(1.702 * self.fc1(tokens)) / 1.702
        narrowed: Tensor = self.drop2(self.fc2(self.drop1(hidden)))
        return narrowed


class Block(nn.Module):
    """Attention, then MLP, each on its normalised input and added to it."""

    def __init__(self, config: ImageGPTConfig, *, drop_path_rate: float) -> None:
        """Build one block; its drop path rate depends on where it stands."""
        super().__init__()
        self.norm1 = RMSNorm(config.embed_dim)
        self.attn = PixelAttention(config)
        self.norm2 = RMSNorm(config.embed_dim)
        self.mlp = QuickGeluMlp(config)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `(B, N, D)` to `(B, N, D)`."""
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        tokens = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return tokens


class ImageGPT(BlockNetwork):
    """Give the colour logits of pixels, and the class logits of images.

    A causal network reads a start token and all pixels but the last, so that its output at a pixel knows the pixels
    before it and not the pixel itself. The other kind reads the pixels where they are, some of them hidden.

    Images are normalised to [-1, 1], and become tokens by the palette, which is saved with the weights. A fresh one has
    uniform colours; `set_palette` gives it others.
    """

    config: ImageGPTConfig
    name = "imagegpt_small"
    pixel_statistics = (0.5, 0.5)  # images in [-1, 1], as the palette is
    palette: Tensor
    """Colours in [-1, 1]: float32 `(V, C)`."""

    def __init__(self, config: ImageGPTConfig) -> None:
        """Build the network with fresh weights."""
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.in_channels = config.in_channels
        self.image_size = to_pair(config.image_size)
        dim = config.embed_dim
        self.register_buffer("palette", torch.empty(config.num_colors, config.in_channels, dtype=torch.float32))
        self.token_embed = nn.Parameter(torch.empty(config.num_colors + 1, dim))  # the last row is the start token
        self.pos_embed = nn.Parameter(torch.empty(1, math.prod(self.image_size), dim))
        self.pos_drop = nn.Dropout(config.drop_rate)
        drop_path_rates = torch.linspace(0, config.drop_path_rate, config.depth, device="cpu").tolist()
        self.blocks = nn.Sequential(*(Block(config, drop_path_rate=rate) for rate in drop_path_rates))
        self.norm = RMSNorm(dim)
        self.color_head = nn.Linear(dim, config.num_colors, bias=False)
        self.head = nn.Linear(dim, config.num_classes, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw fresh weights from normals as OpenAI's code does.

        Standard deviations: colours and start token .02, positions .01, queries, keys and values 1 / sqrt(D), the
        attention's output 1 / sqrt(D L) in a network of L blocks, both layers of the MLP .02. Gains are 1, biases 0.
        Both heads are 0, so that training starts at a loss of ln(V) nats a pixel and ln(K) an image.
        """
        self.palette.copy_(colors.uniform_palette(self.config.num_colors, self.config.in_channels))
        init.normal_table(self.token_embed, std=0.02)
        init.normal_table(self.pos_embed, std=0.01)
        D, L = self.config.embed_dim, self.config.depth
        for module in self.modules():
            if isinstance(module, PixelAttention):
                init.normal_linear(module.qkv, std=D**-0.5)
                init.normal_linear(module.proj, std=(D * L) ** -0.5)
            elif isinstance(module, QuickGeluMlp):
                init.normal_linear(module.fc1, std=0.02)
                init.normal_linear(module.fc2, std=0.02)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        init.zero_linear(self.color_head)
        init.zero_linear(self.head)

    def config_dict(self) -> dict[str, Any]:
        """Give the config's fields as plain JSON values, the size as [height, width]."""
        return dataclasses.asdict(self.config) | {"image_size": list(self.image_size)}

    @property
    def causal(self) -> bool:
        """Whether a pixel's output knows the pixels before it alone."""
        return self.config.causal

    def set_palette(self, palette: Tensor) -> None:
        """Take other colours, `(V, C)` in [-1, 1]; the trained weights go with the old ones.

        Raises:
            InputError: the palette has another number of colours or of channels.
        """
        require(
            palette.shape == self.palette.shape,
            f"the palette is of shape {tuple(palette.shape)} (colours, channels), the network takes "
            f"{tuple(self.palette.shape)}: give another, or build the network with its num_colors and in_channels",
        )
        self.palette.copy_(palette)

    def encode(self, images: Tensor) -> Tensor:
        """Give images `(B, C, H, W)`, normalised to [-1, 1], as tokens: int64 `(B, N)`, row by row.

        Raises:
            InputError: the images have another size or another number of channels than the network was built for.
        """
        check_images(images, image_size=self.image_size, in_channels=self.in_channels)
        return colors.encode(rearrange(images, "b c h w -> b (h w) c"), self.palette)

    def decode(self, tokens: Tensor) -> Tensor:
        """Give tokens `(B, N)` as images: uint8 `(B, C, H, W)`.

        Raises:
            InputError: the tokens are no colours of the palette, or not as many as an image has pixels.
        """
        self._check_tokens(tokens)
        H, _ = self.image_size
        return rearrange(colors.decode(tokens, self.palette), "b (h w) c -> b c h w", h=H)

    def forward_features(self, images: Tensor) -> Tensor:
        """Give the features `(B, N, D)` of images' pixels, normalised: `pixel_features` of their tokens."""
        normalised: Tensor = self.norm(self.last_output(images))
        return normalised

    def pixel_features(self, tokens: Tensor, *, hidden: Tensor | None = None, mask_embedding: bool = False) -> Tensor:
        """Give the features of pixels after the last block, normalised.

        Args:
            tokens: int64 `(B, N)`, without a start token.
            hidden: bool `(B, N)`, True where the network must not see the colour but only that there is a pixel; only
                for a network that is not causal.
            mask_embedding: show a hidden pixel as the start token, which such a network has no other use for, in place
                of zeros.

        Returns:
            `(B, N, D)`; of a causal network each row knows the pixels before its own alone.

        Raises:
            InputError: the tokens are no colours of the palette, or not as many as an image has pixels; or pixels are
                hidden from a causal network.
        """
        self._check_tokens(tokens)
        features = self._embed(tokens, hidden, mask_embedding=mask_embedding)
        for block in self.blocks:
            features = self.run_block(block, features)
        normalised: Tensor = self.norm(features)
        return normalised

    def color_logits(self, features: Tensor) -> Tensor:
        """Map what `pixel_features` gave, `(..., D)`, to logits of the pixel's own colour, `(..., V)`."""
        logits: Tensor = self.color_head(features)
        return logits

    def pixel_logits(self, tokens: Tensor) -> Tensor:
        """Map tokens `(B, N)`, without a start token, to logits of each pixel's colour, `(B, N, V)`."""
        return self.color_logits(self.pixel_features(tokens))

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Average features `(B, N, D)` over the pixels and classify: `(B, K)`; with `pre_logits` the mean `(B, D)`."""
        pooled = features.mean(dim=1)
        return pooled if pre_logits else self.get_classifier()(pooled)

    def block_outputs(self, images: Tensor) -> Iterator[Tensor]:
        """Give each block's features `(B, N, D)`, without the final norm."""
        features = self._embed(self.encode(images))
        for block in self.blocks:
            features = self.run_block(block, features)
            yield features

    def _embed(self, tokens: Tensor, hidden: Tensor | None = None, *, mask_embedding: bool = False) -> Tensor:
        """Give the first block's input `(B, N, D)`."""
        start = self.config.num_colors
        if self.config.causal:
            if hidden is not None:
                raise InputError("a causal network hides no pixels: build it with causal false for masked pixels")
            tokens = F.pad(tokens[:, :-1], (1, 0), value=start)
        elif hidden is not None and mask_embedding:
            tokens = tokens.masked_fill(hidden, start)
        embedded = F.embedding(tokens, self.token_embed)
        if hidden is not None and not mask_embedding:
            embedded = embedded.masked_fill(hidden.unsqueeze(-1), 0.0)
        features: Tensor = self.pos_drop(embedded + self.pos_embed)
        return features

    def _check_tokens(self, tokens: Tensor) -> None:
        """Raise InputError unless tokens are whole images of colours that the palette has."""
        (H, W), V = self.image_size, self.config.num_colors
        require(tokens.dtype == torch.int64, f"tokens are {tokens.dtype}: give int64, as encode does")
        require(
            tokens.ndim == 2 and tokens.shape[1] == H * W,
            f"tokens are of shape {tuple(tokens.shape)}, the network takes (batch, {H * W}), "
            f"a token for each pixel of {H} x {W}, without a start token",
        )
        if tokens.device.type != "cpu" or tokens.numel() == 0:  # looking at them would make a GPU wait
            return
        lowest, highest = tokens.aminmax()
        require(
            bool(lowest >= 0) and bool(highest < V),
            f"tokens range from {lowest} to {highest}, the palette has colours 0 to {V - 1}: encode the images with it",
        )

    def get_classifier(self) -> nn.Linear:
        """Give the linear head of the classes."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """Name the tables of colours and positions."""
        return {"token_embed", "pos_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Give timm's patterns: tables, then block by block (`norm` with the last block), then both heads."""
        return {
            "stem": r"^(?:token_embed|pos_embed)",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def repeated_blocks(self) -> list[nn.Module]:
        """Give the blocks."""
        return list(self.blocks)
