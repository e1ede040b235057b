import csv
import json

import numpy as np
import pytest

from vitlab.data.datasets import fingerprint, load_dataset, load_split
from vitlab.errors import InputError


def load(root, **options):
    return load_dataset(root, **{"val_fraction": 0.25, "seed": 0} | options)


def evaluate(root, split, classes, **options):
    return load_split(root, split, classes=classes, **{"val_fraction": 0.25, "seed": 0} | options)


@pytest.fixture
def images(tmp_path, write_classes):
    """A folder img with the images 00.png to 03.png of the classes 007, b and c."""
    return write_classes(tmp_path / "img", ["007", "b", "c"])


def write_csv(path, text):
    path.write_bytes(text.encode())
    return path


def write_manifest(path, rows):
    """Write rows, dictionaries, in the format of the path's suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def rows_of(images, split=None):
    """A row for each image below a folder; `split` gives the split of the image of a number."""
    rows = []
    for path in sorted(images.glob("*/*.png")):
        row = {"path": str(path.relative_to(images.parent)), "label": path.parent.name}
        rows.append(row | ({"split": split(int(path.stem))} if split else {}))
    return rows


def pairs(split, classes):
    return {(path, classes[label]) for path, label in zip(split.paths, split.labels, strict=True)}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "CSV"])
def test_manifest_of_a_folder_gives_the_folders_own_splits(tmp_path, images, suffix):
    """Whatever the order of its rows: classes, labels, images and the validation cut are those of the folder."""
    rows = rows_of(images)
    np.random.default_rng(0).shuffle(rows)
    manifest, folder = load(write_manifest(tmp_path / f"list.{suffix}", rows), seed=4), load(images, seed=4)
    assert manifest.classes == folder.classes == ("007", "b", "c")
    assert set(manifest.splits) == set(folder.splits) == {"train", "val"}
    for name, split in folder.splits.items():
        assert manifest.splits[name].paths == split.paths
        assert manifest.splits[name].labels.tolist() == split.labels.tolist()
        np.testing.assert_array_equal(manifest.splits[name].read(1), split.read(1))
    assert manifest.notes == ("validation: 3 of 12 training images, a share of 0.25 by class, seed 4",)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_manifest_divides_by_its_splits(tmp_path, images, suffix):
    rows = rows_of(images, ["train", " Validation ", "test", "train"].__getitem__)
    data = load(write_manifest(tmp_path / f"list.{suffix}", rows))
    assert {name: [path[-6:] for path in split.paths] for name, split in data.splits.items()} == {
        "train": ["00.png", "03.png"] * 3,
        "val": ["01.png"] * 3,
        "test": ["02.png"] * 3,
    }
    assert all(split.labels.tolist() == sorted(split.labels) for split in data.splits.values())
    assert data.notes == ()
    for name, split in data.splits.items():
        again, notes = evaluate(tmp_path / f"list.{suffix}", name, data.classes)
        assert (again.name, again.paths, notes) == (name, split.paths, ())
        assert fingerprint(again)["sha256"][name] == fingerprint(data)["sha256"][name]


def test_manifest_without_validation_rows_is_cut(tmp_path, images):
    rows = rows_of(images, ["train", "train", "train", "test"].__getitem__)
    path = write_manifest(tmp_path / "list.csv", rows)
    data = load(path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 6, "val": 3, "test": 3}
    again, notes = evaluate(path, "val", ["c", "b", "007"])
    assert pairs(again, ["c", "b", "007"]) == pairs(data.splits["val"], data.classes)
    assert notes == ("validation: 3 of 9 training images, a share of 0.25 by class, seed 0",)


def test_load_split_takes_an_undivided_manifest_whole(tmp_path, images):
    path = write_manifest(tmp_path / "list.jsonl", rows_of(images))
    split, _ = evaluate(path, "all", ["c", "x", "b", "007"])  # the model's order
    assert np.bincount(split.labels).tolist() == [4, 0, 4, 4]
    with pytest.raises(InputError, match=r"list\.jsonl is not divided into splits and has no test split"):
        evaluate(path, "test", ["007", "b", "c"])
    with pytest.raises(InputError, match=r"list\.jsonl holds 3 classes, the model knows 1: the model lacks b, c"):
        evaluate(path, "all", ["007"])
    divided = write_manifest(tmp_path / "divided.csv", rows_of(images, ["train", "val", "train", "val"].__getitem__))
    with pytest.raises(InputError, match=r"divided\.csv has train, val but no all split"):
        evaluate(divided, "all", ["007", "b", "c"])


def test_manifest_keeps_labels_as_text(tmp_path, images):
    text = "\ufeffpath,label\r\nimg/007/00.png,007\r\nimg/007/01.png, 07 \r\nimg/b/00.png,7\r\nimg/c/00.png,1e3\r\n"
    path = write_csv(tmp_path / "list.csv", text)
    assert evaluate(path, "all", ["007", "07", "1e3", "7"])[0].labels.tolist() == [0, 1, 2, 3]
    lines = ['\ufeff{"path": "img/007/00.png", "label": 7}', "", '{"path": "img/b/00.png", "label": "007"}', "  "]
    lines += ['{"label": 1.50, "path": "img/b/01.png"}', '{"path": "img/c/00.png", "label": -12345678901234567890}']
    path = write_csv(tmp_path / "list.jsonl", "\r\n".join(lines))
    assert evaluate(path, "all", ["7", "007", "1.50", "-12345678901234567890"])[0].labels.tolist() == [3, 1, 2, 0]


def test_manifest_reads_quoted_cells_and_odd_names(tmp_path, write_image):
    odd = 'a, "b"\u2028.png'
    write_image(tmp_path / "sub" / odd)
    write_image(tmp_path / "ü.png")
    cell = odd.replace('"', '""')
    path = write_csv(tmp_path / "list.csv", f'Path , LABEL\n"sub/{cell}","big, red"\n{tmp_path}/ü.png,"two\nlines"\n')
    split, _ = evaluate(path, "all", ["big, red", "two\nlines"])
    assert split.paths == [str(tmp_path / "sub" / odd), str(tmp_path / "ü.png")]
    path = write_manifest(tmp_path / "list.jsonl", [{"path": f"sub/{odd}", "label": "x"}])
    path.write_text(json.dumps({"path": f"sub/{odd}", "label": "x"}, ensure_ascii=False), encoding="utf-8")
    assert evaluate(path, "all", ["x"])[0].paths == [str(tmp_path / "sub" / odd)]


def test_manifest_notes_columns_and_rows_that_it_leaves_out(tmp_path, images):
    rows = [row | {"width": 9, "note": "x"} for row in rows_of(images)]
    rows += [rows[2], rows[0] | {"path": "img/../img/007/00.png"}]
    for suffix in ("csv", "jsonl"):
        path = write_manifest(tmp_path / f"list.{suffix}", rows)
        line = 14 if suffix == "csv" else 13
        assert load(path).notes[:2] == (
            f"{path}: other columns ignored: width, note",
            f"{path}: 2 repeated rows left out, such as line {line}",
        )
        assert len(evaluate(path, "all", ["007", "b", "c"])[0]) == 12


def test_manifest_does_not_count_unlisted_files(tmp_path, images, write_image):
    path = write_manifest(tmp_path / "list.csv", rows_of(images))
    write_image(images / "b/unlisted.png")
    (tmp_path / "img/c/broken.png").symlink_to("nowhere")
    assert sum(map(len, load(path).splits.values())) == 12


HEAD = "path,label,split\nimg/b/00.png,b,train\nimg/c/00.png,c,train\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("img/b/09.png,b,train", r"line 4: .*img/b/09\.png does not exist \(1 of 3 images missing\): give paths that"),
        ("img/b/01,b,train", r"line 4: .*img/b/01 does not exist .*: perhaps .*img/b/01\.png was meant"),
        ("img/b,b,train", r"line 4: .*img/b is a folder, or another .*: list image files"),
        ("img/b/01.png,b,dev", r"line 4: split is dev: give one of train, val, valid, validation, test"),
        ("img/b/01.png,b, ", r"line 4: split is empty"),
        (" ,b,train", r"line 4: path is empty"),
        ("img/b/01.png,,train", r"line 4: label is empty"),
        ("img/b/01.png,b", r"line 4: 2 cells under a header of 3"),
        ("img/b/01.png,b,train,x", r"line 4: 4 cells under a header of 3"),
        ("\n\nimg/b/01.png,b", r"line 6: 2 cells"),
        ("img/b/00.png,c,train", r"line 4: .*img/b/00\.png is labelled c, and b in line 2"),
        ("./img/b/00.png,b,test", r"line 4: .*00\.png is in test, and in train in line 2: an image that trains"),
        ("img/007/01.png,007,val", r"line 4: val holds the class 007, which train lacks \(1 such\)"),
        ("img/007/01.png,007,test", r"line 4: test holds the class 007, which train lacks"),
        ('img/b/01.png,"b,train', r"line 4: is no CSV \(unexpected end of data\)"),
        ("img/b/0\0.png,b,train", r'line 4: path is "img/b/0\\u0000\.png": give text'),
    ],
)
def test_manifest_names_the_line_that_is_wrong(tmp_path, images, row, message):
    path = write_csv(tmp_path / "list.csv", HEAD + row + "\n")
    with pytest.raises(InputError, match=r"list\.csv " + message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_manifest_counts_lines_behind_cells_of_several(tmp_path, images):
    text = 'path,label\nimg/b/00.png,"b\n\nb"\nimg/c/00.png,c\nimg/c/09.png,c\n'
    with pytest.raises(InputError, match=r"line 6: .*09\.png does not exist"):
        load(write_csv(tmp_path / "list.csv", text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", r'line 2: give an object such as \{"path": "a\.jpg", "label": "cat"\}'),
        ('{"path": "img/c/00.png"}', r"line 2: give an object such as"),
        ('{"path": "img/c/00.png", "label": true}', r"line 2: label is true: give text"),
        ('{"path": "img/c/00.png", "label": null}', r"line 2: label is null: give text"),
        ('{"path": "img/c/00.png", "label": ["c"]}', r'line 2: label is \["c"\]: give text'),
        ('{"path": "img/c/00.png", "label": "\\ud800"}', r'line 2: label is "\\ud800": give text'),
        ('{"path": "img/c/\\u0000.png", "label": "c"}', r'line 2: path is "img/c/\\u0000\.png": give text'),
        ('{"path": "img/c/00.png", "label": "c"', r"line 2: is no JSON \(Expecting ',' delimiter\)"),
        ("[" * 100_000, r"line 2: is no JSON \(too deep\)"),
        ('{"path": "img/c/00.png", "label": "c", "split": "test"}', r"line 1: the split is missing, which other rows"),
    ],
)
def test_manifest_names_the_json_line_that_is_wrong(tmp_path, images, line, message):
    path = write_csv(tmp_path / "list.jsonl", '{"path": "img/b/00.png", "label": "b"}\n' + line)
    with pytest.raises(InputError, match=r"list\.jsonl " + message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"list\.csv lists no images"),
        (b"path,label\n", r"list\.csv lists no images"),
        (b"img/b/00.png,b\n", r"line 1: the header is img/b/00\.png, b: name the columns path and label"),
        (b"id,label\n007,b\n", r"line 1: the header is id, label: name the columns path and label"),
        (b"path;label\nx;b\n", r"line 1: the header is path;label: name"),
        (b"path,label,label\nx,b,b\n", r"line 1: the header is path, label, label: .*each once"),
        (b"path,label\nimg/b/00.png,caf\xe9\n", r"line 2: the text is not UTF-8"),
        (b"path,label\nimg/b/00.png,b\nimg/b/01.png,b\n", r"only one class to train on, b"),
        (b"path,label,split\nimg/b/00.png,b,val\n", r"has val but no train split: name the images that train"),
    ],
)
def test_manifest_says_what_it_lacks(tmp_path, images, text, message):
    (tmp_path / "list.csv").write_bytes(text)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path / "list.csv")
    assert "\n" not in str(caught.value)


def test_manifest_matches_classes_by_name_where_val_lacks_one(tmp_path, images):
    rows = rows_of(images, ["train", "val", "train", "train"].__getitem__)
    rows = [row for row in rows if (row["label"], row["split"]) != ("b", "val")]
    path = write_manifest(tmp_path / "list.csv", rows)
    data = load(path)
    assert data.splits["val"].labels.tolist() == [0, 2]
    assert data.notes == (f"val of {path} holds no image of b; their places in the class order stay",)


def test_manifest_fingerprint_stays_when_the_folder_moves_and_the_rows_change_places(tmp_path, write_classes):
    write_classes(tmp_path / "one/img", ["a", "b"])
    rows = rows_of(tmp_path / "one/img")
    first = fingerprint(load(write_manifest(tmp_path / "one/list.csv", rows)))
    (tmp_path / "one").rename(tmp_path / "two")
    assert fingerprint(load(write_manifest(tmp_path / "two/list.csv", rows[::-1]))) == first
    rows[0]["label"] = "b"
    assert fingerprint(load(write_manifest(tmp_path / "two/list.csv", rows))) != first


def test_load_dataset_hints_at_a_manifest_in_the_folder(tmp_path, write_image):
    write_image(tmp_path / "images/0.png")
    (tmp_path / "labels.csv").write_text("path,label\n")
    with pytest.raises(InputError, match=rf"only one class folder, images.*perhaps {tmp_path}/labels\.csv was meant"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"gone\.csv does not exist: .*a \.csv or \.jsonl manifest"):
        load(tmp_path / "gone.csv")


def test_manifest_of_a_folder_has_the_folders_fingerprint(color_folder, tmp_path):
    rows = [f"{path},{path.parent.name},{path.parent.parent.name}" for path in sorted(color_folder.rglob("*.png"))]
    manifest = tmp_path / "all.csv"
    manifest.write_text("path,label,split\n" + "\n".join(reversed(rows)))
    of_folder, of_manifest = (load_dataset(root, val_fraction=0.1, seed=0) for root in (color_folder, manifest))
    assert fingerprint(of_folder) == fingerprint(of_manifest)
