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
            if jpeg.read_header(data) is not None and (image := decoded(data)) is not None:
                np.testing.assert_array_equal(image, by_pillow(data), err_msg=member)
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
    """simplejpeg alone, where it is not strict, gives the upper half and grey below it."""
    data = bytearray(encoded(smooth(80, 64)))
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    data[middle : middle + 2] = b"\xff\x51"
    assert simplejpeg.decode_jpeg(data, strict=False).shape == (80, 64, 3)
    with pytest.raises(ImageError, match=r"a\.jpg: damaged"):
        decode_image(bytes(data), "a.jpg")


def test_decode_image_refuses_what_simplejpeg_gives_as_it_lies_in_memory():
    """After the warning of a missing coefficient, it takes the error of a missing table for a warning too."""
    data = bytearray(encoded(smooth(16, 24)))
    scan = data.index(b"\xff\xda\x00\x0c\x03")
    data[scan + 6] = 0x22  # the first component's tables
    data[scan + 12] = 62  # the last coefficient
    assert simplejpeg.decode_jpeg(bytes(data), strict=False).shape == (16, 24, 3)
    with pytest.raises(ImageError, match=r"a\.jpg: damaged or not supported: broken data stream"):
        decode_image(bytes(data), "a.jpg")


def with_rare_sampling(data, factors):
    """Say another subsampling in a 4:4:4 file: its blocks then lie elsewhere, and those at the end are missing."""
    frame = data.index(b"\xff\xc0")
    return data[: frame + 11] + bytes([factors]) + data[frame + 12 :]


@pytest.mark.parametrize("factors", [0x42, 0x24, 0x13, 0x31])
def test_decode_image_refuses_half_a_picture_of_a_rare_sampling(factors):
    data = with_rare_sampling(encoded(smooth(96, 96), subsampling=0), factors)
    assert decoded(data) is None
    read = decode_image(data, "a.jpg")
    np.testing.assert_array_equal(read, by_pillow(data))
    start = data.index(b"\xff\xda") + 14
    half = data[: start + (len(data) - start) // 8] + b"\xff\xd9"
    assert (by_pillow(half)[-8:, -8:] == 128).all()
    with pytest.raises(ImageError, match=r"a\.jpg: cut off"):
        decode_image(half, "a.jpg")


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_decode_refuses_a_picture_without_its_last_rows_at_every_scale(scale):
    data = encoded(smooth(256, 256))
    start = data.index(b"\xff\xda") + 14
    most = data[: start + (len(data) - start) * 97 // 100] + b"\xff\xd9"
    assert (by_pillow(most)[-8:, -8:] == 128).all()
    assert (by_pillow(most)[-64:-16] != 128).any()
    with pytest.raises(decoders.UnreadableError, match="cut off"):
        decoders.decode(most, lambda height, width: scale)


def test_decode_refuses_a_picture_of_very_many_scans(monkeypatch):
    """A few bytes a scan would have the decoder walk through all blocks each time."""
    whole = encoded(smooth(40, 56), progressive=True)
    scans = whole.count(b"\xff\xda")
    assert jpeg.read_header(whole).scans == scans == 10
    monkeypatch.setattr(decoders, "SCAN_LIMIT", 40 * 56 * 10)
    assert decode_image(whole, "a.jpg").shape == (40, 56, 3)
    monkeypatch.setattr(decoders, "SCAN_LIMIT", 40 * 56 * 10 - 1)
    with pytest.raises(ImageError, match=r"a\.jpg: 56x40 in 10 scans takes too long to read: save it with fewer"):
        decode_image(whole, "a.jpg")


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
