"""Images to patch tokens, and the check that the patches fit the image."""

from einops import rearrange
from torch import Tensor, nn

from vitlab.checks import require_multiple
from vitlab.errors import InputError


def to_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Give (height, width) of a size that may be a side."""
    return size if isinstance(size, tuple) else (size, size)


def check_divides(image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
    """Raise InputError with the legal neighbours where patches would leave a border of the image out."""
    for axis, side, patch in zip(("height", "width"), image_size, patch_size, strict=True):
        require_multiple(f"image {axis}", side, "patch size", patch)


def check_images(images: Tensor, *, image_size: tuple[int, int], in_channels: int) -> None:
    """Raise InputError unless images `(B, C, H, W)` have the size and the channels that a network was built for."""
    _, C, H, W = images.shape
    if image_size != (H, W):
        height, width = image_size
        raise InputError(
            f"images are {H} x {W} (height x width), the network takes {height} x {width}: "
            f"resize them, or build the network with image_size [{H}, {W}]"
        )
    if in_channels != C:
        raise InputError(
            f"images have {C} channels, the network takes {in_channels}: "
            f"convert them, or build the network with in_channels {C}"
        )


class PatchEmbed(nn.Module):
    """Cut images into patches, row by row, and map each linearly to a token.

    The map is a convolution whose kernel and stride are the patch, `proj` as in timm.

    Source: arXiv:2010.11929, sec. 3.1.
    """

    def __init__(
        self, *, image_size: tuple[int, int], patch_size: tuple[int, int], in_channels: int, embed_dim: int
    ) -> None:
        """Build the map for one image size.

        Args:
            image_size: (H, W) in pixels, multiples of the patch size.
            patch_size: (height, width) in pixels.
            in_channels: channels C of the images.
            embed_dim: width D of the tokens.

        Raises:
            InputError: the image is not whole patches.
        """
        super().__init__()
        check_divides(image_size, patch_size)
        self.image_size = image_size
        self.in_channels = in_channels
        self.grid = (image_size[0] // patch_size[0], image_size[1] // patch_size[1])
        self.proj = nn.Conv2d(in_channels, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(B, C, H, W)` to tokens `(B, N, D)`, N the number of patches.

        Raises:
            InputError: the images have another size or another number of channels than the network was built for.
        """
        check_images(images, image_size=self.image_size, in_channels=self.in_channels)
        tokens: Tensor = rearrange(self.proj(images), "b d h w -> b (h w) d")
        return tokens
