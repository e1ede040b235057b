import numpy as np
import pytest

from vitlab.data.datasets import load_dataset, load_split
from vitlab.errors import InputError


def load(root, **options):
    return load_dataset(root, **{"val_fraction": 0.25, "seed": 0} | options)


def evaluate(root, split, classes, **options):
    return load_split(root, split, classes=classes, **{"val_fraction": 0.25, "seed": 0} | options)


def by_class(split, classes):
    """Names of the folders that each label's files lie in."""
    folders = [path.split("/")[-2] for path in split.paths]
    return {
        classes[label]: {f for f, own in zip(folders, split.labels, strict=True) if own == label}
        for label in set(split.labels)
    }


def test_load_dataset_matches_classes_by_name_where_val_lacks_one(tmp_path, write_classes):
    write_classes(tmp_path / "train", [0, 90, 180, 270])
    write_classes(tmp_path / "val", [0, 90, 270])
    data = load(tmp_path)
    assert data.classes == ("0", "180", "270", "90")  # by code point, as torchvision
    for split in data.splits.values():
        assert all(folders == {name} for name, folders in by_class(split, data.classes).items())
    assert set(data.splits["val"].labels.tolist()) == {0, 2, 3}
    assert any("val" in note and "180" in note for note in data.notes)
    # An always-right model scores 100 %: labels of val are those of the same names in training.
    assert (data.splits["val"].labels == [data.classes.index(p.split("/")[-2]) for p in data.splits["val"].paths]).all()


def test_load_dataset_refuses_a_class_that_training_never_saw(tmp_path, write_classes):
    write_classes(tmp_path / "train", ["ant", "bee"])
    write_classes(tmp_path / "val", ["ant", "cat"])
    with pytest.raises(InputError, match=f"{tmp_path}/val holds the class cat, which {tmp_path}/train lacks"):
        load(tmp_path)


def test_load_dataset_sorts_classes_as_torchvision(tmp_path, write_classes):
    from torchvision.datasets import ImageFolder

    names = ["b", "B", "a10", "a2", "_x", "ä", "z", "Z9"]
    write_classes(tmp_path, names, count=2)
    assert list(load(tmp_path).classes) == ImageFolder(tmp_path).classes


def test_load_dataset_counts_ignored_files(tmp_path, write_classes, write_image):
    for name in ("a.JPG", "b.Jpeg", "c.PNG", "d.webp", "e.jpg"):
        for part in ("train/x", "train/y", "val/x", "val/y"):
            write_image(tmp_path / part / name)
    (tmp_path / "train/x/notes.txt").write_text("no image")
    (tmp_path / "train/x/.DS_Store").write_text("no image")
    data = load(tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 10, "val": 10}
    assert any("2 other files ignored" in note for note in data.notes)
    assert len(evaluate(tmp_path, "val", data.classes)[0]) == 10


@pytest.mark.parametrize("flat", ["val", "val/all"])
def test_load_dataset_states_the_layout_where_val_is_flat(tmp_path, write_classes, write_image, flat):
    write_classes(tmp_path / "train", ["n01", "n02", "n03"])
    for number in range(6):
        write_image(tmp_path / flat / f"ILSVRC_{number}.jpeg").rename(tmp_path / flat / f"ILSVRC_{number}.JPEG")
    for attempt in (lambda: load(tmp_path), lambda: evaluate(tmp_path, "val", ["n01", "n02", "n03"])):
        with pytest.raises(InputError) as caught:
            attempt()
        assert str(tmp_path / "val") in str(caught.value)
        assert "ROOT/train/CLASS/IMAGE with ROOT/val/CLASS/IMAGE" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_load_dataset_keeps_an_empty_class_only_when_allowed(tmp_path, write_classes):
    write_classes(tmp_path / "train", ["a", "c"])
    write_classes(tmp_path / "val", ["a", "c"])
    (tmp_path / "train/b").mkdir()
    (tmp_path / "train/b/notes.txt").write_text("no image")
    with pytest.raises(InputError, match=f"class folder {tmp_path}/train/b holds no images .*allow_empty_classes"):
        load(tmp_path)
    data = load(tmp_path, allow_empty_classes=True)
    assert data.classes == ("a", "b", "c")
    assert set(data.splits["train"].labels.tolist()) == set(data.splits["val"].labels.tolist()) == {0, 2}


