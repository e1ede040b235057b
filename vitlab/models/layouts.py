"""How other projects name and shape the weights of ViT, Swin and DaViT, both ways; ImageGPT's have a file of their own.

Our names are timm's, so its files need no table. A layout gives, for a parameter of ours, the name or names that it has
elsewhere; from that follow the way in and the way out.

Source of the names: the modules of torchvision and transformers; microsoft/Swin-Transformer, dingmyu/davit and
google-research/vision_transformer.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One project's names."""

    name: str
    marks: frozenset[str]
    """Names that all must be there to recognise it, without `prefix`."""
    rename: Callable[[str], str]
    """From our name to theirs."""
    qkv: tuple[str, str, str] | None = None
    """What stands for queries, keys and values in the place of `QKV`, where they are three entries."""
    prefix: str = ""
    """In front of every name but the head's in a whole classifier; a bare backbone goes without it."""
    ignored: str = r"(?!)"
    """What the project saves beside weights, such as tables that follow from the shape."""
    to_torch: Callable[[State], State] = dict
    """Brings tensors that have other shapes there into ours, still under their names."""
    from_torch: Callable[[State], State] = dict
    """Its inverse."""

    def names(self, ours: str) -> tuple[str, ...]:
        """Give the name, or the three, of a parameter of ours."""
        theirs = self.rename(ours)
        return tuple(theirs.replace("QKV", part) for part in self.qkv) if self.qkv else (theirs,)

    def recognises(self, names: Iterable[str]) -> bool:
        """Tell whether these are the names of this layout."""
        return self.marks <= {name.removeprefix(self.prefix) for name in names}

    def to_ours(self, state: Mapping[str, Tensor], wanted: Iterable[str]) -> tuple[State, tuple[str, ...]]:
        """Rename a state of this layout.

        Args:
            state: theirs.
            wanted: the network's own names.

        Returns:
            The state under our names, with what the table does not know under its own, and the names ignored.
        """
        rest = {name: tensor for name, tensor in state.items() if not re.search(self.ignored, name)}
        ignored = tuple(name for name in state if name not in rest)
        rest = self.to_torch(rest)
        ours: State = {}
        for name in wanted:
            found = [part if part in rest else part.removeprefix(self.prefix) for part in self.names(name)]
            found = list(dict.fromkeys(found))  # only queries, keys and values have three names
            if all(part in rest for part in found) and _fit_together([rest[part] for part in found]):
                parts = [rest.pop(part) for part in found]
                ours[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return {**ours, **rest}, ignored

    def from_ours(self, state: Mapping[str, Tensor]) -> State:
        """Rename a state of ours to this layout; the inverse of `to_ours`."""
        theirs: State = {}
        for name, tensor in state.items():
            names = tuple(dict.fromkeys(self.names(name)))
            theirs.update(zip(names, tensor.chunk(len(names)), strict=True))
        return self.from_torch(theirs)


def _fit_together(parts: list[Tensor]) -> bool:
    """Tell whether parts differ in their rows at most; what does not is left, and found to match nothing."""
    return len(parts) == 1 or (min(part.ndim for part in parts) > 0 and len({part.shape[1:] for part in parts}) == 1)


def by_rules(*rules: tuple[str, str]) -> Callable[[str], str]:
    """Apply regular expressions, each with its replacement, one after another."""

    def rename(name: str) -> str:
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        return name

    return rename


def _torchvision_swin(ours: str) -> str:
    """Count a stage's blocks and the merging before it as torchvision's one list of features does."""
    ours = by_rules((r"^patch_embed\.proj\.", "features.0.0."), (r"^patch_embed\.norm\.", "features.0.2."))(ours)
    ours = by_rules((r"mlp\.fc1\.", "mlp.0."), (r"mlp\.fc2\.", "mlp.3."), (r"^head\.fc\.", "head."))(ours)
    match = re.match(r"layers\.(\d+)\.(blocks|downsample)\.(.*)", ours)
    if not match:
        return ours
    stage = int(match[1])
    return f"features.{2 * stage + 1}.{match[3]}" if match[2] == "blocks" else f"features.{2 * stage}.{match[3]}"


def _microsoft_swin(ours: str) -> str:
    """Put the merging at the end of the stage before, where Microsoft has it."""
    match = re.match(r"layers\.(\d+)\.(downsample\..*)", ours)
    return f"layers.{int(match[1]) - 1}.{match[2]}" if match else re.sub(r"^head\.fc\.", "head.", ours)


_TORCHVISION_BLOCK = (
    (r"^cls_token$", "class_token"),
    (r"^patch_embed\.proj\.", "conv_proj."),
    (r"^pos_embed$", "encoder.pos_embedding"),
    (r"^norm\.", "encoder.ln."),
    (r"^head\.", "heads.head."),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.encoder_layer_\1.ln_\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.encoder_layer_\1.self_attention.in_proj_"),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.encoder_layer_\1.self_attention.out_proj."),
)
_TRANSFORMERS_FRAME = (
    (r"^cls_token$", "vit.embeddings.cls_token"),
    (r"^pos_embed$", "vit.embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "vit.embeddings.patch_embeddings.projection."),
    (r"^norm\.", "vit.layernorm."),
    (r"^head\.", "classifier."),
)

LAYOUTS = (
    Layout(
        name="torchvision",
        marks=frozenset({"class_token", "conv_proj.weight", "encoder.layers.encoder_layer_0.mlp.0.weight"}),
        rename=by_rules(
            *_TORCHVISION_BLOCK,
            (r"^blocks\.(\d+)\.mlp\.fc1\.", r"encoder.layers.encoder_layer_\1.mlp.0."),
            (r"^blocks\.(\d+)\.mlp\.fc2\.", r"encoder.layers.encoder_layer_\1.mlp.3."),
        ),
    ),
    Layout(  # its names of before 2022
        name="torchvision",
        marks=frozenset({"class_token", "conv_proj.weight", "encoder.layers.encoder_layer_0.mlp.linear_1.weight"}),
        rename=by_rules(
            *_TORCHVISION_BLOCK,
            (r"^blocks\.(\d+)\.mlp\.fc([12])\.", r"encoder.layers.encoder_layer_\1.mlp.linear_\2."),
        ),
    ),
    Layout(
        name="transformers",
        marks=frozenset({"embeddings.cls_token", "layers.0.layernorm_before.weight"}),
        rename=by_rules(
            *_TRANSFORMERS_FRAME,
            (r"^blocks\.(\d+)\.norm1\.", r"vit.layers.\1.layernorm_before."),
            (r"^blocks\.(\d+)\.norm2\.", r"vit.layers.\1.layernorm_after."),
            (r"^blocks\.(\d+)\.attn\.qkv\.", r"vit.layers.\1.attention.QKV_proj."),
            (r"^blocks\.(\d+)\.attn\.proj\.", r"vit.layers.\1.attention.o_proj."),
            (r"^blocks\.(\d+)\.mlp\.", r"vit.layers.\1.mlp."),
        ),
        qkv=("q", "k", "v"),
        prefix="vit.",
        ignored=r"^(vit\.)?pooler\.",
    ),
    Layout(  # the files that transformers before 5 wrote, as most of the published ones are
        name="transformers",
        marks=frozenset({"embeddings.cls_token", "encoder.layer.0.layernorm_before.weight"}),
        rename=by_rules(
            *_TRANSFORMERS_FRAME,
            (r"^blocks\.(\d+)\.norm1\.", r"vit.encoder.layer.\1.layernorm_before."),
            (r"^blocks\.(\d+)\.norm2\.", r"vit.encoder.layer.\1.layernorm_after."),
            (r"^blocks\.(\d+)\.attn\.qkv\.", r"vit.encoder.layer.\1.attention.attention.QKV."),
            (r"^blocks\.(\d+)\.attn\.proj\.", r"vit.encoder.layer.\1.attention.output.dense."),
            (r"^blocks\.(\d+)\.mlp\.fc1\.", r"vit.encoder.layer.\1.intermediate.dense."),
            (r"^blocks\.(\d+)\.mlp\.fc2\.", r"vit.encoder.layer.\1.output.dense."),
        ),
        qkv=("query", "key", "value"),
        prefix="vit.",
        ignored=r"^(vit\.)?pooler\.",
    ),
    Layout(
        name="google",
        marks=frozenset({"cls", "embedding/kernel", "Transformer/encoderblock_0/LayerNorm_0/scale"}),
        rename=by_rules(
            (r"^cls_token$", "cls"),
            (r"^patch_embed\.proj\.", "embedding/"),
            (r"^pos_embed$", "Transformer/posembed_input/pos_embedding"),
            (r"^norm\.", "Transformer/encoder_norm/"),
            (r"^head\.", "head/"),
            (r"^blocks\.(\d+)\.norm1\.", r"Transformer/encoderblock_\1/LayerNorm_0/"),
            (r"^blocks\.(\d+)\.norm2\.", r"Transformer/encoderblock_\1/LayerNorm_1/"),
            (r"^blocks\.(\d+)\.attn\.qkv\.", r"Transformer/encoderblock_\1/MultiHeadDotProductAttention/QKV/"),
            (r"^blocks\.(\d+)\.attn\.proj\.", r"Transformer/encoderblock_\1/MultiHeadDotProductAttention/out/"),
            (r"^blocks\.(\d+)\.mlp\.fc1\.", r"Transformer/encoderblock_\1/MlpBlock/Dense_0/"),
            (r"^blocks\.(\d+)\.mlp\.fc2\.", r"Transformer/encoderblock_\1/MlpBlock/Dense_1/"),
            (r"((?:_norm|LayerNorm_[01])/)weight$", r"\1scale"),
            (r"/weight$", "/kernel"),
        ),
        qkv=("query", "key", "value"),
        ignored=r"^pre_logits/",
    ),
    Layout(
        name="torchvision",
        marks=frozenset({"features.0.0.weight", "features.1.0.attn.relative_position_bias_table"}),
        rename=_torchvision_swin,
        ignored=r"\.relative_position_index$",
    ),
    Layout(
        name="microsoft",
        marks=frozenset({"layers.0.downsample.reduction.weight", "layers.0.blocks.0.attn.qkv.weight"}),
        rename=_microsoft_swin,
        ignored=r"\.(relative_position_index|attn_mask)$",
    ),
    Layout(
        name="dingmyu",
        marks=frozenset({"patch_embeds.0.proj.weight", "main_blocks.0.0.0.attn.qkv.weight"}),
        rename=by_rules(
            (r"^stem\.conv\.", "patch_embeds.0.proj."),
            (r"^stem\.norm\.", "patch_embeds.0.norm."),
            (r"^stages\.(\d+)\.downsample\.conv\.", r"patch_embeds.\1.proj."),
            (r"^stages\.(\d+)\.downsample\.norm\.", r"patch_embeds.\1.norm."),
            (r"^stages\.(\d+)\.blocks\.", r"main_blocks.\1."),
            (r"\.cpe1\.", ".cpe.0."),
            (r"\.cpe2\.", ".cpe.1."),
            (r"^head\.norm\.", "norms."),
            (r"^head\.fc\.", "head."),
        ),
    ),
)


def from_google(arrays: Mapping[str, Tensor]) -> State:
    """Bring the arrays of an .npz file of Google's ViT into torch's shapes, under the names of the layout `google`.

    Kernels are (in, out) there, attention's with the heads apart; big_vision numbers the parts of a block otherwise,
    and may stack all blocks on a leading axis.
    """
    state: State = {}
    for name, array in arrays.items():
        name = re.sub(r"^(opt/target|params)/", "", name)
        name = re.sub(r"(MultiHeadDotProductAttention|MlpBlock)_\d+/", r"\1/", name).replace(
            "LayerNorm_2", "LayerNorm_1"
        )
        if "Transformer/encoderblock/" in name:
            for index, part in enumerate(array):
                state[name.replace("encoderblock/", f"encoderblock_{index}/")] = _google_tensor(name, part)
        else:
            state[name] = _google_tensor(name, array)
    return state


def _google_tensor(name: str, array: Tensor) -> Tensor:
    if name.endswith("/bias"):
        return array.flatten()
    if not name.endswith("/kernel"):
        return array
    if array.ndim == 4:
        return rearrange(array, "h w c d -> d c h w")
    if array.ndim == 3:
        pattern = "h e d -> d (h e)" if "/out/" in name else "d h e -> (h e) d"
        return rearrange(array, pattern)
    return array.T
