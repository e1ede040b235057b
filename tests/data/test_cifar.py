import os
import pickle
import urllib.error

import numpy as np
import pytest
from PIL import Image

from vitlab.data.datasets import load_dataset, load_split
from vitlab.errors import InputError

NAMES_10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NAMES_100 = [f"fine{number:03}" for number in range(100)]


def load(root, **options):
    return load_dataset(root, **{"val_fraction": 0.1, "seed": 0} | options)


def planes(images):
    """uint8 (N, 32, 32, 3) to the planes of a batch, (N, 3072)."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), 3072)


def colored(count, color=(10, 20, 30)):
    images = np.zeros((count, 32, 32, 3), np.uint8)
    images[:] = color
    images[:, 0, 1] = (1, 2, 3)  # tells rows from columns
    return images


def write_python_10(folder, images, labels, *, protocol=2, key=str):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 6):
        rows = slice(number - 1, None, 5)
        batch = {key("data"): planes(images[rows]), key("labels"): np.asarray(labels)[rows].tolist()}
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol))
    test = {key("data"): planes(images[:2]), key("labels"): list(labels[:2])}
    (folder / "test_batch").write_bytes(pickle.dumps(test, protocol))
    (folder / "batches.meta").write_bytes(pickle.dumps({key("label_names"): NAMES_10}, protocol))


def write_python_100(folder, images, labels):
    folder.mkdir(parents=True)
    batch = {"data": planes(images), "fine_labels": list(labels), "coarse_labels": [0] * len(labels)}
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps(batch, 2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": NAMES_100, "coarse_label_names": ["x"] * 20}, 2))


def write_binary(folder, images, labels, *, fine):
    folder.mkdir(parents=True)
    head = np.array([[7, label] if fine else [label] for label in labels], np.uint8)
    records = np.concatenate([head, planes(images)], axis=1).tobytes()
    names = ("train.bin", "test.bin") if fine else (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")
    for name in names:
        (folder / name).write_bytes(records)
    meta = "fine_label_names.txt" if fine else "batches.meta.txt"
    (folder / meta).write_text("\n".join(NAMES_100 if fine else NAMES_10) + "\n\n")


WRITERS = {
    "cifar-10-batches-py": lambda folder: write_python_10(folder, colored(20), list(range(10)) * 2),
    "cifar-10-batches-bin": lambda folder: write_binary(folder, colored(20), list(range(10)) * 2, fine=False),
    "cifar-100-python": lambda folder: write_python_100(folder, colored(200), list(range(100)) * 2),
    "cifar-100-binary": lambda folder: write_binary(folder, colored(200), list(range(100)) * 2, fine=True),
}


@pytest.mark.parametrize("folder", list(WRITERS))
def test_load_dataset_reads_cifar_planes_as_pixels(tmp_path, folder):
    WRITERS[folder](tmp_path / folder)
    parent, inside = load(tmp_path), load(tmp_path / folder)
    for data in (parent, inside):
        assert data.classes == tuple(NAMES_100 if "100" in folder else NAMES_10)
        assert data.native_size == (32, 32)
        assert set(data.splits) == {"train", "val", "test"}
        for split in data.splits.values():
            image = split.read(0)
            assert image.shape == (32, 32, 3)
            assert image[5, 6].tolist() == [10, 20, 30]
            assert image[0, 1].tolist() == [1, 2, 3]
            assert image[1, 0].tolist() == [10, 20, 30]
    assert set(parent.splits["test"].labels.tolist()) <= set(range(len(parent.classes)))
    if "100" in folder:
        assert parent.splits["test"].labels.tolist() == list(range(100)) * 2  # fine labels, not the 20 coarse ones


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("key", [str, str.encode])
def test_load_dataset_reads_cifar_pickles_of_any_protocol(tmp_path, protocol, key):
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    write_python_10(tmp_path, images, [n % 10 for n in range(20)], protocol=protocol, key=key)
    test = load(tmp_path).splits["test"]
    np.testing.assert_array_equal(np.stack([test.read(0), test.read(1)]), images[:2])


def test_load_dataset_reads_pickles_of_python_2(tmp_path):
    """The authors' files: text as Python 2 bytes."""
    write_python_10(tmp_path, colored(20), [n % 10 for n in range(20)])
    data = planes(colored(1)).tobytes()

    def text(value):
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    array += b"(K\x01(K\x01M\x00\x0ctcnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|")
    array += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
    batch = b"\x80\x02}(" + text(b"data") + array + text(b"labels") + b"]K\x03a" + b"u."
    (tmp_path / "test_batch").write_bytes(batch)
    test = load(tmp_path).splits["test"]
    assert test.labels.tolist() == [3]
    np.testing.assert_array_equal(test.read(0), colored(1)[0])


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("file", ["data_batch_3", "batches.meta"])
def test_load_dataset_runs_no_code_of_a_pickle(tmp_path, file):
    write_python_10(tmp_path / "c", colored(20), [n % 10 for n in range(20)])
    marker = tmp_path / "marker"
    (tmp_path / "c" / file).write_bytes(pickle.dumps({"data": Hostile(marker), "label_names": NAMES_10}, 2))
    with pytest.raises(InputError, match=rf"{file} is refused: its pickle asks for posix\.mkdir"):
        load(tmp_path / "c")
    assert not marker.exists()


