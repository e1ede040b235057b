import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from timm.layers import resample_abs_pos_embed
from torch import nn
from torch.optim.swa_utils import AveragedModel

from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError
from vitlab.models.files import save_model
from vitlab.models.weights import WeightsReport, load_weights

HEAD = ("head.weight", "head.bias")


def images_for(network, seed=1):
    shape = (2, network.in_channels, *network.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write_model_file(path, network):
    preprocess = Preprocess(image_size=network.image_size)
    classes = [str(index) for index in range(network.num_classes)]
    save_model(path, network, classes=classes, preprocess=preprocess, metrics={}, data={})
    return path


@pytest.fixture
def source(tiny_vit, randomise):
    """A random ViT of five classes."""
    return randomise(tiny_vit()).eval()


class CreatesFile:
    """An object whose unpickling makes a marker file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_load_weights_takes_timm_names(pool, tiny_vit, timm_vit, randomise):
    peer = randomise(timm_vit(global_pool={"cls": "token", "mean": "avg"}[pool])).eval()
    network = tiny_vit(pool=pool).eval()
    report = load_weights(network, peer.state_dict())
    torch.testing.assert_close(network(images_for(network)), peer(images_for(network)))
    assert report == WeightsReport(tuple(network.state_dict()), (), (), (), "timm")


def test_load_weights_takes_torchvision_names(tiny_vit, torchvision_vit, randomise):
    peer = randomise(torchvision_vit()).eval()
    network = tiny_vit(image_size=8).eval()
    report = load_weights(network, peer.state_dict())
    torch.testing.assert_close(network(images_for(network)), peer(images_for(network)))
    assert report == WeightsReport(tuple(network.state_dict()), (), (), (), "torchvision")


def test_load_weights_takes_torchvision_names_of_before_2022(tiny_vit, torchvision_vit, randomise):
    peer = randomise(torchvision_vit()).eval()
    network = tiny_vit(image_size=8).eval()
    old = {
        name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): tensor
        for name, tensor in peer.state_dict().items()
    }
    load_weights(network, old)
    torch.testing.assert_close(network(images_for(network)), peer(images_for(network)))


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.", ""]
)
@pytest.mark.parametrize("nests", [(), ("model",), ("state_dict",), ("state_dict", "model")])
def test_load_weights_drops_wrappers_however_nested(prefix, nests, source, tiny_vit):
    entries = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    for nest in nests:
        entries = {nest: entries, "epoch": 3}
    network = tiny_vit().eval()
    report = load_weights(network, entries)
    assert torch.equal(network(images_for(network)), source(images_for(network)))
    assert report.ignored == ("epoch",) * len(nests)
    assert report.reinitialised == report.resized == ()


def test_load_weights_drops_wrappers_from_the_front_only(source, tiny_vit):
    entries = {name.replace("mlp.", "module.mlp."): tensor for name, tensor in source.state_dict().items()}
    with pytest.raises(InputError, match=r"missing: blocks\.0\.mlp.*unexpected: blocks\.0\.module\.mlp"):
        load_weights(tiny_vit(), entries)


def test_load_weights_refuses_a_name_given_twice(source, tiny_vit):
    entries = source.state_dict() | {"module.cls_token": torch.zeros(1, 1, 12)}
    with pytest.raises(InputError, match="the weights hold cls_token twice"):
        load_weights(tiny_vit(), entries)


def test_load_weights_takes_real_wrappers(source, tiny_vit):
    network = tiny_vit().eval()
    report = load_weights(network, AveragedModel(nn.DataParallel(source)).state_dict())
    assert torch.equal(network(images_for(network)), source(images_for(network)))
    assert report.ignored == ("n_averaged",)


def test_load_weights_leaves_a_fresh_head_for_other_classes(source, tiny_vit, randomise):
    network = randomise(tiny_vit(num_classes=7), seed=3)
    report = load_weights(network, source.state_dict())
    assert report.reinitialised == HEAD
    assert set(report.loaded) == set(network.state_dict()) - set(HEAD)
    assert network(images_for(network)).eq(0).all()
    assert torch.equal(network.forward_features(images_for(network)), source.forward_features(images_for(network)))
    assert report.summary() == "30 parameters loaded from timm names; reinitialised head.weight, head.bias"


def test_load_weights_leaves_a_fresh_head_where_the_source_has_none(source, tiny_vit):
    entries = {name: tensor for name, tensor in source.state_dict().items() if name not in HEAD}
    network = tiny_vit()
    assert load_weights(network, entries).reinitialised == HEAD


@pytest.mark.parametrize("from_file", [False, True])
def test_load_weights_resamples_positions_as_timm_does(from_file, tiny_vit, randomise, tmp_path):
    source = randomise(tiny_vit(image_size=16))
    network = tiny_vit(image_size=(8, 24))
    path = write_model_file(tmp_path / "source.safetensors", source) if from_file else source.state_dict()
    report = load_weights(network, path)
    expected = resample_abs_pos_embed(source.pos_embed, [2, 6], [4, 4])
    torch.testing.assert_close(network.pos_embed, expected, rtol=0, atol=1e-7)
    assert torch.equal(network.pos_embed[:, 0], source.pos_embed[:, 0])
    assert report.resized == ("pos_embed",)
    assert "pos_embed" not in report.loaded
    assert report.layout == ("vitlab" if from_file else "timm")


def test_load_weights_knows_the_grid_of_a_model_file(tiny_vit, randomise, tmp_path):
    """2 x 6 patches into 3 x 4: as many rows, another grid; only the file's config tells."""
    source = randomise(tiny_vit(image_size=(8, 24)))
    network = tiny_vit(image_size=(12, 16))
    report = load_weights(network, write_model_file(tmp_path / "source.safetensors", source))
    expected = resample_abs_pos_embed(source.pos_embed, [3, 4], [2, 6])
    torch.testing.assert_close(network.pos_embed, expected, rtol=0, atol=1e-7)
    assert report.resized == ("pos_embed",)


def test_load_weights_keeps_the_positions_of_an_equal_oblong_grid(source, tiny_vit):
    network = tiny_vit()
    assert load_weights(network, source.state_dict()).resized == ()
    assert torch.equal(network.pos_embed, source.pos_embed)


def test_load_weights_leaves_fixed_positions_to_the_network(tiny_vit, randomise, tmp_path):
    source = randomise(tiny_vit(image_size=16, pos_embed="sincos"))
    network = tiny_vit(image_size=(8, 24), pos_embed="sincos")
    expected = network.pos_embed.clone()
    report = load_weights(network, write_model_file(tmp_path / "source.safetensors", source))
    assert (report.loaded, report.resized, report.reinitialised) == (tuple(network.state_dict()), (), ())
    assert report.layout == "vitlab"
    assert torch.equal(network.pos_embed, expected)
    assert torch.equal(network.blocks[1].mlp.fc1.weight, source.blocks[1].mlp.fc1.weight)


def test_load_weights_refuses_positions_of_the_other_kind(tiny_vit):
    learned, fixed = tiny_vit(), tiny_vit(pos_embed="sincos")
    with pytest.raises(InputError, match="unexpected: pos_embed; build it as theirs was built"):
        load_weights(fixed, learned.state_dict())
    with pytest.raises(InputError, match="missing: pos_embed; build it as theirs was built"):
        load_weights(learned, fixed.state_dict())


@pytest.mark.parametrize("suffix", [".pth", ".PT", ".bin", ".safetensors", "run"])
def test_load_weights_reads_files(suffix, source, tiny_vit, tmp_path):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(source.state_dict(), path)
    elif suffix == "run":
        path.mkdir()
        write_model_file(path / "best.safetensors", source)
    else:
        torch.save({"model": source.state_dict(), "optimizer": {"lr": 0.1}, "epoch": 3}, path)
    network = tiny_vit().eval()
    report = load_weights(network, str(path))
    assert torch.equal(network(images_for(network)), source(images_for(network)))
    assert report.layout == ("vitlab" if suffix == "run" else "timm")
    assert report.ignored == (("optimizer", "epoch") if suffix.lower() in (".pth", ".pt", ".bin") else ())


@pytest.mark.parametrize("protocol", [None, 2, 4], ids=["torch.save", "pickle 2", "pickle 4"])
def test_load_weights_runs_no_code_of_a_pickle(protocol, source, tiny_vit, tmp_path):
    path, marker = tmp_path / "evil.pth", tmp_path / "marker"
    content = {"model": source.state_dict(), "args": CreatesFile(marker)}
    if protocol is None:
        torch.save(content, path)
    else:
        content = CreatesFile(marker)
        path.write_bytes(pickle.dumps(content, protocol))
    network = tiny_vit()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    reason = "it is damaged, or holds more than tensors" if protocol == 4 else r"it wants to run posix\.mkdir"
    with pytest.raises(InputError, match=rf"evil\.pth was not opened: {reason}; ") as error:
        load_weights(network, path)
    assert "\n" not in str(error.value)
    assert not marker.exists()
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_load_weights_names_missing_unexpected_and_misshapen_entries_and_changes_nothing(source, tiny_vit, randomise):
    entries = source.state_dict()
    del entries["norm.weight"]
    entries["dist_token"] = torch.zeros(1, 1, 12)
    entries["patch_embed.proj.weight"] = torch.zeros(12, 1, 4, 4)
    network = randomise(tiny_vit(), seed=3)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = (
        r"^the weights \(timm names\) do not fit the network: missing: norm\.weight; unexpected: dist_token; "
        r"of another shape: patch_embed\.proj\.weight is \(12, 1, 4, 4\) instead of \(12, 3, 4, 4\); "
    )
    with pytest.raises(InputError, match=expected):
        load_weights(network, entries)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    "fault", [{"head.weight": torch.zeros(7, 8)}, {"head.bias": None}, {"pos_embed": torch.zeros(1, 6, 12)}]
)
def test_load_weights_refuses_heads_and_positions_of_no_known_kind(fault, source, tiny_vit):
    entries = {name: tensor for name, tensor in (source.state_dict() | fault).items() if tensor is not None}
    with pytest.raises(InputError, match=next(iter(fault)).replace(".", r"\.")):
        load_weights(tiny_vit(), entries)


