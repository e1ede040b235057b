"""Kill runs at random moments and inside saves, go on, and compare the end with that of an unbroken run.

    python scripts/kill_test.py --kills 200 --signals 20 --report kill_test.json

Each trial is one recipe of `RECIPES`: a short run on a few small pictures, whose process group is killed with SIGKILL
three times or more, then finished. What must be identical: the model files, the last state (weights, moving average,
optimizer, position), every value in TensorBoard and every line of metrics.jsonl but the speeds.

With `--signals` the group of a run with two loader processes gets so many of each of SIGINT, SIGTERM and SIGUSR1 as
well. What must hold: exit code 130 with one line that names the state, which is that of the last step logged; no
process of the group left; and in the end the bits of the unbroken run.
"""

import argparse
import hashlib
import io
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitlab import commands  # noqa: F401 - imported once; each run is a fork of this process
from vitlab.__main__ import main as vitlab
from vitlab.engine.state import list_states, load_state, step_of
from vitlab.engine.tensorboard import EVENTS_NAME, read_events
from vitlab.engine.trainer import Trainer
from vitlab.runs import training

_VIT = {"patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2, "drop_path_rate": 0.2, "drop_rate": 0.1}
_SWIN = {"patch_size": 1, "window_size": 4, "embed_dim": 32, "depths": [2, 1], "num_heads": [16, 16]}
_DAVIT = {"stem_stride": 1, "window_size": 4, "embed_dims": [16, 32], "depths": [1, 1], "num_heads": [2, 4]}
_GPT = {"num_colors": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "drop_rate": 0.1}
_COMMON = (
    "--train.epochs 3 --train.batch_size 16 --train.device cpu --data.resize_mode squash --data.workers 0",
    "--augment.crop padded --augment.crop_padding 1 --monitor.log_every_steps 1 --train.checkpoint_every_steps 2",
)
RECIPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "vit fp32, mixup, EMA": ("vit_tiny", _VIT, "--train.precision fp32 --augment.mixup 0.4 --train.ema_decay 0.9"),
    "vit bf16, 2 workers": ("vit_tiny", _VIT, "--train.precision bf16 --data.workers 2 --optim.layer_decay 0.8"),
    "vit accumulation, sgd": ("vit_tiny", _VIT, "--train.accumulate 3 --optim.name sgd --optim.lr 0.05"),
    "swin, 16 heads, muon": ("swin_tiny", _SWIN, "--optim.name muon --optim.lr 2e-3 --data.workers 1"),
    "imagegpt, next pixel": ("imagegpt_small", _GPT, "--objective.name next_pixel --train.precision bf16"),
    "imagegpt, joint on masked pixels, accumulation": (
        "imagegpt_small",
        {**_GPT, "causal": False},
        "--objective.name joint --objective.corruption bert --train.accumulate 2 --train.ema_decay 0.9",
    ),
    "davit, repeats": ("davit_tiny", _DAVIT, "--augment.repeats 2 --data.sampling balanced --train.precision fp32"),
}
_SPEEDS = ("images_per_s", "data_wait")
_PATIENCE_S = 300.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SIGNALLED = "vit bf16, 2 workers"
_micro_batches = mmap.mmap(-1, 1)
"""Shared with the run: how many micro-batches of the present step it has begun."""


