import math

import pytest
import timm.optim
import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError
from vitlab.layers.droppath import DropPath
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model
from vitlab.models.imagegpt import IMAGEGPT_SIZES, ImageGPT, ImageGPTConfig
from vitlab.models.weights import load_weights

N, V, K = 24, 16, 5  # pixels, colours and classes of the tiny network
START = V


def random_tokens(batch=3, seed=1, num_colors=V, num_pixels=N):
    return torch.randint(num_colors, (batch, num_pixels), generator=torch.Generator().manual_seed(seed))


def images_of(network, tokens):
    """Give images whose pixels are exactly the palette's colours."""
    H, W = network.image_size
    return rearrange(network.palette[tokens], "b (h w) c -> b c h w", h=H, w=W)


def shifted(tokens):
    """Give what transformers' network wants: a start token, and all pixels but the last."""
    return torch.cat([torch.full_like(tokens[:, :1], START), tokens[:, :-1]], dim=1)


@pytest.fixture(params=[True, False], ids=["biases", "no biases"])
def pair(request, tiny_imagegpt, transformers_imagegpt, randomise):
    """A function that builds a network of ours with the randomised weights of a peer of transformers."""

    def build(kind):
        peer = randomise(transformers_imagegpt(kind).double()).eval()
        if not request.param:
            for name, parameter in peer.named_parameters():
                if name.endswith(".bias"):
                    nn.init.zeros_(parameter)
        network = tiny_imagegpt(bias=request.param).double().eval()
        load_weights(network, peer.state_dict())
        return network, peer

    return build


def test_imagegpt_pixel_logits_equal_transformers(pair):
    network, peer = pair("causal")
    tokens = random_tokens()
    theirs = peer(shifted(tokens), use_cache=False).logits
    torch.testing.assert_close(network.pixel_logits(tokens), theirs, rtol=0, atol=1e-10)
    assert theirs.std() > 0.1


def test_imagegpt_class_logits_equal_transformers(pair):
    network, peer = pair("classifier")
    tokens = random_tokens()
    theirs = peer(shifted(tokens), use_cache=False).logits
    torch.testing.assert_close(network(images_of(network, tokens)), theirs, rtol=0, atol=1e-10)
    assert theirs.std() > 0.1


def plain_features(network, embedded):
    """Compute the features of a network that is not causal from its weights alone, written out."""
    weights = network.state_dict()

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    x = embedded + weights["pos_embed"]
    for block in range(network.config.depth):
        prefix = f"blocks.{block}"
        y = norm(x, f"{prefix}.norm1") @ weights[f"{prefix}.attn.qkv.weight"].T
        q, k, v = rearrange(y, "b n (three h d) -> three b h n d", three=3, h=network.config.num_heads)
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + rearrange(y, "b h n d -> b n (h d)") @ weights[f"{prefix}.attn.proj.weight"].T
        y = norm(x, f"{prefix}.norm2") @ weights[f"{prefix}.mlp.fc1.weight"].T
        x = x + (y * torch.sigmoid(1.702 * y)) @ weights[f"{prefix}.mlp.fc2.weight"].T
    return norm(x, "norm")


