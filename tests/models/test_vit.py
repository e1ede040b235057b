import math
import weakref

import pytest
import timm.optim
import torch
from torch import nn
from torch.nn import functional as F

from vitlab.errors import InputError
from vitlab.layers.droppath import DropPath
from vitlab.models.catalog import create_model
from vitlab.models.vit import VisionTransformer, ViTConfig


def random_images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=["cls", "mean"])
def pool(request):
    return request.param


@pytest.fixture(params=["pre", "post"])
def norm(request):
    return request.param


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"image_size": 8}, {"img_size": 8}),
        ({"patch_size": (2, 3)}, {"patch_size": (2, 3)}),
        ({"in_channels": 1}, {"in_chans": 1}),
        ({"qkv_bias": False, "mlp_ratio": 2.3}, {"qkv_bias": False, "mlp_ratio": 2.3}),
    ],
    ids=["oblong", "square", "oblong patches", "grey", "no qkv bias"],
)
def test_vit_equals_timm(ours, theirs, pool, tiny_vit, timm_vit, randomise):
    network = randomise(tiny_vit(pool=pool, **ours).double())
    peer = timm_vit(global_pool={"cls": "token", "mean": "avg"}[pool], **theirs).double()
    peer.load_state_dict(network.state_dict())
    images = random_images(3, network.in_channels, *network.image_size)
    torch.testing.assert_close(network(images), peer(images), rtol=0, atol=1e-10)
    torch.testing.assert_close(network.forward_features(images), peer.forward_features(images), rtol=0, atol=1e-10)
    features = peer.forward_head(peer.forward_features(images), pre_logits=True)
    ours_features = network.forward_head(network.forward_features(images), pre_logits=True)
    torch.testing.assert_close(ours_features, features, rtol=0, atol=1e-10)


def test_vit_equals_torchvision(tiny_vit, torchvision_vit, randomise):
    network = tiny_vit(image_size=8).double()
    peer = randomise(torchvision_vit().double()).eval()
    by_position = zip(network.state_dict().values(), reordered(peer.state_dict()), strict=True)
    with torch.no_grad():
        for own, theirs in by_position:
            own.copy_(theirs)
    images = random_images(2, 3, 8, 8)
    torch.testing.assert_close(network(images), peer(images), rtol=0, atol=1e-10)


def reordered(state):
    """Give torchvision's tensors in the order of ours: tokens and positions first, then the patch map."""
    first = ["class_token", "encoder.pos_embedding", "conv_proj.weight", "conv_proj.bias"]
    return [state[name] for name in [*first, *(name for name in state if name not in first)]]


@pytest.mark.parametrize("peer_order", ["pre", "post"])
def test_vit_blocks_equal_torch_encoder_layers_in_their_order_only(peer_order, tiny_vit, norm, randomise):
    network = randomise(tiny_vit(norm=norm).double())
    block = network.blocks[1]
    peer = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=peer_order == "pre"
    ).double()
    names = {"norm1": "norm1", "norm2": "norm2", "attn.proj": "self_attn.out_proj", "mlp.fc1": "linear1"}
    names |= {"mlp.fc2": "linear2", "attn.qkv": "self_attn.in_proj"}
    state = {}
    for ours, theirs in names.items():
        joint = "_" if theirs.endswith("in_proj") else "."
        for part in ("weight", "bias"):
            state[f"{theirs}{joint}{part}"] = block.state_dict()[f"{ours}.{part}"]
    peer.load_state_dict(state)
    tokens = random_images(2, 7, 12)
    agree = torch.allclose(block(tokens), peer(tokens), rtol=0, atol=1e-10)
    assert agree == (peer_order == norm)


def test_vit_post_norm_has_no_final_norm(tiny_vit, pool, randomise):
    network = randomise(tiny_vit(norm="post", pool=pool).double())
    images = random_images(2, 3, 8, 12)
    last = network.forward_intermediates(images)[-1]
    torch.testing.assert_close(network.forward_features(images), last, rtol=0, atol=0)
    pooled = last[:, 0] if pool == "cls" else last[:, 1:].mean(dim=1)
    torch.testing.assert_close(network(images), F.linear(pooled, network.head.weight, network.head.bias))
    assert not any(name.startswith(("norm.", "fc_norm.")) for name in network.state_dict())


def test_vit_forward_features_holds_one_blocks_tokens_at_a_time(tiny_vit):
    network = tiny_vit(depth=5)
    outputs, alive = [], []

    def count(block, inputs, output):
        alive.append(sum(earlier() is not None for earlier in outputs))
        outputs.append(weakref.ref(output))

    for block in network.blocks:
        block.register_forward_hook(count)
    with torch.inference_mode():
        network.forward_features(torch.zeros(1, 3, 8, 12))
    assert alive == [0, 1, 1, 1, 1], "a block's input, and no more"


