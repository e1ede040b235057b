"""The vision transformer: patches of an image as tokens, equal blocks of attention and MLP, a linear head.

Parameters bear timm's names. Source: arXiv:2010.11929, and arXiv:2012.12877 (DeiT) for the tiny and small widths.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitlab.checks import require_fractions, require_multiple, require_positive
from vitlab.layers import init
from vitlab.layers.attention import MultiHeadAttention
from vitlab.layers.droppath import DropPath
from vitlab.layers.mlp import Mlp
from vitlab.layers.patch import PatchEmbed, check_divides, to_pair
from vitlab.layers.position import sine_cosine_positions
from vitlab.models.fields import conform_fields
from vitlab.models.network import BlockNetwork, has_hooks

# Of every LayerNorm; torch's own default, 1e-5, would change published weights' logits by 1e-4.
_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The shape of a vision transformer; the defaults are ViT-Base with patches of 16 pixels at 224."""

    image_size: int | tuple[int, int] = 224
    """Side, or (height, width), of the images in pixels."""
    patch_size: int | tuple[int, int] = 16
    """Side, or (height, width), of a patch in pixels; divides the image."""
    in_channels: int = 3
    """Channels of the images."""
    num_classes: int = 1000
    """Number of logits."""
    embed_dim: int = 768
    """Width of a token."""
    depth: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Attention heads in a block; divides the width."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer over the width of a token, rounded down."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    drop_rate: float = 0.0
    """Dropout after the positions and after every linear layer of a block except qkv, as in the paper (timm: head)."""
    drop_path_rate: float = 0.0
    """Probability of dropping the last block's branches for a sample; falls linearly to 0 at the first block."""
    pool: Literal["cls", "mean"] = "cls"
    """What is classified: the class token, or the mean of the patch tokens."""
    norm: Literal["pre", "post"] = "pre"
    """Where a block normalises: the input of each branch, or the sum with its output."""
    pos_embed: Literal["learned", "sincos"] = "learned"
    """A table that is trained, or fixed sines and cosines of the place in the row of tokens, for an even width."""

    def __post_init__(self) -> None:
        conform_fields(self)
        require_positive(self, "image_size", "patch_size", "in_channels", "num_classes")
        require_positive(self, "embed_dim", "depth", "num_heads", "mlp_ratio")
        require_fractions(self, "drop_rate", "drop_path_rate")
        check_divides(to_pair(self.image_size), to_pair(self.patch_size))
        require_multiple("embed_dim", self.embed_dim, "num_heads", self.num_heads)


VIT_SIZES = {
    "vit_tiny": ViTConfig(embed_dim=192, num_heads=3),
    "vit_small": ViTConfig(embed_dim=384, num_heads=6),
    "vit_base": ViTConfig(),
    "vit_large": ViTConfig(embed_dim=1024, depth=24, num_heads=16),
    "vit_huge": ViTConfig(patch_size=14, embed_dim=1280, depth=32, num_heads=16),
}


class Block(nn.Module):
    """Attention, then MLP, each a branch that is added to its input.

    Pre-norm, `x + f(norm(x))`, is ViT's order. Post-norm, `norm(x + f(x))`, is the original encoder's.

    Source: arXiv:2010.11929, eq. 2 and 3; post-norm: arXiv:1706.03762, sec. 3.1.
    """

    def __init__(self, config: ViTConfig, *, drop_path_rate: float) -> None:
        """Build one block; its drop path rate depends on where it stands."""
        super().__init__()
        dim = config.embed_dim
        self.post_norm = config.norm == "post"
        self.norm1 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.attn = MultiHeadAttention(dim, config.num_heads, qkv_bias=config.qkv_bias, drop_rate=config.drop_rate)
        self.norm2 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio), drop_rate=config.drop_rate)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, tokens: Tensor, num_outputs: int | None = None) -> Tensor:
        """Map tokens `(B, N, D)` to `(B, N, D)`, or the first so many of them alone to `(B, num_outputs, D)`."""
        wanted: Tensor = tokens[:, :num_outputs]
        if self.post_norm:
            wanted = self.norm1(wanted + self.drop_path(self.attn(tokens, num_outputs)))
            wanted = self.norm2(wanted + self.drop_path(self.mlp(wanted)))
        else:
            wanted = wanted + self.drop_path(self.attn(self.norm1(tokens), num_outputs))
            wanted = wanted + self.drop_path(self.mlp(self.norm2(wanted)))
        return wanted


