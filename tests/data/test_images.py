import ast
import csv
import io
import pickle
import re
import sys
import tarfile
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from vitlab.data.decoders import PIXEL_LIMIT, WHOLE_LIMIT
from vitlab.data.images import ImageError, decode_image, list_images, read_image
from vitlab.errors import InputError

RED, BLUE = (255, 0, 0), (0, 0, 255)

UNSOLVED: dict[str, str] = {}
"""Files of odd.csv that are not read as expected yet, and why."""


def encoded(image, fmt, **options):
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def quadrant_means(image):
    """Means of the four quadrants; the middle row and column of an odd size belong to none."""
    H, W, _ = image.shape
    rows, columns = (slice(0, H // 2), slice(H - H // 2, H)), (slice(0, W // 2), slice(W - W // 2, W))
    return np.array([image[row, column].mean((0, 1)) for row in rows for column in columns])


def read_or_error(path):
    try:
        return read_image(path), None
    except ImageError as error:
        return None, error


def verdict(row, path):
    """Say what is wrong with how a file of odd.csv is read, or nothing."""
    expected = row["expected"]
    image, error = read_or_error(path)
    if error is not None:
        assert error.path == str(path)
        assert "\n" not in str(error)
        return None if "reported" in expected else f"refused: {error.reason}"
    sized = re.search(r"decodes to (\d+)x(\d+) RGB", expected)
    if sized is None:
        return "was read"
    if image.shape != (int(sized[2]), int(sized[1]), 3) or image.dtype != np.uint8:
        return f"has shape {image.shape}"
    on_white = re.search(r"composited on white: \(([^)]*)\)", row["also_acceptable"])
    if mean := on_white or re.search(r"with mean colour \(([^)]*)\)", expected):
        off = np.abs(image.mean((0, 1)) - [float(value) for value in mean[1].split(",")]).max()
        if off > float(row["tolerance"]):
            return f"mean is off by {off:.1f}"
    if row["expected_quadrants"] and not on_white:  # those are of the colours without their transparency
        off = np.abs(quadrant_means(image) - np.array(ast.literal_eval(row["expected_quadrants"]))).max()
        if off > float(row["tolerance"]):
            return f"a quadrant is off by {off:.1f}"
    return None


def test_read_image_meets_what_odd_files_must_give(shared_data, tmp_path, capfd):
    with tarfile.open(shared_data("odd.tar")) as archive:
        archive.extractall(tmp_path, filter="data")
    with open(shared_data("odd.csv"), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 81
    wrong = {row["file"]: verdict(row, tmp_path / "odd" / row["file"]) for row in rows}
    assert {name: what for name, what in wrong.items() if what and name not in UNSOLVED} == {}
    assert all(wrong[name] for name in UNSOLVED), "solved: take it out of UNSOLVED"


def half_and_half(fmt, orientation, **options):
    """40 wide, 20 high, left red, right blue, with an EXIF orientation."""
    image = np.zeros((20, 40, 3), np.uint8)
    image[:, :20], image[:, 20:] = RED, BLUE
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(image), fmt, exif=exif, **options)


# Where red lies in the upright picture, from the EXIF standard: which side of the view row 0 and column 0 are.
RED_SIDE = {1: "left", 2: "right", 3: "right", 4: "left", 5: "top", 6: "top", 7: "bottom", 8: "bottom"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("JPEG", {"quality": 95}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_decode_image_turns_orientation_upright(fmt, options, orientation):
    image = decode_image(half_and_half(fmt, orientation, **options), "a").astype(int)
    side = RED_SIDE[orientation]
    assert image.shape == ((20, 40, 3) if side in ("left", "right") else (40, 20, 3))
    halves = {"left": image[:, :10], "right": image[:, -10:], "top": image[:10], "bottom": image[-10:]}
    opposite = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}[side]
    assert np.abs(halves[side] - RED).max() <= 8
    assert np.abs(halves[opposite] - BLUE).max() <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_image_mirrors_as_exif_says(orientation):
    # Two corners fix all eight forms; a mirrored form and a turned one differ only in them.
    stored = np.zeros((2, 3, 3), np.uint8)
    stored[0, 0], stored[0, 2] = RED, BLUE
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decode_image(encoded(Image.fromarray(stored), "PNG", exif=exif), "a")
    corners = {1: ((0, 0), (0, 2)), 2: ((0, 2), (0, 0)), 3: ((1, 2), (1, 0)), 4: ((1, 0), (1, 2))}
    corners |= {5: ((0, 0), (2, 0)), 6: ((0, 1), (2, 1)), 7: ((2, 1), (0, 1)), 8: ((2, 0), (0, 0))}
    red, blue = corners[orientation]
    assert tuple(image[red]) == RED
    assert tuple(image[blue]) == BLUE
    assert image.sum() == 2 * 255


def test_decode_image_keeps_pixels_under_malformed_exif():
    pixels = noise(5, 7)
    data = encoded(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff broken")
    np.testing.assert_array_equal(decode_image(data, "a"), pixels)


def test_decode_image_converts_cmyk():
    image = decode_image(encoded(Image.new("CMYK", (16, 8), (0, 255, 255, 0)), "JPEG", quality=100), "a")
    assert image.shape == (8, 16, 3)
    assert np.abs(image.astype(int) - RED).max() <= 2


@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "PGM"])
def test_decode_image_scales_16_bit_grey(fmt):
    samples = np.array([[0, 257, 1000], [65535, 32768, 128]], np.uint16)
    if fmt == "PGM":
        data = b"P5 3 2 65535\n" + samples.astype(">u2").tobytes()
    else:
        data = encoded(Image.fromarray(samples), fmt)
    want = np.array([[0, 1, 4], [255, 128, 0]], np.uint8)  # round(sample / 257)
    np.testing.assert_array_equal(decode_image(data, "a"), np.repeat(want[:, :, None], 3, axis=2))


def test_decode_image_inverts_16_bit_grey_where_white_is_zero():
    data = encoded(Image.fromarray(np.array([[0, 65535, 257]], np.uint16)), "TIFF", tiffinfo={262: 0})
    assert decode_image(data, "a")[0, :, 0].tolist() == [255, 0, 254]


def png(width, height, depth, color, rows):
    """Write a PNG by hand, for kinds that Pillow does not write."""

    def chunk(name, body):
        return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, color, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def test_decode_image_scales_16_bit_color():
    samples = np.array([[0, 257, 65535], [257 * 200, 257 * 3, 257 * 77]], ">u2")
    image = decode_image(png(2, 1, 16, 2, b"\0" + samples.tobytes()), "a")
    assert image[0].tolist() == [[0, 1, 255], [200, 3, 77]]


def on_white(colors, alpha):
    """Mix colours (..., 3) with white by alpha (...) of 255."""
    share = np.asarray(alpha)[..., None] / 255
    return np.rint(np.asarray(colors) * share + 255 * (1 - share)).astype(int)


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "TIFF"])
def test_decode_image_shows_white_through_what_is_transparent(fmt):
    colors, alpha = noise(6, 9), np.linspace(0, 255, 54).astype(np.uint8).reshape(6, 9)
    options = {"lossless": True, "exact": True} if fmt == "WEBP" else {}
    image = decode_image(encoded(Image.fromarray(np.dstack([colors, alpha])), fmt, **options), "a")
    assert np.abs(image - on_white(colors, alpha)).max() <= 1
    np.testing.assert_array_equal(image[0, 0], 255)
    np.testing.assert_array_equal(image[-1, -1], colors[-1, -1])


