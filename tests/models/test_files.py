import hashlib
import json
import os
import resource
import stat
import struct

import pytest
import safetensors.torch
import torch
from torch import nn

import vitlab
from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError, RunError
from vitlab.models.files import checkpoint_path, load_model, save_model

CLASSES = ("0", "chat: mâle", 'dog "big"', "0" * 64, "犬")
PREPROCESS = Preprocess(image_size=(8, 12), resize_mode="pad", mean=(0.1, 0.2, 0.3))


@pytest.fixture
def save(tmp_path, tiny_vit, randomise):
    """A function that saves a network, by default a random ViT of five classes, and gives the path."""

    def save_one(name="best.safetensors", network=None, **changes):
        network = network or randomise(tiny_vit(pool="mean", patch_size=(4, 2)))
        described = {
            "classes": CLASSES,
            "preprocess": PREPROCESS,
            "metrics": {"top1": 0.75, "count": 20, "top5": None},
            "weights": "ema",
            "data": {"files": 3, "sha256": "ab" * 32},
        }
        save_model(tmp_path / name, network, **(described | changes))
        return tmp_path / name

    return save_one


def read_parts(path):
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_parts(path, header, body):
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def change_record(path, change):
    """Change a file's record by a function, and write the hash of the file that results."""
    header, body = read_parts(path)
    record = json.loads(header["__metadata__"]["vitlab"])
    change(record)
    record["sha256"] = "0" * 64
    header["__metadata__"]["vitlab"] = json.dumps(record)
    write_parts(path, header, body)
    content = path.read_bytes()
    digits = hashlib.sha256(content).hexdigest().encode()
    start = content.rindex(b"0" * 64, 0, len(content) - len(body))
    path.write_bytes(content[:start] + digits + content[start + 64 :])


def test_load_model_gives_back_all_that_was_saved(save, tiny_vit, randomise):
    network = randomise(tiny_vit(norm="post", pool="mean", patch_size=(4, 2)))
    file = load_model(save(network=network))
    images = torch.randn(2, 3, 8, 12)
    assert torch.equal(file.network(images), network.eval()(images))
    assert file.network.config_dict() == network.config_dict()
    assert file.network.name == "vit_tiny"
    assert not file.network.training
    assert file.classes == CLASSES
    assert file.preprocess == PREPROCESS
    assert file.metrics == {"top1": 0.75, "count": 20, "top5": None}
    assert file.weights == "ema"
    assert file.data == {"files": 3, "sha256": "ab" * 32}
    assert file.version == vitlab.__version__
    assert file.temperature == 1.0
    assert load_model(save(network=network, temperature=0.37)).temperature == 0.37


def test_load_model_gives_back_a_network_of_fixed_positions(save, tiny_vit, randomise):
    network = randomise(tiny_vit(pos_embed="sincos"))
    path = save(network=network)
    images = torch.randn(2, 3, 8, 12)
    assert torch.equal(load_model(path).network(images), network.eval()(images))
    assert "pos_embed" not in read_parts(path)[0]


def test_load_model_shifts_no_random_stream(save):
    path = save()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_model(path)
    assert torch.equal(torch.rand(3), expected)


def test_save_model_writes_one_documented_record_with_the_hash_of_the_file(save):
    path = save()
    header, _ = read_parts(path)
    assert list(header["__metadata__"]) == ["vitlab"]
    record = json.loads(header["__metadata__"]["vitlab"])
    assert set(record) == {
        "format", "model", "classes", "preprocess", "metrics", "weights", "data", "temperature", "objective", "version",
        "sha256",
    }  # fmt: skip
    assert record["model"]["name"] == "vit_tiny"
    assert record["model"]["config"]["patch_size"] == [4, 2]
    digits = record["sha256"].encode()
    content = path.read_bytes()
    assert content.count(digits) == 1
    assert hashlib.sha256(content.replace(digits, b"0" * 64)).hexdigest() == record["sha256"]


def test_save_model_file_opens_with_safetensors_alone(save, tiny_vit, randomise):
    network = randomise(tiny_vit())
    tensors = safetensors.torch.load_file(save(network=network))
    assert tensors.keys() == network.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in network.state_dict().items())


def test_save_model_leaves_the_usual_file_mode_and_nothing_beside(save, tmp_path):
    before = os.umask(0o027)
    try:
        path = save()
        save()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_save_model_takes_channels_last_sliced_and_tied_tensors(save, tiny_vit, randomise):
    network = randomise(tiny_vit(depth=2)).to(memory_format=torch.channels_last)
    network.blocks[1].mlp.fc1.weight = network.blocks[0].mlp.fc1.weight
    network.head.weight = nn.Parameter(torch.randn(10, 24)[::2, ::2])
    images = torch.randn(2, 3, 8, 12)
    file = load_model(save(network=network))
    torch.testing.assert_close(file.network(images), network.eval()(images), rtol=0, atol=1e-6)


def test_save_model_keeps_names_that_are_not_unicode(save):
    classes = ("a", "b", "c", "d", os.fsdecode(b"caf\xe9"))
    assert load_model(save(classes=classes)).classes == classes


