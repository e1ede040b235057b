"""Weights under other projects' names: the same logits as the project's own module, and the way back."""

import numpy as np
import pytest
import torch

from vitlab.errors import InputError
from vitlab.models.layouts import LAYOUTS
from vitlab.models.weights import load_weights


def layout(mark):
    """Give the layout that has this mark."""
    (found,) = [layout for layout in LAYOUTS if mark in layout.marks]
    return found


def images_for(network, seed=1):
    shape = (2, network.in_channels, *network.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


def transformers_vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        num_labels=5,
        layer_norm_eps=1e-6,
    )
    return ViTForImageClassification(config)


def test_transformers_vit_gives_its_logits_and_goes_back(tiny_vit, randomise):
    peer = randomise(transformers_vit()).eval().double()
    network = tiny_vit(image_size=8).eval().double()
    report = load_weights(network, peer.state_dict())
    assert report.layout == "transformers"
    images = images_for(network)
    torch.testing.assert_close(network(images), peer(images).logits, rtol=0, atol=1e-10)
    back = layout("layers.0.layernorm_before.weight").from_ours(network.state_dict())
    assert_same_state(back, peer.state_dict())


def test_transformers_backbone_without_prefix_or_head_loads(tiny_vit, randomise):
    peer = randomise(transformers_vit())
    bare = {name.removeprefix("vit."): t for name, t in peer.state_dict().items() if name.startswith("vit.")}
    bare["pooler.dense.weight"] = torch.zeros(12, 12)
    network = tiny_vit(image_size=8)
    report = load_weights(network, bare)
    assert (report.ignored, report.reinitialised) == (("pooler.dense.weight",), ("head.weight", "head.bias"))
    torch.testing.assert_close(network.blocks[1].attn.qkv.weight[:12], bare["layers.1.attention.q_proj.weight"])


def test_transformers_names_of_before_5_load_alike(tiny_vit, randomise):
    """The older names are read by transformers itself, so its module is the judge of them."""
    peer = randomise(transformers_vit())
    new, old = tiny_vit(image_size=8), tiny_vit(image_size=8)
    load_weights(new, peer.state_dict())
    before = layout("encoder.layer.0.layernorm_before.weight").from_ours(new.state_dict())
    assert {
        "vit.encoder.layer.1.attention.attention.query.weight",
        "vit.encoder.layer.1.attention.output.dense.bias",
        "vit.encoder.layer.0.intermediate.dense.weight",
        "vit.encoder.layer.0.output.dense.weight",
        "classifier.weight",
    } <= before.keys()
    assert load_weights(old, before).layout == "transformers"
    assert_same_state(old.state_dict(), new.state_dict())


def test_torchvision_vit_goes_back(tiny_vit, torchvision_vit, randomise):
    peer = randomise(torchvision_vit())
    network = tiny_vit(image_size=8)
    load_weights(network, peer.state_dict())
    back = layout("encoder.layers.encoder_layer_0.mlp.0.weight").from_ours(network.state_dict())
    assert_same_state(back, peer.state_dict())


def google_arrays(network, *, num_heads=3, stacked=False):
    """Write a ViT of ours as Google's code holds it: kernels (in, out), heads apart."""
    state = {name: tensor.detach().numpy() for name, tensor in network.state_dict().items()}
    d = state["norm.weight"].shape[0]
    arrays = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    second_norm, mlp, attn = ("LayerNorm_1", "MlpBlock_0", "MultiHeadDotProductAttention_0")
    if not stacked:
        second_norm, mlp, attn = ("LayerNorm_2", "MlpBlock_3", "MultiHeadDotProductAttention_1")
    blocks = []
    for index in range(2):
        ours, block = f"blocks.{index}.", {}
        for name, part in (("LayerNorm_0", "norm1"), (second_norm, "norm2")):
            block[f"{name}/scale"], block[f"{name}/bias"] = state[f"{ours}{part}.weight"], state[f"{ours}{part}.bias"]
        for row, part in enumerate(("query", "key", "value")):
            weight, bias = (state[f"{ours}attn.qkv.{kind}"][row * d : (row + 1) * d] for kind in ("weight", "bias"))
            block[f"{attn}/{part}/kernel"] = weight.T.reshape(d, num_heads, -1)
            block[f"{attn}/{part}/bias"] = bias.reshape(num_heads, -1)
        block[f"{attn}/out/kernel"] = state[f"{ours}attn.proj.weight"].T.reshape(num_heads, -1, d)
        block[f"{attn}/out/bias"] = state[f"{ours}attn.proj.bias"]
        for number in (0, 1):
            block[f"{mlp}/Dense_{number}/kernel"] = state[f"{ours}mlp.fc{number + 1}.weight"].T
            block[f"{mlp}/Dense_{number}/bias"] = state[f"{ours}mlp.fc{number + 1}.bias"]
        blocks.append(block)
    if stacked:
        stacks = {name: np.stack([block[name] for block in blocks]) for name in blocks[0]}
        return {f"params/{name}": array for name, array in arrays.items()} | {
            f"params/Transformer/encoderblock/{name}": array for name, array in stacks.items()
        }
    for index, block in enumerate(blocks):
        arrays |= {f"Transformer/encoderblock_{index}/{name}": array for name, array in block.items()}
    return arrays


