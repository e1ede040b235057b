"""Kill runs at random moments and inside saves, go on, and compare the end with that of an unbroken run.

    python scripts/kill_test.py --kills 200 --report kill_test.json

Each trial is one recipe of `RECIPES`: a short run on the built-in digits, whose process group is killed with SIGKILL
three times or more, then finished. What must be identical: the model files, the last state (weights, moving average,
optimizer, position), every value in TensorBoard and every line of metrics.jsonl but the speeds.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vitlab.training  # imported once; each run is a fork of this process
from vitlab.cli import parse
from vitlab.engine.state import list_states, load_state
from vitlab.errors import Finished

_VIT = {"patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2, "drop_path_rate": 0.2, "drop_rate": 0.1}
_SWIN = {"patch_size": 1, "window_size": 4, "embed_dim": 32, "depths": [2, 1], "num_heads": [16, 16]}
_DAVIT = {"stem_stride": 1, "window_size": 4, "embed_dims": [16, 32], "depths": [1, 1], "num_heads": [2, 4]}
_COMMON = (
    "--data.root digits --data.val_fraction 0.9 --train.epochs 3 --train.batch_size 16 --train.device cpu",
    "--augment.crop padded --augment.crop_padding 1 --monitor.log_every_steps 1 --train.checkpoint_every_steps 2",
)
RECIPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "vit fp32, mixup, EMA": ("vit_tiny", _VIT, "--train.precision fp32 --augment.mixup 0.4 --train.ema_decay 0.9"),
    "vit bf16, 2 workers": ("vit_tiny", _VIT, "--train.precision bf16 --data.workers 2 --optim.layer_decay 0.8"),
    "vit accumulation, sgd": ("vit_tiny", _VIT, "--train.accumulate 3 --optim.name sgd --optim.lr 0.05"),
    "swin, 16 heads, muon": ("swin_tiny", _SWIN, "--optim.name muon --optim.lr 2e-3 --data.workers 1"),
    "davit, repeats": ("davit_tiny", _DAVIT, "--augment.repeats 2 --data.sampling balanced --train.precision fp32"),
}
_SPEEDS = ("images_per_s", "data_wait")
_PATIENCE_S = 300.0


@dataclass
class Trial:
    """What happened to one run."""

    recipe: str
    kills: int = 0
    inside_saves: int = 0
    inside_accumulations: int = 0
    differences: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; give 0 where all ends were identical, 1 where not."""
    args = _parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    generator = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-test-"))
    trials: list[Trial] = []
    whole = {name: _unbroken(name, folder / f"whole-{index}") for index, name in enumerate(RECIPES)}
    while sum(trial.kills for trial in trials) < args.kills:
        name = list(RECIPES)[len(trials) % len(RECIPES)]
        reference, seconds = whole[name]
        trial = _trial(name, folder / f"trial-{len(trials)}", reference, seconds, generator)
        trials.append(trial)
        verdict = "identical" if not trial.differences else f"DIFFERENT: {'; '.join(trial.differences[:3])}"
        print(f"{len(trials)}: {name}: {trial.kills} kills, {trial.inside_saves} inside a save: {verdict}", flush=True)
    report = {
        "runs": len(trials),
        "kills": sum(trial.kills for trial in trials),
        "inside_saves": sum(trial.inside_saves for trial in trials),
        "inside_accumulations": sum(trial.inside_accumulations for trial in trials),
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
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: %(default)s)")
    parser.add_argument("--report", help="write what happened to this JSON file")
    return parser.parse_args(arguments)


def _line(recipe: str, run: Path) -> list[str]:
    name, overrides, options = RECIPES[recipe]
    network = ["--model.name", name, "--model.image_size", "8", "--model.overrides", json.dumps(overrides)]
    return ["train", *" ".join(_COMMON).split(), *network, *options.split(), "--train.run_dir", str(run)]


def _start(recipe: str, run: Path) -> int:
    """Fork a process that makes the run, in a group of its own; give its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    code = 1
    try:
        _, config = parse(_line(recipe, run))
        with suppress(Finished):  # killed between its last state and its end
            vitlab.training.run_training(config)
        code = 0
    except BaseException as error:
        print(f"{recipe}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


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
        moment = generator.uniform(0.05, 0.9 * seconds)
        killed = _kill_inside_save(pid, run, moment) if in_save else _kill_after(pid, moment)
        if not killed:
            break  # it came to its end before its moment
        trial.kills += 1
        trial.inside_saves += in_save
        trial.inside_accumulations += "accumulation" in recipe and not in_save
    _, status = os.waitpid(_start(recipe, run), 0)
    if status:
        trial.differences.append("the run did not go on")
        return trial
    outcome = _outcome(run)
    trial.differences = [name for name in reference.keys() | outcome.keys() if reference.get(name) != outcome.get(name)]
    return trial


def _kill_after(pid: int, seconds: float) -> bool:
    time.sleep(seconds)
    return _kill(pid)


def _kill_inside_save(pid: int, run: Path, seconds: float) -> bool:
    """Kill when the folder of a save appears, after a while of the run."""
    began = time.monotonic()
    while time.monotonic() - began < _PATIENCE_S:
        if time.monotonic() - began > seconds and any((run / "resume").glob(".new-*")):
            return _kill(pid)
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:
            return False
    raise SystemExit("a run did not end")


def _kill(pid: int) -> bool:
    """Kill a process and its group; False where it had ended."""
    ended, _ = os.waitpid(pid, os.WNOHANG)
    if ended:
        return False
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
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
    """Give every scalar point, each step as often as it is there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(_SPEEDS)]
    return {f"tensorboard {tag}": [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


if __name__ == "__main__":
    sys.exit(main())
