import functools
import math
import re
import shlex

import pytest
import torch
import torch.nn.functional as F

from vitlab.cli import parse
from vitlab.errors import InputError
from vitlab.layers import window_attention
from vitlab.models import davit
from vitlab.models.catalog import create_model
from vitlab.models.costs import count_macs, count_parameters, training_memory
from vitlab.models.proposals import NUM_CLASSES, propose

SIZES = [(32, 32), (64, 64), (112, 112), (200, 200), (224, 224), (96, 160), (192, 224)]
# Grids that do not divide, grids that are cut where they halve, pixels that do not fill a patch.
ODD_SIZES = [(31, 45), (62, 62), (61, 67), (226, 200), (15, 90)]


propose_once = functools.cache(propose)


def proposal_of(architecture, size):
    return next(proposal for proposal in propose_once(size) if proposal.architecture == architecture)


def typed(proposal, device="cpu"):
    """Build the network of the line that a proposal prints, as a shell and the command line read it."""
    command, *arguments = shlex.split(proposal.command())
    assert command == "vitlab"
    name, config = parse(arguments)
    assert (name, config.data.root) == ("train", "FOLDER")
    with torch.device(device):
        return create_model(
            config.model.name,
            num_classes=NUM_CLASSES,
            image_size=config.model.image_size,
            **config.model.overrides,
        )


