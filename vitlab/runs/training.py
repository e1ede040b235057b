"""Training as one call: from a configuration to a finished run folder."""

import dataclasses
import json
import os
import shutil
import statistics
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from vitlab.checks import require
from vitlab.config import RunConfig
from vitlab.data.datasets import Dataset, fingerprint, load_dataset
from vitlab.disk import replacing
from vitlab.engine import figures
from vitlab.engine.device import resolve_device
from vitlab.engine.distributed import Processes, launched, restarts_allowed
from vitlab.engine.evaluator import Scores
from vitlab.engine.lr_finder import sweep_lr
from vitlab.engine.monitor import Monitor
from vitlab.engine.run_folder import RunFolder, Start, flatten, fresh_run_folder, open_run
from vitlab.engine.state import list_states, step_of
from vitlab.engine.tensorboard import EVENTS_NAME, EventLog, cut_metrics
from vitlab.engine.trainer import Trainer
from vitlab.errors import Finished, InputError, RunError
from vitlab.layers.patch import to_pair
from vitlab.models.safetensors_file import read_safetensors
from vitlab.runs.card import write_card
from vitlab.runs.networks import build_network, build_preprocess, settle_model
from vitlab.runs.parts import build_data, build_trainer, build_trial
from vitlab.runs.showing import conclude, describe, describe_data, preview, show_evaluation
from vitlab.runs.watching import curve_groups, watch_gradients
from vitlab.text import say

_CURVES = ("val/top1", "val/loss", "train/loss")


def run_training(config: RunConfig, *, console: Console | None = None) -> Path:
    """Train as configured: read the data, build the network, fit, score, save.

    Args:
        config: everything that the run depends on.
        console: where progress is shown; default: nowhere.

    Returns:
        The run folder; with `train.seeds` the folder that holds a run for each seed.

    Raises:
        InputError: the configuration, the data or an image is wrong.
        RunError: the loss is not finite, or a loader process died.
        Interrupted: a signal came; the state is saved, and the same call goes on.
    """
    given, config = config, settle_model(config)
    with launched(config.train.device) as processes:
        console = console if console and processes.is_main else Console(quiet=True)
        if given.model.image_size is None and config.model.image_size is not None:
            size = "x".join(map(str, to_pair(config.model.image_size)))
            say(console, f"images {size}, as {config.model.weights} has them: --model.image_size takes others")
        if config.train.seeds is None:
            return _run(config, console, processes)
        return _run_seeds(config, config.train.seeds, console, processes)


def _run_seeds(config: RunConfig, seeds: tuple[int, ...], console: Console, processes: Processes) -> Path:
    """Make a run for each seed; one that is finished already stays, so that the same call goes on after a stop."""
    if config.train.resume not in ("auto", "never"):
        raise InputError(
            f"train.resume {config.train.resume} is one run's, and train.seeds makes several: leave it out"
        )
    run_dir = config.train.run_dir
    if run_dir is not None and RunFolder(Path(run_dir)).config.exists():
        raise InputError(f"train.run_dir {run_dir} holds a run of one seed: give another folder for several")
    parent = Path(run_dir) if run_dir else processes.on_main(lambda: fresh_run_folder(Path("runs"), _stem(config)).path)
    metrics = []
    hint = "" if run_dir else f"; after a stop the same command goes on with --train.run_dir {parent}"
    say(console, f"{len(seeds)} runs in {parent}{hint}")
    try:
        for seed in seeds:
            folder = parent / f"seed-{seed}"
            train = dataclasses.replace(config.train, seeds=None, seed=seed, run_dir=str(folder))
            try:
                _run(dataclasses.replace(config, train=train), console, processes)
            except Finished as finished:
                say(console, str(finished))
            metrics.append(_best_metrics(folder))
    finally:
        with suppress(OSError):  # only an empty folder goes: the first run did not get so far as to begin
            parent.rmdir()
    key, name, form = ("top1", "top-1", ".2%") if config.objective.classifies else ("loss", "loss", ".4f")
    scores = [record[key] for record in metrics]
    listed = ", ".join(f"{record[key]:{form}} ({record['weights']})" for record in metrics)
    spread = f", standard deviation {statistics.stdev(scores):{form}}" if len(scores) > 1 else ""
    say(console, f"{len(seeds)} seeds: val {name} {listed}; mean {statistics.mean(scores):{form}}{spread}")
    say(console, f"runs: {parent}")
    return parent


