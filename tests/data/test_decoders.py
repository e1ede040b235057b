import io

import numpy as np
import pytest
from PIL import Image

from vitlab.data import decoders, images
from vitlab.data.decoders import decode
from vitlab.data.images import ImageError, decode_image, read_shrunk

XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def noise(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image, fmt, **options):
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


def left_red_right_blue():
    image = np.zeros((32, 64, 3), np.uint8)
    image[:, :32, 0] = image[:, 32:, 2] = 255
    return Image.fromarray(image)


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
def test_decode_turns_what_xmp_alone_tells(fmt):
    picture = left_red_right_blue()
    if fmt == "PNG":
        from PIL.PngImagePlugin import PngInfo

        text = PngInfo()
        text.add_itxt("XML:com.adobe.xmp", XMP.decode())
        data = encoded(picture, fmt, pnginfo=text)
    else:
        data = encoded(picture, fmt, xmp=XMP, **({"quality": 95} if fmt == "JPEG" else {"lossless": True}))
    image = decode_image(data, "a").astype(int)
    assert image.shape == (64, 32, 3)
    assert np.abs(image[:24] - (255, 0, 0)).max() <= 8
    assert np.abs(image[-24:] - (0, 0, 255)).max() <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_turns_what_an_avif_container_tells(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation  # Pillow writes it as the container's own rotation and mirror
    image = decode_image(encoded(left_red_right_blue(), "AVIF", exif=exif, quality=95), "a").astype(int)
    assert image.shape == ((32, 64, 3) if orientation < 5 else (64, 32, 3))
    first = image[:, :24] if orientation < 5 else image[:24]
    color = (255, 0, 0) if orientation in (1, 4, 5, 6) else (0, 0, 255)
    assert np.abs(first - color).max() <= 24


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK", "I;16"])
def test_decode_converts_strip_by_strip_as_at_once(monkeypatch, mode):
    if mode == "I;16":
        picture = Image.fromarray(noise(37, 23)[:, :, 0].astype(np.uint16) * 200)
    else:
        picture = Image.fromarray(np.dstack([noise(37, 23), noise(23, 37).reshape(37, 23, 3)[:, :, 0]])).convert(mode)
    data = encoded(picture, "TIFF" if mode == "CMYK" else "PNG")
    whole = decode_image(data, "a")
    monkeypatch.setattr(decoders, "_STRIP", 100)  # four rows
    np.testing.assert_array_equal(decode_image(data, "a"), whole)


@pytest.mark.parametrize("fmt", ["PNG", "JPEG"])
def test_decode_reads_large_pictures_at_half_their_size(monkeypatch, fmt):
    pixels = np.array(Image.fromarray(noise(8, 6)).resize((63, 81), Image.Resampling.BICUBIC))
    data = encoded(Image.fromarray(pixels), fmt)
    monkeypatch.setattr(decoders, "FULL_SCALE", 81 * 63)
    assert decode_image(data, "a").shape == (81, 63, 3)
    monkeypatch.setattr(decoders, "FULL_SCALE", 81 * 63 - 1)
    monkeypatch.setattr(decoders, "_STRIP", 63 * 10)
    image = decode_image(data, "a")
    assert image.shape == (41, 32, 3)
    means = pixels[:80, :62].reshape(40, 2, 31, 2, 3).mean((1, 3))
    assert np.abs(image[:40, :31] - means).mean() < 4
    if fmt == "PNG":
        assert np.abs(image[:40, :31] - means).max() <= 1


def test_decode_allows_progressive_jpeg_no_more_than_others(monkeypatch):
    monkeypatch.setattr(decoders, "WHOLE_LIMIT", 100)
    picture = Image.fromarray(noise(10, 11))
    for fmt, options in (("PNG", {}), ("JPEG", {"progressive": True})):
        with pytest.raises(ImageError, match=r"a: 11x10 claims more than 100 pixels: scale the picture down"):
            decode_image(encoded(picture, fmt, **options), "a")
    monkeypatch.setattr(decoders, "PIXEL_LIMIT", 110)
    assert decode_image(encoded(picture, "JPEG"), "a").shape == (10, 11, 3)
    monkeypatch.setattr(decoders, "PIXEL_LIMIT", 109)
    with pytest.raises(ImageError, match="claims more than 109 pixels"):
        decode_image(encoded(picture, "JPEG"), "a")


def test_decode_asks_for_the_scale_with_the_upright_size():
    exif = Image.Exif()
    exif[0x0112] = 6
    asked = []

    def shrink(height, width):
        asked.append((height, width))
        return 4

    image, size = decode(encoded(left_red_right_blue(), "JPEG", exif=exif), shrink)
    assert asked == [(64, 32)]
    assert (image.shape, size) == ((16, 8, 3), (64, 32))
    assert image[0, 0, 0] > 200 > 60 > image[-1, 0, 0]  # red above, blue below


def test_read_shrunk_gives_other_formats_whole(tmp_path):
    pixels = noise(20, 30)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image, size = read_shrunk(tmp_path / "a.png", lambda height, width: 8)
    np.testing.assert_array_equal(image, pixels)
    assert size == (20, 30)
    with pytest.raises(ImageError, match=r"gone\.png: cannot be opened"):
        read_shrunk(tmp_path / "gone.png", lambda height, width: 8)


@pytest.mark.parametrize(
    ("fmt", "mode", "options", "decoder_bytes"),  # measured: what reading 12 million pixels took beside the result
    [
        ("PNG", "L", {}, 1),
        ("PNG", "I;16", {}, 2),
        ("PNG", "RGB", {}, 4),
        ("TIFF", "CMYK", {}, 4),
        ("GIF", "P", {}, 1),
        ("WEBP", "RGB", {}, 14),
        ("AVIF", "RGB", {}, 8),
        ("JPEG2000", "RGB", {}, 17),
        ("JPEG", "RGB", {}, 0),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}, 6),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 2}, 3),
    ],
)
def test_decode_refuses_what_would_take_more_memory_than_the_limit(monkeypatch, fmt, mode, options, decoder_bytes):
    monkeypatch.setattr(decoders, "_STRIP_BYTES", 0)
    data = encoded(Image.new(mode, (100, 80)), fmt, **options)
    needed = len(data) + (max(decoder_bytes, 3) + 3) * 100 * 80
    monkeypatch.setattr(decoders, "MEMORY_LIMIT", needed)
    assert decode_image(data, "a").shape == (80, 100, 3)
    monkeypatch.setattr(decoders, "MEMORY_LIMIT", needed - 1)
    with pytest.raises(ImageError, match=r"a: 100x80 in this format takes 0 MB to read, more than 0: scale the pic"):
        decode_image(data, "a")


def test_memory_limit_lets_what_cameras_write_pass():
    for megapixels, scale, decoder_bytes in ((25, 1, 0), (50, 2, 3 * 50_000_000), (25, 1, 4 * 25_000_000)):
        decoders._require_memory(megapixels * 1000, 1000, scale, 30_000_000, decoder_bytes)


def test_read_shrunk_refuses_a_file_that_fills_memory(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(noise(8, 9)), "PNG"))
    monkeypatch.setattr(images, "MEMORY_LIMIT", 100)
    with pytest.raises(ImageError, match=r"a\.png: is a file of 0 MB: scale the picture down"):
        read_shrunk(tmp_path / "a.png", lambda height, width: 1)
