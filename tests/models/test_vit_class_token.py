"""The way of a ViT on which its last block works for the class token alone."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode


def images_of(seed):
    return torch.randn(4, 3, 8, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(network, images):
    return network.forward_head(network.forward_features(images))


def gradients(network, logits):
    return torch.autograd.grad(F.cross_entropy(logits, torch.tensor([0, 1, 2, 1])), list(network.parameters()))


def products(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_class_token_way_gives_the_logits_and_gradients_of_all_tokens(checkpointing, depth, norm, tiny_vit, randomise):
    network = randomise(tiny_vit(norm=norm, depth=depth, drop_path_rate=0.5).double()).train()
    network.set_grad_checkpointing(checkpointing)
    images = images_of(1)
    torch.manual_seed(0)
    short = network(images)
    torch.manual_seed(0)
    long = whole(network, images)
    torch.testing.assert_close(short, long, rtol=0, atol=1e-12)
    pairs = zip(gradients(network, short), gradients(network, long), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_class_token_way_saves_the_other_tokens_products_in_the_last_block(tiny_vit):
    network = tiny_vit(depth=3).eval()
    images = images_of(1).float()
    B, D, N = 4, 12, 7  # six patches and the class token
    saved = B * (N - 1) * (D * D + 2 * D * 4 * D + 2 * N * D)  # projection, MLP, and both products of attention
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert products(whole, network, images) - products(network, images) == saved
        average = tiny_vit(depth=3, pool="mean").eval()
        assert products(whole, average, images) == products(average, images)


@pytest.mark.parametrize("where", ["blocks.2", "blocks.2.attn.proj", "norm"])
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_sees_all_tokens(where, before, tiny_vit, randomise):
    network = randomise(tiny_vit(depth=3).double())
    images = images_of(1)
    logits = network(images)
    seen = []
    module = network.get_submodule(where)
    if before:
        hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    else:
        hook = module.register_forward_hook(lambda _, inputs, output: seen.append(output))
    torch.testing.assert_close(network(images), logits, rtol=0, atol=1e-12)
    assert seen[0].shape == (4, 7, 12)
    hook.remove()
    assert network.head_features(images).shape == (4, 1, 12)
    network.skips_unused = False
    assert network.head_features(images).shape == (4, 7, 12)


def test_compiled_blocks_are_those_that_work_alike(tiny_vit):
    network = tiny_vit(depth=3)
    assert network.compiled_blocks() == list(network.blocks)[:2]
    network = tiny_vit(depth=3, pool="mean")
    assert network.compiled_blocks() == list(network.blocks)
