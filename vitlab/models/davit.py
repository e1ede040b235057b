"""DaViT: a pyramid of maps in which attention within windows and attention between channels take turns.

Windows mix neighbours finely. Channels, each of which holds every position, mix the whole image coarsely. Both cost in
proportion to the number of positions. What tells a position where it lies is convolutions of 3 x 3 alone.

Parameters bear timm's names. Source: arXiv:2204.03645, and the code released with it. Legend: `H W` size of a stage's
map; `N = H W` positions; `g` groups of `e` channels.
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
from vitlab.layers.attention import AttentionProjections, attention, in_product_dtype, is_fused, scale_in_float16
from vitlab.layers.droppath import DropPath
from vitlab.layers.mlp import Mlp
from vitlab.layers.patch import check_images, to_pair
from vitlab.layers.windows import join_heads, pad_to_multiple, partition, partition_heads, reverse
from vitlab.models.fields import conform_fields
from vitlab.models.network import BlockNetwork, has_hooks

# Of every LayerNorm.
_NORM_EPS = 1e-5
# Side, in pixels, of the squares that the stem maps.
_STEM_SIZE = 7


@dataclass(frozen=True, kw_only=True)
class DaViTConfig:
    """The shape of a DaViT; the defaults are DaViT-Tiny at 224.

    Every size of image fits. An image that is not whole strides, a map of an odd side where 2 x 2 positions become one,
    and a map that is not whole windows or is smaller than one, are continued with zeros at the bottom and on the right.
    """

    image_size: int | tuple[int, int] = 224
    """Side, or (height, width), of the images in pixels."""
    in_channels: int = 3
    """Channels of the images."""
    num_classes: int = 1000
    """Number of logits."""
    stem_stride: int = 4
    """Pixels from one position of the first map to the next, up to the 7 of the stem's squares; small images want 2."""
    embed_dims: tuple[int, ...] = (96, 192, 384, 768)
    """Width of the map in each stage; from stage to stage, its height and width halve."""
    depths: tuple[int, ...] = (1, 1, 3, 1)
    """Pairs of blocks in each stage: one of attention within windows, one of attention between channels."""
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    """Heads of the one attention, and groups of the other, in each stage; divide its width."""
    window_size: int | tuple[int, int] = 7
    """Side, or (height, width), of a window in positions; windows much larger than a map waste time on padding."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer over the width of the map, rounded down."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias, in both kinds of attention."""
    drop_rate: float = 0.0
    """Dropout after every linear layer of a block except qkv, as in ViT here (timm: before the head)."""
    drop_path_rate: float = 0.0
    """Probability of dropping the last block's branches for a sample; falls linearly to 0 at the first block."""

    def __post_init__(self) -> None:
        conform_fields(self)
        require_positive(self, "image_size", "in_channels", "num_classes", "stem_stride", "window_size", "mlp_ratio")
        require_positive(self, "embed_dims", "depths", "num_heads")
        require_fractions(self, "drop_rate", "drop_path_rate")
        # Of one pixel the stem's gradient in torch is now and then not a number.
        require(min(to_pair(self.image_size)) > 1, f"image_size is {self.image_size}: give 2 pixels or more a side")
        require(self.stem_stride <= _STEM_SIZE, f"stem_stride is {self.stem_stride}: give at most {_STEM_SIZE}")
        stages = len(self.embed_dims)
        for name in ("depths", "num_heads"):
            given = len(getattr(self, name))
            require(given == stages, f"{name} has {given} values for {stages} embed_dims: give one for each stage")
        for stage, (dim, heads) in enumerate(zip(self.embed_dims, self.num_heads, strict=True)):
            require_multiple(f"embed_dims[{stage}]", dim, f"num_heads[{stage}]", heads)