@pytest.mark.parametrize("architecture", ["vit", "swin", "davit"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_propose_gives_lines_whose_networks_train(size, architecture):
    torch.manual_seed(0)
    proposal = proposal_of(architecture, size)
    network = typed(proposal)
    assert network.image_size == size
    assert count_parameters(network) == proposal.parameters
    images, labels = torch.randn(2, 3, *size), torch.tensor([3, 7])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    losses = []
    for _ in range(2 if max(size) <= 112 else 1):  # the first step changes a head of zeros alone
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    changed = {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}
    assert losses[0] == pytest.approx(math.log(NUM_CLASSES), abs=1e-4)
    if len(losses) == 2:
        assert losses[1] < losses[0]
        assert changed == before.keys()
    else:
        assert changed == {name for name in before if name.startswith("head") and "norm" not in name}
    assert all(parameter.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("architecture", ["swin", "davit"])
@pytest.mark.parametrize("size", SIZES + ODD_SIZES, ids=str)
def test_propose_states_the_grids_and_the_padding_of_the_network(size, architecture, monkeypatch):
    proposal = proposal_of(architecture, size)
    network = typed(proposal, device="meta")
    cut = {}  # of each stage, told by its width, the grid of whole windows

    def record(partition):
        def recording(qkv, window, *num_heads):
            _, H, W, D = qkv.shape
            cut[D] = (H, W, window)
            return partition(qkv, window, *num_heads)

        return recording

    for module, name in ((window_attention, "partition_heads"), (davit, "partition")):
        monkeypatch.setattr(module, name, record(getattr(module, name)))
    with torch.no_grad():
        grids = [output.shape[1:3] for output in network.forward_intermediates(torch.empty(1, 3, *size, device="meta"))]
    grids = list(dict.fromkeys((H, W) for H, W in grids))
    whole = [(H, W) for H, W, _ in cut.values()]
    (window,) = {window for *_, window in cut.values()}
    stride = network.config.patch_size if architecture == "swin" else network.config.stem_stride
    seen = sum(math.prod(size) / (stride * 2**stage) ** 2 for stage in range(len(grids)))
    padding = 1 - seen / sum(H * W for H, W in whole)
    divides = sum(grid == cut_grid for grid, cut_grid in zip(grids, whole, strict=True))
    sides = {str(window[0]), f"{window[0]}x{window[1]}"} if window[0] == window[1] else {f"{window[0]}x{window[1]}"}
    stated = re.fullmatch(
        r"grids (?P<grids>.*); window (?P<window>\S+) divides (?P<divides>all|\d+ of \d+)"
        r"(, (?P<padding>\S+)% of its positions are padding)?",
        proposal.reason,
    )
    assert stated["grids"] == ", ".join(f"{H}x{W}" for H, W in grids)
    assert stated["window"] in sides
    assert stated["divides"] == ("all" if divides == len(grids) else f"{divides} of {len(grids)}")
    assert float(stated["padding"] or 0) == pytest.approx(100 * padding, abs=0.051)
    assert min(grids[-1]) >= 4
    assert padding < 0.2
    if size in SIZES:
        assert padding == 0


@pytest.mark.parametrize(
    ("size", "grids"),
    [
        ((32, 32), "16x16, 8x8, 4x4; window 4"),
        ((64, 64), "16x16, 8x8, 4x4; window 4"),
        ((112, 112), "28x28, 14x14, 7x7; window 7"),
        ((200, 200), "40x40, 20x20, 10x10, 5x5; window 5"),
        ((96, 160), "24x40, 12x20, 6x10; window 6x5"),
        ((192, 224), "48x56, 24x28, 12x14, 6x7; window 6x7"),
    ],
    ids=str,
)
def test_propose_finds_windows_that_divide_every_grid(size, grids):
    for architecture in ("swin", "davit"):
        assert proposal_of(architecture, size).reason == f"grids {grids} divides all"


def test_propose_gives_the_named_networks_at_their_own_size():
    named = [("vit_tiny", {}), ("swin_tiny", {}), ("davit_tiny", {}), (None, {})]
    assert [(proposal.name, proposal.overrides) for proposal in propose_once((224, 224))] == named


@pytest.mark.parametrize("size", [(16, 16), (28, 28), (32, 32), (48, 64), (64, 64)], ids=str)
def test_propose_keeps_networks_for_small_images_small(size):
    assert all(1e6 < proposal.parameters < 2e6 for proposal in propose_once(size))


@pytest.mark.parametrize("size", [(28, 28), (20, 32), (64, 64)], ids=str)
def test_propose_imagegpt_gives_a_line_and_what_its_training_costs(size):
    proposal = proposal_of("imagegpt", size)
    network = typed(proposal, device="meta")
    assert network.image_size == size
    assert count_parameters(network) == proposal.parameters
    told = re.fullmatch(
        r"a row of (\S+) pixels; a training step of 32 images takes about (\S+) GiB in float32 "
        r"and (\S+) G multiply-adds",
        proposal.reason,
    )
    pixels, memory, macs = (float(number.replace(",", "")) for number in told.groups())
    assert pixels == math.prod(size)
    assert memory == pytest.approx(training_memory(network.config, batch_size=32) / 2**30, abs=0.051)
    assert macs == pytest.approx(3 * 32 * count_macs(network) / 1e9, abs=0.51)


@pytest.mark.parametrize(
    ("size", "near"),
    [((65, 64), "64x63"), ((224, 224), "64x64"), ((1, 8192), "1x4096"), ((300, 100), "110x36")],
    ids=str,
)
def test_propose_imagegpt_names_a_size_whose_row_of_pixels_is_short_enough(size, near):
    proposal = proposal_of("imagegpt", size)
    assert proposal.reason == f"a row of {math.prod(size):,} pixels is longer than 4,096: resize to {near} or less"
    assert proposal_of("imagegpt", tuple(map(int, near.split("x")))).name == "imagegpt_small"


def test_propose_vit_takes_a_patch_that_divides_or_names_a_size_that_has_one():
    found = 0
    for size in [(8, 8), (28, 28), (31, 31), (3, 9), (45, 75), (61, 67), (62, 62), (97, 53), (100, 140), (226, 226)]:
        proposal = proposal_of("vit", size)
        if proposal.name is None:
            near = re.search(r"resize to (\d+)x(\d+)$", proposal.reason)
            assert proposal_of("vit", (int(near[1]), int(near[2]))).name == "vit_tiny"
        else:
            patch, tokens = proposal.overrides["patch_size"], int(re.search(r"(\d+) tokens", proposal.reason)[1])
            assert size[0] % patch == size[1] % patch == 0
            assert tokens == size[0] // patch * (size[1] // patch)
            assert 16 <= tokens <= 784
            found += 1
    assert found == 4


@pytest.mark.parametrize(("size", "patch"), [((32, 32), 4), ((64, 64), 8), ((112, 112), 8), ((96, 160), 8)], ids=str)
def test_propose_vit_comes_near_to_64_tokens_for_small_images_and_196_for_others(size, patch):
    assert proposal_of("vit", size).overrides["patch_size"] == patch


@pytest.mark.parametrize(
    ("architecture", "size", "reason"),
    [
        (
            "vit",
            (31, 31),
            "of patches of 2 pixels and more 31 (1 tokens) divide the image, and 16 to 256 tokens are wanted: "
            "resize to 32x32",
        ),
        (
            "swin",
            (8, 40),
            "the image is too small for two stages with grids down to 4x4 of patches of 2 pixels: resize to 16x40",
        ),
        ("davit", (7, 7), "the image is too small for two stages with grids down to 4x4: resize to 8x8"),
    ],
)
def test_propose_gives_a_reason_where_nothing_fits(architecture, size, reason):
    proposal = proposal_of(architecture, size)
    assert (proposal.name, proposal.parameters, proposal.macs, proposal.reason) == (None, None, None, reason)
    assert proposal.to_dict()["command"] is None
    with pytest.raises(InputError, match=f"^no {architecture} for images of {size[0]}x{size[1]}: "):
        proposal.command()


@pytest.mark.parametrize("size", [(1, 1), (1, 8192), (8192, 8192)], ids=str)
def test_propose_answers_for_every_size(size):
    for proposal in propose(size):
        assert (proposal.name is None) == ("resize to" in proposal.reason)