def test_load_weights_lists_a_line_that_can_be_read(source, tiny_vit):
    with pytest.raises(InputError, match=r"unexpected: blocks\.2\..* and 28 more") as error:
        load_weights(tiny_vit(depth=2), tiny_vit(depth=5).state_dict())
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pth", b"no pickle", r"a\.pth was not opened: it is damaged, or holds more than tensors"),
        ("b.pth", b"", r"b\.pth is damaged, or not a file of torch\.save"),
        ("c.npz", b"", r"c\.npz is damaged, or no \.npz of plain arrays"),
        ("e.h5", b"", r"e\.h5 is no weights file: give a run folder, \.safetensors, \.pth, \.pt, \.bin, \.npz"),
        ("d.safetensors", b"", r"d\.safetensors is damaged"),
    ],
)
def test_load_weights_refuses_other_files(name, content, message, tmp_path, tiny_vit):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_weights(tiny_vit(), tmp_path / name)


def test_load_weights_refuses_a_cut_checkpoint(source, tiny_vit, tmp_path):
    path = tmp_path / "cut.pth"
    torch.save(source.state_dict(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"cut\.pth is damaged, or not a file of torch\.save"):
        load_weights(tiny_vit(), path)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"lr": 0.1}, {"model": {}}])
def test_load_weights_refuses_what_holds_no_state_dict(content, tiny_vit, tmp_path):
    path = tmp_path / "odd.pth"
    torch.save(content, path)
    with pytest.raises(InputError, match=r"holds a list|no tensors|no named tensors of plain numbers: lr"):
        load_weights(tiny_vit(), path)