# In the released code the large network is one for images of 384 pixels and windows of 12; it has no larger ones.
DAVIT_SIZES = {
    "davit_tiny": DaViTConfig(),
    "davit_small": DaViTConfig(depths=(1, 1, 9, 1)),
    "davit_base": DaViTConfig(embed_dims=(128, 256, 512, 1024), depths=(1, 1, 9, 1), num_heads=(4, 8, 16, 32)),
    "davit_large": DaViTConfig(
        image_size=384, window_size=12, embed_dims=(192, 384, 768, 1536), depths=(1, 1, 9, 1), num_heads=(6, 12, 24, 48)
    ),
    "davit_huge": DaViTConfig(embed_dims=(256, 512, 1024, 2048), depths=(1, 1, 9, 1), num_heads=(8, 16, 32, 64)),
    "davit_giant": DaViTConfig(embed_dims=(384, 768, 1536, 3072), depths=(1, 1, 12, 3), num_heads=(12, 24, 48, 96)),
}


def convolve(conv: nn.Conv2d, grid: Tensor) -> Tensor:
    """Apply a convolution to a map `(B, H, W, D)`; both turns are views, of what torch calls channels-last memory."""
    convolved: Tensor = rearrange(conv(rearrange(grid, "b h w d -> b d h w")), "b d h w -> b h w d")
    return convolved