def test_decode_image_reads_grey_with_alpha():
    grey = Image.fromarray(np.array([[10, 100, 200]], np.uint8))
    grey.putalpha(Image.fromarray(np.array([[255, 0, 128]], np.uint8)))
    image = decode_image(encoded(grey, "PNG"), "a")
    assert image[0].tolist() == on_white([[10] * 3, [100] * 3, [200] * 3], [255, 0, 128]).tolist()


def test_decode_image_reads_palette_with_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putdata([0, 1])
    data = encoded(image, "PNG", transparency=bytes([0, 128]))
    assert decode_image(data, "a")[0].tolist() == on_white([RED, BLUE], [0, 128]).tolist()


def test_decode_image_shows_white_for_a_transparent_color():
    image = Image.fromarray(np.array([[RED, BLUE, RED]], np.uint8))
    assert decode_image(encoded(image, "PNG", transparency=RED), "a")[0].tolist() == [[255] * 3, list(BLUE), [255] * 3]
    grey = Image.fromarray(np.array([[0, 257 * 7]], np.uint16))
    data = encoded(grey, "PNG", transparency=0)
    assert decode_image(data, "a")[0, :, 0].tolist() == [255, 7]


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG", "TIFF"])
def test_decode_image_takes_the_first_frame(fmt):
    frames = [Image.new("RGB", (8, 4), color) for color in (RED, BLUE)]
    options = {"lossless": True} if fmt == "WEBP" else {}
    image = decode_image(encoded(frames[0], fmt, save_all=True, append_images=frames[1:], **options), "a")
    assert np.unique(image.reshape(-1, 3), axis=0).tolist() == [list(RED)]


