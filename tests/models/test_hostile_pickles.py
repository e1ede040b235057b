"""Pickles that would run code, under the names of every file that vitlab reads: an audit hook sees nothing happen."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from vitlab.errors import InputError
from vitlab.models.sources import read_source
from vitlab.models.weights import load_weights

# Reads every file once with harmless content, so that all is imported, then the hostile ones under a hook.
WATCHED = r"""
import json, os, sys, warnings
from pathlib import Path
from vitlab.data.cifar import find_cifar, load_cifar
from vitlab.data.palette_file import read_palette
from vitlab.engine.state import load_state
from vitlab.errors import InputError
from vitlab.models.files import load_model
from vitlab.models.sources import read_source

warnings.simplefilter("error")

def read(path):
    readers = [read_palette] if path.suffix == ".npy" else [load_model, read_source]
    if path.is_dir():
        readers = [load_state] if (path / "state.json").exists() else [lambda path: load_cifar(*find_cifar(path))]
    for reader in readers:
        try:
            reader(path)
        except InputError:
            yield path.name, "refused"
        else:
            yield path.name, "read"

root = Path(sys.argv[1])
for path in (root / "harmless").iterdir():
    list(read(path))
events = []
FORBIDDEN = ("socket.", "os.", "subprocess.", "shutil.", "exec", "pickle.find_class", "import", "ctypes.", "urllib.")
READING = ("os.listdir", "os.scandir")