def test_save_model_refuses_weights_that_are_not_finite(save, tiny_vit, randomise):
    path = save()
    before = path.read_bytes()
    network = randomise(tiny_vit())
    network.blocks[1].mlp.fc2.bias.data[3] = torch.inf
    with pytest.raises(RunError, match=r"blocks\.1\.mlp\.fc2\.bias holds values that are not finite"):
        save(network=network)
    assert path.read_bytes() == before


def test_save_model_on_a_full_disk_keeps_the_previous_file(save, tmp_path):
    path = save()
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunError, match=r"^cannot write .*best\.safetensors: .*too large.*an earlier file stays"):
            save(metrics={"top1": 0.9})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_save_model_without_its_folder_says_so(save):
    with pytest.raises(RunError, match=r"^cannot write .*nowhere/best\.safetensors: No such file or directory"):
        save("nowhere/best.safetensors")


def test_save_model_killed_midway_leaves_the_previous_file(save, tmp_path, monkeypatch):
    path = save()
    before = path.read_bytes()
    with monkeypatch.context() as killed:
        killed.setattr(os, "fsync", lambda descriptor: os._exit(9))
        child = os.fork()
        if child == 0:
            save(metrics={"top1": 0.9})
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_bytes() == before
    assert (tmp_path / ".best.safetensors.tmp").exists()
    assert load_model(save(metrics={"top1": 0.9})).metrics == {"top1": 0.9}
    assert list(tmp_path.iterdir()) == [path]


def test_load_model_finds_every_flipped_bit(save, tmp_path):
    content = save().read_bytes()
    generator = torch.Generator().manual_seed(0)
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    positions = torch.randint(header_end, (150,), generator=generator).tolist()
    positions += torch.randint(header_end, len(content), (50,), generator=generator).tolist()
    path = tmp_path / "flipped.safetensors"
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(InputError, match=r"flipped\.safetensors is "):
            load_model(path)


def test_load_model_finds_every_truncation(save, tmp_path):
    content = save().read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in [0, 5, 8, 100, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"cut\.safetensors is damaged"):
            load_model(path)


def test_load_model_refuses_a_newer_format(save):
    path = save()
    header, body = read_parts(path)
    record = json.loads(header["__metadata__"]["vitlab"]) | {"format": 2, "version": "9.1"}
    header["__metadata__"]["vitlab"] = json.dumps(record)
    write_parts(path, header, body)
    with pytest.raises(InputError, match=r"is in format 2, written by vitlab 9\.1, .* install a newer vitlab"):
        load_model(path)


def test_load_model_refuses_weights_from_elsewhere(tmp_path):
    path = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"head.weight": torch.zeros(2)}, path)
    with pytest.raises(
        InputError,
        match=r"foreign\.safetensors is not a model file of vitlab, .*: vitlab train --model\.weights .*foreign\.safet",
    ):
        load_model(path)


@pytest.mark.parametrize("content", [b"", b"no", b"\x80\x02}q\x00.", b"PK\x03\x04" * 9, struct.pack("<Q", 2) + b"[]"])
def test_load_model_refuses_other_files(tmp_path, content):
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"other\.safetensors is damaged, or no safetensors file"):
        load_model(path)


def test_load_model_refuses_a_huge_header_unread(tmp_path):
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**24 + 1))
        file.truncate(2**34)  # a sparse file of 16 GiB
    with pytest.raises(InputError, match=r"a header of 16,777,217 bytes is above the limit of 16,777,216"):
        load_model(path)


def test_load_model_compares_shapes_before_it_builds(save, monkeypatch):
    path = save()
    sizes = {"embed_dim": 3 * 2**16, "depth": 2}  # 2 TB of weights, were they built
    change_record(path, lambda record: record["model"]["config"].update(sizes))
    with pytest.raises(InputError, match="its weights do not fit its config"):
        load_model(path)


def test_load_model_takes_a_file_without_a_temperature_as_it_is(save):
    """Files of earlier versions have none; and those versions refuse only what lacks one of their own fields."""
    path = save(temperature=2.5)
    change_record(path, lambda record: record.pop("temperature"))
    assert load_model(path).temperature == 1.0
    assert json.loads(read_parts(path)[0]["__metadata__"]["vitlab"])["format"] == 1


@pytest.mark.parametrize("temperature", [0, -1.5, "1", None, True, float("inf"), float("nan")])
def test_load_model_refuses_a_temperature_that_is_none(save, temperature):
    path = save()
    change_record(path, lambda record: record.update(temperature=temperature))
    with pytest.raises(InputError, match=r"best\.safetensors is damaged, .*its temperature is "):
        load_model(path)


def test_checkpoint_path_takes_a_run_for_its_best_file(save, tmp_path):
    path = save()
    assert checkpoint_path(tmp_path) == path
    assert checkpoint_path(str(path)) == path
    assert load_model(tmp_path).classes == CLASSES


def test_checkpoint_path_says_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"^no such file or run folder: runs/none$"):
        checkpoint_path("runs/none")
    with pytest.raises(InputError, match=r"holds no best\.safetensors: give a model file, or the folder of a run"):
        checkpoint_path(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_load_model_brings_a_file_written_on_a_gpu_to_the_cpu(save, tiny_vit, randomise):
    network = randomise(tiny_vit()).cuda()
    file = load_model(save(network=network))
    assert all(tensor.device.type == "cpu" for tensor in file.network.state_dict().values())
    images = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(file.network(images), network.eval()(images.cuda()).cpu(), rtol=0, atol=1e-3)