@pytest.mark.parametrize("fmt", ["BMP", "TGA", "PPM", "TIFF", "PNG", "ICO", "JPEG2000"])
def test_decode_image_reads_lossless_formats_exactly(fmt):
    pixels = noise(32, 32)
    np.testing.assert_array_equal(decode_image(encoded(Image.fromarray(pixels), fmt), "named.jpg"), pixels)


def test_decode_image_gives_a_writable_contiguous_array():
    for orientation in (1, 6):
        image = decode_image(half_and_half("JPEG", orientation), "a")
        assert image.flags.c_contiguous
        assert image.flags.writeable


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "AVIF", "TIFF", "PPM", "TGA", "JPEG2000"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_read_image_refuses_cut_off_files(tmp_path, capfd, fmt, share):
    data = encoded(Image.fromarray(noise(40, 60)), fmt)
    path = tmp_path / "cut.jpg"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ImageError) as caught:
        read_image(path)
    assert caught.value.path == str(path)
    assert str(caught.value) == f"{path}: {caught.value.reason}"


def test_read_image_refuses_cut_off_progressive_jpeg(tmp_path):
    data = encoded(Image.fromarray(noise(40, 60)), "JPEG", progressive=True)
    (tmp_path / "a.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageError, match=r"a\.jpg: .*truncated"):
        read_image(tmp_path / "a.jpg")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"hello, I am text", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    ],
)
def test_read_image_names_why_a_file_is_no_image(tmp_path, content, reason):
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=reason):
        read_image(path)


def test_read_image_reports_missing_files_and_folders(tmp_path):
    with pytest.raises(ImageError, match=r"gone\.jpg: cannot be opened: No such file"):
        read_image(tmp_path / "gone.jpg")
    with pytest.raises(ImageError, match="is no regular file"):
        read_image(tmp_path)


def test_decode_image_refuses_float_and_32_bit_samples():
    for kind in (np.int32, np.float32):
        with pytest.raises(ImageError, match="32-bit samples"):
            decode_image(encoded(Image.fromarray(np.ones((3, 4), kind)), "TIFF"), "a.tif")


def test_decode_image_refuses_bombs_before_memory_is_taken(monkeypatch):
    row = b"\0" + bytes(20000 // 8)
    bomb = png(20000, 20000, 1, 0, row * 20000)
    assert len(bomb) < 60_000
    for limit in (Image.MAX_IMAGE_PIXELS, None):  # also where someone else has lifted Pillow's limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        tracemalloc.start()
        with pytest.raises(ImageError, match=r"bomb\.png: .*more than 50,000,000 pixels"):
            decode_image(bomb, "bomb.png")
        assert tracemalloc.get_traced_memory()[1] < 5e6
        tracemalloc.stop()
        assert limit == Image.MAX_IMAGE_PIXELS


def test_decode_image_reads_between_pillows_warning_and_the_limit(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # Pillow warns above this, and refuses above twice as many
    pixels = noise(8, 9)
    np.testing.assert_array_equal(decode_image(encoded(Image.fromarray(pixels), "PNG"), "a"), pixels)
    assert (PIXEL_LIMIT, WHOLE_LIMIT) == (178_956_970, 50_000_000)


def heif_bytes():
    return b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64)


def test_decode_image_says_how_to_read_heif(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageError, match=r'pip install "vitlab\[heif\]"'):
        decode_image(heif_bytes(), "a.heic")


def test_decode_image_reads_heif_where_the_decoder_is_there():
    pillow_heif = pytest.importorskip("pillow_heif")
    pixels = np.full((48, 64, 3), (200, 100, 50), np.uint8)
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(file, quality=90)
    assert np.abs(decode_image(file.getvalue(), "a.heic").astype(int) - pixels).max() < 8


def test_decode_image_reads_avif():
    image = decode_image(encoded(Image.new("RGB", (24, 10), (200, 100, 50)), "AVIF"), "a.avif")
    assert image.shape == (10, 24, 3)
    assert np.abs(image.astype(int) - (200, 100, 50)).max() <= 6


def test_image_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ImageError("a/b.jpg", "the file is empty")))
    assert (error.path, error.reason, str(error)) == ("a/b.jpg", "the file is empty", "a/b.jpg: the file is empty")