def test_load_dataset_refuses_arrays_of_objects(tmp_path):
    write_python_10(tmp_path, colored(20), [n % 10 for n in range(20)])
    batch = {"data": np.array([{}, []], dtype=object), "labels": [0, 1]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(InputError, match="array of objects"):
        load(tmp_path)


def test_load_dataset_names_missing_batches(tmp_path):
    for folder, write in WRITERS.items():
        write(tmp_path / folder / folder)
    (tmp_path / "cifar-10-batches-py/cifar-10-batches-py/data_batch_4").unlink()
    with pytest.raises(InputError, match=r"cifar-10-batches-py lacks data_batch_4: CIFAR-10 needs data_batch_1"):
        load(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-100-binary/cifar-100-binary/fine_label_names.txt").unlink()
    with pytest.raises(InputError, match=r"lacks fine_label_names\.txt"):
        load(tmp_path / "cifar-100-binary/cifar-100-binary")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a CIFAR batch"),
        (b"garbage", "cannot be read as a CIFAR batch"),
        (pickle.dumps([1, 2]), "holds a list, not a dictionary"),
        (pickle.dumps({"labels": [1]}), "holds no `data`"),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 2),
            "holds no `labels` for each of its 2",
        ),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, 2), "has labels from 10 to 10"),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [[1], [2, 3]]}, 2),
            "holds no `labels` for each of its 2",
        ),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0.5, 10**400]}, 2),
            "holds no `labels` for each of its 2",
        ),
    ],
)
def test_load_dataset_refuses_damaged_batches(tmp_path, content, message):
    write_python_10(tmp_path, colored(20), [n % 10 for n in range(20)])
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(InputError, match=f"data_batch_2.*{message}|{message}"):
        load(tmp_path)


@pytest.mark.parametrize("names", [7, None, "abcdefghij", dict.fromkeys(NAMES_10), [*NAMES_10[:9], [b"truck"]]])
def test_load_dataset_refuses_class_names_that_are_no_list_of_texts(tmp_path, names):
    write_python_10(tmp_path, colored(20), [n % 10 for n in range(20)])
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, 2))
    with pytest.raises(InputError, match=r"batches\.meta holds no list of texts `label_names`: .*unpack it again"):
        load(tmp_path)


def test_load_dataset_refuses_class_names_that_are_no_text(tmp_path):
    WRITERS["cifar-10-batches-bin"](tmp_path / "c")
    (tmp_path / "c/batches.meta.txt").write_bytes("\n".join(NAMES_10).encode() + b"\xff\n")
    with pytest.raises(InputError, match=r"batches\.meta\.txt cannot be read as a list of class names .*invalid start"):
        load(tmp_path / "c")


def test_load_dataset_refuses_cut_binary_batches(tmp_path):
    WRITERS["cifar-10-batches-bin"](tmp_path / "c")
    batch = tmp_path / "c/data_batch_1.bin"
    batch.write_bytes(batch.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"data_batch_1\.bin has 61459 bytes: records of 3073 do not fill it"):
        load(tmp_path / "c")


