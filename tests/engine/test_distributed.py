"""Several processes: the same batches, weights and scores as one; the same bits after a stop; none is left behind."""

import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vitlab.__main__ import main
from vitlab.config import AugmentConfig
from vitlab.data.augment import TrainTransform
from vitlab.data.datasets import load_dataset
from vitlab.data.loader import Batch, Loader
from vitlab.data.preprocess import Preprocess
from vitlab.engine.distributed import ALONE
from vitlab.engine.objectives import Classification
from vitlab.engine.parallel import Wrapped, batch_norms
from vitlab.engine.state import differing_tensors, list_states, load_state
from vitlab.inference.sameness import compare_bits
from vitlab.models.catalog import create_model
from vitlab.models.files import save_model

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
HERE = Path(__file__).parent
PLAIN = {"train__steps": 20, "train__accumulate": 2, "optim__lr": 1e-3}
"""Without what draws random numbers on each process, or divides noise by its own size."""
VIT = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "qkv_bias": False}
SWIN = {"patch_size": 1, "window_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4), "qkv_bias": False}
GPT = {"num_colors": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
RANDOM = {
    "train__steps": 12,
    "train__checkpoint_every_steps": 7,
    "train__keep_states": 9,
    "train__ema_decay": 0.9,
    "augment__mixup": 0.8,
    "train__batch_size": 6,
}


@contextmanager
def launched(count: int, *arguments: str, restarts: int = 0) -> Iterator[subprocess.Popen]:
    """Start processes, and leave none behind however the test ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*LAUNCHER, str(count), "--max-restarts", str(restarts), *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            family = [launcher.pid, *children(launcher.pid)]
            for pid in alive(family) if launcher.poll() is None else ():
                os.kill(pid, signal.SIGKILL)


class Jobs:
    """Command lines that one launcher runs one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[list[str]] = []
        folder.mkdir()

    def train(self, name: str, config, *, resume: Path | None = None) -> Path:
        run, file = self.folder / name, self.folder / f"{name}.yaml"
        file.write_text(config.to_yaml())
        more = [] if resume is None else ["--train.resume", str(resume)]
        self.lines.append(["train", "--config", str(file), "--train.run_dir", str(run), *more])
        return run

    def run(self, count: int) -> None:
        """Run them; every line has to end with 0 on every process."""
        jobs, ends = self.folder / "jobs.json", self.folder / "ends.json"
        jobs.write_text(json.dumps(self.lines))
        with launched(count, str(HERE / "run_commands.py"), str(jobs), str(ends)) as launcher:
            output = launcher.communicate(timeout=600)[0]
        assert launcher.returncode == 0, output
        codes = json.loads(ends.read_text())
        assert codes == [[0] * len(self.lines)] * count, output


@pytest.fixture(scope="module")
def configs(color_config):
    """Runs that several processes and one have to make alike, by name."""
    pixels = {"objective__name": "next_pixel", "model__name": "imagegpt_small", "model__overrides": GPT}
    masked = {**GPT, "causal": False}
    runs = {
        "vit": {"model__overrides": VIT},
        "sharded": {"model__overrides": VIT, "train__parallel": "fsdp"},
        "swin": {"model__name": "swin_tiny", "model__overrides": SWIN, "model__image_size": (8, 8)},
        "next": pixels,
        "masked": pixels | {"objective__name": "masked_pixel", "model__overrides": masked},
        "joint": pixels | {"objective__name": "joint", "model__overrides": masked, "objective__corruption": "bert"},
    }
    runs["sharded lamb"] = runs["sharded"] | {"optim__name": "lamb", "optim__clip_grad": 0.5}
    common = {"monitor__drawings": 2, "monitor__tensorboard": False, "augment__hflip": 0.5}
    return {name: color_config(Path("unused"), **PLAIN, **common, **changes) for name, changes in runs.items()}


@pytest.fixture(scope="module")
def alone(configs, tmp_path_factory):
    """The runs of one process."""
    jobs = Jobs(tmp_path_factory.mktemp("alone") / "jobs")
    runs = {name: jobs.train(name, config) for name, config in configs.items()}
    assert [main(line) for line in jobs.lines] == [0] * len(runs)
    return runs


@pytest.fixture(scope="module")
def two(configs, color_config, color_folder, tmp_path_factory):
    """What two processes made: those runs, runs with all that is random, scores and predictions."""
    jobs = Jobs(tmp_path_factory.mktemp("two") / "jobs")
    runs = {name: jobs.train(name, config) for name, config in configs.items()}
    sharded = color_config(Path("unused"), **RANDOM | {"train__ema_decay": None}, train__parallel="fsdp")
    runs["random"] = jobs.train("random", sharded)
    runs["resumed"] = jobs.train("resumed", sharded, resume=runs["random"] / "resume" / "step-7")
    norms = {"model__name": "timm/test_efficientnet", "model__overrides": {}, "model__image_size": (32, 48)}
    runs["norms"] = jobs.train("norms", color_config(Path("unused"), **norms, train__steps=5))
    run, out = str(runs["vit"]), jobs.folder
    jobs.lines += [
        ["evaluate", run, "--data", str(color_folder), "--json", str(out / "scores.json"), "--batch_size", "4"],
        ["predict", run, str(color_folder / "val"), "--out", str(out / "rows.csv"), "--batch_size", "4"],
    ]
    jobs.run(2)
    return runs


@pytest.fixture(scope="module")
def four(configs, color_config, tmp_path_factory):
    """What four processes made; the last batch of an epoch leaves some of them without an image."""
    jobs = Jobs(tmp_path_factory.mktemp("four") / "jobs")
    runs = {"vit": jobs.train("vit", configs["vit"])}
    config = color_config(Path("unused"), **RANDOM)
    runs["random"] = jobs.train("random", config)
    runs["resumed"] = jobs.train("resumed", config, resume=runs["random"] / "resume" / "step-7")
    evaluate = ["evaluate", str(constant_model(jobs.folder)), "--data", str(ten_images(jobs.folder))]
    jobs.lines += [[*evaluate, "--json", str(jobs.folder / f"ten-{size}.json"), "--batch_size", size] for size in "37"]
    jobs.run(4)
    return runs


def constant_model(folder: Path) -> Path:
    """Write a model file that takes every image for the first class."""
    network = create_model("vit_tiny", num_classes=2, image_size=8, **VIT)
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor([3.0, 0.0]))
    path = folder / "constant.safetensors"
    save_model(
        path,
        network,
        classes=("ant", "bee"),
        preprocess=Preprocess(image_size=(8, 8)),
        metrics={},
        data={"name": "ten"},
    )
    return path


def ten_images(folder: Path) -> Path:
    """Write a validation split whose images 0 and 1 alone are of the first class."""
    for split, counts in (("val", (2, 8)), ("train", (1, 1))):
        for name, count in zip(("ant", "bee"), counts, strict=True):
            (folder / "ten" / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (9, 8), (10 * number, 0, 0)).save(folder / "ten" / split / name / f"{number}.png")
    return folder / "ten"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_an_epoch_is_the_same_for_any_number_of_processes_and_workers(color_folder, count):
    dataset = load_dataset(str(color_folder), val_fraction=0.1, seed=0)
    transform = TrainTransform(AugmentConfig(crop="resized", color_jitter=0.3), Preprocess(image_size=(8, 12)))

    def digest(count: int, workers: int) -> str:
        samples = {}
        for part in range(count):
            loader = Loader(
                dataset.splits["train"],
                transform,
                batch_size=8,
                seed=5,
                workers=workers,
                shuffle=True,
                repeats=2,
                part=(part, count),
            )
            with closing(loader):
                for number, batch in enumerate(loader.epoch(3)):
                    for place, (image, index) in enumerate(zip(batch.images, batch.indices.tolist(), strict=True)):
                        samples[number, part, place] = index, image.numpy().tobytes()
        assert len(samples) == 39
        content = [samples[key] for key in sorted(samples)]
        return hashlib.sha256(repr(content).encode()).hexdigest()

    digests = {digest(count, workers) for workers in (0, 1, 2)}
    assert digests == {digest(1, 0)}


def test_two_processes_shuffle_anew_each_epoch_and_cover_the_data(color_folder):
    split = load_dataset(str(color_folder), val_fraction=0.1, seed=0).splits["train"]

    def orders(seed: int) -> list[list[int]]:
        loaders = [Loader(split, _corner, batch_size=8, seed=seed, shuffle=True, part=(part, 2)) for part in (0, 1)]
        return [
            [index for loader in loaders for batch in loader.epoch(epoch) for index in batch.indices.tolist()]
            for epoch in range(3)
        ]

    first, second, third = orders(0)
    assert first != second != third != first
    assert sorted(first) == sorted(second) == sorted(third) == list(range(39))
    assert orders(0) == [first, second, third]
    assert orders(1)[0] != first


def _corner(image, seed):
    return image[:4, :4]


@pytest.mark.parametrize("name", ["vit", "sharded", "sharded lamb", "swin", "next"])
def test_two_processes_end_with_the_weights_of_one(alone, two, name):
    assert_near(alone[name], two[name])


def test_four_processes_end_with_the_weights_of_one(alone, four):
    assert_near(alone["vit"], four["vit"])


def test_sharding_gives_the_weights_of_whole_networks(two):
    assert_near(two["vit"], two["sharded"])


@pytest.mark.parametrize("name", ["masked", "joint"])
def test_two_processes_train_each_objective(alone, two, name):
    # Which pixels are hidden is drawn on each process by itself.
    losses, others = (rows(runs[name], "train/loss") for runs in (alone, two))
    assert losses[-1] < losses[0]
    assert others[-1] < others[0]


def assert_near(run: Path, other: Path) -> None:
    weights, others = (load_file(one / "last.safetensors") for one in (run, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            others[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for tag in ("train/loss", "val/loss"):
        np.testing.assert_allclose(rows(run, tag), rows(other, tag), rtol=1e-5)


def rows(run: Path, tag: str) -> list[float]:
    return [json.loads(line)[tag] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("count", ["two", "four"])
def test_a_state_of_several_processes_goes_on_to_the_bit(request, count):
    runs = request.getfixturevalue(count)
    same = compare_bits(runs["random"], runs["resumed"])
    assert same.identical, same.lines()
    ends = [load_state(list_states(runs[name] / "resume")[0]) for name in ("random", "resumed")]
    assert differing_tensors(ends[0][0], ends[1][0]) == []
    assert ends[0][1]["progress"] == ends[1][1]["progress"]


@pytest.mark.parametrize(("count", "name"), [("two", "sharded"), ("four", "vit")])
def test_a_state_of_several_processes_goes_on_in_one(request, configs, tmp_path, capsys, count, name):
    runs, jobs = request.getfixturevalue(count), Jobs(tmp_path / "jobs")
    run = jobs.train("one", configs[name], resume=runs[name] / "resume" / "step-18")
    assert main(jobs.lines[0]) == 0
    assert f"processes was {2 if count == 'two' else 4}, is 1" in capsys.readouterr().out
    assert_near(runs[name], run)


def test_evaluation_counts_each_image_once(two, color_folder, tmp_path):
    scores = json.loads((two["vit"].parent / "scores.json").read_text())
    line = ["evaluate", str(two["vit"]), "--data", str(color_folder), "--json", str(tmp_path / "one.json")]
    assert main([*line, "--batch_size", "4"]) == 0
    one = json.loads((tmp_path / "one.json").read_text())
    assert scores["count"] == one["count"] == 15
    assert scores["confusion"] == one["confusion"]
    assert scores["intervals"]["macro_f1"] == one["intervals"]["macro_f1"]
    assert scores["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_the_score_of_a_network_with_batch_norm_is_that_of_its_file(two, color_folder, tmp_path):
    file = str(two["norms"] / "last.safetensors")
    line = ["evaluate", file, "--data", str(color_folder), "--json", str(tmp_path / "one.json")]
    assert main(line) == 0
    loss = json.loads((tmp_path / "one.json").read_text())["loss"]
    assert loss == pytest.approx(rows(two["norms"], "val/loss")[-1], rel=1e-5)


def test_norms_over_the_batch_rest_where_it_is_one_image():
    network = create_model("timm/test_efficientnet", num_classes=2, image_size=32)
    wrapped = Wrapped(Classification(network.train()), ALONE, "ddp")
    norm = batch_norms(network)[0]

    def mean_after(count: int) -> torch.Tensor:
        batch = Batch(torch.randn(count, 3, 32, 32) + 5, torch.zeros(count, dtype=torch.int64), torch.arange(count))
        wrapped(batch).loss.backward()
        return norm.running_mean.clone()

    first = mean_after(3)
    assert torch.equal(mean_after(1), first)
    assert not torch.equal(mean_after(2), first)


@pytest.mark.parametrize("size", [3, 7])
def test_ten_images_on_four_processes_count_each_once(four, size):
    scores = json.loads((four["vit"].parent / f"ten-{size}.json").read_text())
    assert scores["count"] == 10
    assert scores["confusion"] == [[2, 0], [8, 0]]
    assert scores["top1"] == 0.2


def test_predictions_of_two_processes_are_those_of_one(two, color_folder, tmp_path):
    line = ["predict", str(two["vit"]), str(color_folder / "val"), "--out", str(tmp_path / "one.csv")]
    assert main([*line, "--batch_size", "4"]) == 0
    files = [two["vit"].parent / "rows.csv", tmp_path / "one.csv"]
    tables = [list(csv.DictReader(path.read_text().splitlines())) for path in files]
    assert [row["path"] for row in tables[0]] == [row["path"] for row in tables[1]]
    assert len(tables[0]) == 15
    for mine, theirs in zip(*tables, strict=True):
        assert mine["label_1"] == theirs["label_1"]
        assert float(mine["probability_1"]) == pytest.approx(float(theirs["probability_1"]), abs=1e-5)


def children(pid: int) -> list[int]:
    """Find the processes that a process has started, and those that they have."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found + [grandchild for child in found for grandchild in children(child)]


def wait_for(condition, seconds: float = 120):
    for _ in range(int(seconds / 0.05)):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def alive(pids: list[int]) -> list[int]:
    there = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                there.append(pid)
    return there


@pytest.fixture
def long_job(color_config, tmp_path):
    """A run of two processes that saves often and takes longer than a test waits; and its arguments."""
    jobs = Jobs(tmp_path / "jobs")
    config = color_config(
        Path("unused"), train__steps=100_000, train__checkpoint_every_steps=5, monitor__tensorboard=False
    )
    run = jobs.train("run", config)
    return run, jobs.lines[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves_once_and_ends_all(long_job, number):
    run, line = long_job
    with launched(2, "-m", "vitlab", *line) as launcher:
        wait_for(lambda: step_in(run) >= 5)
        family = children(launcher.pid)
        launcher.send_signal(number)
        output = launcher.communicate(timeout=120)[0]
        assert not alive(family)
    assert launcher.returncode != 0
    assert output.count("state saved in") == 1, output
    saved = output.partition("state saved in ")[2].partition(";")[0]
    assert load_state(Path(saved))[1]["progress"]["step"] == step_in(run)


def step_in(run: Path) -> int:
    states = list_states(run / "resume")
    return int(states[0].name.partition("-")[2]) if states else 0


def test_no_process_outlives_its_launcher(long_job):
    run, line = long_job
    with launched(2, "-m", "vitlab", *line) as launcher:
        wait_for(lambda: step_in(run) >= 5)
        family = children(launcher.pid)
        assert len(family) == 2
        launcher.send_signal(signal.SIGKILL)
        wait_for(lambda: not alive(family))
        assert "state saved in" in launcher.communicate(timeout=60)[0]


def test_a_killed_process_is_started_again_and_ends_in_the_same_bits(color_config, tmp_path):
    jobs = Jobs(tmp_path / "jobs")
    config = color_config(Path("unused"), **RANDOM | {"train__steps": 120, "train__keep_states": 2})
    whole = jobs.train("whole", config)
    killed = jobs.train("killed", config)
    with launched(2, "-m", "vitlab", *jobs.lines[0]) as launcher:
        output = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 0, output
    with launched(2, "-m", "vitlab", *jobs.lines[1], restarts=2) as launcher:
        wait_for(lambda: step_in(killed) >= 20)
        os.kill(children(launcher.pid)[-1], signal.SIGKILL)
        output = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 0, output
    assert "going on from" in output
    same = compare_bits(whole, killed)
    assert same.identical, same.lines()


def test_restarts_need_the_name_of_a_folder(color_folder, tmp_path):
    line = ["train", "--data.root", str(color_folder), "--model.image_size", "8", "--model.overrides.patch_size", "4"]
    with launched(1, "-m", "vitlab", *line, restarts=1) as launcher:
        output = launcher.communicate(timeout=120)[0]
    assert launcher.returncode != 0
    assert "give it a name with --train.run_dir" in output


def test_what_all_processes_meet_is_said_once(color_config, tmp_path):
    jobs = Jobs(tmp_path / "jobs")
    jobs.train("run", color_config(Path("unused"), optim__name="muon", train__parallel="fsdp"))
    with launched(2, "-m", "vitlab", *jobs.lines[0]) as launcher:
        output = launcher.communicate(timeout=120)[0]
    lines = [line for line in output.splitlines() if line.startswith("vitlab:")]
    assert len(lines) == 1, output
    assert lines[0].startswith("vitlab: optim.name muon makes other steps")
    assert not list((tmp_path / "jobs").glob("run/*"))


def test_what_one_process_alone_meets_is_said_by_it(color_config, tmp_path):
    jobs = Jobs(tmp_path / "jobs")
    jobs.train("run", color_config(Path("unused")))
    code = (
        "import os, sys, vitlab.runs.training as t; from vitlab.errors import InputError; from vitlab import __main__\n"
        "def fail(*a, **k): raise InputError('no such disk here')\n"
        "if os.environ['RANK'] == '1': t.load_dataset = fail\n"
        "sys.exit(__main__.main(sys.argv[1:]))\n"
    )
    (tmp_path / "one_fails.py").write_text(code)
    with launched(2, str(tmp_path / "one_fails.py"), *jobs.lines[0]) as launcher:
        output = launcher.communicate(timeout=120)[0]
    lines = [line for line in output.splitlines() if line.startswith("vitlab:")]
    assert lines == ["vitlab: process 1: no such disk here"], output


def test_an_image_that_one_process_cannot_read_ends_all_with_its_name(color_config, tmp_path):
    root = tmp_path / "data"
    for name in ("ant", "bee"):
        (root / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(root / name / f"{number}.png")
    (root / "bee" / "7.png").write_bytes(b"no picture")
    jobs = Jobs(tmp_path / "jobs")
    run = jobs.train("run", color_config(Path("unused"), data__root=str(root), data__val_fraction=0.2))
    with launched(2, "-m", "vitlab", *jobs.lines[0]) as launcher:
        output = launcher.communicate(timeout=120)[0]
    assert launcher.returncode != 0
    lines = [line for line in output.splitlines() if line.startswith("vitlab:")]
    assert len(lines) == 1, output
    assert str(root / "bee" / "7.png") in lines[0]
    assert "Traceback" not in output.partition("ChildFailedError")[0].partition("torch/distributed")[0]
    assert run.is_dir()
