import os
import stat

import pytest

from vitlab import disk
from vitlab.disk import flush, replacing


def test_flush_reaches_the_disk_with_files_and_folders(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(disk.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    (tmp_path / "a").write_text("a")
    for path in (tmp_path / "a", tmp_path):
        flush(path)
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]
    with pytest.raises(FileNotFoundError):
        flush(tmp_path / "gone")


def test_replacing_shows_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as aside:
        assert (aside.parent, aside.name) == (tmp_path, ".a.txt.tmp")
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_flushes_the_file_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events, replace = [], os.replace
    monkeypatch.setattr(disk.os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(disk.os, "replace", lambda *paths: (events.append("rename"), replace(*paths)))
    with replacing(tmp_path / "a") as aside:
        aside.write_text("new")
    assert events == [(tmp_path / "a").stat().st_ino, "rename", tmp_path.stat().st_ino]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["body", "fsync", "replace"])
def test_replacing_leaves_the_old_file_and_nothing_beside_where_it_fails(tmp_path, monkeypatch, where, error):
    def fail(*arguments):
        raise error

    path = tmp_path / "a"
    path.write_text("old")
    if where != "body":
        monkeypatch.setattr(disk.os, where, fail)
    with pytest.raises(type(error)), replacing(path) as aside:  # noqa: PT012 - either line may fail
        aside.write_text("new")
        if where == "body":
            fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_gives_the_usual_mode_whatever_the_writer_left(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "a") as aside:
            aside.chmod(0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_replacing_starts_anew_over_what_a_killed_process_left(tmp_path):
    (tmp_path / ".a.tmp").write_text("half of somet")
    (tmp_path / ".a.tmp").chmod(0o400)
    with replacing(tmp_path / "a") as aside:
        assert aside.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_replacing_takes_the_place_of_a_link_and_leaves_what_it_leads_to(tmp_path):
    own, path = tmp_path / "own", tmp_path / "out.txt"
    own.write_text("mine")
    path.symlink_to(own)
    (tmp_path / ".out.txt.tmp").symlink_to(own)
    with replacing(path) as aside:
        assert not aside.is_symlink()
        aside.write_text("new")
    assert own.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_text() == "new"