class Stem(nn.Module):
    """Map overlapping squares of 7 x 7 pixels, the first around the first pixel, to positions, and normalise these."""

    def __init__(self, in_channels: int, dim: int, *, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, dim, kernel_size=_STEM_SIZE, stride=stride, padding=_STEM_SIZE // 2)
        self.norm = nn.LayerNorm(dim, eps=_NORM_EPS)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(B, C, height, width)` to `(B, H, W, D)`, H and W a stride's part of them, rounded up."""
        normalised: Tensor = self.norm(rearrange(self.conv(images), "b d h w -> b h w d"))
        return normalised


class Downsample(nn.Module):
    """Normalise each position, then map 2 x 2 of them to one."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_dim, eps=_NORM_EPS)
        self.conv = nn.Conv2d(in_dim, dim, kernel_size=2, stride=2)

    def forward(self, grid: Tensor) -> Tensor:
        """Map `(B, H, W, D)` to the new width, with half of H and W, rounded up."""
        return convolve(self.conv, pad_to_multiple(self.norm(grid), (2, 2)))


class ConvPosition(nn.Module):
    """Add to each channel its 3 x 3 convolution, whose zeros beyond the border tell positions where they lie."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim)

    def forward(self, grid: Tensor) -> Tensor:
        """Map `(B, H, W, D)` to the same shape."""
        return grid + convolve(self.proj, grid)


class SpatialAttention(AttentionProjections):
    """Let the positions of each window attend to one another, padding among them, as in the released network."""

    def __init__(self, config: DaViTConfig, stage: int) -> None:
        dim, num_heads = config.embed_dims[stage], config.num_heads[stage]
        super().__init__(dim, num_heads, qkv_bias=config.qkv_bias, drop_rate=config.drop_rate)
        self.window = to_pair(config.window_size)

    def forward(self, grid: Tensor) -> Tensor:
        """Map `(B, H, W, D)` to the same shape."""
        _, H, W, _ = grid.shape
        qkv = self.qkv(pad_to_multiple(in_product_dtype(grid), self.window))
        grid_size = (qkv.shape[1], qkv.shape[2])
        # Where attention is fused, a join after the projection keeps a copy less.
        if is_fused(math.prod(self.window), qkv.device, qkv.dtype, causal=False):
            projected = reverse(self.attend(partition(qkv, self.window)), self.window, grid_size)
        else:
            heads = attention(*partition_heads(qkv, self.window, self.num_heads))
            projected = self.proj(join_heads(heads, self.window, grid_size))
        mixed: Tensor = self.proj_drop(projected)[:, :H, :W]
        return mixed


def channel_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Give each channel the average of its group's channels, weighted by how well they match over all positions.

    This is attention with channels for tokens: `(softmax(Q^T K / sqrt(e), over the last axis) V^T)^T`. Only the divisor
    is not from the length N of what is multiplied, but from the width of a group, so that scores grow with the map.

    All three, and the result, are `(B, g, N, e)`. Source: arXiv:2204.03645, "Channel Group Attention".
    """
    query, scale = scale_in_float16(query)
    weights = (query.transpose(-2, -1) @ key * scale).softmax(dim=-1)  # (B, g, e, e)
    return value @ weights.transpose(-2, -1)


class ChannelAttention(AttentionProjections):
    """Let the channels of each group, which are those of a head, attend to one another.

    The rows of `qkv` are values, queries, keys, in this order: the released code makes the weights from what it calls
    keys and values, and averages what it calls queries.
    """

    def __init__(self, config: DaViTConfig, stage: int) -> None:
        dim, num_groups = config.embed_dims[stage], config.num_heads[stage]
        super().__init__(dim, num_groups, qkv_bias=config.qkv_bias, drop_rate=config.drop_rate)
        stride = config.stem_stride * 2**stage
        self.num_positions = math.prod(math.ceil(side / stride) for side in to_pair(config.image_size))

    def forward(self, grid: Tensor) -> Tensor:
        """Map `(B, H, W, D)` to the same shape."""
        _, H, W, _ = grid.shape
        value, query, key = rearrange(
            self.qkv(grid), "b h w (three g e) -> three b g (h w) e", three=3, g=self.num_heads
        )
        groups = channel_attention(query, key, value)
        mixed: Tensor = self.proj_drop(self.proj(rearrange(groups, "b g (h w) e -> b h w (g e)", h=H, w=W)))
        return mixed


class Block(nn.Module):
    """Attention of either kind, then MLP, each a branch that is added to its input, after a convolution."""

    def __init__(self, config: DaViTConfig, stage: int, attention: nn.Module, *, drop_path_rate: float) -> None:
        super().__init__()
        dim = config.embed_dims[stage]
        self.cpe1 = ConvPosition(dim)
        self.norm1 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.attn = attention
        self.cpe2 = ConvPosition(dim)
        self.norm2 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio), drop_rate=config.drop_rate)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, grid: Tensor, mean_over: tuple[int, ...] = ()) -> Tensor:
        """Map `(B, H, W, D)` to the same shape, or to the mean over some axes, which stay with length 1."""
        grid = self.cpe1(grid)
        grid = grid + self.drop_path(self.attn(self.norm1(grid)))
        grid = self.cpe2(grid)
        wanted: Tensor = grid.mean(mean_over, keepdim=True) if mean_over else grid
        wanted = wanted + self.drop_path(self.mlp(self.norm2(grid), mean_over))
        return wanted


def _build_stage(config: DaViTConfig, stage: int, drop_path_rates: Iterator[float]) -> nn.Sequential:
    """Give a stage: the step down to its size of map, except at the first, then pairs of the two kinds of blocks."""
    dims = config.embed_dims
    pairs = []
    for _ in range(config.depths[stage]):
        attentions = (SpatialAttention(config, stage), ChannelAttention(config, stage))
        blocks = [Block(config, stage, attn, drop_path_rate=next(drop_path_rates)) for attn in attentions]
        pairs.append(nn.Sequential(*blocks))
    steps: dict[str, nn.Module] = {"downsample": Downsample(dims[stage - 1], dims[stage])} if stage else {}
    return nn.Sequential(OrderedDict(**steps, blocks=nn.Sequential(*pairs)))


class Head(nn.Module):
    """Normalise the average over all positions, and classify it."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, grid: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Map `(B, H, W, D)` to logits `(B, K)`, or with `pre_logits` to the normalised average `(B, D)`."""
        features: Tensor = self.norm(grid.mean(dim=(1, 2)))
        return features if pre_logits else self.fc(features)


class DaViT(BlockNetwork):
    """Classify images. Each block has its own drop path rate, as in the released code; in timm, each pair of blocks."""

    name = "davit_tiny"

    def __init__(self, config: DaViTConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.in_channels = config.in_channels
        self.image_size = to_pair(config.image_size)
        self.stem = Stem(config.in_channels, config.embed_dims[0], stride=config.stem_stride)
        rates = iter(torch.linspace(0, config.drop_path_rate, 2 * sum(config.depths), device="cpu").tolist())
        self.stages = nn.Sequential(*(_build_stage(config, stage, rates) for stage in range(len(config.depths))))
        self.head = Head(config.embed_dims[-1], config.num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw fresh weights.

        As in ViT here: linear layers xavier uniform, convolutions lecun normal, biases and head 0, norms the identity.
        Two things differ. The convolutions before the branches keep torch's default, which adds a third to a map's
        variance. Queries and keys of channel attention are smaller, so that scores start below 1 on every map; xavier
        alone starts them at 420 for images of 224, where softmax picks one channel and passes no gradient. timm draws
        all linear layers from a normal of .02, which starts these scores at 13, and keeps torch's convolutions.
        (6,000 images of CIFAR-10, 5 epochs, widths 32 to 128, mean of two seeds: training loss 1.36, and 43.3 % of
        2,000 test images; drawn as timm does 1.44 and 43.0 %; with xavier alone 1.49 and 40.3 %.)
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                init.xavier_linear(module, parts=3 if name.endswith("qkv") else 1)
            elif isinstance(module, nn.Conv2d) and module.groups == 1:
                init.lecun_conv(module)
            elif isinstance(module, nn.Conv2d | nn.LayerNorm):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, ChannelAttention):
                dim, num_groups = module.proj.in_features, module.num_heads
                queries_and_keys = module.qkv.weight.detach()[dim:]
                queries_and_keys *= math.sqrt(math.sqrt(dim / num_groups) / module.num_positions)
        init.zero_linear(self.head.fc)

    def config_dict(self) -> dict[str, Any]:
        """Give the config's fields as plain JSON values, the image size as [height, width]."""
        config = dataclasses.asdict(self.config) | {"image_size": self.image_size}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}

    def forward_features(self, images: Tensor) -> Tensor:
        """Give the last block's map `(B, H, W, D)`, not normalised."""
        grid = self.last_output(images)
        return grid

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Average a map `(B, H, W, D)`, normalise and classify: `(B, K)`; with `pre_logits` `(B, D)`, normalised."""
        outputs: Tensor = self.head(features, pre_logits=pre_logits)
        return outputs

    def head_features(self, images: Tensor) -> Tensor:
        """Give what `forward_head` needs: the mean of the last block's map alone, `(B, 1, 1, D)`.

        The block's last layer then works for one position. With dropout after it, with a hook in the block or the head,
        or with `skips_unused` off, it works for all.
        """
        last = self.repeated_blocks()[-1]
        dropout = last.mlp.drop2
        if (dropout.training and dropout.p > 0) or not self.skips_unused or has_hooks(last, self.head):
            return self.forward_features(images)
        return self.last_output(images, means_last=True)

    def block_outputs(self, images: Tensor, *, means_last: bool = False) -> Iterator[Tensor]:
        """Give each block's map `(B, H, W, D)`; with `means_last` of the last one the mean `(B, 1, 1, D)`."""
        check_images(images, image_size=self.image_size, in_channels=self.in_channels)
        last = self.repeated_blocks()[-1]
        grid: Tensor = self.stem(images)
        for step in self.stages.modules():  # in the order in which they were built
            if isinstance(step, Downsample):
                grid = step(grid)
            elif isinstance(step, Block):
                grid = self.run_block(step, grid, mean_over=(1, 2) if means_last and step is last else ())
                yield grid

    def get_classifier(self) -> nn.Linear:
        """Give the head's linear layer."""
        return self.head.fc

    def no_weight_decay(self) -> set[str]:
        """Name nothing: there are no tokens and no tables; convolutions decay."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Give timm's patterns: stem, then pair by pair (or stage by stage), a downsampling with the pair after it."""
        pairs = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else pairs}

    def repeated_blocks(self) -> list[Any]:
        """Give the blocks, those of window attention and those of channel attention."""
        return [module for module in self.modules() if isinstance(module, Block)]
