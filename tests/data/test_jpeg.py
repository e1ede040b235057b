import io
import tarfile
import warnings

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from vitlab.data import decoders, jpeg
from vitlab.data.images import ImageError, decode_image


def by_pillow(data):
    with Image.open(io.BytesIO(data)) as picture:
        return np.array(picture.convert("RGB"))


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def smooth(height, width, step=8):
    """A picture with slopes and some detail."""
    small = np.random.default_rng(0).integers(0, 256, (height // step + 2, width // step + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def decoded(data, scale=1):
    return jpeg.decode(data, jpeg.read_header(data), scale)


def jpeg_members(archive, step=1):
    for index, member in enumerate(archive):
        if member.isfile() and member.name.endswith((".jpg", ".jpeg", ".mpo", ".png")) and index % step == 0:
            yield member.name, archive.extractfile(member).read()


@pytest.mark.parametrize(("name", "step", "least"), [("trashnet.tar", 13, 50), ("odd.tar", 1, 15)])
def test_decode_gives_pillows_pixels_of_real_files(shared_data, name, step, least):
    seen = 0
    with tarfile.open(shared_data(name)) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for member, data in jpeg_members(archive, step):
            if jpeg.read_header(data) is not None:
                np.testing.assert_array_equal(decoded(data), by_pillow(data), err_msg=member)
                seen += 1
    assert seen >= least


def test_decode_gives_pillows_pixels_of_small_files(cifar_jpegs):
    for path in sorted(cifar_jpegs.glob("*/*.jpg")):
        data = path.read_bytes()
        assert jpeg.read_header(data) is not None
        np.testing.assert_array_equal(decoded(data), by_pillow(data))


@pytest.mark.parametrize("size", [(1, 1), (17, 9), (64, 48), (50, 131)])
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 1},
        {"subsampling": 2},
        {"progressive": True},
        {"restart_marker_rows": 1},
        {"quality": 100, "subsampling": 0, "keep_rgb": True},
    ],
)
def test_decode_gives_pillows_pixels_of_every_coding(options, size):
    for image in (smooth(*size), smooth(*size).convert("L")):
        data = encoded(image, **options)
        header = jpeg.read_header(data)
        assert (header.height, header.width) == size
        assert (header.held_bytes > 0, header.has_metadata) == ("progressive" in options, False)
        assert data[header.end :] == b"\xff\xd9"
        np.testing.assert_array_equal(decoded(data), by_pillow(data))


@pytest.mark.parametrize("sampling", ["411", "420", "422", "440", "444"])
def test_decode_gives_pillows_pixels_of_every_sampling(sampling):
    factors = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{sampling}")
    _, data = cv2.imencode(".jpg", np.array(smooth(50, 71)), [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors])
    np.testing.assert_array_equal(decoded(data.tobytes()), by_pillow(data.tobytes()))


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("size", [(64, 96), (65, 91), (9, 200)])
def test_decode_at_a_smaller_scale_gives_pillows_draft(scale, size):
    data = encoded(smooth(*size))
    with Image.open(io.BytesIO(data)) as picture:
        picture.draft("RGB", tuple(side // scale for side in picture.size))
        np.testing.assert_array_equal(decoded(data, scale), np.array(picture))


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_decode_at_a_smaller_scale_is_nearly_the_mean(scale):
    data = encoded(smooth(64, 96, step=32), quality=95)
    small = decoded(data, scale)
    means = by_pillow(data).reshape(64 // scale, scale, 96 // scale, scale, 3).mean((1, 3))
    assert np.abs(small - means).mean() < 1.5
    assert decoded(encoded(smooth(65, 90)), scale).shape == (-(-65 // scale), -(-90 // scale), 3)


def test_read_header_leaves_what_simplejpeg_reads_otherwise():
    assert jpeg.read_header(encoded(Image.new("CMYK", (16, 8)))) is None
    assert jpeg.read_header(b"") is None
    assert jpeg.read_header(b"\x89PNG\r\n\x1a\n" + bytes(100)) is None
    whole = encoded(smooth(32, 32))
    frame = whole.index(b"\xff\xc0")
    for other in (0xC3, 0xC9, 0xCA):  # lossless, arithmetic
        assert jpeg.read_header(whole[: frame + 1] + bytes([other]) + whole[frame + 2 :]) is None
    assert jpeg.read_header(whole[: frame + 4] + b"\x0c" + whole[frame + 5 :]) is None  # 12 bits


@pytest.mark.parametrize(("subsampling", "samples"), [(0, 3), (1, 2), (2, 1.5)])
def test_read_header_counts_the_coefficients_that_several_scans_keep_in_memory(subsampling, samples):
    header = jpeg.read_header(encoded(smooth(40, 56), progressive=True, subsampling=subsampling))
    assert header.held_bytes == 2 * samples * 40 * 56
    whole = encoded(smooth(40, 56), subsampling=subsampling)
    scan = whole.index(b"\xff\xda\x00\x0c\x03")  # of three components
    assert jpeg.read_header(whole).held_bytes == 0
    assert jpeg.read_header(whole[: scan + 4] + b"\1" + whole[scan + 5 :]).held_bytes == 2 * samples * 40 * 56


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_read_header_leaves_every_cut_file(options):
    data = encoded(smooth(40, 56), **options)
    assert all(jpeg.read_header(data[:length]) is None for length in range(len(data)))
    assert jpeg.read_header(data + b"more than the picture") is not None


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_decode_image_refuses_half_a_picture_with_an_end(options):
    data = encoded(smooth(80, 64), **options)
    start = data.index(b"\xff\xda") + 14
    stop = data.find(b"\xff\xc4", start) if options else len(data)
    half = data[: start + (stop - start) // 2] + b"\xff\xd9"
    assert by_pillow(half).shape == (80, 64, 3)  # Pillow says nothing
    with pytest.raises(ImageError, match=r"a\.jpg: cut off"):
        decode_image(half, "a.jpg")


def test_decode_image_refuses_pixels_that_a_strange_marker_ends():
    """simplejpeg alone gives the upper half and grey below it."""
    data = bytearray(encoded(smooth(80, 64)))
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    data[middle : middle + 2] = b"\xff\x51"
    assert simplejpeg.decode_jpeg(data, strict=False).shape == (80, 64, 3)
    with pytest.raises(ImageError, match=r"a\.jpg: damaged"):
        decode_image(bytes(data), "a.jpg")


def test_decode_image_takes_a_grey_picture_for_whole():
    for options in ({}, {"progressive": True}):
        image = decode_image(encoded(Image.new("RGB", (48, 40), (128, 128, 128)), **options), "a.jpg")
        np.testing.assert_array_equal(image, np.full((40, 48, 3), 128))


@pytest.mark.parametrize("error", [ValueError("tables"), MemoryError()])
def test_decode_image_leaves_to_pillow_what_simplejpeg_fails_at(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(jpeg.simplejpeg, "decode_jpeg", fail)
    data = encoded(smooth(20, 30))
    np.testing.assert_array_equal(decode_image(data, "a"), by_pillow(data))
    monkeypatch.setattr(decoders, "_read_rgb", fail)
    with pytest.raises(ImageError, match=r"a\.jpg: damaged or not supported"):
        decode_image(data, "a.jpg")