def _stem(config: RunConfig) -> str:
    return f"{config.model.name}-{Path(config.data.root).resolve().name}"


def _run(config: RunConfig, console: Console, processes: Processes) -> Path:
    began = time.perf_counter()
    device = resolve_device(config.train.device)
    require(
        config.train.run_dir is not None or not restarts_allowed(),
        "torchrun --max-restarts starts a run again from its folder: give it a name with --train.run_dir",
    )
    dataset = load_dataset(
        config.data.root,
        val_fraction=config.data.val_fraction,
        seed=config.data.val_seed,
        allow_empty_classes=config.data.allow_empty_classes,
        download=config.data.download,
    )
    describe_data(console, dataset, config.data.root)
    with ExitStack() as stack:
        start = processes.on_main(lambda: _claim(config, dataset, console, stack))
        network, stated = build_network(config, dataset, console, fresh=start.state is None)
        network = network.to(device)
        preprocess = start.preprocess or build_preprocess(config.data, network, stated)
        data = build_data(config, dataset, preprocess, console, processes)
        stack.enter_context(closing(data.train))
        stack.enter_context(closing(data.val))
        trainer = build_trainer(config, dataset, network, data, start.folder, console, processes)
        try:
            if start.state is not None:
                _go_on(trainer, start, start.state, console, config, dataset)
            is_new = start.state is None or not start.in_place
            processes.on_main(lambda: _open_folder(config, dataset, trainer, is_new=is_new))
            if is_new:
                trainer.keeper.started(trainer)
            if processes.is_main:
                _open_curves(config, trainer)
            if trainer.monitor.events is not None:
                stack.callback(trainer.monitor.events.close)
            if processes.is_main:
                describe(console, config, dataset, trainer)
            if config.train.find_lr and start.state is None:
                _find_lr(config, trainer, console)
            elif config.train.find_lr:
                say(console, "train.find_lr: rates are tried at the start of a run only, and this one goes on")
            _fit(trainer, config, dataset)
            if processes.is_main:
                write_card(trainer, config, dataset)
        except OSError as error:
            reason = f"{error.strerror or error} ({error.filename or start.folder.path})"
            raise RunError(f"{reason}: {trainer.keeper.what_is_safe()}") from error
    if trainer.progress.step < trainer.total_steps:
        say(
            console, f"no better score in {trainer.progress.stale} evaluations: stopped at step {trainer.progress.step}"
        )
    if processes.is_main:
        conclude(console, start.folder, _best_metrics(start.folder.path), time.perf_counter() - began)
    return start.folder.path


def _claim(config: RunConfig, dataset: Dataset, console: Console, stack: ExitStack) -> Start:
    """Find where the run begins, and keep other runs out of its folder until the stack is left."""
    data = fingerprint(dataset, contents=config.data.hash_contents)
    start = open_run(config, data, stem=_stem(config), say=lambda line: say(console, line))
    stack.enter_context(start.folder.claimed())
    return start


def _fit(trainer: Trainer, config: RunConfig, dataset: Dataset) -> None:
    """Train, and draw the curves however that ends."""

    def show(scores: list[Scores]) -> None:
        if trainer.processes.is_main:
            show_evaluation(trainer, config, dataset, scores)

    try:
        trainer.fit(on_evaluation=show)
    except BaseException:
        with suppress(Exception):  # how the run ended counts, not what a picture of it may lack
            _plot(trainer)
        raise
    _plot(trainer)


def _go_on(trainer: Trainer, start: Start, state: Path, console: Console, config: RunConfig, dataset: Dataset) -> None:
    """Put the trainer where a state stands; a state of another folder brings its run's best file and curves along."""
    elsewhere = trainer.keeper.resume(trainer, state)
    old = RunFolder(state.parent.parent)
    if trainer.progress.step > trainer.total_steps:
        raise InputError(
            f"{state} is beyond the {trainer.total_steps} steps that train.epochs or train.steps ask for: give more"
        )
    if trainer.done:
        _plot(trainer)  # the run may have been killed just before
        if trainer.processes.is_main and start.in_place and not start.folder.card.exists():
            with suppress(InputError):  # the best file is gone, and the run is finished all the same
                write_card(trainer, config, dataset)
        trainer.processes.gather_numbers(0)  # a launcher may end them all at the first that ends
        raise Finished(
            f"the run of {state} is finished: give another train.run_dir for a new one, or more {_longer(trainer)} "
            "to go on"
        )
    say(console, f"going on from {state}")
    if elsewhere:
        say(console, f"note: {'; '.join(elsewhere)}: the run goes on, but not to the last bit as it would have")
    if not trainer.processes.on_main(lambda: _bring_along(trainer, start, old)):
        trainer.progress.best_rank = None


