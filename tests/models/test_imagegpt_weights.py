"""ImageGPT's weights under the names of transformers and of OpenAI, there and back, and what they have or lack."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError
from vitlab.layers.position import resample_positions
from vitlab.models.files import save_model
from vitlab.models.imagegpt_weights import to_openai, to_transformers
from vitlab.models.weights import load_weights

BIASES = [f"blocks.{i}.{part}.bias" for i in range(2) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


def write_model_file(path, network):
    channels = network.in_channels
    preprocess = Preprocess(
        image_size=network.image_size, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels
    )
    save_model(path, network, classes=list("abcde"), preprocess=preprocess, metrics={}, data={})
    return path


def without_biases(peer):
    for name, parameter in peer.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
    return peer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "other_head"), [("causal", "score.weight"), ("classifier", "lm_head.weight")], ids=["causal", "classifier"]
)
def test_transformers_weights_load_and_go_back(kind, other_head, bias, tiny_imagegpt, transformers_imagegpt, randomise):
    peer = randomise(transformers_imagegpt(kind))
    network = randomise(tiny_imagegpt(bias=bias), seed=5)
    palette = network.palette.clone()
    report = load_weights(network, (peer if bias else without_biases(peer)).state_dict())
    back = to_transformers(network)
    assert back.pop(other_head).eq(0).all()
    assert_same_state(back, peer.state_dict())
    assert (report.layout, report.kept) == ("transformers", ("palette",))
    assert torch.equal(network.palette, palette)
    assert report.ignored == (() if bias else tuple(BIASES))
    assert report.reinitialised == (("head.weight",) if kind == "causal" else ())
    assert report.zeroed == (() if kind == "causal" else ("color_head.weight",))
    told = {*report.loaded, *report.reinitialised, *report.zeroed, *report.kept}
    assert told == set(network.state_dict())


def test_transformers_body_of_before_5_without_prefix_or_head_loads(tiny_imagegpt, transformers_imagegpt, randomise):
    peer = randomise(transformers_imagegpt("causal"))
    bare = {
        name.removeprefix("transformer."): tensor
        for name, tensor in peer.state_dict().items()
        if name.startswith("transformer.")
    }
    masks = {"h.0.attn.bias": torch.ones(1, 1, 24, 24).tril().bool(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    network = tiny_imagegpt(bias=True)
    report = load_weights(network, bare | masks)
    assert set(report.ignored) == set(masks)
    assert (report.reinitialised, report.zeroed) == (("head.weight",), ("color_head.weight",))
    assert torch.equal(network.blocks[1].mlp.fc2.weight, bare["h.1.mlp.c_proj.weight"].T)
    assert "zeroed color_head.weight; kept palette; ignored h.0.attn.bias" in report.summary()


def test_biases_that_are_not_0_do_not_load_into_a_network_without(tiny_imagegpt, transformers_imagegpt):
    peer = transformers_imagegpt("causal")
    nn.init.ones_(peer.transformer.h[1].mlp.c_fc.bias)
    network = tiny_imagegpt()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    message = "the weights hold 1 biases that are not 0, such as blocks.1.mlp.fc1.bias, and the network has none: build"
    with pytest.raises(InputError, match=message):
        load_weights(network, peer.state_dict())
    assert_same_state(network.state_dict(), before)


def test_half_of_the_biases_are_an_error(tiny_imagegpt):
    state = tiny_imagegpt(bias=True).state_dict()
    del state[BIASES[3]]
    with pytest.raises(InputError, match=rf"missing: {re.escape(BIASES[3])}; "):
        load_weights(tiny_imagegpt(bias=True), state)


def openai_arrays(seed=0, *, dim=12, heads=3, depth=2, colors=16, pixels=24, classes=5):
    """Draw a checkpoint of OpenAI's code: no biases, heads apart, matrices (in, out)."""
    generator = np.random.default_rng(seed)
    shapes = {"wte": (colors, dim), "wpe": (pixels, dim), "sos": (dim,), "wtet": (colors, dim), "ln_f/g": (dim,)}
    shapes["clf/wclf"] = (classes, dim)
    for block in range(depth):
        shapes |= {f"h{block}/ln_{norm}/g": (dim,) for norm in (1, 2)}
        shapes |= {f"h{block}/attn/{part}_proj": (heads, dim // heads, dim) for part in "qkvc"}
        shapes |= {f"h{block}/mlp/c_fc/w": (1, dim, 4 * dim), f"h{block}/mlp/c_proj/w": (1, 4 * dim, dim)}
    return {f"model/{name}": generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def openai_logits(arrays, tokens):
    """Compute colour logits and class logits as OpenAI's code does, in float64."""
    w = {name.removeprefix("model/"): torch.from_numpy(array).double() for name, array in arrays.items()}
    x = torch.cat([w["sos"].expand(len(tokens), 1, -1), w["wte"][tokens[:, :-1]]], dim=1) + w["wpe"]

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}/g"]

    N = tokens.shape[1]
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    for block in range(2):
        h = f"h{block}"
        y = norm(x, f"{h}/ln_1")
        q, k, v = (torch.einsum("bsf,hef->bhse", y, w[f"{h}/attn/{part}_proj"]) for part in "qkv")
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -1e10)
        x = x + torch.einsum("bhse,hef->bsf", scores.softmax(-1) @ v, w[f"{h}/attn/c_proj"])
        y = norm(x, f"{h}/ln_2") @ w[f"{h}/mlp/c_fc/w"].squeeze(0)
        x = x + (y * torch.sigmoid(1.702 * y)) @ w[f"{h}/mlp/c_proj/w"].squeeze(0)
    x = norm(x, "ln_f")
    return x @ w["wtet"].T, x.mean(dim=1) @ w["clf/wclf"].T


@pytest.mark.parametrize("source", ["npz", "arrays", "tensors without model/"])
@pytest.mark.parametrize("bias", [True, False])
def test_openai_variables_give_their_logits_and_go_back(bias, source, tiny_imagegpt, randomise, tmp_path):
    arrays = openai_arrays()
    entries = arrays | {"model/h0/attn/q_proj/adam_m": np.zeros(3), "global_step": np.array(7)}
    if source == "npz":
        np.savez(tmp_path / "a.npz", **entries)
        entries = tmp_path / "a.npz"
    elif source != "arrays":
        entries = {name.removeprefix("model/"): torch.from_numpy(array) for name, array in entries.items()}
    network = randomise(tiny_imagegpt(bias=bias))
    report = load_weights(network, entries)
    assert report.layout == "openai"
    assert [name.removeprefix("model/") for name in report.ignored] == ["h0/attn/q_proj/adam_m", "global_step"]
    assert report.zeroed == (tuple(BIASES) if bias else ())
    assert_same_state(to_openai(network), {name: torch.from_numpy(a).squeeze(0) for name, a in arrays.items()})
    tokens = torch.randint(16, (3, 24), generator=torch.Generator().manual_seed(1))
    network = network.double()
    pixels, classes = openai_logits(arrays, tokens)
    torch.testing.assert_close(network.pixel_logits(tokens), pixels, rtol=0, atol=1e-10)
    ours = network.forward_head(network.pixel_features(tokens))
    torch.testing.assert_close(ours, classes, rtol=0, atol=1e-10)


def test_to_openai_refuses_biases_that_are_not_0(tiny_imagegpt, randomise):
    with pytest.raises(InputError, match="bias is not 0, and OpenAI's ImageGPT has no biases"):
        to_openai(randomise(tiny_imagegpt(bias=True)))


@pytest.mark.parametrize(
    "spoil",
    [
        {"model/h0/attn/q_proj": np.zeros((12, 12, 1, 1))},
        {"model/h1/mlp/c_fc/w": np.zeros((2, 12, 48))},
        {"model/sos": np.zeros((2, 12))},
        {"model/wpe": np.zeros((3, 4, 5))},
    ],
)
def test_odd_openai_arrays_are_one_line(spoil, tiny_imagegpt):
    with pytest.raises(InputError, match=r"the weights \(openai names\) do not fit the network: ") as error:
        load_weights(tiny_imagegpt(), openai_arrays() | spoil)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["transformer.h.0.attn.c_attn.weight", "transformer.wpe.weight"])