@dataclass
class Trial:
    """What happened to one run."""

    recipe: str
    kills: int = 0
    inside_saves: int = 0
    inside_accumulations: int = 0
    """Kills after a micro-batch has left its gradient and before the optimizer's step."""
    signals: int = 0
    differences: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; give 0 where all ends were identical, 1 where not."""
    args = _parse(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts beside itself ignores it
    generator = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-test-"))
    trials: list[Trial] = []
    _write_pictures(folder / "pictures")
    with redirect_stdout(io.StringIO()):  # what a run imports is then there in every fork
        vitlab([*_line("swin, 16 heads, muon", folder / "imports"), "--data.workers", "0", "--train.steps", "1"])
    whole = {name: _unbroken(name, folder / f"whole-{index}") for index, name in enumerate(RECIPES)}
    while sum(trial.kills for trial in trials) < args.kills:
        name = list(RECIPES)[len(trials) % len(RECIPES)]
        reference, seconds = whole[name]
        trial = _trial(name, folder / f"trial-{len(trials)}", reference, seconds, generator)
        trials.append(trial)
        verdict = "identical" if not trial.differences else f"DIFFERENT: {'; '.join(trial.differences[:3])}"
        print(f"{len(trials)}: {name}: {trial.kills} kills, {trial.inside_saves} inside a save: {verdict}", flush=True)
    left = list(_SIGNALS) * args.signals
    generator.shuffle(left)
    while left:
        reference, seconds = whole[_SIGNALLED]
        trial = _signalled(folder / f"trial-{len(trials)}", left, reference, seconds, generator)
        trials.append(trial)
        print(f"{len(trials)}: {trial.signals} signals: {'; '.join(trial.differences[:3]) or 'identical'}", flush=True)
    report = {
        "runs": len(trials),
        "kills": sum(trial.kills for trial in trials),
        "runs_with_3_kills": sum(trial.kills >= 3 for trial in trials),
        "inside_saves": sum(trial.inside_saves for trial in trials),
        "inside_accumulations": sum(trial.inside_accumulations for trial in trials),
        "signals": sum(trial.signals for trial in trials),
        "different": sum(bool(trial.differences) for trial in trials),
    }
    print(json.dumps(report))
    if args.report is not None:
        Path(args.report).write_text(json.dumps({**report, "trials": [vars(trial) for trial in trials]}, indent=1))
    shutil.rmtree(folder)
    return int(report["different"] > 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kills", type=int, default=20, help="kills in all (default: %(default)s)")
    parser.add_argument("--signals", type=int, default=0, help="signals of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: %(default)s)")
    parser.add_argument("--report", help="write what happened to this JSON file")
    return parser.parse_args(arguments)


def _line(recipe: str, run: Path) -> list[str]:
    name, overrides, options = RECIPES[recipe]
    network = ["--model.name", name, "--model.image_size", "8", "--model.overrides", json.dumps(overrides)]
    network += ["--data.root", str(run.parent / "pictures")]
    return ["train", *" ".join(_COMMON).split(), *network, *options.split(), "--train.run_dir", str(run)]


def _write_pictures(root: Path) -> None:
    """Write noise in four classes, 36 images each to learn and 8 to validate."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 36), ("val", 8)):
        for name in "abcd":
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")


