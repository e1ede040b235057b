"""Model files of strangers: whatever their bytes, they load as they were written, or InputError says why not.

`VITLAB_FUZZ=full` runs all 1,000 flips, 256 truncations and 10,000 headers; otherwise a share of them.
"""

import copy
import hashlib
import json
import os
import random
import re
import resource
import struct
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model
from vitlab.models.safetensors_file import read_safetensors
from vitlab.models.size_limits import at_most_tensors

FULL = os.environ.get("VITLAB_FUZZ") == "full"
FLIPS, TRUNCATIONS, HEADERS = (1000, 256, 10_000) if FULL else (200, 48, 250)
ROOM_BYTES = 2**30  # beside what the process holds already
CLASSES = ("a", "=b", "../c", "d\0", "0" * 64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a model file of a small ViT."""
    network = create_model(
        "vit_tiny", image_size=(8, 12), patch_size=4, embed_dim=12, depth=2, num_heads=3, num_classes=5
    )
    path = tmp_path_factory.mktemp("whole") / "model.safetensors"
    preprocess = Preprocess(image_size=(8, 12))
    data = {"val_fraction": 0.1, "seed": 0, "fingerprint": {"counts": {"train": 9}, "sha256": {"train": "ab" * 32}}}
    objective = {"name": "classification", "label_smoothing": 0.1, "class_weights": "none"}
    described = {"metrics": {"top1": 0.5}, "data": data, "objective": objective}
    save_model(path, network, classes=CLASSES, preprocess=preprocess, **described)
    return path.read_bytes()


@pytest.fixture
def little_memory():
    """Let the process take little more memory than it has, so that a file that wants more fails at once."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def parts(content):
    """Give the header, the record in it, and the tensors' bytes."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    return header, json.loads(header["__metadata__"].pop("vitlab")), content[8 + size :]


def packed(header, record, body, *, rehash=True):
    """Write a file of these parts, with the hash of its bytes or with the one that the record has."""
    if rehash and isinstance(record, dict):
        record = {**record, "sha256": "0" * 64}
    metadata = header.get("__metadata__", {})
    if isinstance(metadata, dict):
        header = {**header, "__metadata__": {**metadata, "vitlab": json.dumps(record)}}
    raw = json.dumps(header).encode()
    content = struct.pack("<Q", len(raw)) + raw + body
    return with_hash(content) if rehash else content


def with_hash(content):
    """Put the hash of a file's bytes in the place of the last row of zeros in its header."""
    size = 8 + struct.unpack("<Q", content[:8])[0]
    place = content[:size].rfind(b"0" * 64)
    digits = hashlib.sha256(content).hexdigest().encode()
    return content if place < 0 else content[:place] + digits + content[place + 64 :]


def refused(tmp_path, content):
    """Load a file and give the message with which it was refused."""
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(content, change):
    """Give the file with its header, record and body changed by a function, and a hash that is right."""
    header, record, body = parts(content)
    return packed(header, record, change(header, record, body) or body)


def test_every_flipped_bit_is_found(whole, tmp_path, little_memory):
    generator = random.Random(0)
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    for number in range(FLIPS):
        place = generator.randrange(header_end) if number % 4 else generator.randrange(header_end, len(whole))
        flipped = bytearray(whole)
        flipped[place] ^= 1 << generator.randrange(8)
        refused(tmp_path, bytes(flipped))


def test_every_truncation_is_found(whole, tmp_path, little_memory):
    generator = random.Random(1)
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    lengths = [*range(12), header_end, header_end - 1, len(whole) - 1]
    lengths += [generator.randrange(len(whole)) for _ in range(TRUNCATIONS - len(lengths))]
    for length in lengths:
        refused(tmp_path, whole[:length])


DEEP = json.loads("[" * 80 + "]" * 80)
JUNK = (
    *(None, True, False, -1, 0, 1, 2, 3, 2**31, 2 * 10**9, 10**12, 10**30, 2**63, 1.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x" * 1000, "\0", "../../etc/passwd", "timm/resnet18", "timm/hf-hub:a/b", "ema"),
    *([], [[]], {}, {"a": {"b": 1}}, DEEP, [1] * 1000, [8, 12], [10**6, 10**6], [2, 2], {"name": "joint"}),
    *({"pretrained_cfg": {"file": "/etc/passwd"}}, {"checkpoint_path": "/etc/passwd"}, "0" * 64),
)
FIELDS = ("embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size", "image_size", "num_classes", "pool", "new")


def mutate(generator, header, record, body):
    """Change one thing in a file's parts; give the body."""
    name = generator.choice([name for name in header if name != "__metadata__"])
    junk = copy.deepcopy(generator.choice(JUNK))
    kind = generator.randrange(12)
    if kind == 0:
        header[name][generator.choice(["shape", "dtype", "data_offsets", "new"])] = junk
    elif kind == 1:
        header[name]["shape"][0:1] = [junk]
    elif kind == 2:
        header[name]["data_offsets"][generator.randrange(2)] += generator.choice([-4, 4, 2**40, -(2**40)])
    elif kind == 3:
        header[generator.choice(["new", "blocks.99.norm1.weight", ""])] = header.pop(name)
    elif kind == 4:
        header[name], header["head.bias"] = header["head.bias"], header[name]
    elif kind == 5:
        header[name]["dtype"] = generator.choice(["F16", "F64", "I32", "U32", "X", "f32", "BOOL"])
    elif kind == 6:
        record[generator.choice([*record, "new"])] = junk
    elif kind == 7:
        record["model"]["config"][generator.choice(FIELDS)] = junk
    elif kind == 8:
        record["model"][generator.choice(["name", "config", "new"])] = junk
    elif kind == 9:
        part = generator.choice(["preprocess", "metrics", "data", "objective"])
        record[part][generator.choice([*record[part], "new"])] = junk
    elif kind == 10:
        del record[generator.choice(list(record))]
    else:
        return generator.choice([body + b"\0", body[:-4], b"", body * 2])
    return body


def test_every_fuzzed_header_is_refused_or_means_what_it_says(whole, tmp_path, little_memory):
    """Half of the files have the right hash, so that what lies behind that check is met, too."""
    generator, path, outcomes, slowest = random.Random(2), tmp_path / "fuzzed.safetensors", Counter(), 0.0
    for number in range(HEADERS):
        header, record, body = parts(whole)
        body = mutate(generator, header, record, body)
        rehash = number % 2 == 0
        content = packed(header, record, body, rehash=rehash)
        began = time.perf_counter()
        try:
            model = load_model(_written(path, content))
        except InputError:
            outcomes["refused", rehash] += 1
        else:
            outcomes["loaded", rehash] += 1
            assert rehash
            weights = read_safetensors(path).tensors()
            assert all(torch.equal(tensor, weights[name]) for name, tensor in model.network.state_dict().items())
            assert all(tensor.dtype == torch.float32 for tensor in weights.values())
            assert all(isinstance(name, str) for name in model.classes)
        slowest = max(slowest, time.perf_counter() - began)
    assert outcomes["loaded", False] == 0
    assert outcomes["refused", True] > outcomes["loaded", True] > 0  # such as a metric that is another one
    if FULL:
        print(dict(outcomes), f"slowest {slowest:.2f} s")


def _written(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embed_dim": 2 * 10**9}, "embed_dim is 2000000000: give at most 1048576"),
        ({"depth": 10**12}, "depth is 1000000000000: give at most 1024"),
        ({"depth": 1000}, "more than .* parameters and buffers"),
        ({"image_size": [10**6, 10**6]}, "image_size is .*: give at most 8192"),
        ({"embed_dim": 2**20, "num_heads": 1}, "its weights do not fit its config"),
        ({"mlp_ratio": 1e300}, "mlp_ratio is 1e.300"),
        ({"depth": -1}, "depth is -1: give more than 0"),
        ({"depth": True}, "depth is True: give a whole number"),
        ({"depth": "12"}, "depth is '12': give a whole number"),
        ({"drop_rate": float("nan")}, "drop_rate is nan"),
        ({"overrides": {"depth": 1}}, "unknown vit_tiny field overrides"),
    ],
)
def test_a_config_that_would_build_too_much_is_refused(whole, tmp_path, little_memory, fields, message):
    def change(header, record, body):
        record["model"]["config"].update(fields)

    assert re.search(message, refused(tmp_path, changed(whole, change)))


def test_tables_that_are_no_weights_are_bounded_too(tmp_path, little_memory):
    """Fixed positions are in no file: a small one could ask for any number of them."""
    shape = {"patch_size": 1, "embed_dim": 12, "depth": 1, "num_heads": 3, "num_classes": 5, "pos_embed": "sincos"}
    path = tmp_path / "model.safetensors"
    small = create_model("vit_tiny", image_size=8, **shape)
    save_model(path, small, classes=CLASSES, preprocess=Preprocess(image_size=(8, 8)), metrics={}, data={})

    def change(header, record, body):
        record["model"]["config"]["image_size"] = [8192, 8192]

    assert "its config builds tables of 3,221,225,520 bytes" in refused(tmp_path, changed(path.read_bytes(), change))


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpoint_path": "/etc/hostname"},
        {"pretrained_cfg": {"file": "/etc/hostname"}},
        {"pretrained_cfg_overlay": {"hf_hub_id": "a/b"}},
        {"pretrained": True},
        {"cache_dir": "/tmp/elsewhere"},
        {"features_only": True},
        {"device": "cpu"},
        {"scriptable": True},
        {"layers": [10**12] * 4},
        {"block_args": {"a": {"b": {"c": {"d": {"e": 1}}}}}},
    ],
)
def test_a_timm_network_takes_no_orders_from_a_file(tmp_path, little_memory, fields):
    path = tmp_path / "model.safetensors"
    network = create_model("timm/test_resnet", num_classes=5, image_size=32)
    save_model(path, network, classes=CLASSES, preprocess=Preprocess(image_size=(32, 32)), metrics={}, data={})

    def change(header, record, body):
        record["model"]["config"].update(fields)

    assert f"model.overrides.{next(iter(fields))}" in refused(tmp_path, changed(path.read_bytes(), change))