def test_load_dataset_allows_empty_classes_in_a_cut_folder(tmp_path, write_classes):
    write_classes(tmp_path, ["a", "c"])
    (tmp_path / "b").mkdir()
    data = load(tmp_path, allow_empty_classes=True)
    assert [len(data.splits[name]) for name in ("train", "val")] == [6, 2]
    assert set(data.splits["val"].labels.tolist()) == {0, 2}


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_load_dataset_reads_every_name_of_validation(tmp_path, write_classes, name):
    write_classes(tmp_path / "train", ["a", "b"])
    write_classes(tmp_path / name, ["a", "b"], count=3)
    data = load(tmp_path)
    assert len(data.splits["train"]) == 8
    assert all(f"/{name}/" in path for path in data.splits["val"].paths)


def test_load_dataset_refuses_two_validation_folders(tmp_path, write_classes):
    for name in ("train", "val", "valid"):
        write_classes(tmp_path / name, ["a", "b"])
    with pytest.raises(InputError, match="are both the val split"):
        load(tmp_path)


def test_load_dataset_cuts_validation_from_training_and_never_from_test(tmp_path, write_classes):
    write_classes(tmp_path / "train", ["a", "b"], count=8)
    write_classes(tmp_path / "test", ["a", "b"], count=5)
    data = load(tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 12, "val": 4, "test": 10}
    assert all("/train/" in path for name in ("train", "val") for path in data.splits[name].paths)
    assert all("/test/" in path for path in data.splits["test"].paths)
    assert not set(data.splits["train"].paths) & set(data.splits["val"].paths)
    assert "validation: 4 of 16 training images, a share of 0.25 by class, seed 0" in data.notes


def test_load_dataset_leaves_out_a_test_folder_without_labels(tmp_path, write_classes, write_image):
    write_classes(tmp_path / "train", ["a", "b"])
    write_image(tmp_path / "test/0.png")
    data = load(tmp_path)
    assert set(data.splits) == {"train", "val"}
    assert any(note.startswith("test split left out:") for note in data.notes)


def test_load_dataset_reads_nested_folders_and_follows_links(tmp_path, write_classes, write_image):
    write_classes(tmp_path / "data", ["a", "b"])
    write_image(tmp_path / "data/a/deep/er/x.png")
    (tmp_path / "data/a/loop").symlink_to(tmp_path / "data", target_is_directory=True)
    elsewhere = write_classes(tmp_path / "else", ["c"])
    (tmp_path / "data/c").symlink_to(elsewhere / "c", target_is_directory=True)
    data = load(tmp_path / "data")
    assert data.classes == ("a", "b", "c")
    assert sum(len(split) for split in data.splits.values()) == 4 + 1 + 4 + 4


def test_load_dataset_counts_an_image_in_every_class_that_links_to_it_as_torchvision(tmp_path, write_classes):
    from torchvision.datasets import ImageFolder

    write_classes(tmp_path / "data", ["a", "b/sub", "c"])
    (tmp_path / "data/a/x").symlink_to("../b/sub", target_is_directory=True)
    (tmp_path / "data/d").symlink_to("c", target_is_directory=True)
    classes = ["a", "b", "c", "d"]
    split, _ = evaluate(tmp_path / "data", "all", classes)
    peer = ImageFolder(tmp_path / "data")
    assert peer.classes == classes
    assert sorted(zip(split.paths, split.labels.tolist(), strict=True)) == sorted(peer.samples)
    assert np.bincount(split.labels).tolist() == [8, 4, 4, 4]


def test_load_dataset_takes_a_class_named_like_a_split(tmp_path, write_classes):
    write_classes(tmp_path, ["car", "plane", "train"])
    assert load(tmp_path).classes == ("car", "plane", "train")