def test_list_images_takes_any_case_and_counts_the_rest(tmp_path, write_image):
    names = ["a.JPG", "b.Jpeg", "c.PNG", "d.webp", "e.jpg"]
    for name in names:
        write_image(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    images, ignored = list_images([tmp_path])
    assert images == [tmp_path / name for name in names]
    assert ignored == [tmp_path / "notes.txt"]


def test_list_images_leaves_out_what_systems_leave_behind(tmp_path, write_image):
    keep = [write_image(tmp_path / name) for name in ("b/c/x.png", "b/y.png", "z.png")]
    junk = [
        "._z.png",
        ".DS_Store",
        ".hidden/a.png",
        "Thumbs.db",
        "desktop.ini",
        "__MACOSX/a.png",
        ".ipynb_checkpoints/a.png",
    ]
    for name in junk:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    images, ignored = list_images([tmp_path])
    assert images == keep
    assert [path.name for path in ignored] == sorted(name.split("/")[0] for name in junk)


def test_list_images_keeps_heif_and_broken_links(tmp_path, write_image):
    write_image(tmp_path / "a.jpg")
    write_image(tmp_path / "b.avif")
    (tmp_path / "c.HEIC").write_bytes(heif_bytes())
    (tmp_path / "d.png").symlink_to(tmp_path / "gone.png")
    images, _ = list_images([tmp_path])
    assert [path.name for path in images] == ["a.jpg", "b.avif", "c.HEIC", "d.png"]
    with pytest.raises(ImageError, match=r"d\.png: cannot be opened"):
        read_image(images[3])


def test_list_images_ends_at_link_loops(tmp_path, write_image):
    real = write_image(tmp_path / "a/b/x.png")
    for name in ("a/loop", "a/b/up", "a/again"):
        (tmp_path / name).symlink_to(tmp_path / "a", target_is_directory=True)
    assert list_images([tmp_path])[0] == [real]


def test_list_images_keeps_a_link_to_itself_as_an_image_that_cannot_be_read(tmp_path, write_image):
    write_image(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("b.png")
    (tmp_path / "c").symlink_to("c")
    images, ignored = list_images([tmp_path])
    assert ([path.name for path in images], [path.name for path in ignored]) == (["a.png", "b.png"], ["c"])
    with pytest.raises(ImageError, match=r"b\.png: cannot be opened: Too many levels"):
        read_image(images[1])


def test_list_images_follows_links_between_neighbours(tmp_path, write_image):
    write_image(tmp_path / "a/1.png")
    write_image(tmp_path / "b/2.png")
    (tmp_path / "a/b").symlink_to("../b", target_is_directory=True)
    (tmp_path / "b/a").symlink_to("../a", target_is_directory=True)
    images, _ = list_images([tmp_path])
    assert [str(path.relative_to(tmp_path)) for path in images] == ["a/1.png", "a/b/2.png", "b/2.png", "b/a/1.png"]


def test_list_images_refuses_a_cascade_of_links(tmp_path, write_image):
    """Two links at each of 30 levels: a billion paths to one image."""
    write_image(tmp_path / "30/x.png")
    for level in range(30):
        for name in ("left", "right"):
            (tmp_path / f"{level}").mkdir(exist_ok=True)
            (tmp_path / f"{level}" / name).symlink_to(f"../{level + 1}", target_is_directory=True)
    with pytest.raises(InputError, match=r"links lead to folder .* in more than 1,000 ways: remove some") as caught:
        list_images([tmp_path / "0"])
    assert "\n" not in str(caught.value)


def test_list_images_gives_each_file_once_and_sorts_as_text(tmp_path, write_image):
    paths = [write_image(tmp_path / name) for name in ("a-b.png", "a/x.png", "a.png")]
    images, _ = list_images([paths[2], tmp_path, paths[1]])
    assert images == sorted(paths, key=str)  # "-" < "." < "/", which parts of paths do not follow


def test_list_images_takes_a_named_file_whatever_its_suffix(tmp_path):
    (tmp_path / "photo.bak").write_bytes(encoded(Image.new("RGB", (3, 2)), "PNG"))
    images, _ = list_images([tmp_path / "photo.bak"])
    assert read_image(images[0]).shape == (2, 3, 3)


def test_list_images_refuses_missing_and_empty(tmp_path):
    with pytest.raises(InputError, match="gone does not exist"):
        list_images([tmp_path / "gone"])
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(InputError, match=r"no images in .* \(1 other file\)"):
        list_images([tmp_path])