def test_vit_forward_intermediates_gives_each_block_before_the_final_norm(tiny_vit, randomise):
    network = randomise(tiny_vit(depth=3).double())
    images = random_images(2, 3, 8, 12)
    outputs = network.forward_intermediates(images)
    assert len(outputs) == 3
    for block, before, after in zip(network.blocks[1:], outputs, outputs[1:], strict=False):
        torch.testing.assert_close(block(before), after, rtol=0, atol=0)
    torch.testing.assert_close(network.norm(outputs[-1]), network.forward_features(images), rtol=0, atol=0)


def test_vit_sees_a_shuffle_of_patches_only_through_its_positions(tiny_vit, randomise):
    network = randomise(tiny_vit(pool="mean").double())
    images = random_images(2, 3, 8, 12)
    patches = images.view(2, 3, 2, 4, 3, 4).permute(0, 2, 4, 1, 3, 5).reshape(2, 6, 3, 4, 4)
    patches = patches[:, [4, 2, 0, 5, 1, 3]]
    shuffled = patches.view(2, 2, 3, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 8, 12)
    assert (network(images) - network(shuffled)).abs().max() > 1e-3
    nn.init.zeros_(network.pos_embed)
    torch.testing.assert_close(network(images), network(shuffled), rtol=0, atol=1e-10)


def test_vit_sincos_positions_count_tokens_from_the_class_token(tiny_vit):
    network = tiny_vit(pos_embed="sincos")
    assert network.pos_embed.shape == (1, 7, 12)
    for position, row in enumerate(network.pos_embed[0].tolist()):
        for pair in range(6):
            angle = position / 10000 ** (pair / 6)
            assert row[2 * pair : 2 * pair + 2] == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)


def test_vit_sincos_equals_a_learned_table_of_the_same_values(tiny_vit, randomise):
    network, learned = randomise(tiny_vit(pos_embed="sincos").double()), tiny_vit().double()
    learned.load_state_dict(network.state_dict() | {"pos_embed": network.pos_embed})
    images = random_images(2, 3, 8, 12)
    torch.testing.assert_close(network(images), learned(images), rtol=0, atol=1e-12)


def test_vit_sincos_positions_are_no_weights(tiny_vit):
    network = tiny_vit(pos_embed="sincos")
    learned = dict(tiny_vit().named_parameters())
    assert [name for name, _ in network.named_parameters()] == [name for name in learned if name != "pos_embed"]
    assert network.state_dict().keys() == learned.keys() - {"pos_embed"}
    assert network.no_weight_decay() == {"cls_token"}


def test_vit_sincos_gradient_reaches_every_parameter(tiny_vit, randomise):
    network = randomise(tiny_vit(pos_embed="sincos"))
    network(random_images(2, 3, 8, 12).float()).square().sum().backward()
    assert all(parameter.grad.abs().max() > 1e-6 for parameter in network.parameters())


def test_vit_sincos_refuses_an_odd_width(tiny_vit):
    with pytest.raises(InputError, match="width 15 is odd: use 14 or 16"):
        tiny_vit(pos_embed="sincos", embed_dim=15)


def test_vit_init_weights_fills_sincos_positions_of_a_network_without_memory(tiny_vit):
    with torch.device("meta"):
        network = tiny_vit(pos_embed="sincos")
    network.to_empty(device="cpu").init_weights()
    assert torch.equal(network.pos_embed, tiny_vit(pos_embed="sincos").pos_embed)


def test_vit_logits_do_not_depend_on_neighbours(tiny_vit, randomise, pool):
    network = randomise(tiny_vit(pool=pool).double())
    images = random_images(4, 3, 8, 12)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone, rtol=0, atol=1e-12)


def test_vit_gradient_reaches_every_parameter(tiny_vit, randomise, pool, norm):
    network = randomise(tiny_vit(pool=pool, norm=norm))
    network(random_images(2, 3, 8, 12).float()).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name


def test_vit_overfits_a_tiny_batch(tiny_vit, pool, norm):
    torch.manual_seed(0)
    network = tiny_vit(pool=pool, norm=norm)
    images, labels = random_images(8, 3, 8, 12).float(), torch.arange(8) % 5
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(60):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05, "chance is ln 5 = 1.6"


def test_vit_fresh_weights_are_as_documented():
    torch.manual_seed(0)
    network = create_model("vit_tiny", image_size=64, depth=2, num_classes=7)
    bound = math.sqrt(6 / (192 + 192))
    assert network.blocks[0].attn.qkv.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert network.blocks[1].mlp.fc1.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (5 * 192)), rel=1e-3)
    assert network.patch_embed.proj.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 256), rel=0.02)
    assert network.pos_embed.std().item() == pytest.approx(0.5, rel=0.05)
    logits = network(torch.randn(2, 3, 64, 64))
    assert F.cross_entropy(logits, torch.tensor([0, 6])).item() == pytest.approx(math.log(7), abs=1e-6)
    for name, parameter in network.named_parameters():
        zero = name in {"cls_token", "head.weight"} or name.endswith("bias")
        assert parameter.eq(0).all().item() == zero, name