@pytest.mark.parametrize("mask_embedding", [False, True])
def test_imagegpt_that_is_not_causal_sees_all_pixels_where_they_are_but_hidden_ones(
    mask_embedding, tiny_imagegpt, randomise
):
    network = randomise(tiny_imagegpt(causal=False).double())
    tokens, hidden = random_tokens(), random_tokens(seed=2) < 4
    table = network.token_embed
    shown = table[START] if mask_embedding else torch.zeros_like(table[0])
    embedded = torch.where(hidden[..., None], shown, table[tokens])
    features = network.pixel_features(tokens, hidden=hidden, mask_embedding=mask_embedding)
    torch.testing.assert_close(features, plain_features(network, embedded), rtol=0, atol=1e-10)
    logits = features @ network.color_head.weight.T
    torch.testing.assert_close(network.color_logits(features), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask_embedding", [False, True])
def test_imagegpt_keeps_a_hidden_colour_from_everything_and_shows_the_others_to_all(
    mask_embedding, tiny_imagegpt, randomise
):
    network = randomise(tiny_imagegpt(causal=False).double())
    tokens, hidden = random_tokens(batch=1), torch.zeros(1, N, dtype=torch.bool)
    hidden[0, [3, 17]] = True
    before = network.pixel_features(tokens, hidden=hidden, mask_embedding=mask_embedding)
    for pixel in range(N):
        changed = tokens.clone()
        changed[0, pixel] = (tokens[0, pixel] + 1) % V
        after = network.pixel_features(changed, hidden=hidden, mask_embedding=mask_embedding)
        moved = (after - before).abs().amax(dim=(0, 2))
        assert moved.eq(0).all() if hidden[0, pixel] else moved.gt(1e-9).all()


def test_imagegpt_causal_output_depends_on_the_pixels_before_it_alone(tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt().double())
    tokens = random_tokens(batch=2)
    before = network.pixel_logits(tokens)
    for pixel in range(N):
        changed = tokens.clone()
        changed[:, pixel] = (tokens[:, pixel] + 1) % V
        moved = (network.pixel_logits(changed) - before).abs().amax(dim=(0, 2))
        assert moved[: pixel + 1].eq(0).all()
        assert moved[pixel + 1 :].gt(1e-9).all()


def test_imagegpt_causal_hides_no_pixels(tiny_imagegpt):
    with pytest.raises(InputError, match="a causal network hides no pixels: build it with causal false"):
        tiny_imagegpt().pixel_features(random_tokens(), hidden=torch.ones(3, N, dtype=torch.bool))


@pytest.mark.parametrize("causal", [True, False])
def test_imagegpt_starts_at_the_logarithm_of_the_number_of_colours(causal):
    torch.manual_seed(0)
    network = create_model("imagegpt_small", image_size=8, embed_dim=32, depth=2, num_heads=2, causal=causal)
    tokens = random_tokens(num_colors=512, num_pixels=64)
    logits = network.pixel_logits(tokens)
    assert logits.eq(0).all()
    assert F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).item() == pytest.approx(math.log(512), abs=1e-4)
    assert network(images_of(network, tokens)).eq(0).all()


def test_imagegpt_probabilities_of_all_images_sum_to_one(tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt(image_size=(1, 2), num_colors=3, in_channels=1).double())
    tokens = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    logs = network.pixel_logits(tokens).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    probabilities = logs.sum(dim=1).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
    assert probabilities.max() > 2 * probabilities.min()


def test_imagegpt_encode_reads_pixels_row_by_row_and_decode_gives_them_back(tiny_imagegpt):
    network = tiny_imagegpt(image_size=(2, 3), num_colors=4, in_channels=1)
    network.set_palette(torch.tensor([[-1.0], [1.0], [0.0], [0.6]]))
    images = torch.tensor([[[[-0.9, 0.2, 1.0], [0.7, 0.31, -0.5]]]])  # -0.5 is as near to -1 as to 0
    tokens = network.encode(images)
    assert tokens.tolist() == [[0, 2, 1, 3, 3, 0]]
    assert tokens.dtype == torch.int64
    decoded = network.decode(tokens)
    assert decoded.dtype == torch.uint8
    assert decoded.tolist() == [[[[0, 128, 255], [204, 204, 0]]]]


def test_imagegpt_encode_and_decode_keep_channels_apart(tiny_imagegpt):
    network = tiny_imagegpt()
    tokens = random_tokens()
    images = images_of(network, tokens)
    assert torch.equal(network.encode(images.contiguous(memory_format=torch.channels_last)), tokens)
    decoded = network.decode(tokens)
    torch.testing.assert_close(decoded.float(), (127.5 * (images + 1)).round(), rtol=0, atol=0)
    assert decoded.shape == (3, 3, 4, 6)


