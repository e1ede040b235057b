"""Power cuts and failing calls at every point of a save: a whole state, a whole model file, and one clear line.

`Disk` watches every call that writes, syncs or renames, and keeps the tree before each. From these trees the disks
follow that a power cut can leave: contents as they were last synced, folders as they stood at any moment since their
own last sync, because a journal keeps the order of renames but writes them when it likes.
"""

import errno
import io
import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from vitlab.data.preprocess import Preprocess
from vitlab.engine import state as state_module
from vitlab.engine.run_folder import RunFolder, _newest_whole
from vitlab.engine.state import drop_old_states, list_states, load_state, save_state
from vitlab.engine.state_writer import StateWriter
from vitlab.engine.tensorboard import EVENTS_NAME, EventLog, cut_metrics, read_events
from vitlab.errors import InputError, RunError
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model

ERRORS = [errno.ENOSPC, errno.EIO]
CLASSES = ("ant", "bee")
RUN = {"config": {}, "data": {"counts": {}}, "preprocess": {}}
WATCHED = ("mkdir", "rename", "replace", "unlink", "rmdir", "open", "fsync")


class Disk:
    """Watches the calls that change a folder; lets one of them fail."""

    def __init__(self, root, monkeypatch):
        self.root, self._monkeypatch = root, monkeypatch
        self._ids, self._next, self._busy = {}, 0, False
        self.contents = {}
        """What each file last held, by the numbers of `_number`."""

    @contextmanager
    def watching(self, *, fail_at=None, error=None):
        self.calls, self.fail_at, self.error = 0, fail_at, error
        self.trees = [self._tree()]
        # What lies there before is on the disk.
        self.synced = {number: (0, entries) for number, entries in self.trees[0].items()}
        self._durable = dict(self.contents)
        self.cuts = [(dict(self.synced), dict(self._durable))]
        with self._monkeypatch.context() as patch:
            for name in WATCHED:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            patch.setattr(io, "open", self._watched("open", io.open))
            for name in ("write_bytes", "write_text"):
                patch.setattr(Path, name, self._torn(getattr(Path, name)))
            for module in (state_module, safetensors.torch):
                patch.setattr(module, "save_file", self._torn_tensors(module.save_file))
            yield

    def _tree(self):
        """Give the entries of each folder by numbers of our own: the system gives an inode's number again."""
        tree, inodes = {}, {}
        for folder, names, files in os.walk(self.root):
            entries = {}
            for name in (*names, *files):
                inode = os.stat(os.path.join(folder, name)).st_ino
                inodes[inode] = entries[name] = self._number(inode)
                if name in files:
                    with suppress(FileNotFoundError), open(os.path.join(folder, name), "rb") as file:
                        self.contents[entries[name]] = file.read()
            root = os.stat(folder).st_ino
            inodes[root] = self._number(root)
            tree[inodes[root]] = entries
        self._ids = inodes
        return tree

    def _number(self, inode):
        if inode not in self._ids:
            self._ids[inode] = self._next
            self._next += 1
        return self._ids[inode]

    def _before(self, name):
        self.calls += 1
        if self.fail_at is None and not self._busy:
            self._busy = True
            self.trees.append(self._tree())
            self.cuts.append((dict(self.synced), dict(self._durable)))
            self._busy = False
        elif self.calls == self.fail_at:
            raise OSError(self.error, os.strerror(self.error))

    def _watched(self, name, function):
        def call(*args, **kwargs):
            if self._busy:
                return function(*args, **kwargs)
            self._before(name)
            if name == "fsync" and self.fail_at is None:
                self._sync(os.fstat(args[0]).st_ino)
            return function(*args, **kwargs)

        return call

    def _sync(self, inode):
        tree = self.trees[-1]
        number = self._ids[inode]
        if number in tree:
            self.synced[number] = (len(self.trees) - 1, tree[number])
        else:
            self._durable[number] = self.contents[number]

    def _torn(self, write):
        def call(path, content, **kwargs):
            self.calls += 1
            if self.calls == self.fail_at:
                write(path, content[: len(content) // 2], **kwargs)
                raise OSError(self.error, os.strerror(self.error))
            return write(path, content, **kwargs)

        return call

    def _torn_tensors(self, save_file):
        def call(tensors, path, **kwargs):
            self.calls += 1
            if self.calls == self.fail_at:
                (Path(path).parent / ".tmpAbCdEf").write_bytes(b"half")  # what it renames when it is whole
                os.unlink(Path(path).parent / ".tmpAbCdEf")
                raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(self.error)} (os error 28)")
            self._before("save_file")
            save_file(tensors, path, **kwargs)

        return call

    @property
    def moment(self):
        """The number of trees seen; a power cut of this moment or later comes after all that was done so far."""
        return len(self.cuts)

    def after_a_power_cut(self):
        """Give every disk that a power cut can leave: its moment, and bytes by path."""
        self._before("the end")
        root = self._ids[os.stat(self.root).st_ino]
        seen = set()
        for moment, (synced, durable) in enumerate(self.cuts):
            for journal in range(moment + 1):
                for unsynced in (lambda content: b"", lambda content: content[: len(content) // 2]):
                    disk = frozenset(self._files(root, "", journal, synced, durable, unsynced))
                    if (moment, disk) not in seen:
                        seen.add((moment, disk))
                        yield moment, dict(disk)

    def _files(self, folder, path, journal, synced, durable, unsynced):
        when, entries = synced.get(folder, (-1, {}))
        if when < journal:
            entries = self.trees[journal].get(folder, entries)
        for name, number in entries.items():
            if number in self.contents:
                content = durable[number] if number in durable else unsynced(self.contents[number])
                yield f"{path}{name}", content
            else:
                yield f"{path}{name}/", b""
                yield from self._files(number, f"{path}{name}/", journal, synced, durable, unsynced)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    return Disk(tmp_path / "run", monkeypatch)


def rebuild(files, root):
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in sorted(files.items()):
        if name.endswith("/"):
            (root / name).mkdir(parents=True)
        else:
            (root / name).write_bytes(content)
    return root


def tensors(number):
    return {"model.a": torch.full((3, 2), float(number)), "optimizer.0.step": torch.tensor(float(number))}


def record(number):
    return {"number": number, "run": RUN}


def whole_state(folder):
    """Load what a run would go on from; give the number that its every part holds."""
    path, told = _newest_whole(list_states(folder), lambda line: None)
    loaded = load_state(path)[0]
    assert all(torch.equal(value, tensors(told["number"])[name]) for name, value in loaded.items())
    return told["number"]


@pytest.mark.parametrize(("old", "new"), [("step-1", "step-2"), ("step-2", "step-2")], ids=["next", "again"])
def test_state_is_whole_after_a_power_cut_at_any_moment_of_a_save(disk, tmp_path, old, new):
    resume = disk.root / "resume"
    save_state(resume / old, tensors(1), record(1))
    with disk.watching():
        save_state(resume / new, tensors(2), record(2))
        saved = disk.moment
        drop_old_states(resume, keep=1)
    found = {1: 0, 2: 0}
    for moment, files in disk.after_a_power_cut():
        again = rebuild(files, tmp_path / "again") / "resume"
        number = whole_state(again)
        found[number] += 1
        assert number == 2 or moment < saved
        save_state(again / new, tensors(3), record(3))  # whatever the power cut left half written there
        drop_old_states(again, keep=1)
        assert [path.name for path in again.iterdir()] == [new]
        assert whole_state(again) == 3
    assert min(found.values()) > 5
    assert sum(found.values()) > 50


def test_first_state_is_there_after_a_power_cut_once_it_is_saved(disk, tmp_path):
    with disk.watching():
        save_state(disk.root / "resume" / "step-0", tensors(0), record(0))
        saved = disk.moment
    held = 0
    for moment, files in disk.after_a_power_cut():
        again = rebuild(files, tmp_path / "again") / "resume"
        if list_states(again):
            assert whole_state(again) == 0
            held += 1
        else:
            assert moment < saved
    assert held > 1


def test_logs_reach_the_disk_before_the_state_that_follows_them(disk, tmp_path):
    folder = RunFolder(disk.root)
    log = EventLog(folder.tensorboard)
    past = (folder.metrics, folder.tensorboard / EVENTS_NAME, folder.tensorboard, folder.path)
    writer = StateWriter(folder.resume, keep=2, past=past)
    with disk.watching():
        for step in (1, 2, 3):
            log.scalars(step, {"train/loss": step / 8})
            log.flush()
            with folder.metrics.open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")
            writer.start(step, tensors(step), record(step))
            writer.wait()
    log.close()
    checked = 0
    for _, files in disk.after_a_power_cut():
        again = RunFolder(rebuild(files, tmp_path / "again"))
        states = list_states(again.resume)
        if not states:
            continue
        step = whole_state(again.resume)
        checked += 1
        cut_metrics(again.metrics, step)
        assert [row["step"] for row in again.read_metrics()] == list(range(1, step + 1))
        EventLog(again.tensorboard, keep_steps=step).close()
        events = [event for event, _ in read_events(again.tensorboard / EVENTS_NAME)]
        assert [event.step for event in events if event.summary.value] == list(range(1, step + 1))
    assert checked > 50


def test_model_file_is_the_old_or_the_new_one_after_a_power_cut(disk, tmp_path):
    path = disk.root / "best.safetensors"
    write_model(path, 1)
    with disk.watching():
        write_model(path, 2)
        saved = disk.moment
    found = {1: 0, 2: 0}
    for moment, files in disk.after_a_power_cut():
        number = model_number(rebuild(files, tmp_path / "again") / "best.safetensors")
        found[number] += 1
        assert number == 2 or moment < saved
    assert min(found.values()) > 0


def write_model(path, number):
    network = create_model(
        "vit_tiny", num_classes=2, image_size=(4, 8), patch_size=4, embed_dim=4, depth=1, num_heads=1
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(number)
    preprocess = Preprocess(image_size=(4, 8))
    save_model(path, network, classes=CLASSES, preprocess=preprocess, metrics={"number": number}, data={})


def model_number(path):
    model = load_model(path)
    assert all((parameter == model.metrics["number"]).all() for parameter in model.network.parameters())
    return model.metrics["number"]


def calls_of(disk, save):
    with disk.watching():
        save()
        return disk.calls


def failure(disk, call, error, save):
    """Save while one call fails; give the message of the error that this raises, if it does."""
    try:
        with disk.watching(fail_at=call, error=error):
            save()
    except RunError as raised:
        return str(raised)
    return ""


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("old", "new"), [("step-1", "step-2"), ("step-2", "step-2")], ids=["next", "again"])
def test_state_survives_a_failure_of_any_call_of_the_next_save(disk, old, new, error):
    resume = disk.root / "resume"

    def save(number):
        save_state(resume / (old if number == 1 else new), tensors(number), record(number))
        drop_old_states(resume, keep=1)

    save(1)
    count = calls_of(disk, lambda: save(2))
    failed = 0
    for call in range(1, count + 1):
        shutil.rmtree(resume)
        save(1)
        message = failure(disk, call, error, lambda: save(2))
        if message:
            failed += 1
            assert message.startswith(f"cannot write the state {resume / new}: ")
            assert os.strerror(error) in message
            assert message.endswith("; the states before it are whole")
        assert whole_state(resume) == 2 or (message and whole_state(resume) == 1)
        save(3)
        assert whole_state(resume) == 3
        assert [path.name for path in resume.iterdir()] == [new]
    assert failed >= 9


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_first_state_may_fail_at_any_call_and_be_saved_after_that(disk, error):
    resume = disk.root / "resume"
    save = [resume / "step-0", tensors(0), record(0)]
    count = calls_of(disk, lambda: save_state(*save))
    for call in range(1, count + 1):
        shutil.rmtree(resume)
        with suppress(RunError), disk.watching(fail_at=call, error=error):
            save_state(*save)
        assert [path.name for path in resume.glob("*")] in ([], ["step-0"])
        save_state(*save)
        assert whole_state(resume) == 0


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_model_file_survives_a_failure_of_any_call_of_the_next_save(disk, error):
    path = disk.root / "best.safetensors"
    write_model(path, 1)
    count = calls_of(disk, lambda: write_model(path, 2))
    failed = 0
    for call in range(1, count + 1):
        write_model(path, 1)
        message = failure(disk, call, error, lambda: write_model(path, 2))
        if message:
            failed += 1
            assert message.startswith(f"cannot write {path}: ")
            assert os.strerror(error) in message
            assert "\n" not in message
        assert model_number(path) == 2 or (message and model_number(path) == 1)
        with suppress(OSError):
            (disk.root / ".best.safetensors.tmp").unlink()  # where the removal itself failed
    assert failed >= 7


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_logs_that_cannot_be_synced_fail_before_the_state_is_written(tmp_path, monkeypatch, error):
    (tmp_path / "metrics.jsonl").write_text("{}\n")

    def fail(descriptor):
        raise OSError(error, os.strerror(error))

    writer = StateWriter(tmp_path / "resume", keep=2, past=(tmp_path / "gone", tmp_path / "metrics.jsonl"))
    monkeypatch.setattr(os, "fsync", fail)
    writer.start(1, tensors(1), record(1))
    with pytest.raises(RunError, match=rf"^cannot write .*metrics\.jsonl: {os.strerror(error)}; the states before"):
        writer.wait()
    with pytest.raises(InputError):
        load_state(tmp_path / "resume" / "step-1")