def test_weights_must_be_numbers_of_the_networks_kind(whole, tmp_path):
    def whole_numbers(header, record, body):
        header["head.weight"]["dtype"] = "I32"

    def not_finite(header, record, body):
        return body[:-4] + struct.pack("<f", float("nan"))

    for change in (whole_numbers, not_finite):
        assert "or values that are not finite" in refused(tmp_path, changed(whole, change))


@pytest.mark.parametrize("name", ["timm/hf-hub:a/b", "timm/local-dir:/etc", "timm/../../x", "", "vit_tiny\0", "os"])
def test_a_network_of_another_name_is_refused(whole, tmp_path, name):
    def change(header, record, body):
        record["model"]["name"] = name

    assert "unknown" in refused(tmp_path, changed(whole, change))


def test_tensors_must_fill_the_file_one_after_another(whole, tmp_path):
    def overlap(header, record, body):
        header["head.bias"]["data_offsets"] = header["norm.bias"]["data_offsets"][:]
        header["head.bias"]["shape"] = header["norm.bias"]["shape"][:]

    assert "gaps or overlap" in refused(tmp_path, changed(whole, overlap))
    header, record, body = parts(whole)
    assert "follow its header" in refused(tmp_path, packed(header, record, body + b" "))
    raw = json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}).encode()
    assert "follow its header" in refused(tmp_path, struct.pack("<Q", len(raw)) + raw)