class VisionTransformer(BlockNetwork):
    """Classify images from their patches.

    The class token is there with either pool. With `pool='mean'` it takes part in attention but not in the mean, and
    the final norm moves behind the mean (`fc_norm` in place of `norm`), as in timm with `global_pool='avg'`. With
    `norm='post'` there is no final norm: the last block already ends in one. With `pos_embed='sincos'` the positions
    are no weights: no file holds them, and a network of another image size has its own.
    """

    name = "vit_base"
    pos_embed: Tensor
    """Of the class token, then of the patches row by row: `(1, 1 + N, D)`."""

    def __init__(self, config: ViTConfig) -> None:
        """Build the network with fresh weights."""
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.in_channels = config.in_channels
        self.image_size = to_pair(config.image_size)
        dim = config.embed_dim
        self.patch_embed = PatchEmbed(
            image_size=self.image_size,
            patch_size=to_pair(config.patch_size),
            in_channels=config.in_channels,
            embed_dim=dim,
        )
        height, width = self.patch_embed.grid
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        positions = torch.empty(1, 1 + height * width, dim)
        if config.pos_embed == "learned":
            self.pos_embed = nn.Parameter(positions)
        else:
            self.register_buffer("pos_embed", positions, persistent=False)
        self.pos_drop = nn.Dropout(config.drop_rate)
        drop_path_rates = torch.linspace(0, config.drop_path_rate, config.depth, device="cpu").tolist()
        self.blocks = nn.Sequential(*(Block(config, drop_path_rate=rate) for rate in drop_path_rates))
        final_norm = config.norm == "pre"
        cls = config.pool == "cls"
        self.norm = nn.LayerNorm(dim, eps=_NORM_EPS) if final_norm and cls else nn.Identity()
        self.fc_norm = nn.LayerNorm(dim, eps=_NORM_EPS) if final_norm and not cls else nn.Identity()
        self.head = nn.Linear(dim, config.num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw fresh weights as the paper's own code did, but for the positions.

        Linear layers xavier uniform (queries, keys and values each for themselves), the patch map lecun normal, biases
        and class token 0, norms the identity. At small widths this learns much faster than a normal of .02 everywhere,
        which shrinks the signal there. The head starts at 0, so that training starts at a loss of ln(classes) and the
        first step shapes the head before it disturbs a pretrained backbone.

        The position table is normal with standard deviation .5, where the paper has .02: tokens of lecun patches vary
        by about 1, and beside them a short run hardly sees positions of .02. (Digits, 20 epochs: 95 % against 98 % of
        the test split. 20,000 images of CIFAR-10, 4 epochs: 48.6 % against 51.0 %. One seed each.) Fixed positions are
        those of `sine_cosine_positions`, with the class token at position 0.
        """
        init.lecun_conv(self.patch_embed.proj)
        nn.init.zeros_(self.cls_token)
        if self.config.pos_embed == "learned":
            init.normal_table(self.pos_embed, std=0.5)
        else:
            _, N, D = self.pos_embed.shape
            self.pos_embed.copy_(sine_cosine_positions(N, D))
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                init.xavier_linear(module.qkv, parts=3)
                init.xavier_linear(module.proj)
            elif isinstance(module, Mlp):
                init.xavier_linear(module.fc1)
                init.xavier_linear(module.fc2)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        init.zero_linear(self.head)

    def config_dict(self) -> dict[str, Any]:
        """Give the config's fields as plain JSON values, sizes as [height, width]."""
        config = dataclasses.asdict(self.config)
        for size in ("image_size", "patch_size"):
            config[size] = list(to_pair(config[size]))
        return config

    def head_features(self, images: Tensor) -> Tensor:
        """Give what `forward_head` needs: with `pool='cls'` the class token alone, `(B, 1, D)`.

        The last block then works for it alone: what it makes of the others would be dropped, and no gradient comes from
        there. With a hook in that block, or at the norm after it, or with `skips_unused` off, it makes all tokens.
        """
        if self.config.pool != "cls" or not self.skips_unused or has_hooks(self.blocks[-1], self.norm):
            return self.forward_features(images)
        normalised: Tensor = self.norm(self.last_output(images, num_last_outputs=1))
        return normalised

    def forward_features(self, images: Tensor) -> Tensor:
        """Give the tokens `(B, 1 + N, D)` after the last block, class token first; with `pool='cls'` normalised."""
        tokens = self.last_output(images)
        normalised: Tensor = self.norm(tokens)
        return normalised

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Pool tokens `(B, 1 + N, D)` and classify: `(B, K)`; with `pre_logits` the pooled `(B, D)`, normalised."""
        pooled = features[:, 0] if self.config.pool == "cls" else features[:, 1:].mean(dim=1)
        normalised: Tensor = self.fc_norm(pooled)
        return normalised if pre_logits else self.get_classifier()(normalised)

    def block_outputs(self, images: Tensor, *, num_last_outputs: int | None = None) -> Iterator[Tensor]:
        """Give each block's tokens `(B, 1 + N, D)`, class token first, without the final norm.

        Args:
            images: `(B, C, height, width)`.
            num_last_outputs: give of the last block the first so many tokens alone.
        """
        patches = self.patch_embed(images)
        B, _, D = patches.shape
        tokens: Tensor = torch.cat([self.cls_token.expand(B, 1, D), patches], dim=1)
        tokens = self.pos_drop(tokens + self.pos_embed)
        *others, last = self.blocks
        for block in others:
            tokens = self.run_block(block, tokens)
            yield tokens
        yield self.run_block(last, tokens, num_outputs=num_last_outputs)

    def get_classifier(self) -> nn.Linear:
        """Give the linear head."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """Name the class token and the learned position table."""
        return {"cls_token", "pos_embed"} if self.config.pos_embed == "learned" else {"cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Give timm's patterns: embeddings, then block by block (`norm` with the last block), then what is left."""
        return {
            "stem": r"^(?:cls_token|pos_embed|patch_embed)",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def repeated_blocks(self) -> list[nn.Module]:
        """Give the blocks."""
        return list(self.blocks)

    def compiled_blocks(self) -> list[nn.Module]:
        """Give the blocks that work alike: with `pool='cls'` all but the last, whose code no other would share."""
        blocks = self.repeated_blocks()
        return (blocks[:-1] or blocks) if self.config.pool == "cls" else blocks
