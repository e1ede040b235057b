"""Palettes against float64, transformers' image processor and values worked out by hand."""

import math
import tarfile

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from sklearn.datasets import load_digits

from vitlab.data import palette as palettes
from vitlab.data.palette import decode, encode, fit_palette, palette_quality, to_unit, uniform_palette
from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError


def nearest(pixels, palette):
    """Encode (..., C) by every distance in float64."""
    points, colors = pixels.double().numpy(), palette.double().numpy()
    flat = points.reshape(-1, 1, points.shape[-1])
    tokens = [
        ((chunk - colors) ** 2).sum(axis=2).argmin(axis=1) for chunk in np.array_split(flat, 1 + len(flat) // 999)
    ]
    return torch.from_numpy(np.concatenate(tokens)).reshape(pixels.shape[:-1])


def random_palette(num_colors, channels=3, seed=0):
    return torch.rand(num_colors, channels, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def random_images(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def midpoints(palette, count=20_000):
    """Give points as near to the middle of two colours as float32 holds, and the floats around them."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randint(len(palette), (2, count), generator=generator)
    middle = (palette[first] + palette[second]) / 2
    up, down = (torch.nextafter(middle, torch.full_like(middle, edge)) for edge in (2.0, -2.0))
    return torch.cat([middle, up, down])


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("num_colors", [1, 2, 17, 512])
def test_encode_equals_float64_at_random_and_between_colors(num_colors, channels):
    palette = random_palette(num_colors, channels)
    for pixels in (random_palette(5_000, channels, seed=2), midpoints(palette)):
        assert torch.equal(encode(pixels, palette), nearest(pixels, palette))


@pytest.mark.parametrize("offset", [0.0, 1e-7, 3e-8])
def test_encode_tells_colors_apart_that_float32_distances_do_not(offset):
    """Twelve colours around a corner, 1e-4 and less apart: of 1.0 and more, float32 would lose the difference."""
    corner = torch.tensor([0.9, -0.8, 0.7])
    palette = corner + (random_palette(12) * 1e-4) + offset
    pixels = corner + random_palette(3_000, seed=3) * 2e-4
    assert torch.equal(encode(pixels, palette), nearest(pixels, palette))
    scores = palette.square().sum(1) - 2 * pixels @ palette.T
    assert not torch.equal(scores.argmin(1), nearest(pixels, palette))  # the test would see a float32 encoder


def test_encode_gives_the_lowest_index_on_a_tie():
    palette = torch.tensor([[1.0, 0, 0], [0.5, 0, 0], [-0.5, 0, 0], [0.5, 0, 0], [0, 0.5, 0]])
    pixels = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0.75, 0, 0], [-0.5, 0.5, 0], [0, 1, 0]])
    assert encode(pixels, palette).tolist() == [1, 1, 0, 2, 4]
    assert encode(pixels, palette.flip(0)).tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_encode_takes_pixels_of_any_precision_for_what_they_are(dtype):
    palette = random_palette(64)
    pixels = midpoints(palette.double() + 1e-9, count=3_000).to(dtype)
    assert torch.equal(encode(pixels, palette), nearest(pixels, palette))


def test_encode_is_the_same_under_autocast_and_low_matmul_precision():
    palette = random_palette(512)
    pixels = midpoints(palette, count=2_000).requires_grad_()
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tokens = encode(pixels, palette)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.equal(tokens, nearest(pixels.detach(), palette))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_encode_is_the_same_on_a_gpu_whose_products_are_tf32(monkeypatch):
    palette = random_palette(512)
    pixels = midpoints(palette)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert torch.equal(encode(pixels.cuda(), palette.cuda()).cpu(), nearest(pixels, palette))


def test_encode_reads_channels_last_images_and_any_layout():
    palette = random_palette(40)
    images = to_unit(random_images((2, 3, 5, 7)))
    expected = nearest(rearrange(images, "b c h w -> b h w c").contiguous(), palette)
    for layout in (images, images.contiguous(memory_format=torch.channels_last), images.flip(0).flip(0)):
        assert torch.equal(encode(rearrange(layout, "b c h w -> b h w c"), palette), expected)
    assert encode(torch.empty(0, 4, 3), palette).shape == (0, 4)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-12, 1e3, 1e18, 1e30])
def test_encode_holds_for_numbers_of_any_size(scale):
    palette = random_palette(20)
    pixels = torch.cat([random_palette(200, seed=4) * scale, midpoints(palette, count=100)])
    assert torch.equal(encode(pixels, palette), nearest(pixels, palette))
    assert torch.equal(encode(pixels, palette * scale), nearest(pixels, palette * scale))
    assert torch.equal(encode(pixels * scale, palette * scale), nearest(pixels * scale, palette * scale))


def test_encode_gives_what_is_no_number_the_first_color():
    pixels = torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [0, 0, -math.inf], [1, 1, 1]])
    assert encode(pixels, torch.tensor([[-1.0, -1, -1], [1, 1, 1]])).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("chunk", [1, 100, 10**9])
def test_encode_does_not_depend_on_the_chunk(chunk, monkeypatch):
    palette, pixels = random_palette(7), random_palette(300, seed=5)
    monkeypatch.setattr(palettes, "_CHUNK", chunk)
    assert torch.equal(encode(pixels, palette), nearest(pixels, palette))


def test_encode_bounds_its_memory(monkeypatch):
    """However many the pixels, and even where all colours are equally near, no tensor exceeds the chunk threefold."""
    largest = 0
    original = palettes._nearest

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            largest = max(
                [largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(result) if hasattr(x, "numel"))]
            )
            return result

    def watched(*arguments):
        with Watch():
            return original(*arguments)

    monkeypatch.setattr(palettes, "_CHUNK", 1_000)
    monkeypatch.setattr(palettes, "_nearest", watched)
    tokens = encode(torch.zeros(5_000, 3), torch.ones(50, 3))
    assert torch.equal(tokens, torch.zeros(5_000, dtype=torch.int64))
    assert 1_000 <= largest <= 3_000


def test_encode_equals_transformers_image_processor():
    from transformers import ImageGPTImageProcessor

    palette = random_palette(512)
    images = random_images((3, 8, 13, 3))
    processor = ImageGPTImageProcessor(clusters=palette.numpy(), size={"height": 8, "width": 13})
    expected = processor(list(images), return_tensors="pt")["input_ids"]
    assert torch.equal(rearrange(encode(to_unit(images), palette), "b h w -> b (h w)"), expected)


def test_decode_rounds_halves_to_even_and_stays_in_range():
    palette = torch.tensor([[-1.0, 0, 1], [1 / 127.5, 0.5 / 127.5, -2], [2, -0.5, 1.5 / 127.5]])
    assert decode(torch.arange(3), palette).tolist() == [[0, 128, 255], [128, 128, 0], [255, 64, 129]]
    tokens = torch.tensor([[2, 0], [1, 1], [0, 2]])
    assert torch.equal(decode(tokens, palette)[2, 1], decode(torch.tensor(2), palette))
    assert decode(tokens, palette).dtype == torch.uint8


def test_encode_and_decode_give_back_every_token_and_every_grey():
    palette = random_palette(300)
    tokens = torch.randperm(300)
    assert torch.equal(encode(palette[tokens], palette), tokens)
    greys = np.arange(256, dtype=np.uint8)[:, None]
    assert np.array_equal(decode(encode(to_unit(greys), uniform_palette(256, 1)), uniform_palette(256, 1)), greys)


def test_to_unit_gives_the_bits_that_a_network_sees():
    images = random_images((2, 5, 6, 3))
    seen = Preprocess(image_size=(5, 6), mean=(0.5,) * 3, std=(0.5,) * 3).normalize(
        rearrange(torch.from_numpy(images), "b h w c -> b c h w")
    )
    assert torch.equal(to_unit(images), rearrange(seen, "b c h w -> b h w c"))
    assert to_unit(np.array([0, 255], dtype=np.uint8)).tolist() == [-1, 1]


def test_uniform_palette_of_512_takes_the_three_high_bits_of_each_channel():
    palette = uniform_palette(512)
    assert palette[0].tolist() == [-0.875] * 3
    assert palette[1].tolist() == [-0.875, -0.875, -0.625]
    assert palette[8].tolist() == [-0.875, -0.625, -0.875]
    assert palette[64].tolist() == [-0.625, -0.875, -0.875]
    assert palette[511].tolist() == [0.875] * 3
    pixels = random_images((2_000, 3))
    red, green, blue = (pixels >> 5).astype(np.int64).T
    assert encode(to_unit(pixels), palette).tolist() == (64 * red + 8 * green + blue).tolist()


@pytest.mark.parametrize(
    ("num_colors", "levels"),
    [(1, (1, 1, 1)), (2, (1, 2, 1)), (4, (2, 2, 1)), (8, (2, 2, 2)), (16, (2, 4, 2)), (256, (8, 8, 4))],
)
def test_uniform_palette_shares_bits_green_first_then_red(num_colors, levels):
    palette = uniform_palette(num_colors)
    assert palette.shape == (num_colors, 3)
    assert len(palette.unique(dim=0)) == num_colors
    for channel, count in enumerate(levels):
        assert palette[:, channel].unique().tolist() == [(2 * level + 1) / count - 1 for level in range(count)]


def test_uniform_palette_of_other_numbers_and_of_one_channel_is_grey():
    thirds = [-2 / 3, 0, 2 / 3]
    assert torch.allclose(uniform_palette(3), torch.tensor(thirds)[:, None].expand(3, 3))
    assert uniform_palette(4, channels=1).tolist() == [[-0.75], [-0.25], [0.25], [0.75]]


@pytest.mark.parametrize(("num_colors", "channels"), [(0, 3), (-1, 1), (70_000, 3), (8, 2), (8, 4)])
def test_uniform_palette_refuses_other_numbers(num_colors, channels):
    with pytest.raises(InputError, match=f"(num_colors is {num_colors}|channels is {channels}): "):
        uniform_palette(num_colors, channels)


def luminance(palette):
    return (palette * torch.tensor([0.299, 0.587, 0.114])).sum(dim=1)


def test_fit_palette_recovers_as_many_colors_as_there_are():
    colors = random_images((24, 3))
    images = colors[np.random.default_rng(1).integers(0, 24, (6, 5, 7))]
    palette = fit_palette(images, 24, seed=0)
    assert set(map(tuple, decode(torch.arange(24), palette).tolist())) == set(map(tuple, colors.tolist()))
    assert torch.equal(palette, to_unit(decode(torch.arange(24), palette).numpy()))  # to the bit
    assert (luminance(palette).diff() > 0).all()
    assert palette_quality(images, palette).psnr_db == math.inf


def test_fit_palette_keeps_the_greys_of_digits_and_fills_up_with_others():
    grey = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    for channels in (1, 3):
        images = np.repeat(grey[..., None], channels, axis=3)
        palette = fit_palette(images, 40, seed=0)
        assert palette.shape == (40, channels)
        assert len(palette.unique(dim=0)) == 40
        assert palette.abs().max() <= 1
        quality = palette_quality(images, palette)
        assert (quality.psnr_db, quality.colors_used) == (math.inf, 17)


def test_fit_palette_finds_well_separated_groups_and_their_means():
    """Five groups of a thousand pixels each: each centre is the mean of its group."""
    generator = np.random.default_rng(0)
    centers = np.array([[30, 30, 30], [220, 40, 40], [40, 220, 40], [40, 40, 220], [220, 220, 220]])
    pixels = np.clip(centers[:, None] + generator.normal(0, 6, (5, 1000, 3)).round(), 0, 255).astype(np.uint8)
    palette = fit_palette(rearrange(pixels, "g (h w) c -> g h w c", w=25), 5, seed=0)
    means = torch.from_numpy(pixels.mean(axis=1) / 127.5 - 1).float()
    assert torch.allclose(palette, means[luminance(means).argsort()], atol=1e-6)


def test_fit_palette_leaves_no_color_without_pixels():
    """Most pixels are two greys, which draw centres that rare colours far away need; each of 40 gets some."""
    images = np.full((20, 10, 10, 3), 100, dtype=np.uint8)
    images[:, :5] = 101
    images[:, 0, :3] = random_images((20, 3, 3), seed=3)
    palette = fit_palette(images, 40, seed=0)
    assert palette_quality(images, palette).colors_used == 40


def test_fit_palette_depends_on_the_seed_alone():
    images = random_images((3, 20, 30, 3))
    first = fit_palette(images, 30, seed=5)
    np.random.seed(1)
    torch.manual_seed(1)
    assert torch.equal(fit_palette(images, 30, seed=5), first)
    assert not torch.equal(fit_palette(images, 30, seed=6), first)
    assert (luminance(first).diff() >= 0).all()


def test_fit_palette_sees_a_bounded_number_of_pixels(monkeypatch):
    """With 40 pixels allowed of 4 images, each image gives ten, which the seed draws."""
    monkeypatch.setattr(palettes, "MAX_FITTED_PIXELS", 40)
    images = np.zeros((4, 50, 60, 1), dtype=np.uint8)
    images += np.array([10, 90, 170, 250], dtype=np.uint8).reshape(4, 1, 1, 1)
    drawn = palettes._draw_pixels(images, np.random.default_rng(0))
    assert np.unique(drawn, return_counts=True)[1].tolist() == [10] * 4
    assert decode(torch.arange(4), fit_palette(images, 4, seed=0)).flatten().tolist() == [10, 90, 170, 250]
    images = random_images((4, 50, 60, 3))
    drawn = [fit_palette(images, 64, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_fit_palette_refuses_no_images():
    with pytest.raises(InputError, match="no image could be read"):
        fit_palette(np.empty((0, 4, 4, 3), dtype=np.uint8), 8, seed=0)


def test_palette_quality_is_worked_out_by_hand():
    """Two colours, 0 and 255. Pixels 0, 0, 10, 245: squares 0, 0, 100, 100; colours three to one."""
    palette = torch.tensor([[-1.0], [1.0], [0.1]])
    images = np.array([0, 0, 10, 245], dtype=np.uint8).reshape(2, 1, 2, 1)
    quality = palette_quality(images, palette)
    assert quality.psnr_db == pytest.approx(10 * math.log10(255**2 / 50))
    assert quality.colors_used == 2
    assert quality.entropy_nats == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert quality.num_images == 2
    assert quality.describe() == "31.14 dB, 2 of 3 colours used, 0.562 nats a pixel, images: 2"
    exact = "exact, 1 of 3 colours used, 0.000 nats a pixel, images: 1"
    assert palette_quality(images[:1, :, :1], palette).describe() == exact


def test_fitted_palette_serves_held_out_cifar10(shared_data):
    """512 colours of 3,000 images, on 1,000 others that lie between them."""
    images = []
    with tarfile.open(shared_data("cifar10-jpeg.tar.xz"), "r|xz") as archive:  # a stream: the rest stays packed
        for number, member in enumerate(member for member in archive if member.isfile()):
            if number % 8 == 0:
                images.append(np.array(Image.open(archive.extractfile(member))))
            if len(images) == 4_000:
                break
    images = np.stack(images)
    held_out = np.arange(4_000) % 4 == 3
    palette = fit_palette(images[~held_out], 512, seed=0)
    quality = palette_quality(images[held_out], palette)
    assert quality.psnr_db > 33.5
    assert quality.colors_used > 500
    assert 5.8 < quality.entropy_nats < 6.1
    uniform = palette_quality(images[held_out], uniform_palette(512))
    assert uniform.psnr_db == pytest.approx(28.7, abs=0.2)