def hook(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            events.append([event, str(path), mode])
    elif event.startswith(FORBIDDEN) and event not in READING:
        events.append([event, str(arguments)[:100]])

sys.addaudithook(hook)
hostile = sorted((root / "hostile").iterdir())
outcomes = [outcome for path in hostile for outcome in read(path)]
before = list(events)
eval("__import__('os').system('true')")  # the hook does see such things
print(json.dumps({"outcomes": outcomes, "events": before, "sees": len(events) > len(before)}))
"""


class Runs:
    """Runs a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def hostile_pickles(marker):
    """Give pickles that would each make a file, or reach out otherwise."""
    pickles = {
        "system": pickle.dumps(Runs(os.system, f"touch {marker}")),
        "eval": pickle.dumps(Runs(eval, f"open({str(marker)!r}, 'w')"), protocol=2),
        "nested": pickle.dumps({"state_dict": {"a": [Runs(exec, f"open({str(marker)!r}, 'w')")]}}),
        "popen": pickle.dumps(Runs(subprocess.Popen, ["touch", str(marker)])),
        "socket": b"csocket\ncreate_connection\n((S'127.0.0.1'\nI9\ntI1\ntR.",
        "import": b"cantigravity\ngeohash\n(tR.",
        "torch": b"ctorch.hub\nload\n(S'a/b'\nS'c'\ntR.",
        "numpy": b"cnumpy\nload\n(S'/etc/hostname'\ntR.",
        "getattr": b"c__builtin__\ngetattr\n(c__builtin__\n__import__\nS'__call__'\ntR.",
        "bytearray": b"cbuiltins\nbytearray\n(L100000000000L\ntR.",
    }
    return pickles


def zipped(content):
    """Give a pickle as torch.save lays it out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def in_array(content):
    """Give a pickle as the objects of an .npy file."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def in_npz(content):
    """Give a pickle as the objects of an .npz file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.npy", in_array(content))
    return buffer.getvalue()


def write_all(folder, name, content):
    """Write a pickle under the names of all that vitlab reads."""
    files = {
        ".safetensors": content,
        "-in-header.safetensors": struct.pack("<Q", len(content)) + content,
        ".pth": content,
        "-zip.pth": zipped(content),
        ".pt": zipped(content),
        ".bin": content,
        ".npz": content,
        "-objects.npz": in_npz(content),
        ".npy": content,
        "-objects.npy": in_array(content),
    }
    for suffix, written in files.items():
        (folder / f"{name}{suffix}").write_bytes(written)
    for kind in ("state.json", "tensors.safetensors", "data_batch_1", "batches.meta"):
        (folder / f"{name}-{kind}").mkdir()
        others = ("state.json", "tensors.safetensors")
        if kind not in others:
            others = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
        for other in others:
            (folder / f"{name}-{kind}" / other).write_bytes(content if other == kind else b"{}")


def test_no_pickle_runs_under_any_name(tmp_path):
    marker = tmp_path / "marker"
    for folder in ("harmless", "hostile"):
        (tmp_path / folder).mkdir()
    write_all(tmp_path / "harmless", "none", pickle.dumps({"a": 1}))
    torch.save({"a": torch.zeros(2)}, tmp_path / "harmless" / "real.pth")
    np.savez(tmp_path / "harmless" / "real.npz", a=np.zeros(2))
    np.save(tmp_path / "harmless" / "real.npy", np.zeros((2, 3)))
    for name, content in hostile_pickles(marker).items():
        write_all(tmp_path / "hostile", name, content)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["events"] == []
    assert seen["sees"]
    paths = list((tmp_path / "hostile").iterdir())
    assert len(paths) == 140
    assert {name for name, _ in seen["outcomes"]} == {path.name for path in paths}
    assert {outcome for _, outcome in seen["outcomes"]} == {"refused"}
    assert not marker.exists()


def test_a_bytearray_of_any_length_is_refused(tmp_path):
    """torch's own weights-only loading would make it: 100 GB of zeros."""
    path = tmp_path / "large.pth"
    for content in (b"cbuiltins\nbytearray\n", b"c__builtin__\nbytearray\n"):
        path.write_bytes(zipped(b"\x80\x02" + content + b"\x8a\x05\x00\xe8\x76\x48\x17\x85R."))
        with pytest.raises(InputError, match="damaged, or not a file of torch"):
            read_source(path)


def test_packed_archives_are_refused(tmp_path):
    """Of zeros a thousand times more than the file has: torch would unpack it, and it packs nothing itself."""
    torch.save({"a": torch.zeros(2**18)}, tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(tmp_path / "bomb.pth", "w", 8) as bomb:
        for entry in plain.namelist():
            bomb.writestr(entry, plain.read(entry))
    assert torch.equal(read_source(tmp_path / "plain.pth").entries["a"], torch.zeros(2**18))
    with pytest.raises(InputError, match="damaged, or not a file of torch"):
        read_source(tmp_path / "bomb.pth")
    with (
        zipfile.ZipFile(tmp_path / "bomb.npz", "w", 8, compresslevel=1) as bomb,
        bomb.open("a.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**27,)})
        for _ in range(257):
            file.write(bytes(2**20))
    with pytest.raises(InputError, match=r"it would unpack into 269,484,\d+ bytes"):
        read_source(tmp_path / "bomb.npz")


def test_one_number_repeated_to_any_shape_is_refused(tmp_path, tiny_vit):
    """In a pickle a tensor may stride by 0 over a storage of four bytes."""
    network = tiny_vit()
    state = dict(network.state_dict()) | {"pos_embed": torch.zeros(1).expand(1, 10**9, 12)}
    torch.save(state, tmp_path / "wide.pth")
    with pytest.raises(InputError, match="no named tensors of plain numbers: pos_embed"):
        load_weights(network, tmp_path / "wide.pth")


def test_an_older_torch_opens_no_pickle(tmp_path, monkeypatch):
    torch.save({"a": torch.zeros(2)}, tmp_path / "plain.pth")
    for version in ("2.5.1", "2.9.1+cu128", "1.13.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(InputError, match=r"can be tricked; install 2\.10 or newer"):
            read_source(tmp_path / "plain.pth")
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git1")
    assert read_source(tmp_path / "plain.pth").entries["a"].shape == (2,)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"pretrained_cfg": {"crop_pct": 1' + "0" * 400 + "}}", "[]", "7"])
def test_settings_beside_weights_that_say_nothing_sane_are_passed_over(tmp_path, content):
    torch.save({"a": torch.zeros(2)}, tmp_path / "plain.pth")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(content)
    assert not read_source(tmp_path / "plain.pth").preprocess
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    assert list(read_source(tmp_path / "plain.pth").entries) == ["a"]