def _bring_along(trainer: Trainer, start: Start, old: RunFolder) -> bool:
    """Put the folder where a state stands, and say whether it holds the best file that the state knows."""
    folder = start.folder
    if not start.in_place:
        folder.tensorboard.mkdir(parents=True, exist_ok=True)
        for path in (old.metrics, old.tensorboard / EVENTS_NAME, old.best):
            if path.exists():
                shutil.copyfile(path, folder.path / path.relative_to(old.path))
    # What came after this state is behind us: later states, and a best file that the state does not know.
    for later in list_states(folder.resume):
        if step_of(later) > trainer.progress.step:
            shutil.rmtree(later)
    return _holds_best(folder, trainer.progress.best_step)


def _longer(trainer: Trainer) -> str:
    """Name the option that ended the run."""
    if trainer.progress.step < trainer.total_steps:
        return "train.patience"
    return "train.epochs" if trainer.config.steps is None else "train.steps"


def _holds_best(folder: RunFolder, step: int) -> bool:
    try:
        return bool(_best_metrics(folder.path)["step"] == step)
    except InputError:  # gone or damaged: the next evaluation writes a new one
        return False


def _best_metrics(run: Path) -> dict[str, Any]:
    """Read the scores of a run's best weights, whose file is checked as a whole."""
    record = read_safetensors(run / "best.safetensors").record
    if record is None:
        raise InputError(f"{run / 'best.safetensors'} is no model file of vitlab: give another train.run_dir")
    metrics: dict[str, Any] = record["metrics"]
    return metrics


def _open_folder(config: RunConfig, dataset: Dataset, trainer: Trainer, *, is_new: bool) -> None:
    """Write the configuration that repeats the run, and a picture of what it learns from."""
    folder = trainer.keeper.folder
    folder.card.unlink(missing_ok=True)  # of a shorter run that goes on now
    with replacing(folder.config) as aside:
        aside.write_text(config.to_yaml(), encoding="utf-8")
    if is_new or not folder.train_batch.exists():
        figures.save_image(folder.train_batch, preview(config, dataset, trainer.data))


def _open_curves(config: RunConfig, trainer: Trainer) -> None:
    """Open the run's curves behind the steps already done."""
    folder, step = trainer.keeper.folder, trainer.progress.step
    cut_metrics(folder.metrics, step)
    if not config.monitor.tensorboard:
        return
    trainer.monitor.events = events = EventLog(folder.tensorboard, keep_steps=step)
    if events.is_new:
        events.hparams(flatten(config.to_dict()), _CURVES)
        events.text("config", f"```yaml\n{config.to_yaml()}```")
        events.layout(curve_groups(config))
        events.image(0, "train/batch", figures.load_image(folder.train_batch))
    if config.monitor.histograms:
        watch_gradients(trainer, events)


def _plot(trainer: Trainer) -> None:
    folder = trainer.keeper.folder
    if trainer.progress.epoch and trainer.processes.is_main:
        figures.plot_results(folder.metrics, folder.results, title=folder.path.name)


def _find_lr(config: RunConfig, trainer: Trainer, console: Console) -> None:
    """Try rates on a copy, save the curve, and say what to make of it; the run itself stays as it is configured."""
    say(console, "learning rates: trying up to 100 steps on a copy")
    quiet = Monitor(Path(os.devnull), log_every_steps=1, total_epochs=None, console=Console(quiet=True))
    curve = sweep_lr(build_trial(config, trainer, quiet))
    folder = trainer.keeper.folder
    found = curve.suggestion
    with replacing(folder.lr_json) as aside:
        aside.write_text(
            json.dumps({**dataclasses.asdict(curve), "smoothed": curve.smoothed, "suggestion": found}, indent=1) + "\n"
        )
    figures.plot_lr_curve(curve.rates, curve.losses, curve.smoothed, found, folder.lr_plot)
    hint = "the loss did not fall at any rate" if found is None else f"the loss falls steepest at {found:.1e}"
    say(console, f"learning rates: {hint}; this run keeps optim.lr {config.optim.lr:g}; curve: {folder.lr_plot}")