def test_load_dataset_notes_what_it_leaves_out(tmp_path, write_classes, write_image):
    write_classes(tmp_path / "train", ["a", "b"])
    write_image(tmp_path / "train/loose.png")
    (tmp_path / "annotations").mkdir()
    notes = load(tmp_path).notes
    assert any("1 image in no class folder" in note for note in notes)
    assert any("annotations" in note for note in notes)


def test_load_dataset_explains_roots_of_another_layout(tmp_path, write_classes, write_image):
    write_image(tmp_path / "images/a.png")
    write_classes(tmp_path / "single", ["only"])
    write_classes(tmp_path / "up/set/train", ["a", "b"])
    write_classes(tmp_path / "eval/val", ["a", "b"])
    (tmp_path / "empty/a").mkdir(parents=True)
    layout = "ROOT/train/CLASS/IMAGE"
    for name, message in {
        "gone": "gone does not exist",
        "images/a.png": "is a file: give the folder",
        "images": "holds 1 image but no class folders",
        "single": "only one class folder, only",
        "up": f"only one class folder, set.*perhaps {tmp_path}/up/set was meant",
        "eval": "has val but no train folder",
        "empty": "holds no images",
    }.items():
        with pytest.raises(InputError, match=f"{message}.*") as caught:
            load(tmp_path / name)
        assert layout in str(caught.value)
        assert "\n" not in str(caught.value)


def test_load_split_gives_the_cut_of_training(tmp_path, write_classes):
    write_classes(tmp_path, ["a", "b", "c"], count=9)
    data = load(tmp_path, seed=5)
    for name in ("train", "val"):
        split, _ = evaluate(tmp_path, name, data.classes, seed=5)
        assert split.paths == data.splits[name].paths
        assert split.labels.tolist() == data.splits[name].labels.tolist()
    assert len(evaluate(tmp_path, "all", data.classes)[0]) == 27


def test_load_split_keeps_the_models_class_order(tmp_path, write_classes):
    write_classes(tmp_path / "val", ["a", "b", "c"], count=2)
    split, _ = evaluate(tmp_path, "val", ["c", "x", "a", "b"])  # no train folder is needed
    assert split.labels.tolist() == [2, 2, 3, 3, 0, 0]


def test_load_split_reads_a_folder_of_one_class_alike(tmp_path, write_classes):
    classes = ["a", "b", "c"]
    write_classes(tmp_path / "whole", classes, count=8)
    whole, _ = evaluate(tmp_path / "whole", "val", classes)
    (tmp_path / "one").mkdir()
    (tmp_path / "whole/b").rename(tmp_path / "one/b")
    one, notes = evaluate(tmp_path / "one", "val", classes)
    names = [path.rsplit("/", 1)[1] for path in whole.paths if "/b/" in path]
    assert [path.rsplit("/", 1)[1] for path in one.paths] == names
    assert one.labels.tolist() == [1] * len(names)
    assert any("a, c" in note for note in notes)


def test_load_split_refuses_classes_that_the_model_lacks(tmp_path, write_classes):
    write_classes(tmp_path, [f"k{i}" for i in range(7)], count=2)
    with pytest.raises(InputError, match="holds 7 classes, the model knows 10: the model lacks k0"):
        evaluate(tmp_path, "all", [f"c{i}" for i in range(10)])


def test_load_split_lists_the_splits_there_are(tmp_path, write_classes):
    write_classes(tmp_path / "sets/train", ["a", "b"])
    write_classes(tmp_path / "sets/val", ["a", "b"])
    write_classes(tmp_path / "flat", ["a", "b"])
    for root, split, message in (
        ("sets", "test", "has train, val but no test split"),
        ("sets", "all", "has train, val but no all split"),
        ("flat", "test", "flat is not divided into splits and has no test split: evaluate `val`"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(tmp_path / root, split, ["a", "b"])


def test_load_split_reads_train_whole_beside_a_val_folder(tmp_path, write_classes):
    write_classes(tmp_path / "train", ["a", "b"], count=8)
    write_classes(tmp_path / "val", ["a", "b"])
    assert len(evaluate(tmp_path, "train", ["a", "b"])[0]) == 16
    np.testing.assert_array_equal(evaluate(tmp_path, "val", ["b", "a"])[0].labels, [1] * 4 + [0] * 4)
