"""The way from images to logits on which the last block does no work that the head drops."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture(params=["vit", "vit post-norm", "vit of one block", "davit"])
def network(request, tiny_vit, tiny_davit, randomise):
    shapes = {"vit": {"depth": 3}, "vit post-norm": {"norm": "post", "depth": 2}, "vit of one block": {"depth": 1}}
    if request.param == "davit":
        return randomise(tiny_davit(drop_path_rate=0.5).double())
    return randomise(tiny_vit(drop_path_rate=0.5, **shapes[request.param]).double())


def images_for(network):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, *network.image_size, generator=generator, dtype=torch.float64)


def whole(network, images):
    return network.forward_head(network.forward_features(images))


def gradients(network, logits):
    labels = torch.arange(len(logits)) % logits.shape[1]
    return torch.autograd.grad(F.cross_entropy(logits, labels), list(network.parameters()))


def products(function, *inputs):
    """Count the multiply-adds of matrix products, those of attention among them."""
    backend = torch.nn.attention.SDPBackend.MATH
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_logits_and_gradients_are_those_of_all_features(training, checkpointing, network):
    network.train(training).set_grad_checkpointing(checkpointing)
    images = images_for(network)
    torch.manual_seed(0)
    short = network(images)
    torch.manual_seed(0)
    long = whole(network, images)
    torch.testing.assert_close(short, long, rtol=0, atol=1e-11)
    for ours, theirs in zip(gradients(network, short), gradients(network, long), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_a_vit_saves_the_other_tokens_in_its_last_block(tiny_vit):
    network = tiny_vit(depth=3).eval()
    images = images_for(network).float()
    B, D, N = 4, 12, 7  # six patches and the class token
    saved = B * (N - 1) * (D * D + 2 * D * 4 * D + 2 * N * D)  # projection, MLP, and both products of attention
    assert products(whole, network, images) - products(network, images) == saved
    average = tiny_vit(depth=3, pool="mean").eval()
    assert products(whole, average, images) == products(average, images)


def test_a_davit_saves_the_other_positions_in_its_last_layer(tiny_davit):
    network = tiny_davit().eval()
    images = images_for(network).float()
    B, H, W, D = network.forward_features(images).shape
    assert products(whole, network, images) - products(network, images) == B * (H * W - 1) * 4 * D * D


def test_dropout_in_training_is_for_each_position(tiny_davit):
    network = tiny_davit(drop_rate=0.1)
    images = images_for(network).float()
    everywhere = network.forward_features(images).shape
    assert network.train().head_features(images).shape == everywhere
    assert network.eval().head_features(images).shape == (everywhere[0], 1, 1, everywhere[-1])
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()  # as Monte Carlo dropout has it
    assert network.head_features(images).shape == everywhere


@pytest.mark.parametrize("part", ["", "attn.proj", "mlp"])
def test_a_backward_hook_sees_everything(part, network):
    module = network.repeated_blocks()[-1].get_submodule(part)
    seen = []
    module.register_full_backward_hook(lambda _, inputs, outputs: seen.append(outputs[0]))
    images = images_for(network)
    network(images).sum().backward()
    assert seen[0].shape == network.forward_features(images).shape


def test_hooks_of_all_modules_leave_the_way_as_it_is(network):
    """As those of a replay, which must make the same step."""
    images = images_for(network)
    short = network.head_features(images).shape
    with torch.nn.modules.module.register_module_forward_hook(lambda *given: None):
        assert network.head_features(images).shape == short != network.forward_features(images).shape


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("part", ["", "attn.proj", "mlp"])
def test_a_hook_sees_everything(part, before, network):
    network.eval()
    images = images_for(network)
    logits = network(images)
    everything = network.forward_features(images).shape
    short = network.head_features(images).shape
    seen = []
    module = network.repeated_blocks()[-1].get_submodule(part)
    if before:
        hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    else:
        hook = module.register_forward_hook(lambda _, inputs, output: seen.append(output))
    torch.testing.assert_close(network(images), logits, rtol=0, atol=1e-11)
    assert seen[0].shape == everything
    hook.remove()
    assert network.head_features(images).shape == short != everything
    network.skips_unused = False
    assert network.head_features(images).shape == everything


def test_a_hook_behind_the_blocks_sees_everything(tiny_vit, tiny_davit):
    seen = []
    for network, name in ((tiny_vit(), "norm"), (tiny_davit(), "head")):
        images = images_for(network).float()
        everything = network.forward_features(images).shape
        network.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        network(images)
        assert seen.pop().shape == everything


def test_compiled_blocks_are_those_that_work_alike(tiny_vit):
    network = tiny_vit(depth=3)
    assert network.compiled_blocks() == list(network.blocks)[:2]
    for network in (tiny_vit(depth=3, pool="mean"), tiny_vit(depth=1)):
        assert network.compiled_blocks() == list(network.blocks)