def test_odd_transformers_tensors_are_one_line(name, tiny_imagegpt, transformers_imagegpt):
    state = transformers_imagegpt("causal").state_dict() | {name: torch.zeros(2, 3, 4)}
    with pytest.raises(
        InputError, match=r"the weights \(transformers names\) do not fit the network: of another shape"
    ):
        load_weights(tiny_imagegpt(), state)


def test_positions_of_a_square_are_resampled_in_two_dimensions(tiny_imagegpt, transformers_imagegpt, randomise):
    peer = randomise(transformers_imagegpt("causal", n_positions=64))
    network = tiny_imagegpt(bias=True, image_size=12)
    report = load_weights(network, peer.state_dict())
    assert report.resized == ("pos_embed",)
    table = peer.transformer.wpe.weight[None].detach()
    expected = resample_positions(table, old_grid=(8, 8), new_grid=(12, 12), num_prefix=0)
    torch.testing.assert_close(network.pos_embed.detach(), expected, rtol=0, atol=0)
    assert expected.shape == (1, 144, 12)


def test_model_file_brings_its_palette_and_the_grid_of_its_positions(tiny_imagegpt, randomise, tmp_path):
    source = randomise(tiny_imagegpt(image_size=(3, 8)))
    source.set_palette(torch.rand(16, 3) * 2 - 1)
    network = tiny_imagegpt(num_classes=7)  # 4 x 6: as many pixels, another grid
    report = load_weights(network, write_model_file(tmp_path / "a.safetensors", source))
    assert (report.layout, report.resized, report.reinitialised) == ("vitlab", ("pos_embed",), ("head.weight",))
    assert (report.zeroed, report.kept, report.ignored) == ((), (), ())
    expected = resample_positions(source.pos_embed, old_grid=(3, 8), new_grid=(4, 6), num_prefix=0)
    torch.testing.assert_close(network.pos_embed, expected, rtol=0, atol=0)
    assert torch.equal(network.palette, source.palette)
    assert "palette" in report.loaded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_colors": 8}, r"palette is \(16, 3\) instead of \(8, 3\).*theirs has num_colors 16 \(here 8\): give the"),
        ({"in_channels": 1}, r"palette is \(16, 3\) instead of \(16, 1\)"),
        ({"depth": 3}, r"missing: blocks\.2\..*theirs has depth 2 \(here 3\)"),
    ],
)
def test_model_file_of_another_shape_says_in_what(changes, message, tiny_imagegpt, randomise, tmp_path):
    path = write_model_file(tmp_path / "a.safetensors", randomise(tiny_imagegpt()))
    with pytest.raises(InputError, match=message):
        load_weights(tiny_imagegpt(**changes), path)