@pytest.mark.parametrize("stacked", [False, True])
def test_google_npz_loads(stacked, tiny_vit, randomise, tmp_path):
    source = randomise(tiny_vit())
    path = tmp_path / "vit.npz"
    np.savez(path, **google_arrays(source, stacked=stacked))
    network = tiny_vit()
    report = load_weights(network, path)
    assert report.layout == "google"
    assert report.preprocess == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert_same_state(network.state_dict(), source.state_dict())


def test_google_npz_is_read_as_timm_reads_it(tiny_vit, timm_vit, randomise, tmp_path):
    source = randomise(tiny_vit(image_size=8))
    arrays = google_arrays(source) | {"pre_logits/kernel": np.zeros((12, 12)), "pre_logits/bias": np.zeros(12)}
    np.savez(tmp_path / "vit.npz", **arrays)
    peer = timm_vit(img_size=8)
    peer.load_pretrained(str(tmp_path / "vit.npz"))
    network = tiny_vit(image_size=8)
    assert load_weights(network, tmp_path / "vit.npz").ignored == ("pre_logits/kernel", "pre_logits/bias")
    assert_same_state(network.state_dict(), peer.state_dict())


def test_google_npz_with_objects_is_refused(tiny_vit, tmp_path):
    np.savez(tmp_path / "vit.npz", cls=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match=r"vit\.npz is damaged, or no \.npz of plain arrays"):
        load_weights(tiny_vit(), tmp_path / "vit.npz")


def test_torchvision_swin_gives_its_logits_and_goes_back(tiny_swin, randomise):
    from torchvision.models.swin_transformer import SwinTransformer

    peer = SwinTransformer([4, 4], 12, [2, 2], [2, 4], [3, 3], num_classes=5)
    randomise(peer).eval().double()
    network = tiny_swin(image_size=(48, 72)).eval().double()
    report = load_weights(network, peer.state_dict())
    assert report.layout == "torchvision"
    assert all(name.endswith("relative_position_index") for name in report.ignored)
    images = images_for(network)
    torch.testing.assert_close(network(images), peer(images), rtol=0, atol=1e-10)
    back = layout("features.0.0.weight").from_ours(network.state_dict())
    kept = {name: t for name, t in peer.state_dict().items() if not name.endswith("relative_position_index")}
    assert_same_state(back, kept)


def test_microsoft_swin_is_read_as_timm_reads_it_and_goes_back(tiny_swin, timm_swin, randomise):
    from timm.models.swin_transformer import checkpoint_filter_fn

    source = randomise(tiny_swin())
    theirs = layout("layers.0.downsample.reduction.weight").from_ours(source.state_dict())
    assert {"layers.0.downsample.norm.weight", "head.weight", "layers.1.blocks.1.attn.qkv.weight"} <= theirs.keys()
    assert not any(name.startswith("layers.1.downsample") for name in theirs)
    buffers = {
        "layers.0.blocks.1.attn_mask": torch.zeros(1),
        "layers.0.blocks.0.attn.relative_position_index": torch.zeros(1),
    }
    network = tiny_swin()
    report = load_weights(network, {"model": theirs | buffers})
    assert (report.layout, set(report.ignored)) == ("microsoft", set(buffers))
    assert_same_state(network.state_dict(), source.state_dict())
    peer = timm_swin(source)
    peer.load_state_dict(checkpoint_filter_fn(dict(theirs), peer))
    assert_same_state(peer.state_dict(), network.state_dict())


def test_dingmyu_davit_is_read_as_timm_reads_it_and_goes_back(tiny_davit, timm_davit, randomise):
    from timm.models.davit import checkpoint_filter_fn

    source = randomise(tiny_davit())
    theirs = layout("main_blocks.0.0.0.attn.qkv.weight").from_ours(source.state_dict())
    assert {
        "patch_embeds.1.proj.weight",
        "main_blocks.1.1.1.cpe.1.proj.bias",
        "norms.weight",
        "head.bias",
    } <= theirs.keys()
    network = tiny_davit()
    assert load_weights(network, {"state_dict": theirs}).layout == "dingmyu"
    assert_same_state(network.state_dict(), source.state_dict())
    peer = timm_davit()
    peer.load_state_dict(checkpoint_filter_fn({"state_dict": theirs}, peer))
    assert_same_state(peer.state_dict(), network.state_dict())


def test_half_matching_file_lists_what_is_missing_and_left_over(tiny_swin):
    state = layout("layers.0.downsample.reduction.weight").from_ours(tiny_swin().state_dict())
    del state["layers.0.downsample.norm.bias"]
    state["layers.7.blocks.0.norm1.bias"] = torch.zeros(12)
    with pytest.raises(
        InputError,
        match=r"\(microsoft names\) .* missing: layers\.1\.downsample\.norm\.bias; "
        r"unexpected: layers\.7\.blocks\.0\.norm1\.bias",
    ):
        load_weights(tiny_swin(), state)


def test_weights_of_another_family_do_not_load(tiny_swin, tiny_davit):
    with pytest.raises(InputError, match=r"the weights \(timm names\) do not fit the network: missing: patch_embed"):
        load_weights(tiny_swin(), tiny_davit().state_dict())


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-60], lambda data: data[:400] + b"????" + data[404:], lambda _: b"PK"]
)
def test_damaged_npz_is_refused(damage, tiny_vit, tmp_path):
    path = tmp_path / "vit.npz"
    np.savez_compressed(path, **google_arrays(tiny_vit()))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"vit\.npz is damaged, or no \.npz of plain arrays"):
        load_weights(tiny_vit(), path)
