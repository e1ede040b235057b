"""The Swin transformer: attention within windows that shift to and fro, on a grid of tokens that halves in stages.

Parameters bear timm's names. Source: arXiv:2103.14030. Legend: `H W` size of a stage's grid of tokens.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vitlab.checks import require, require_fractions, require_multiple, require_positive
from vitlab.layers import init
from vitlab.layers.attention import AttentionProjections
from vitlab.layers.droppath import DropPath
from vitlab.layers.mlp import Mlp
from vitlab.layers.patch import check_images, to_pair
from vitlab.layers.window_attention import WindowAttention
from vitlab.layers.windows import pad_to_multiple
from vitlab.models.fields import conform_fields
from vitlab.models.network import BlockNetwork

# Of every LayerNorm, as in the original code.
_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class SwinConfig:
    """The shape of a Swin transformer; the defaults are Swin-T at 224.

    Every size of image fits. An image that is not whole patches is continued with zeros at the bottom and on the right,
    as is a grid that is not whole windows, and a grid of an odd side where 2 x 2 tokens become one.
    """

    image_size: int | tuple[int, int] = 224
    """Side, or (height, width), of the images in pixels."""
    patch_size: int | tuple[int, int] = 4
    """Side, or (height, width), of a patch in pixels."""
    window_size: int | tuple[int, int] = 7
    """Side, or (height, width), of a window in tokens; in a stage with a smaller grid, the grid's."""
    in_channels: int = 3
    """Channels of the images."""
    num_classes: int = 1000
    """Number of logits."""
    embed_dim: int = 96
    """Width of a token in the first stage; doubles from stage to stage."""
    depths: tuple[int, ...] = (2, 2, 6, 2)
    """Blocks of each stage; every second one shifts its windows."""
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    """Attention heads in the blocks of each stage; divide its width."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer over the width of a token, rounded down."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    drop_rate: float = 0.0
    """Dropout after the patches and after every linear layer of a block except qkv (timm: head alone)."""
    drop_path_rate: float = 0.0
    """Probability of dropping the last block's branches for a sample; falls linearly to 0 at the first block."""

    def __post_init__(self) -> None:
        conform_fields(self)
        require_positive(self, "image_size", "patch_size", "window_size", "in_channels", "num_classes")
        require_positive(self, "embed_dim", "depths", "num_heads", "mlp_ratio")
        require_fractions(self, "drop_rate", "drop_path_rate")
        require(
            len(self.depths) == len(self.num_heads),
            f"num_heads has {len(self.num_heads)} values for {len(self.depths)} depths: give one for each stage",
        )
        divisor = math.lcm(*(heads // math.gcd(heads, 2**stage) for stage, heads in enumerate(self.num_heads)))
        require_multiple("embed_dim", self.embed_dim, f"what num_heads {self.num_heads} need,", divisor)


SWIN_SIZES = {
    "swin_tiny": SwinConfig(),
    "swin_small": SwinConfig(depths=(2, 2, 18, 2)),
    "swin_base": SwinConfig(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
    "swin_large": SwinConfig(embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48)),
}


class PatchGrid(nn.Module):
    """Cut images into patches, map each linearly to a token, and normalise the tokens.

    Source: arXiv:2103.14030, sec. 3.1; the norm is the original code's.
    """

    def __init__(self, config: SwinConfig) -> None:
        """Build the map for one image size."""
        super().__init__()
        self.image_size = to_pair(config.image_size)
        self.in_channels = config.in_channels
        self.patch_size = to_pair(config.patch_size)
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        self.grid = (math.ceil(height / patch_height), math.ceil(width / patch_width))
        self.proj = nn.Conv2d(config.in_channels, config.embed_dim, self.patch_size, stride=self.patch_size)
        self.norm = nn.LayerNorm(config.embed_dim, eps=_NORM_EPS)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(B, C, height, width)` to tokens `(B, H, W, D)`.

        Raises:
            InputError: the images have another size or another number of channels than the network was built for.
        """
        check_images(images, image_size=self.image_size, in_channels=self.in_channels)
        pixels = pad_to_multiple(rearrange(images, "b c h w -> b h w c"), self.patch_size)
        patches = self.proj(rearrange(pixels, "b h w c -> b c h w"))
        tokens: Tensor = self.norm(rearrange(patches, "b d h w -> b h w d"))
        return tokens


class PatchMerging(nn.Module):
    """Make one token of 2 x 2: their values side by side, normalised, then mapped to twice the width of one.

    The four stand column by column: top left, bottom left, top right, bottom right.

    Source: arXiv:2103.14030, sec. 3.1; the order and the norm are the original code's.
    """

    def __init__(self, dim: int) -> None:
        """Build the layers for tokens of width `dim`."""
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=_NORM_EPS)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, grid: Tensor) -> Tensor:
        """Map `(B, H, W, D)` to `(B, H / 2, W / 2, 2 D)`; an odd side is first continued by zeros."""
        fours = rearrange(
            pad_to_multiple(grid, (2, 2)), "b (h down) (w right) d -> b h w (right down d)", down=2, right=2
        )
        merged: Tensor = self.reduction(self.norm(fours))
        return merged


class Block(nn.Module):
    """Attention within windows, then MLP, each a branch that is added to its input: `x + f(norm(x))`.

    Source: arXiv:2103.14030, eq. 3.
    """

    def __init__(
        self, config: SwinConfig, stage: int, *, grid_size: tuple[int, int], shifted: bool, drop_path_rate: float
    ) -> None:
        """Build one block of a stage, counted from 0."""
        super().__init__()
        dim = config.embed_dim * 2**stage
        self.norm1 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.attn = WindowAttention(
            dim,
            config.num_heads[stage],
            grid_size=grid_size,
            window_size=to_pair(config.window_size),
            shifted=shifted,
            qkv_bias=config.qkv_bias,
            drop_rate=config.drop_rate,
        )
        self.norm2 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio), drop_rate=config.drop_rate)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, grid: Tensor) -> Tensor:
        """Map a grid `(B, H, W, D)` to the same shape."""
        grid = grid + self.drop_path(self.attn(self.norm1(grid)))
        grid = grid + self.drop_path(self.mlp(self.norm2(grid)))
        return grid


def _build_stage(
    config: SwinConfig, stage: int, grid_size: tuple[int, int], drop_path_rates: Iterator[float]
) -> nn.Sequential:
    """Give a stage: the merging that leads to its size of grid, except at the first, then its blocks."""
    blocks = [
        Block(config, stage, grid_size=grid_size, shifted=number % 2 == 1, drop_path_rate=next(drop_path_rates))
        for number in range(config.depths[stage])
    ]
    steps: dict[str, nn.Module] = {"downsample": PatchMerging(config.embed_dim * 2 ** (stage - 1))} if stage else {}
    return nn.Sequential(OrderedDict(**steps, blocks=nn.Sequential(*blocks)))


class Head(nn.Module):
    """Average a grid of tokens, then classify the average."""

    def __init__(self, dim: int, num_classes: int) -> None:
        """Build the linear layer."""
        super().__init__()
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, grid: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Map `(B, H, W, D)` to logits `(B, K)`, or with `pre_logits` to the average `(B, D)`."""
        pooled: Tensor = grid.mean(dim=(1, 2))
        return pooled if pre_logits else self.fc(pooled)


class SwinTransformer(BlockNetwork):
    """Classify images from their patches, in windows that grow over the image as the grid of tokens shrinks."""

    name = "swin_tiny"

    def __init__(self, config: SwinConfig) -> None:
        """Build the network with fresh weights."""
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.in_channels = config.in_channels
        self.image_size = to_pair(config.image_size)
        self.patch_embed = PatchGrid(config)
        self.pos_drop = nn.Dropout(config.drop_rate)
        rates = iter(torch.linspace(0, config.drop_path_rate, sum(config.depths), device="cpu").tolist())
        H, W = self.patch_embed.grid
        self.layers = nn.Sequential()
        for stage in range(len(config.depths)):
            self.layers.append(_build_stage(config, stage, (H, W), rates))
            H, W = math.ceil(H / 2), math.ceil(W / 2)
        dim = config.embed_dim * 2 ** (len(config.depths) - 1)
        self.norm = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.head = Head(dim, config.num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw fresh weights, by the same rule as our ViT's.

        Linear layers xavier uniform (queries, keys and values each for themselves), the patch map lecun normal, the
        head and all biases 0, norms the identity; tables of relative biases normal with standard deviation .02.

        The original code and timm draw every linear layer, the head too, with .02, and leave the patch map to torch
        (its scale does not matter, a norm follows). Xavier gives .10 to .023 in Swin-T and more in narrow layers, where
        .02 shrinks the signal. (Digits, width 32, two stages, held-out images, mean of three seeds: 58 % against 37 %
        after 10 epochs, 85 % against 82 % after 20 at three times the rate.) A head of 0 starts at a loss of
        ln(classes). The original's tables, cut at plus and minus 2, are the same normal: nothing lies out there.
        """
        init.lecun_conv(self.patch_embed.proj)
        for module in self.modules():
            if isinstance(module, AttentionProjections):
                init.xavier_linear(module.qkv, parts=3)
                init.xavier_linear(module.proj)
            elif isinstance(module, Mlp):
                init.xavier_linear(module.fc1)
                init.xavier_linear(module.fc2)
            elif isinstance(module, PatchMerging):
                init.xavier_linear(module.reduction)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, WindowAttention):
                init.normal_table(module.relative_position_bias_table, std=0.02)
                module.fill_buffers()
        init.zero_linear(self.head.fc)

    def config_dict(self) -> dict[str, Any]:
        """Give the config's fields as plain JSON values, sizes as [height, width]."""
        config = dataclasses.asdict(self.config)
        for size in ("image_size", "patch_size", "window_size"):
            config[size] = list(to_pair(config[size]))
        for per_stage in ("depths", "num_heads"):
            config[per_stage] = list(config[per_stage])
        return config

    def forward_features(self, images: Tensor) -> Tensor:
        """Give the tokens `(B, H, W, D)` after the last block, normalised."""
        grid = self.last_output(images)
        normalised: Tensor = self.norm(grid)
        return normalised

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Average tokens `(B, H, W, D)` and classify: `(B, K)`; with `pre_logits` the average `(B, D)`."""
        result: Tensor = self.head(features, pre_logits=pre_logits)
        return result

    def block_outputs(self, images: Tensor) -> Iterator[Tensor]:
        """Give each block's tokens `(B, H, W, D)`, of its stage's size, without the final norm."""
        grid: Tensor = self.pos_drop(self.patch_embed(images))
        for step in self.layers.modules():  # in the order in which they were built
            if isinstance(step, PatchMerging):
                grid = step(grid)
            elif isinstance(step, Block):
                grid = self.run_block(step, grid)
                yield grid

    def get_classifier(self) -> nn.Linear:
        """Give the linear layer of the head."""
        return self.head.fc

    def no_weight_decay(self) -> set[str]:
        """Name the tables of relative biases."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Give timm's patterns: patches, then block by block (`norm` with the last block), then what is left.

        A stage's merging goes with its first block. With `coarse`, a stage is one group.
        """
        blocks = [(r"^layers\.(\d+)\.downsample", (0,)), (r"^layers\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^patch_embed", "blocks": r"^layers\.(\d+)" if coarse else blocks}

    def repeated_blocks(self) -> list[nn.Module]:
        """Give the blocks, first stage first."""
        return [module for module in self.modules() if isinstance(module, Block)]