def test_load_dataset_explains_cifar_at_the_wrong_level(tmp_path):
    WRITERS["cifar-10-batches-py"](tmp_path / "up/down/cifar-10-batches-py")
    with pytest.raises(InputError, match=rf"holds no images: .*perhaps {tmp_path}/up/down was meant"):
        load(tmp_path / "up")
    with pytest.raises(InputError, match="test_batch is a file: give the folder"):
        load(tmp_path / "up/down/cifar-10-batches-py/test_batch")


def test_load_dataset_refuses_two_cifars_in_one_folder(tmp_path):
    for folder in ("cifar-10-batches-py", "cifar-100-python"):
        WRITERS[folder](tmp_path / folder)
    with pytest.raises(InputError, match="give one of them"):
        load(tmp_path)


def test_load_dataset_reads_a_packed_folder_as_the_folder(tmp_path, cifar_jpegs):
    """The same JPEGs as files and as batches: the same pixels and classes, image by image."""
    paths = sorted(cifar_jpegs.glob("*/*.jpg"))[:205]
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    labels = [NAMES_10.index(path.parent.name) for path in paths]
    write_python_10(tmp_path / "py", images, labels)
    write_binary(tmp_path / "bin", images, labels, fine=False)
    folder, _ = load_split(cifar_jpegs, "all", classes=NAMES_10, val_fraction=0.1, seed=0)
    from_files = {path: (folder.read(i), folder.labels[i]) for i, path in enumerate(folder.paths)}
    for root, order in (
        (tmp_path / "py", [i for n in range(5) for i in range(n, len(paths), 5)]),
        (tmp_path / "bin", None),
    ):
        data = load(root)
        packed = {}
        for name in ("train", "val"):
            for row, path in enumerate(data.splits[name].paths):
                file, index = path.rsplit("#", 1)
                number = int("".join(c for c in file.rsplit("/", 1)[1] if c.isdigit()))
                where = int(index) * 5 + number - 1 if order else int(index)
                packed[where] = (data.splits[name].read(row), data.splits[name].labels[row])
        assert len(packed) == len(paths)
        for where, path in enumerate(paths):
            np.testing.assert_array_equal(packed[where][0], from_files[str(path)][0])
            assert packed[where][1] == from_files[str(path)][1]


def test_load_split_matches_cifar_by_name(tmp_path):
    WRITERS["cifar-10-batches-py"](tmp_path / "c")
    wanted = [*reversed(NAMES_10), "extra"]
    split, notes = load_split(tmp_path / "c", "test", classes=wanted, val_fraction=0.1, seed=0)
    assert split.labels.tolist() == [9, 8]
    assert notes == (
        f"{tmp_path}/c holds no image of truck, ship, horse, frog, dog and 4 more; "
        "their places in the class order stay",
    )
    with pytest.raises(InputError, match="the model knows 7: the model lacks"):
        load_split(tmp_path / "c", "train", classes=NAMES_10[:7], val_fraction=0.1, seed=0)
    with pytest.raises(InputError, match="has train, val, test but no all split"):
        load_split(tmp_path / "c", "all", classes=NAMES_10, val_fraction=0.1, seed=0)


def test_load_dataset_downloads_only_when_asked(tmp_path, monkeypatch):
    import torchvision.datasets.utils as utils

    asked = []

    def fail(url, root, **options):
        asked.append((url.rsplit("/", 1)[1], root))
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(utils, "download_and_extract_archive", fail)
    with pytest.raises(InputError, match=r"cifar10 does not exist: .*data\.download fetches CIFAR"):
        load(tmp_path / "cifar10")
    assert asked == []
    for name, archive in (("cifar10", "cifar-10-python.tar.gz"), ("my-CIFAR-100", "cifar-100-python.tar.gz")):
        with pytest.raises(InputError, match=r"could not be fetched .*no route to host") as caught:
            load(tmp_path / name, download=True)
        assert "\n" not in str(caught.value)
        assert asked.pop() == (archive, str(tmp_path / name))
    with pytest.raises(InputError, match="name the folder cifar10 or cifar100"):
        load(tmp_path / "pictures", download=True)


def test_load_dataset_downloads_nothing_over_data_that_is_there(tmp_path, monkeypatch):
    import torchvision.datasets.utils as utils

    monkeypatch.setattr(utils, "download_and_extract_archive", None)
    WRITERS["cifar-10-batches-py"](tmp_path / "cifar10")
    assert len(load(tmp_path / "cifar10", download=True).splits["test"]) == 2
