import os

import numpy as np
import pytest

from vitlab.data.images import ImageError
from vitlab.data.splits import (
    ArraySplit,
    Dataset,
    FileSplit,
    cut_validation,
    fingerprint,
    locate_split,
    match_classes,
    may_be_same,
    split_validation,
)
from vitlab.errors import InputError


def array_split(counts, name="train"):
    labels = np.repeat(np.arange(len(counts)), counts)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 2, 3, 3), dtype=np.uint8)
    return ArraySplit(name=name, labels=labels, paths=[f"p{i}" for i in range(len(labels))], images=images)


def cut(counts, fraction, seed=0, classes=None):
    return cut_validation(
        array_split(counts), classes or [f"c{i}" for i in range(len(counts))], fraction=fraction, seed=seed
    )


def counts_of(labels, num_classes):
    return np.bincount(labels, minlength=num_classes).tolist()


def test_cut_validation_rounds_by_class_and_leaves_one_on_each_side():
    counts = [0, 1, 2, 3, 10, 25, 100]
    labels = np.repeat(np.arange(7), counts)
    train, val, _ = cut(counts, 0.1)
    assert counts_of(labels[val], 7) == [0, 0, 1, 1, 1, 2, 10]
    train, val, _ = cut(counts, 0.9)
    assert counts_of(labels[train], 7) == [0, 1, 1, 1, 1, 3, 10]  # 25 * .9 = 22.5 rounds to 22, half to even
    assert sorted([*train, *val]) == list(range(sum(counts)))
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(val) > 0)


def test_cut_validation_depends_on_the_seed():
    assert cut([50, 50], 0.2, seed=1)[1].tolist() == cut([50, 50], 0.2, seed=1)[1].tolist()
    assert cut([50, 50], 0.2, seed=1)[1].tolist() != cut([50, 50], 0.2, seed=2)[1].tolist()


def test_cut_validation_cuts_a_class_alike_without_the_others():
    both = cut([40, 30], 0.2, classes=["cat", "dog"])[1]
    alone = cut([30], 0.2, classes=["dog"])[1]
    assert alone.tolist() == [row - 40 for row in both if row >= 40]


def test_cut_validation_says_what_it_cut():
    assert cut([40, 30], 0.2, seed=3)[2] == "validation: 14 of 70 training images, a share of 0.2 by class, seed 3"


def test_cut_validation_needs_two_images_of_a_class():
    with pytest.raises(InputError, match="leave none for validation"):
        cut([1, 1], 0.5)


def test_split_validation_gives_both_parts_of_the_cut():
    split, classes = array_split([4, 6]), ["x", "y"]
    parts, note = split_validation(split, classes, fraction=0.25, seed=2)
    train, val, line = cut_validation(split, classes, fraction=0.25, seed=2)
    assert note == line
    for name, rows in (("train", train), ("val", val)):
        assert parts[name].name == name
        assert parts[name].paths == [f"p{row}" for row in rows]
        assert parts[name].labels.tolist() == split.labels[rows].tolist()


@pytest.mark.parametrize(
    ("split", "parts", "want"),
    [
        ("train", ["train", "val"], ("train", False)),
        ("val", ["train", "val"], ("val", False)),
        ("val", ["val"], ("val", False)),
        ("train", ["train", "test"], ("train", True)),
        ("val", ["train", "test"], ("train", True)),
        ("test", ["train", "test"], ("test", False)),
        ("train", [], ("all", True)),
        ("val", [], ("all", True)),
        ("all", [], ("all", False)),
    ],
)
def test_locate_split_says_where_a_split_lies_and_whether_it_is_cut(split, parts, want):
    assert locate_split(split, parts, "DIR") == want


@pytest.mark.parametrize(
    ("split", "parts", "message"),
    [
        ("test", [], "DIR is not divided into splits and has no test split: evaluate `val`"),
        ("test", ["train", "val"], "DIR has train, val but no test split"),
        ("train", ["val", "test"], "DIR has val, test but no train split"),
        ("val", ["test"], "DIR has test but no val split"),
        ("all", ["train"], "DIR has train but no all split"),
    ],
)
def test_locate_split_names_what_there_is(split, parts, message):
    with pytest.raises(InputError, match=message):
        locate_split(split, parts, "DIR")


def test_match_classes_translates_labels_by_name():
    split, notes = match_classes(array_split([2, 1]), ["dog", "ant"], ["ant", "bee", "dog"], "DIR")
    assert split.labels.tolist() == [2, 2, 0]
    assert notes == ["DIR holds no image of bee; their places in the class order stay"]