def test_imagegpt_forward_features_are_those_of_its_tokens(tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt().double())
    tokens = random_tokens()
    features = network.pixel_features(tokens)
    images = images_of(network, tokens)
    assert torch.equal(network.forward_features(images), features)
    pooled = network.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, features.sum(dim=1) / N, rtol=0, atol=1e-12)
    torch.testing.assert_close(network(images), pooled @ network.head.weight.T, rtol=0, atol=1e-12)


def test_imagegpt_forward_intermediates_gives_each_block_before_the_final_norm(tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt(depth=3).double())
    images = images_of(network, random_tokens())
    outputs = network.forward_intermediates(images)
    assert len(outputs) == 3
    for block, before, after in zip(network.blocks[1:], outputs, outputs[1:], strict=False):
        assert torch.equal(block(before), after)
    assert torch.equal(network.norm(outputs[-1]), network.forward_features(images))


def test_imagegpt_logits_do_not_depend_on_neighbours(tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt().double())
    tokens = random_tokens(batch=4)
    alone = torch.cat([network.pixel_logits(row[None]) for row in tokens])
    torch.testing.assert_close(network.pixel_logits(tokens), alone, rtol=0, atol=1e-12)
    images = images_of(network, tokens)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone, rtol=0, atol=1e-12)


def joint_loss(network, tokens):
    hidden = None if network.config.causal else tokens % 3 == 0
    features = network.pixel_features(tokens, hidden=hidden, mask_embedding=not network.config.causal)
    pixels = F.cross_entropy(network.color_logits(features).flatten(0, 1), tokens.flatten())
    return pixels + F.cross_entropy(network.forward_head(features), torch.arange(len(tokens)) % K)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_imagegpt_gradient_reaches_every_parameter(causal, bias, tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt(causal=causal, bias=bias))
    joint_loss(network, random_tokens()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.abs().max() > 1e-7, name
    assert network.token_embed.grad[START].abs().max() > 1e-7


def test_imagegpt_overfits_a_tiny_batch(tiny_imagegpt):
    torch.manual_seed(0)
    network, tokens = tiny_imagegpt(embed_dim=32, num_heads=2), random_tokens()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(80):
        loss = joint_loss(network, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2, "chance is ln 16 + ln 5 = 4.4; the first pixels of three images cost ln 3 / 24 = .05"


def test_imagegpt_grad_checkpointing_changes_no_bit(tiny_imagegpt, randomise):
    gradients = []
    for enable in (False, True):
        network = randomise(tiny_imagegpt(drop_rate=0.1, drop_path_rate=0.3))
        network.set_grad_checkpointing(enable)
        blocks_run = []
        for block in network.blocks:
            block.register_forward_pre_hook(lambda *_, blocks_run=blocks_run: blocks_run.append(1))
        torch.manual_seed(0)
        joint_loss(network, random_tokens()).backward()
        assert len(blocks_run) == (4 if enable else 2)
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


def test_imagegpt_under_bf16_autocast_stays_near_float32(tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt(embed_dim=32, num_heads=2)).eval()
    tokens = random_tokens()
    images = images_of(network, tokens)
    exact = network.pixel_logits(tokens), network(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network.encode(images), tokens)
        rounded = network.pixel_logits(tokens), network(images)
    for logits, near in zip(exact, rounded, strict=True):
        assert 0 < (near - logits).abs().max() < 0.05 * logits.std()


@pytest.mark.parametrize(
    ("name", "bias_free", "with_biases"),
    [
        ("imagegpt_small", 76_571_648, 76_682_240),
        ("imagegpt_medium", 455_157_760, 455_489_536),
        ("imagegpt_large", 1_362_250_752, 1_362_914_304),
        ("imagegpt_xlarge", 6_801_438_720, 6_803_097_600),
    ],
)
def test_imagegpt_has_the_published_parameters_beside_its_classifier(name, bias_free, with_biases):
    for bias, published in ((False, bias_free), (True, with_biases)):
        with torch.device("meta"):
            network = create_model(name, bias=bias, num_classes=7)
        classifier = network.get_classifier().weight.numel()
        assert sum(parameter.numel() for parameter in network.parameters()) - classifier == published
        assert classifier == 7 * network.config.embed_dim


def test_imagegpt_sizes_have_the_published_widths_of_a_head():
    widths = {name: config.embed_dim // config.num_heads for name, config in IMAGEGPT_SIZES.items()}
    assert widths == {"imagegpt_small": 64, "imagegpt_medium": 128, "imagegpt_large": 96, "imagegpt_xlarge": 192}


def test_imagegpt_fresh_weights_are_as_openais():
    torch.manual_seed(0)
    network = create_model("imagegpt_small", image_size=16, embed_dim=256, depth=3, num_heads=4, bias=True)
    stds = {"token_embed": 0.02, "pos_embed": 0.01}
    for block in range(3):
        stds[f"blocks.{block}.attn.qkv.weight"] = 1 / 16
        stds[f"blocks.{block}.attn.proj.weight"] = 1 / 16 / math.sqrt(3)
        stds[f"blocks.{block}.mlp.fc1.weight"] = stds[f"blocks.{block}.mlp.fc2.weight"] = 0.02
    for name, parameter in network.named_parameters():
        if name in stds:
            assert parameter.std().item() == pytest.approx(stds[name], rel=0.03), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            assert name.endswith(("bias", "head.weight"))
            assert parameter.eq(0).all(), name
    assert network.token_embed[-1].std().item() == pytest.approx(0.02, rel=0.2)


def test_imagegpt_init_weights_fills_a_network_without_memory(tiny_imagegpt):
    with torch.device("meta"):
        network = tiny_imagegpt()
    network.to_empty(device="cpu").init_weights()
    assert torch.equal(network.palette, tiny_imagegpt().palette)
    assert len(network.palette.unique(dim=0)) == V


@pytest.mark.parametrize("channels", [1, 3])
def test_imagegpt_in_a_model_file_keeps_its_logits_and_its_palette(channels, tiny_imagegpt, randomise, tmp_path):
    network = randomise(tiny_imagegpt(in_channels=channels, causal=False, bias=True)).eval()
    network.set_palette(torch.rand(V, channels) * 2 - 1)
    preprocess = Preprocess(image_size=(4, 6), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
    save_model(tmp_path / "a.safetensors", network, classes=list("abcde"), preprocess=preprocess, metrics={}, data={})
    again = load_model(tmp_path / "a.safetensors").network
    assert isinstance(again, ImageGPT)
    assert again.config == network.config
    assert torch.equal(again.palette, network.palette)
    images = torch.rand(2, channels, 4, 6) * 2 - 1
    assert torch.equal(again(images), network(images))
    tokens = network.encode(images)
    assert torch.equal(again.pixel_logits(tokens), network.pixel_logits(tokens))


def test_imagegpt_drop_path_and_dropout_are_where_a_vit_has_them(tiny_imagegpt):
    network = tiny_imagegpt(depth=5, drop_rate=0.3, drop_path_rate=0.2)
    rates = [module.rate for module in network.modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    dropped = [name for name, module in network.named_modules() if isinstance(module, nn.Dropout) and module.p == 0.3]
    assert dropped[:4] == ["pos_drop", "blocks.0.attn.proj_drop", "blocks.0.mlp.drop1", "blocks.0.mlp.drop2"]
    assert len(dropped) == 1 + 5 * 3
    nn.init.ones_(network.color_head.weight)
    tokens = random_tokens()
    assert not torch.equal(network.pixel_logits(tokens), network.pixel_logits(tokens))
    network.eval()
    assert torch.equal(network.pixel_logits(tokens), network.pixel_logits(tokens))


def test_imagegpt_layer_decay_groups_count_from_the_tables_to_both_heads():
    with torch.device("meta"):
        network = create_model("imagegpt_small", depth=12, bias=True)
    groups = timm.optim.param_groups_layer_decay(
        network, 0.05, no_weight_decay_list=network.no_weight_decay(), layer_decay=0.75
    )
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    scale = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    decay = {names[id(parameter)]: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert scale.keys() == set(names.values())
    assert scale["token_embed"] == scale["pos_embed"] == pytest.approx(0.75**13)
    assert scale["blocks.0.attn.qkv.weight"] == pytest.approx(0.75**12)
    assert scale["blocks.11.mlp.fc2.bias"] == scale["norm.weight"] == 0.75
    assert scale["head.weight"] == scale["color_head.weight"] == 1.0
    decaying = ("proj.weight", "qkv.weight", "fc1.weight", "fc2.weight", "head.weight")
    assert {name for name in decay if decay[name]} == {name for name in names.values() if name.endswith(decaying)}


def test_imagegpt_reset_classifier_leaves_the_rest_alone(tiny_imagegpt, randomise):
    network = randomise(tiny_imagegpt().double())
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.reset_classifier(7)
    assert network.get_classifier() is network.head
    assert network.num_classes == network.config_dict()["num_classes"] == 7
    logits = network(images_of(network, random_tokens()))
    assert logits.shape == (3, 7)
    assert logits.eq(0).all()
    after = network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "head.weight")


def test_imagegpt_repeated_blocks_are_its_blocks(tiny_imagegpt):
    network = tiny_imagegpt(depth=3)
    assert network.repeated_blocks() == list(network.blocks)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            torch.full((2, N), V),
            "tokens range from 16 to 16, the palette has colours 0 to 15: encode the images with it",
        ),
        (torch.full((2, N), -1), "tokens range from -1 to -1, the palette has colours 0 to 15: encode the images with"),
        (torch.zeros(2, N + 1, dtype=torch.int64), r"tokens are of shape \(2, 25\), the network takes \(batch, 24\), "),
        (torch.zeros(N, dtype=torch.int64), r"tokens are of shape \(24,\), .* without a start token"),
        (torch.zeros(2, N), "tokens are torch.float32: give int64, as encode does"),
    ],
)
def test_imagegpt_refuses_tokens_that_are_no_images(tokens, message, tiny_imagegpt):
    network = tiny_imagegpt()
    for method in (network.pixel_features, network.pixel_logits, network.decode):
        with pytest.raises(InputError, match=f"^{message}"):
            method(tokens)


def test_imagegpt_names_the_images_that_it_takes(tiny_imagegpt):
    network = tiny_imagegpt()
    with pytest.raises(InputError, match=r"images are 6 x 4 \(height x width\), the network takes 4 x 6"):
        network(torch.zeros(1, 3, 6, 4))
    with pytest.raises(InputError, match="images have 1 channels, the network takes 3"):
        network.encode(torch.zeros(1, 1, 4, 6))


def test_imagegpt_refuses_a_palette_of_another_shape(tiny_imagegpt):
    with pytest.raises(InputError, match=r"the palette is of shape \(17, 3\) \(colours, channels\), the network takes"):
        tiny_imagegpt().set_palette(torch.zeros(17, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"in_channels": 4}, r"in_channels is 4: give 3 \(RGB\) or 1 \(greyscale\)"),
        ({"num_colors": 0}, "num_colors is 0: give more than 0"),
        ({"embed_dim": 100, "num_heads": 3}, "embed_dim 100 is not a multiple of num_heads 3: use 99 or 102"),
        ({"depth": 0}, "depth is 0: give more than 0"),
        ({"drop_rate": 1.5}, "drop_rate is 1.5: give a number from 0 to 1"),
        ({"causal": "no"}, "causal is 'no': give true or false"),
    ],
)
def test_imagegpt_config_refuses_what_cannot_be_built(fields, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        ImageGPTConfig(**fields)


def test_imagegpt_config_defaults_are_the_network_of_its_name():
    with torch.device("meta"):
        network = ImageGPT(ImageGPTConfig())
        named = create_model(network.name)
    assert network.config_dict() == named.config_dict()