@pytest.mark.parametrize("name", ["vit_base", Path("gone.pth")])
def test_load_weights_names_a_file_that_is_not_there(name, tiny_vit):
    with pytest.raises(InputError, match=f"^no such file or run folder: {name}$"):
        load_weights(tiny_vit(), name)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: {1: state["norm.weight"]}, "no named tensors of plain numbers: 1"),
        (lambda state: {**state, "norm.weight": state["norm.weight"].to_sparse()}, "plain numbers: norm.weight"),
        (lambda state: {**state, "norm.weight": state["norm.weight"] + 1j}, "plain numbers: norm.weight"),
        (lambda state: {**state, "norm.weight": state["norm.weight"].to("meta")}, "plain numbers: norm.weight"),
        (lambda state: {**state, "norm.weight": state["norm.weight"] * torch.nan}, "not finite: norm.weight"),
        (lambda state: {**state, "norm.weight": state["norm.weight"].long()}, "not finite: norm.weight"),
    ],
)
def test_load_weights_refuses_odd_tensors_and_changes_nothing(spoil, message, source, tiny_vit):
    network = tiny_vit()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(InputError, match=message):
        load_weights(network, spoil(dict(source.state_dict())))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_load_weights_says_how_a_model_file_was_built(source, tiny_vit, tmp_path):
    path = write_model_file(tmp_path / "source.safetensors", source)
    with pytest.raises(
        InputError, match=r"theirs has depth 2 \(here 3\), pool cls \(here mean\): give the same in model"
    ):
        load_weights(tiny_vit(depth=3, pool="mean"), path)


def test_load_weights_sums_the_rgb_stem_of_a_davit_for_grey_images(tiny_davit, randomise):
    source, network = randomise(tiny_davit()), tiny_davit(in_channels=1)
    report = load_weights(network, source.state_dict())
    assert report.resized == ("stem.conv.weight",)
    grey = torch.randn(2, 1, 20, 32)
    torch.testing.assert_close(network.eval()(grey), source.eval()(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)