def test_a_key_must_not_stand_twice(whole, tmp_path):
    """Of two, Python's reader takes the last and others the first: a file would be two models."""
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    header = whole[8:header_end].rstrip()
    twice = header[:-1] + b',"head.bias":' + json.dumps(parts(whole)[0]["head.bias"]).encode() + b"}"
    content = struct.pack("<Q", len(twice)) + twice + whole[header_end:]
    assert "its header cannot be read" in refused(tmp_path, content)


def test_the_hash_must_stand_in_the_record(whole, tmp_path):
    def hide(header, record, body):
        record["classes"][0] = "0" * 64

    hidden = changed(whole, hide)  # of two rows of zeros, one became the hash
    load_model(_written(tmp_path / "two.safetensors", hidden))
    digits = json.loads(json.loads(hidden[8 : 8 + struct.unpack("<Q", hidden[:8])[0]])["__metadata__"]["vitlab"])[
        "sha256"
    ]
    assert "SHA-256" in refused(tmp_path, hidden.replace(b"0" * 64, digits.encode()))
    for bad in ("", "0" * 63, "Z" * 64, digits.upper(), digits):
        header, record, body = parts(whole)
        assert "SHA-256" in refused(tmp_path, packed(header, record | {"sha256": bad}, body, rehash=False))


def test_a_file_of_21841_classes_is_a_normal_file(tmp_path):
    """As many as ImageNet-21k has."""
    classes = tuple(f"n{number:08d}, some name of a thing" for number in range(21_841))
    shape = {"image_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 3}
    network, path = create_model("vit_tiny", num_classes=len(classes), **shape), tmp_path / "many.safetensors"
    save_model(path, network, classes=classes, preprocess=Preprocess(image_size=(8, 8)), metrics={}, data={})
    assert load_model(path).classes == classes
    assert 700_000 < struct.unpack("<Q", path.read_bytes()[:8])[0] < 1_300_000


def test_read_safetensors_reads_regular_files_alone(tmp_path):
    """A pipe would be waited for, a device would never end."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    for name in ("pipe.safetensors", "zero.safetensors"):
        with pytest.raises(InputError, match="no regular file"):
            read_safetensors(tmp_path / name)


def test_create_model_refuses_more_than_the_machines_memory():
    with pytest.raises(InputError, match=r"a vit_tiny of this shape takes [\d,]+ GiB, and this machine has"):
        create_model("vit_tiny", embed_dim=2**18, num_heads=1, depth=100)
    with torch.device("meta"):  # whoever only asks what it would cost
        assert create_model("vit_tiny", embed_dim=2**18, num_heads=1, depth=2).num_classes == 1000


def test_at_most_tensors_counts_parameters_and_buffers_and_forgets_it():
    with pytest.raises(InputError, match="more than 3 parameters and buffers"), at_most_tensors(3):
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
