"""A piece of a run made again: from one kept state to the next, bit for bit, or the step that failed."""

import dataclasses
import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from vitlab.checks import require
from vitlab.config import RunConfig
from vitlab.data.datasets import fingerprint, load_dataset, may_be_same
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.device import resolve_device
from vitlab.engine.optim import gradient_norms
from vitlab.engine.run_folder import RunFolder, require_run
from vitlab.engine.state import capture, differing_tensors, list_states, load_state, step_of
from vitlab.engine.trainer import Trainer
from vitlab.errors import InputError, NonFinite
from vitlab.runs.networks import build_network
from vitlab.runs.parts import build_data, build_trainer


@dataclass(frozen=True)
class Replay:
    """What came out."""

    first_step: int
    """Optimizer steps done before it."""
    last_step: int
    """Optimizer steps done after it."""
    agrees: bool
    """Whether every bit is that of the kept state; of a crash, whether the step failed again, and alike."""
    lines: tuple[str, ...]
    """What is to be said of it."""


def replay(path: str | Path, *, root: str | None = None) -> Replay:
    """Make the steps from a state up to the next one that was kept again, or the step of a crash.

    Nothing in the run's folder changes.

    Args:
        path: RUN/resume/step-N or RUN/crash-N.
        root: where the images lie now; default: where they lay then.

    Raises:
        InputError: there is no such state, it is damaged, no later one was kept, or the images are others.
    """
    path = Path(path)
    require(
        (path / "state.json").is_file(),
        f"{path} is no state: give RUN/resume/step-N or RUN/crash-N, one that is there",
    )
    _, record = load_state(path)
    several = record["machine"].get("processes", 1)
    require(
        several == 1, f"{path} is a state of {several} processes, whose steps one alone cannot make again to the bit"
    )
    target = None if "crash" in record else _next_state(path)
    trainer, elsewhere = _rebuild(path, record, root)
    notes = [f"note: {'; '.join(elsewhere)}: the last bits may differ for that alone"] if elsewhere else []
    with closing(trainer.data.train), closing(trainer.data.val):
        first_step = trainer.progress.step
        if target is None:
            agrees, lines = _repeat_crash(trainer, record["crash"])
            return Replay(first_step, first_step, agrees, (*notes, *lines))
        last_step = step_of(target)
        for group in _groups(trainer, last_step):
            trainer.train_step(group)
        made, _ = capture(trainer.objective, trainer.optimizer, trainer.scaler, trainer.progress, trainer.averaged)
    differing = differing_tensors(made, load_state(target)[0])
    lines = [f"{name} differs by up to {difference:.3g}" for name, difference in differing]
    return Replay(first_step, last_step, not differing, (*notes, *lines))


def _next_state(path: Path) -> Path:
    later = [state for state in list_states(path.parent) if step_of(state) > step_of(path) >= 0]
    if not later:
        raise InputError(
            f"{path} has no later state beside it to compare with: give an earlier one, or train with a higher "
            "train.keep_states"
        )
    return later[-1]


def _rebuild(path: Path, record: dict[str, Any], root: str | None) -> tuple[Trainer, list[str]]:
    """Build the run's parts anew and put them where the state stands."""
    require_run(path, record)
    run = record["run"]
    config = RunConfig.from_dict(run["config"])
    if root is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, root=root))
    console = Console(file=io.StringIO())
    dataset = load_dataset(
        config.data.root,
        val_fraction=config.data.val_fraction,
        seed=config.data.val_seed,
        allow_empty_classes=config.data.allow_empty_classes,
    )
    if not may_be_same(fingerprint(dataset, contents=config.data.hash_contents), run["data"]):
        raise InputError(f"the images of {config.data.root} are not those of {path}: restore them, or give --data")
    network, _ = build_network(config, dataset, console, fresh=False)
    network = network.to(resolve_device(config.train.device))
    data = build_data(config, dataset, Preprocess.from_dict(run["preprocess"]), console)
    trainer = build_trainer(config, dataset, network, data, RunFolder(path.parent), console)
    return trainer, trainer.keeper.resume(trainer, path)


def _groups(trainer: Trainer, last_step: int) -> Iterator[list[Batch]]:
    """Give the micro-batches of each step up to `last_step`, over the ends of epochs."""
    progress, loader = trainer.progress, trainer.data.train
    trainer.objective.train()
    while progress.step < last_step:
        batches = loader.epoch(progress.epoch, start_batch=progress.batch)
        while progress.step < last_step and progress.batch < len(loader):
            yield list(islice(batches, trainer.config.accumulate))
        if progress.batch == len(loader):
            progress.start_epoch()


def _repeat_crash(trainer: Trainer, crash: dict[str, Any]) -> tuple[bool, list[str]]:
    """Make the failed step again, and look where the first number went wrong."""
    (group,) = islice(_groups(trainer, trainer.progress.step + 1), 1)
    lines = [f"then: {crash['what']}; images {crash['indices']}"]
    blocks = trainer.objective.network.repeated_blocks()
    watch = _Watch({block: f"block {number}" for number, block in enumerate(blocks)})
    try:
        # For all modules: beside a hook of its own, a last block makes more than it did in the run (`head_features`).
        with register_module_forward_hook(watch):
            report = trainer.train_step(group)
    except NonFinite as failure:
        lines.append(f"now: {failure}")
        norms = gradient_norms(trainer.objective.network)
        where = (
            f"the first output that is not finite is that of {watch.found}"
            if watch.found
            else "all blocks' outputs are finite"
        )
        lines.append(where)
        lines += [f"gradient norm of {part}: {norm}" for part, norm in norms.items()]
        return str(failure) == crash["what"] and norms == crash["gradient_norms"], lines
    lines.append(f"now: the step did not fail; loss {report.loss:.6g}, gradient norm {report.grad_norm:.6g}")
    return False, lines


class _Watch:
    """Notes the first block whose output is not finite."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names = names
        self.found = ""

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self.found and module in self.names and not output.isfinite().all():
            self.found = self.names[module]
