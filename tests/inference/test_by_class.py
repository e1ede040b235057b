import os
from pathlib import Path

import pytest

from vitlab.errors import InputError, RunError
from vitlab.inference.by_class import ClassFolders
from vitlab.inference.tables import Prediction
from vitlab.text import file_name


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def copied(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path):
    return tmp_path / "source"


def test_images_of_one_name_are_all_kept(source, tmp_path):
    contents = {"a": b"first", "b": b"other", "c": b"first", "d": b"same5"}
    paths = [write(source / folder / "cat.png", content) for folder, content in contents.items()]
    paths += [write(source / "e" / "cat-2.png", b"third")]
    folders = ClassFolders(tmp_path / "out", ("cat", "dog"), [source])
    labels = ("cat", "cat", "dog", "cat", "cat")
    rows = [Prediction(path, (label,), (0.9,)) for path, label in zip(paths, labels, strict=True)]
    assert folders.copy(rows) == 5
    expected = {"cat/cat.png": b"first", "cat/cat-2.png": b"other", "dog/cat.png": b"first"}
    expected |= {"cat/cat-3.png": b"same5", "cat/cat-2-2.png": b"third"}
    assert copied(tmp_path / "out") == expected


def test_a_copy_that_is_there_is_not_made_again(source, tmp_path):
    """Not in another call with the same images, nor with some of them, whose numbers would be others."""
    paths = [write(source / str(folder) / "cat.png", f"{folder:03d}".encode()) for folder in range(5)]
    paths += [write(source / "6" / "cat.png", b"001"), write(source / "7" / "cat.jpg.png", b"007")]
    rows = [Prediction(path, ("cat",), (0.9,)) for path in paths]
    root = tmp_path / "out"
    assert ClassFolders(root, ("cat",), [source]).copy(rows) == 7
    first = copied(root)
    assert first == {
        "cat/cat.png": b"000",
        **{f"cat/cat-{number}.png": f"{number - 1:03d}".encode() for number in range(2, 6)},
        "cat/cat.jpg.png": b"007",
    }
    for some in (rows, rows[::-1], rows[3:], rows[2:3]):
        assert ClassFolders(root, ("cat",), [source]).copy(some) == len(some)
        assert copied(root) == first


def test_nothing_is_overwritten(source, tmp_path):
    own = write(tmp_path / "out" / "cat" / "a.png", b"somebody's own")
    link = tmp_path / "out" / "cat" / "b.png"
    link.symlink_to(tmp_path / "target")
    paths = [write(source / "a.png", b"1"), write(source / "b.png", b"2")]
    ClassFolders(tmp_path / "out", ("cat",), [source]).copy([Prediction(p, ("cat",), (1.0,)) for p in paths])
    assert Path(own).read_bytes() == b"somebody's own"
    assert link.is_symlink()
    assert not (tmp_path / "target").exists()
    assert sorted(os.listdir(link.parent)) == ["a-2.png", "a.png", "b-2.png", "b.png"]


def test_hostile_classes_stay_in_the_folder_and_apart(source, tmp_path):
    classes = (
        "../x",
        "/etc/x",
        "_etc_x",
        "..",
        ".",
        "-rf",
        "a/b",
        "a_b",
        "A_B",
        "\x1b[31m",
        "e" * 300,
        "",
        "bird's nest",
    )
    path = write(source / "a.png", b"1")
    folders = ClassFolders(tmp_path / "out", classes, [source])
    for name in classes:
        folders.copy([Prediction(path, (name,), (1.0,))])
    names = os.listdir(tmp_path / "out")
    assert len({name.casefold() for name in names}) == len(classes)
    assert "bird's nest" in names
    assert not any(name.startswith((".", "-")) or not name.isprintable() for name in names)
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_rows_without_a_label_are_not_copied(source, tmp_path):
    path = write(source / "a.png", b"1")
    folders = ClassFolders(tmp_path / "out", ("cat",), [source])
    assert folders.copy([Prediction(path, error="empty"), Prediction(path, (None, "dog"), (0.4, 0.3))]) == 0
    assert not (tmp_path / "out").exists()


def test_class_folders_are_no_links_and_no_files(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "cat").symlink_to(tmp_path)
    with pytest.raises(InputError, match="cat is a link: put a folder in its place"):
        ClassFolders(tmp_path / "out", ("cat",), [source])
    write(tmp_path / "out" / "dog", b"")
    with pytest.raises(InputError, match="dog is a file: remove it, or give another folder"):
        ClassFolders(tmp_path / "out", ("dog",), [source])


@pytest.mark.parametrize(("root", "searched"), [("s/out", "s"), ("s", "s/deep"), ("s", "s")])
def test_copies_do_not_lie_among_the_images(tmp_path, root, searched):
    (tmp_path / "s" / "deep").mkdir(parents=True)
    with pytest.raises(InputError, match="lie in one another: give a folder elsewhere for the copies"):
        ClassFolders(tmp_path / root, ("cat",), [tmp_path / searched])


def test_an_image_that_has_gone_ends_in_one_line(source, tmp_path):
    folders = ClassFolders(tmp_path / "out", ("cat",), [source])
    with pytest.raises(RunError, match=r"cannot copy .*gone\.png into .*cat: No such file"):
        folders.copy([Prediction(str(source / "gone.png"), ("cat",), (1.0,))])
    assert copied(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cat.jpg", "cat.jpg"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("..", "_"),
        (".hidden", "hidden"),
        (" .png", "_.png"),
        ("-..jpg", "_.jpg"),
        (". a. ", "a"),
        ("a\nb\u202ec", "a_b_c"),
        ("犬 e\u0301", "犬 e\u0301"),
        ("n" * 300 + ".jpg", "n" * 196 + ".jpg"),
        ("犬" * 100 + ".jpg", "犬" * 65 + ".jpg"),
    ],
)
def test_file_name_is_harmless(text, name):
    assert file_name(text) == name
    assert len(name.encode()) <= 200
