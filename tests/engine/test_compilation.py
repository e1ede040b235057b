"""Compilation of the repeated blocks: how much code, and the same results."""

import copy

import pytest
import torch

from vitlab.engine.compilation import compile_blocks
from vitlab.errors import InputError
from vitlab.models.catalog import create_model

# torch's own tracing looks at the gradients of tensors that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def network():
    settings = {"image_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 5, "num_heads": 1, "drop_path_rate": 0.4}
    torch.manual_seed(0)
    network = create_model("vit_tiny", num_classes=3, **settings)
    with torch.no_grad():
        network.get_classifier().weight.normal_()
    return network


def compiled(network):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_blocks(network, backend=backend)
    return graphs


def test_compiled_blocks_share_their_code_whatever_their_drop_rates(network):
    torch.compiler.reset()
    graphs = compiled(network.train())
    network(torch.randn(2, 3, 8, 8))
    assert len(graphs) == 3, "before, between and after the two drop paths of a block, once for all five blocks"


def test_compiled_blocks_drop_the_same_paths(network):
    torch.compiler.reset()
    plain, images = copy.deepcopy(network).train(), torch.randn(64, 3, 8, 8)
    compiled(network.train())
    outputs = []
    for one in (plain, network, copy.deepcopy(network)):
        torch.manual_seed(1)
        outputs.append(one(images))
    assert (plain(images) != outputs[0]).any(), "nothing was dropped"
    torch.testing.assert_close(outputs[1:], [outputs[0]] * 2)
    torch.testing.assert_close(network.eval()(images), plain.eval()(images))


def test_a_copy_of_a_compiled_network_has_its_own_mode(network):
    torch.compiler.reset()
    compiled(network.train())
    images = torch.randn(64, 3, 8, 8)
    copied = copy.deepcopy(network).eval()
    assert torch.equal(copied(images), copied(images))
    assert (network(images) != network(images)).any()


def test_compile_needs_a_compiler(network):
    with pytest.raises(InputError, match=r"train.compile needs a C\+\+ compiler"):
        compile_blocks(network, find=lambda name: None)


def test_blocks_of_a_pyramid_are_compiled_for_each_size():
    """torch failed to make code for any size of a DaViT's."""
    torch.compiler.reset()
    torch.manual_seed(0)
    settings = {"embed_dims": (8, 16), "depths": (1, 1), "num_heads": (1, 2), "window_size": 4, "image_size": 32}
    network = create_model("davit_tiny", num_classes=3, **settings).train()
    plain, images = copy.deepcopy(network), torch.randn(2, 3, 32, 32)
    sizes = []

    def backend(graph, inputs):
        sizes.extend(size for each in inputs if isinstance(each, torch.Tensor) for size in each.shape)
        return graph.forward

    compile_blocks(network, backend=backend)
    torch.testing.assert_close(network(images), plain(images))
    assert sizes
    assert all(type(size) is int for size in sizes)