def test_vit_grad_checkpointing_changes_no_bit(tiny_vit, randomise):
    images = random_images(4, 3, 8, 12).float()
    gradients = []
    for enable in (False, True):
        network = randomise(tiny_vit(drop_rate=0.1, drop_path_rate=0.3))
        network.set_grad_checkpointing(enable)
        blocks_run = []
        for block in network.blocks:
            block.register_forward_pre_hook(lambda *_, blocks_run=blocks_run: blocks_run.append(1))
        torch.manual_seed(0)
        network(images).square().sum().backward()
        assert len(blocks_run) == (4 if enable else 2)
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


def test_vit_drop_path_rises_linearly_with_depth(tiny_vit):
    rates = [module.rate for module in tiny_vit(depth=5, drop_path_rate=0.2).modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert [module.rate for module in tiny_vit(depth=1, drop_path_rate=0.2).modules() if hasattr(module, "rate")] == [0]


def test_vit_dropout_follows_positions_and_all_linear_layers_but_qkv(tiny_vit):
    network = tiny_vit(depth=1, drop_rate=0.3)
    dropped = {name: module.p for name, module in network.named_modules() if isinstance(module, nn.Dropout)}
    expected = ["pos_drop", "blocks.0.attn.proj_drop", "blocks.0.mlp.drop1", "blocks.0.mlp.drop2"]
    assert dropped == dict.fromkeys(expected, 0.3)
    torch.manual_seed(0)
    nn.init.ones_(network.head.weight)
    images = torch.randn(1, 3, 8, 12)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


def test_vit_no_weight_decay_names_all_tables(tiny_vit):
    network = tiny_vit()
    matrices = {
        name
        for name, parameter in network.named_parameters()
        if parameter.ndim > 1 and not name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight"))
    }
    assert matrices - {"head.weight"} == network.no_weight_decay() == {"cls_token", "pos_embed"}


def test_vit_layer_decay_groups_count_from_embeddings_to_head(pool):
    with torch.device("meta"):
        network = create_model("vit_tiny", pool=pool)
    groups = timm.optim.param_groups_layer_decay(
        network, 0.05, no_weight_decay_list=network.no_weight_decay(), layer_decay=0.75
    )
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    scale = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    decay = {names[id(parameter)]: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(names) == len(scale)
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"):
        assert scale[name] == pytest.approx(0.023757, abs=5e-7)
    assert scale["blocks.0.attn.qkv.weight"] == pytest.approx(0.031676, abs=5e-7)
    assert scale["blocks.11.mlp.fc2.bias"] == 0.75
    assert scale["head.weight"] == scale["head.bias"] == 1.0
    if pool == "cls":
        assert scale["norm.weight"] == 0.75
    decaying = ("proj.weight", "qkv.weight", "fc1.weight", "fc2.weight", "head.weight")
    assert {name for name in decay if decay[name]} == {name for name in names.values() if name.endswith(decaying)}


def test_vit_reset_classifier_leaves_the_rest_alone(tiny_vit, randomise):
    network = randomise(tiny_vit().double())
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    images = random_images(2, 3, 8, 12)
    network.reset_classifier(7)
    assert network.get_classifier() is network.head
    assert network.num_classes == network.config_dict()["num_classes"] == 7
    assert network(images).eq(0).all()
    assert network(images).shape == (2, 7)
    after = network.state_dict()
    assert after["head.weight"].dtype == torch.float64
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))


def test_vit_repeated_blocks_are_its_blocks(tiny_vit):
    network = tiny_vit(depth=3)
    assert network.repeated_blocks() == list(network.blocks)


def test_vit_names_the_sizes_that_it_takes(tiny_vit):
    with pytest.raises(InputError, match=r"images are 12 x 8 \(height x width\), the network takes 8 x 12"):
        tiny_vit()(torch.zeros(1, 3, 12, 8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 225}, "image height 225 is not a multiple of patch size 16: use 224 or 240"),
        ({"image_size": (32, 40)}, "image width 40 is not a multiple of patch size 16: use 32 or 48"),
        ({"embed_dim": 100, "num_heads": 3}, "embed_dim 100 is not a multiple of num_heads 3: use 99 or 102"),
        ({"depth": 0}, "depth is 0: give more than 0"),
        ({"patch_size": (0, 4)}, r"patch_size is \(0, 4\): give more than 0"),
        ({"drop_path_rate": 1.5}, "drop_path_rate is 1.5: give a number from 0 to 1"),
        ({"pool": "max"}, "pool is 'max': give one of 'cls', 'mean'"),
        ({"norm": None}, "norm is None: give one of 'pre', 'post'"),
        ({"pos_embed": "none"}, "pos_embed is 'none': give one of 'learned', 'sincos'"),
    ],
)
def test_vit_config_refuses_what_cannot_be_built(fields, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        ViTConfig(**fields)


def test_vit_config_defaults_are_the_network_of_its_name():
    with torch.device("meta"):
        network = VisionTransformer(ViTConfig())
        named = create_model(network.name)
    assert network.config_dict() == named.config_dict()