def test_match_classes_names_what_differs():
    with pytest.raises(
        InputError, match="DIR holds 2 classes, the model knows 3: the model lacks dog and DIR lacks bee, cat"
    ):
        match_classes(array_split([1, 1]), ["ant", "dog"], ["ant", "bee", "cat"], "DIR")


def test_array_split_reads_copies_and_subsets():
    split = array_split([3, 2])
    split.read(1)[:] = 0
    assert split.images[1].max() > 0
    part = split.subset("val", np.array([4, 0]))
    assert (part.name, part.labels.tolist(), list(part.paths)) == ("val", [1, 0], ["p4", "p0"])
    np.testing.assert_array_equal(part.read(0), split.images[4])


def test_file_split_of_classes_labels_in_the_mappings_order():
    split = FileSplit.of_classes("val", {"b": ["b/1", "b/2"], "empty": [], "a": ["a/1"]})
    assert (split.name, split.paths) == ("val", ["b/1", "b/2", "a/1"])
    assert split.labels.tolist() == [0, 0, 2]
    assert split.labels.dtype == np.int64


def test_stamps_change_with_place_size_and_time_of_a_file(tmp_path, write_image, monkeypatch):
    path = write_image(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)

    def stamp(path):
        return next(FileSplit(name="val", labels=np.array([0]), paths=[str(path)]).stamps())

    first = stamp(path)
    assert stamp("a.png") == stamp("../" + tmp_path.name + "/a.png") == first
    time = os.stat(path).st_mtime_ns
    os.utime(path, ns=(time, time + 1))
    assert stamp(path) != first
    os.utime(path, ns=(time, time))
    assert stamp(path) == first
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path, ns=(time, time))
    assert stamp(path) != first
    path.rename(tmp_path / "b.png")
    assert stamp(path) not in (first, stamp(tmp_path / "b.png"))


def test_stamps_of_arrays_are_their_pixels():
    split = array_split([2])
    assert list(split.stamps()) == [image.tobytes() for image in split.images]


def test_file_split_reads_files_and_reports_bad_ones(tmp_path, write_image):
    paths = [str(write_image(tmp_path / "a.png", (1, 2, 3))), str(tmp_path / "gone.png")]
    split = FileSplit(name="files", labels=np.array([-1, -1]), paths=paths)
    assert split.read(0)[0, 0].tolist() == [1, 2, 3]
    with pytest.raises(ImageError, match=r"gone\.png"):
        split.read(1)


def file_fingerprint(root):
    paths = sorted(map(str, root.rglob("*.png")))
    split = FileSplit(name="val", labels=np.arange(len(paths)) % 2, paths=paths)
    return fingerprint(split)


def test_fingerprint_of_files_stays_when_the_folder_moves_and_changes_with_a_file(tmp_path, write_classes, write_image):
    root = write_classes(tmp_path / "one", ["a", "b"])
    first = file_fingerprint(root)
    assert first["counts"] == {"val": 8}
    root = root.rename(tmp_path / "two")
    assert file_fingerprint(root) == first
    write_image(root / "a" / "00.png", size=(30, 40))
    assert file_fingerprint(root) != first
    (root / "a" / "gone.png").symlink_to(root / "nowhere")
    assert file_fingerprint(root)["counts"] == {"val": 9}


def test_fingerprint_with_contents_sees_a_changed_pixel_under_the_same_name_and_size(tmp_path):
    def record(*, contents):
        return fingerprint(FileSplit.of_classes("val", {"a": [str(path)]}), contents=contents)

    path = tmp_path / "a.bmp"
    path.write_bytes(b"one")
    first, plain = record(contents=True), record(contents=False)
    assert "contents" not in plain
    assert may_be_same(first, plain)
    path.write_bytes(b"two")
    assert record(contents=False) == plain
    assert not may_be_same(first, record(contents=True))
    assert may_be_same(first, record(contents=False))
    path.unlink()
    assert not may_be_same(first, record(contents=True))
    assert not may_be_same(plain, record(contents=False))


def test_fingerprint_of_arrays_covers_pixels_labels_and_classes():
    def record(split, classes=("x", "y")):
        return fingerprint(Dataset(classes=classes, splits={"train": split}))

    split = array_split([3, 2])
    first = record(split)
    assert first["classes"] == ["x", "y"]
    assert first["counts"] == {"train": 5}
    assert record(array_split([3, 2])) == first
    assert record(array_split([2, 3]))["sha256"] != first["sha256"]
    split.images[4, 1, 2, 0] ^= 1
    assert record(split)["sha256"] != first["sha256"]
