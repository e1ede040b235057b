"""Which token can reach which: what the masks say is what a changed input changes."""

import pytest
import torch

from vitlab.inference.attention_maps import attention_layers
from vitlab.inference.reach import kinds_of_reach, position_similarity, reach
from vitlab.models.catalog import create_model

NETWORKS = {
    "full": ("vit_tiny", {"image_size": (8, 12), "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}),
    "causal": ("imagegpt_small", {"image_size": (3, 4), "num_colors": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}),
    "window": (
        "swin_tiny",
        # A grid of 5 x 7 in windows of 2 x 4: both sides are padded.
        {"image_size": (10, 14), "patch_size": 2, "window_size": (2, 4), "embed_dim": 8},
    ),
    "whole": (
        "swin_tiny",
        {"image_size": (12, 24), "patch_size": 2, "window_size": (2, 4), "embed_dim": 8},
    ),
    "channel": (
        "davit_tiny",
        {"image_size": (10, 14), "stem_stride": 2, "window_size": (2, 4), "embed_dims": (8,), "depths": (1,)},
    ),
}


def layers_of(name):
    torch.manual_seed(0)
    model, shape = NETWORKS[name]
    more = {"depths": (2,), "num_heads": (2,)} if model == "swin_tiny" else {}
    more = {"num_heads": (2,)} if model == "davit_tiny" else more
    network = create_model(model, num_classes=3, **shape, **more).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    layers = attention_layers(network)
    network.double()
    return network, layers


def perturbed_reach(layer, width):
    """Change one token after the other, and see whose output changes."""
    height, right = layer.grid
    N = layer.num_prefix + height * right
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(N, width, generator=generator, dtype=torch.float64)
    changed = tokens.repeat(N, 1, 1)
    changed[torch.arange(N), torch.arange(N)] += 1
    shape = (N, width) if layer.kind in ("full", "causal") else (height, right, width)
    with torch.no_grad():
        before = layer.module(tokens.reshape(1, *shape)).reshape(N, width)
        after = layer.module(changed.reshape(N, *shape)).reshape(N, N, width)
    return ((after - before).abs().amax(dim=-1) > 1e-12).T  # query, then key


@pytest.mark.parametrize("name", NETWORKS)
def test_reach_equals_what_a_changed_token_changes(name):
    _, layers = layers_of(name)
    for layer in layers:
        matrix = reach(layer)
        assert torch.equal(matrix, perturbed_reach(layer, 8)), layer.name
        assert matrix.diagonal().all()
        assert matrix.all() == (layer.kind in ("full", "channel"))


def test_reach_of_shifted_windows_gives_the_values_worked_by_hand():
    """A row of 8 tokens in windows of 4, shifted by 2: tokens 2 to 5 meet, and the two ends meet among themselves."""
    torch.manual_seed(0)
    shape = {"image_size": (1, 8), "patch_size": 1, "window_size": (1, 4), "embed_dim": 4}
    network = create_model("swin_tiny", num_classes=2, depths=(2,), num_heads=(1,), **shape)
    plain, shifted = (reach(layer) for layer in attention_layers(network))
    assert [row.nonzero().flatten().tolist() for row in plain] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    expected = [[0, 1]] * 2 + [[2, 3, 4, 5]] * 4 + [[6, 7]] * 2
    assert [row.nonzero().flatten().tolist() for row in shifted] == expected


def test_kinds_of_reach_gives_the_first_of_each_kind_and_size():
    network, layers = layers_of("whole")
    assert list(kinds_of_reach(layers)) == ["layer_01_window", "layer_02_shifted"]
    assert kinds_of_reach(layers)["layer_01_window"].shape == (72, 72)
    assert position_similarity(network) is None


@pytest.mark.parametrize("name", ["full", "causal"])
def test_position_similarity_is_the_cosine_of_the_tables_rows(name):
    network, layers = layers_of(name)
    similarity = position_similarity(network)
    first = layers[0].num_prefix
    rows = network.pos_embed[0].float()
    assert similarity.shape == (len(rows) - first,) * 2
    expected = torch.cosine_similarity(rows[first + 2], rows[first + 4], dim=0)
    torch.testing.assert_close(similarity[2, 4], expected)
    torch.testing.assert_close(similarity.diagonal(), torch.ones(len(similarity)))
