import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.config import DataConfig
from vitlab.data.datasets import fingerprint, load_dataset, load_split
from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError

FASHION = Path("/usr/share/datasets/fashion-mnist")
FASHION_NAMES = [
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
]


def load(root, **options):
    return load_dataset(root, **{"val_fraction": 0.25, "seed": 0} | options)


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, labels=(3, 1, 1, 3, 3, 1, 7, 7), *, test_labels=(7, 1), separator="-", packed=False, rgb=False):
    """Write the four files, images 5 high and 4 wide; gives the images of both parts."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    parts = {}
    for part, values in (("train", labels), ("t10k", test_labels)):
        images = generator.integers(0, 256, (len(values), 5, 4, 3) if rgb else (len(values), 5, 4), dtype=np.uint8)
        parts[part] = images
        for kind, array in (("images", images), ("labels", np.array(values, dtype=np.uint8))):
            content = idx_bytes(array)
            name = f"{part}-{kind}{separator}idx{array.ndim}-ubyte" + (".gz" if packed else "")
            (folder / name).write_bytes(gzip.compress(content) if packed else content)
    return parts


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("separator", ["-", "."])
def test_load_dataset_reads_idx_files(tmp_path, separator, packed):
    images = write_idx(tmp_path, separator=separator, packed=packed)
    data = load(tmp_path)
    assert data.classes == ("1", "3", "7")  # labels need not start at 0, nor be dense
    assert data.native_size == (5, 4)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 5, "val": 3, "test": 2}
    want = {"t10k": [7, 1], "train": [3, 1, 1, 3, 3, 1, 7, 7]}
    for name, split in data.splits.items():
        part = "t10k" if name == "test" else "train"
        for row, path in enumerate(split.paths):
            file, number = path.split("#")
            assert Path(file).name.startswith(f"{part}-images")
            assert data.classes[split.labels[row]] == str(want[part][int(number)])
            np.testing.assert_array_equal(split.read(row), np.dstack([images[part][int(number)]] * 3))


def test_load_dataset_reads_idx_files_in_colour(tmp_path):
    images = write_idx(tmp_path, rgb=True)
    test = load(tmp_path).splits["test"]
    np.testing.assert_array_equal(test.read(1), images["t10k"][1])
    test.read(1)[:] = 0
    np.testing.assert_array_equal(test.read(1), images["t10k"][1])


def test_load_dataset_orders_idx_labels_as_numbers(tmp_path):
    write_idx(tmp_path, labels=[2, 10, 9, 2, 10, 9], test_labels=[9])
    assert load(tmp_path).classes == ("2", "9", "10")


def test_load_dataset_takes_the_plain_idx_file_before_its_packed_twin(tmp_path):
    images = write_idx(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"damaged")
    np.testing.assert_array_equal(load(tmp_path).splits["test"].read(0)[:, :, 1], images["t10k"][0])


def test_load_dataset_unpacks_idx_files_by_content(tmp_path):
    images = write_idx(tmp_path, packed=True)
    (tmp_path / "t10k-images-idx3-ubyte.gz").rename(tmp_path / "t10k-images-idx3-ubyte")
    np.testing.assert_array_equal(load(tmp_path).splits["test"].read(0)[:, :, 1], images["t10k"][0])


@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw"])
def test_load_dataset_names_the_classes_of_fashion_mnist(tmp_path, folder):
    write_idx(tmp_path / folder)
    data = load(tmp_path / folder)
    assert list(data.classes) == FASHION_NAMES
    assert data.splits["test"].labels.tolist() == [7, 1]


@pytest.mark.parametrize("folder", ["fashion/mnist", "raw", "mnist"])
def test_load_dataset_names_other_idx_classes_by_their_numbers(tmp_path, folder):
    write_idx(tmp_path / folder)
    assert load(tmp_path / folder).classes == ("1", "3", "7")


def test_load_dataset_does_not_name_more_labels_than_fashion_mnist_has(tmp_path):
    write_idx(tmp_path / "fashion", labels=[10, 0, 10, 0], test_labels=[0])
    assert load(tmp_path / "fashion").classes == ("0", "10")


def damage_magic(content):
    return b"\x00\x00\x0d" + content[3:]


def zeros(*shape):
    return idx_bytes(np.zeros(shape, dtype=np.uint8))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-images-idx3", damage_magic, r"begins with 00000d03: IDX images begin with 00000803 or 00000804"),
        ("train-images-idx3", lambda c: b"", r"begins with nothing"),
        ("train-images-idx3", lambda c: c[:9], r"ends within its header"),
        ("train-images-idx3", lambda c: c[:-1], r"ends before the 8x5x4 bytes that it claims"),
        ("t10k-images-idx3", lambda c: c + b"\0", r"goes on after the 2x5x4 bytes that it claims"),
        ("train-labels-idx1", lambda c: zeros(8, 1), r"begins with 00000802: IDX labels begin with 00000801"),
        ("train-labels-idx1", lambda c: zeros(7), r"holds 8 images for 7 labels"),
        ("t10k-labels-idx1", lambda c: zeros(2), r"holds the label 0, which .*train-labels.* lacks"),
        ("t10k-images-idx3", lambda c: zeros(2, 4, 5), r"images of 5x4 pixels and test images of 4x5"),
        ("t10k-images-idx3", lambda c: zeros(2, 5, 4, 2), r"claims 2x5x4x2 images"),
        ("t10k-images-idx3", lambda c: zeros(2, 0, 4), r"claims 2x0x4 images"),
        ("train-labels-idx1", lambda c: zeros(0), r"claims 0 labels"),
        ("t10k-images-idx3", lambda c: c[:8] + b"\xff" * 8 + c[16:], r"claims 2x4294967295x4294967295 images"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_load_dataset_refuses_damaged_idx_files(tmp_path, name, change, message, packed):
    write_idx(tmp_path)
    path = tmp_path / f"{name}-ubyte"
    content = change(path.read_bytes())
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_dataset_refuses_cut_and_changed_gzip(tmp_path):
    write_idx(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content in (whole[:-9], whole[:-1], whole[:40] + bytes([whole[40] ^ 255]) + whole[41:], whole[:2]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"train-images-idx3-ubyte\.gz cannot be read \(.*fetch it again"):
            load(tmp_path)


def test_load_dataset_unpacks_no_more_than_an_idx_header_claims(tmp_path):
    write_idx(tmp_path, packed=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    header = struct.pack(">HBB3I", 0, 8, 3, 2, 5, 4)
    path.write_bytes(gzip.compress(header + bytes(50_000_000)))
    with pytest.raises(InputError, match="goes on after the 2x5x4 bytes"):
        load(tmp_path)
    # A header that claims more than any packing of the file can give is refused before memory is taken.
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 2**32 - 1) + bytes(1000)))
    with pytest.raises(InputError, match="ends before the 4294967295 bytes"):
        load(tmp_path)


def test_load_dataset_names_missing_idx_files(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(InputError, match=r"lacks train-labels, t10k-images: it needs train-images-idx3-ubyte, "):
        load(tmp_path)


def test_load_dataset_hints_at_idx_files_one_folder_down(tmp_path):
    write_idx(tmp_path / "set/raw")
    with pytest.raises(InputError, match=rf"holds no images: .*IDX files.*perhaps {tmp_path}/set/raw was meant"):
        load(tmp_path / "set")


def test_load_split_matches_idx_classes_by_name(tmp_path):
    write_idx(tmp_path)
    split, notes = load_split(tmp_path, "test", classes=["7", "x", "3", "1"], val_fraction=0.25, seed=0)
    assert split.labels.tolist() == [0, 3]
    assert notes == (f"{tmp_path} holds no image of x, 3; their places in the class order stay",)
    again, _ = load_split(tmp_path, "val", classes=["1", "3", "7"], val_fraction=0.25, seed=0)
    assert again.paths == load(tmp_path).splits["val"].paths
    assert fingerprint(again)["sha256"]["val"] == fingerprint(load(tmp_path))["sha256"]["val"]


def test_grey_bytes_come_back_through_one_channel(tmp_path):
    """Luma of equal channels is the value itself, for all 256."""
    images = write_idx(tmp_path)
    greys = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    record = Preprocess(image_size=(16, 16), channels=1, mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    np.testing.assert_array_equal(record.apply(np.repeat(greys[0][:, :, None], 3, axis=2))[:, :, 0], greys[0])
    record = Preprocess(image_size=(5, 4), channels=1, mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    test = load(tmp_path).splits["test"]
    np.testing.assert_array_equal(record.apply(test.read(0))[:, :, 0], images["t10k"][0])


def test_channels_and_their_statistics_must_agree():
    with pytest.raises(InputError, match=r"data\.mean has 3 values for data\.channels 1: give one for each"):
        DataConfig(channels=1, mean=(0.5, 0.5, 0.5))
    with pytest.raises(InputError, match="mean has 3 values for channels 1"):
        Preprocess(image_size=(4, 4), channels=1)
    with pytest.raises(InputError, match=r"channels is 4: images have 3 \(RGB\) or 1 \(greyscale\)"):
        Preprocess(image_size=(4, 4), channels=4, mean=(0.5,) * 4, std=(0.5,) * 4)


@pytest.mark.skipif(not FASHION.is_dir(), reason=f"{FASHION} is not there: apt-get install dataset-fashion-mnist")
def test_load_dataset_reads_fashion_mnist():
    data = load(FASHION, val_fraction=0.1)
    assert list(data.classes) == FASHION_NAMES
    assert data.native_size == (28, 28)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 54_000, "val": 6_000, "test": 10_000}
    test = data.splits["test"]
    assert [data.classes[label] for label in test.labels[:4]] == ["Ankle boot", "Pullover", "Trouser", "Trouser"]
    assert np.bincount(test.labels).tolist() == [1000] * 10
    row = [98, 136, 110, 109, 110, 162, 135, 144, 149, 159, 167, 144, 158, 169, 119]  # through the first boot
    np.testing.assert_array_equal(test.read(0)[14, 12:27, 2], row)
    pixels = [data.splits[name].images[..., 0] for name in ("train", "val")]
    mean = sum(part.sum(dtype=np.int64) for part in pixels) / (60_000 * 28 * 28 * 255)
    assert mean == pytest.approx(0.2860405969887955, abs=1e-12)  # the published 0.2860
    assert Image.fromarray(test.read(0)).size == (28, 28)