def test_folder_of_transformers_brings_the_palette_of_its_image_processor(
    tiny_imagegpt, transformers_imagegpt, randomise, tmp_path
):
    from transformers import ImageGPTImageProcessor

    peer = randomise(transformers_imagegpt("causal"))
    clusters = torch.rand(16, 3) * 2 - 1
    peer.save_pretrained(tmp_path)
    ImageGPTImageProcessor(clusters=clusters.tolist(), size={"height": 4, "width": 6}).save_pretrained(tmp_path)
    network = tiny_imagegpt(bias=True)
    report = load_weights(network, tmp_path)
    torch.testing.assert_close(network.palette, clusters)
    assert (report.layout, report.kept, "palette" in report.loaded) == ("transformers", (), True)
    stated = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    assert report.preprocess == stated
    before = {"clusters": clusters.tolist(), "do_normalize": True, "resample": 2, "size": 6}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(before))
    assert load_weights(network, tmp_path / "model.safetensors").preprocess == stated


def test_folder_with_a_palette_of_another_length_is_an_error(tiny_imagegpt, transformers_imagegpt, tmp_path):
    transformers_imagegpt("causal").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"clusters": [[0, 0, 0.5]] * 9, "resample": 2}))
    with pytest.raises(InputError, match=r"of another shape: palette is \(9, 3\) instead of \(16, 3\)"):
        load_weights(tiny_imagegpt(), tmp_path)