def _start(recipe: str, run: Path) -> int:
    """Fork a process that makes the run, in a group of its own; RUN.out and RUN.err get its output. Give its id."""
    _micro_batches[0] = 0
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
            os.dup2(os.open(run.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
        _count_micro_batches()
        for name in ("_plot", "show_evaluation"):  # pictures take longer than such a run
            setattr(training, name, lambda *_: None)
        code = vitlab(_line(recipe, run))
        sys.stdout.flush()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _count_micro_batches() -> None:
    """Let this process's trainer tell its parent where in an accumulation it is."""
    prepare, make_step = Trainer.prepare, Trainer.train_step

    def counted(self: Trainer, *batch: Any) -> Any:
        _micro_batches[0] += 1
        return prepare(self, *batch)

    def ended(self: Trainer, *micro_batches: Any) -> Any:
        report = make_step(self, *micro_batches)
        _micro_batches[0] = 0
        return report

    Trainer.prepare, Trainer.train_step = counted, ended  # type: ignore[method-assign, assignment]


def _unbroken(recipe: str, run: Path) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    _, status = os.waitpid(_start(recipe, run), 0)
    if status:
        raise SystemExit(f"the unbroken run of {recipe} failed")
    return _outcome(run), time.monotonic() - began


def _trial(recipe: str, run: Path, reference: dict[str, Any], seconds: float, generator: random.Random) -> Trial:
    trial = Trial(recipe)
    while trial.kills < 3:
        pid = _start(recipe, run)
        in_save = generator.random() < 0.4
        if in_save:
            reached = _wait(pid, generator.uniform(0.05, 0.5) * seconds, lambda: any((run / "resume").glob(".new-*")))
        elif "accumulation" in recipe:
            reached = _wait(pid, generator.uniform(0.05, 0.5) * seconds, lambda: _micro_batches[0] > 1)
        else:
            reached = _wait(pid, generator.uniform(0.05, 0.5) * seconds)
        if not reached:
            break  # it came to its end before its moment
        os.kill(pid, signal.SIGSTOP)  # so that it is killed where it is seen to be
        trial.inside_saves += in_save
        trial.inside_accumulations += _micro_batches[0] > 1
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        trial.kills += 1
    return _finished(trial, run, reference)


def _finished(trial: Trial, run: Path, reference: dict[str, Any]) -> Trial:
    """Let the run go on to its end, and compare that with the unbroken run's."""
    _, status = os.waitpid(_start(trial.recipe, run), 0)
    if status:
        trial.differences.append(f"the run did not go on: {run.with_suffix('.err').read_text().strip()}")
        return trial
    outcome = _outcome(run)
    names = sorted(reference.keys() | outcome.keys())
    trial.differences += [name for name in names if reference.get(name) != outcome.get(name)]
    return trial


def _wait(pid: int, seconds: float, reached: Callable[[], bool] = lambda: True) -> bool:
    """Wait a while of the run, then for a moment in it; False where the run ends before."""
    began = time.monotonic()
    while time.monotonic() - began < _PATIENCE_S:
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:
            return False
        if time.monotonic() - began > seconds and reached():
            return True
        time.sleep(0.0005)
    raise SystemExit("a run did not end")


def _signalled(
    run: Path, left: list[signal.Signals], reference: dict[str, Any], seconds: float, generator: random.Random
) -> Trial:
    """Send signals to the group of a run until it ends; takes those that it has got from `left`."""
    trial = Trial(_SIGNALLED)
    while left and trial.signals < 5:
        pid = _start(trial.recipe, run)
        before = _newest_step(run)
        if not _wait(pid, generator.uniform(0.1, 0.8) * seconds):
            return trial
        number = left.pop()
        trial.signals += 1
        os.killpg(pid, number)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        ended = code == 0 and _newest_step(run) == json.loads(reference["progress"])["step"]  # nothing was left to do
        trial.differences += _faults(run, pid, number, before, ended=ended)
        if code != 130 and not ended:
            trial.differences.append(f"{number.name}: exit code {code}")
    return _finished(trial, run, reference)


def _faults(run: Path, pid: int, number: signal.Signals, before: int, *, ended: bool) -> list[str]:
    """Say what is not as it must be after a run was interrupted."""
    lines = run.with_suffix(".err").read_text().split("\n")
    newest = _newest_step(run)
    events = run / "tensorboard" / EVENTS_NAME
    logged = max((event.step for event, _ in read_events(events)), default=0) if events.exists() else 0
    faults = []
    if newest < before or newest != logged:
        faults.append(f"{number.name}: state {newest} after {before}, logged {logged}")
    noted = ["", f"vitlab: {number.name}: finishing the step and saving; once more stops at once"]
    saved = "".join(lines[2:])
    fitting = lines[:2] == noted and len(lines) <= 4 and (not saved or f"{number.name}: state saved in" in saved)
    if not fitting and not ended and lines != ["vitlab: interrupted", ""]:  # before the first step, or after the last
        faults.append(f"{number.name}: said {lines}")
    deadline = time.monotonic() + 10
    while _lives(pid):
        if time.monotonic() > deadline:
            faults.append(f"{number.name}: a process is left")
            break
        time.sleep(0.02)
    return faults


def _newest_step(run: Path) -> int:
    return max((step_of(state) for state in list_states(run / "resume")), default=0)


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _outcome(run: Path) -> dict[str, Any]:
    """Give digests of everything in a finished run that must not depend on interruptions."""
    outcome: dict[str, Any] = {}
    for name in ("best.safetensors", "last.safetensors"):
        outcome[name] = hashlib.sha256((run / name).read_bytes()).hexdigest()
    tensors, record = load_state(list_states(run / "resume")[0])
    for name, tensor in tensors.items():
        outcome[f"state {name}"] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    outcome["progress"] = json.dumps(record["progress"], sort_keys=True)
    for row in (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()):
        outcome[f"metrics {row['step']}"] = {key: v for key, v in row.items() if not key.endswith(_SPEEDS)}
    outcome |= _tensorboard(run / "tensorboard")
    return outcome


def _tensorboard(folder: Path) -> dict[str, Any]:
    """Give every value that TensorBoard shows, each step as often as it is there; a digest of what is no number."""
    shown: dict[str, Any] = {}
    for event, _ in read_events(folder / EVENTS_NAME):
        for value in event.summary.value:
            if value.tag.endswith(_SPEEDS) or value.tag.startswith("_hparams_"):  # a start time is among the latter
                continue
            digest = hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
            point = value.simple_value if value.HasField("simple_value") else digest
            shown.setdefault(f"tensorboard {value.tag}", []).append((event.step, point))
    return shown


if __name__ == "__main__":
    sys.exit(main())
