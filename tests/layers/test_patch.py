import re

import pytest
import torch
from einops import rearrange

from vitlab.errors import InputError
from vitlab.layers.patch import PatchEmbed, check_divides


def test_patch_embed_is_a_linear_map_of_flattened_patches():
    torch.manual_seed(0)
    embed = PatchEmbed(image_size=(12, 20), patch_size=(3, 5), in_channels=2, embed_dim=7).double()
    images = torch.randn(2, 2, 12, 20, dtype=torch.float64)
    patches = rearrange(images, "b c (rows h) (columns w) -> b (rows columns) (c h w)", h=3, w=5)
    expected = patches @ embed.proj.weight.flatten(1).T + embed.proj.bias
    assert embed.grid == (4, 4)
    torch.testing.assert_close(embed(images), expected, rtol=0, atol=1e-12)


def test_patch_embed_counts_patches_row_by_row():
    embed = PatchEmbed(image_size=(8, 12), patch_size=(4, 4), in_channels=1, embed_dim=1)
    torch.nn.init.ones_(embed.proj.weight)
    torch.nn.init.zeros_(embed.proj.bias)
    images = torch.zeros(1, 1, 8, 12)
    images[:, :, 5, 1] = 1.0  # second row of patches, first column
    assert embed(images).flatten().tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("image_size", "patch_size", "message"),
    [
        ((30, 32), (4, 4), "image height 30 is not a multiple of patch size 4: use 28 or 32"),
        ((32, 30), (4, 8), "image width 30 is not a multiple of patch size 8: use 24 or 32"),
        ((225, 225), (16, 16), "image height 225 is not a multiple of patch size 16: use 224 or 240"),
        ((3, 8), (4, 4), "image height 3 is not a multiple of patch size 4: use 4"),
    ],
)
def test_check_divides_names_the_legal_neighbours(image_size, patch_size, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        check_divides(image_size, patch_size)


def test_patch_embed_refuses_other_sizes_and_channels():
    embed = PatchEmbed(image_size=(8, 12), patch_size=(4, 4), in_channels=3, embed_dim=5)
    with pytest.raises(InputError, match=r"images are 12 x 8 .* the network takes 8 x 12: .*image_size \[12, 8\]"):
        embed(torch.zeros(1, 3, 12, 8))
    with pytest.raises(InputError, match=r"images have 1 channels, the network takes 3: .*in_channels 1"):
        embed(torch.zeros(1, 1, 8, 12))
