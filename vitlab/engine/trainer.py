"""The one training loop: fit -> train_epoch -> train_step. It knows no architecture and no objective.

What is saved and shown stands beside it: the keeper (files, signals) and the monitor (console, curves) are told after
each step, evaluation and epoch.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from vitlab.config import TrainConfig, WeightsKind
from vitlab.data.augment import Mixer
from vitlab.data.loader import Batch, Loader
from vitlab.data.preprocess import Preprocess
from vitlab.engine.device import autocast_dtype
from vitlab.engine.distributed import ALONE, Processes, of_all
from vitlab.engine.evaluator import Scores, evaluate
from vitlab.engine.keeper import Keeper
from vitlab.engine.monitor import Monitor, StepReport
from vitlab.engine.objectives import Objective
from vitlab.engine.optim import build_ema, set_lr
from vitlab.engine.parallel import Wrapped, whole
from vitlab.engine.state import Progress
from vitlab.errors import InputError, NonFinite, RunError
from vitlab.models.network import device_of
from vitlab.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a run learns from and is scored on."""

    train: Loader
    val: Loader
    classes: tuple[str, ...]
    preprocess: Preprocess
    mixer: Mixer
    unmixed_epochs: int = 0
    """Epochs at the end that are not mixed."""


def count_steps(config: TrainConfig, batches_per_epoch: int) -> int:
    """Give the optimizer steps of a run; the micro-batches left at the end of an epoch are a step too."""
    return config.steps or config.epochs * math.ceil(batches_per_epoch / config.accumulate)


class Trainer:
    """Fits an objective.

    Args:
        objective: on its device.
        optimizer: over the objective's parameters.
        schedule: learning rate of a step, from 0.
        data: loaders and what goes with them.
        config: the run's `train` section.
        clip_grad: largest norm of the whole gradient, or None.
        keeper: saves files and states.
        monitor: shows and logs.
        processes: those that train together. Each calls the same methods; the loaders give each its part of a batch.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
        *,
        data: TrainingData,
        config: TrainConfig,
        clip_grad: float | None,
        keeper: Keeper,
        monitor: Monitor,
        processes: Processes = ALONE,
    ) -> None:
        self.objective, self.optimizer, self.schedule = objective, optimizer, schedule
        self.data, self.config, self.clip_grad = data, config, clip_grad
        self.keeper, self.monitor, self.processes = keeper, monitor, processes
        self.wrapped = Wrapped(objective, processes, config.parallel)
        self.device = device_of(objective)
        self.autocast = autocast_dtype(config.precision, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.autocast == torch.float16)
        self.ema = None if config.ema_decay is None else build_ema(objective, config.ema_decay)
        self.total_steps = count_steps(config, len(data.train))
        self.progress = Progress()

    @property
    def averaged(self) -> Objective | None:
        """The objective with the moving average of the weights, where the run keeps one."""
        return None if self.ema is None else self.ema.module

    @property
    def done(self) -> bool:
        """Whether all steps are made and scored, or no better score has come for too long."""
        if self.progress.batch > 0:
            return False
        patience = self.config.patience
        return self.progress.step >= self.total_steps or (patience is not None and self.progress.stale >= patience)

    def fit(self, on_evaluation: Callable[[list[Scores]], None] | None = None) -> Progress:
        """Train from where `progress` stands to the last step, scoring and saving on the way.

        Args:
            on_evaluation: called with each evaluation's scores, raw and averaged, for what the caller wants shown.

        Raises:
            RunError: the loss or the gradient is not finite, or memory is full; the files hold the last good weights.
            InputError: an image cannot be read; the state is saved.
            Interrupted: a signal came; the state is saved.
        """
        keeper, running = self.keeper, self.monitor.running(self.progress, self.total_steps)
        with running, keeper.listening(), keeper.explaining_memory(self):
            while not self.done:
                self.train_epoch()
                scores = self.evaluate() if self._evaluation_is_due() else []
                self.monitor.epoch(self.progress, scores)
                if scores and on_evaluation is not None:
                    on_evaluation(scores)
                self.progress.start_epoch()
                keeper.epoch_ended(self)
        return self.progress

    def train_epoch(self) -> None:
        """Make the optimizer steps that are left of the present epoch and of the run."""
        if self.progress.step >= self.total_steps:  # a signal came between the last step and its evaluation
            return
        self.objective.train()
        batches = self.data.train.epoch(self.progress.epoch, start_batch=self.progress.batch)
        asked = time.perf_counter()
        for micro_batches in self.keeper.fetching(self, _groups(batches, self.config.accumulate)):
            data_wait = time.perf_counter() - asked
            try:
                report = self.train_step(micro_batches)
            except NonFinite as failure:
                raise self.keeper.failed(self, micro_batches, failure) from None
            duration = time.perf_counter() - asked
            self.monitor.step(self.progress, replace(report, data_wait=data_wait / duration, duration_s=duration))
            at_end = self.progress.batch == len(self.data.train) or self.progress.step == self.total_steps
            self.keeper.step_ended(self, epoch_ends=at_end)
            if self.progress.step == self.total_steps:
                break
            asked = time.perf_counter()
        if not self.progress.seen:
            raise InputError(f"none of {self.progress.skipped} training images could be read: mend those listed above")

    def train_step(self, micro_batches: list[Batch]) -> StepReport:
        """Make one optimizer step on the mean loss over all images of its micro-batches."""
        progress, processes = self.progress, self.processes
        lr = self.schedule(progress.step)
        set_lr(self.optimizer, lr)
        total = int(processes.sum(sum(len(batch.labels) for batch in micro_batches))[0])
        loss_sum, correct = 0.0, 0.0
        for index, batch in enumerate(micro_batches):
            # Keyed by place, not by history: a resumed run and an unbroken one draw the same masks and mixes.
            place = (index, processes.rank) if processes.rank else (index,)
            torch.manual_seed(derive_seed(self.config.seed, "step", progress.step, *place))
            B = len(batch.labels)
            if B or (processes.count > 1 and total):  # gradients are exchanged by all, or by none
                batch = self.prepare(batch if B else batch.blank())
                with self.wrapped.syncing(is_last=index == len(micro_batches) - 1):
                    with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                        step = self.wrapped(batch)
                    # The mean over the processes makes of these shares the mean over all images.
                    self.scaler.scale(step.loss * (processes.count * B / total)).backward()
            if B:
                loss_sum += step.loss.item() * B
                correct += _count_correct(step.outputs, batch.labels)
        errors = [error for batch in micro_batches for error in batch.errors]
        loss_sum, correct, skipped = processes.sum(loss_sum, correct, len(errors))
        if skipped:
            self.monitor.unreadable(of_all(processes.gather(errors)))
        grad_norm = self._update(loss_sum) if total else 0.0
        progress.lr, progress.grad_norm = lr, grad_norm
        progress.step += 1
        progress.batch += len(micro_batches)
        progress.seen += total
        progress.skipped += int(skipped)
        progress.loss_sum += loss_sum
        progress.correct += int(correct)
        return StepReport(loss=loss_sum / total if total else 0.0, lr=lr, grad_norm=grad_norm, images=total)

    def prepare(self, batch: Batch) -> Batch:
        """Move a uint8 batch to the device, normalise and mix it; labels become (B, K) where they are mixed."""
        images = self.data.preprocess.normalize(batch.images.to(self.device, non_blocking=True))
        labels = batch.labels.to(self.device, non_blocking=True)
        if self.data.mixer.enabled and not self._in_unmixed_epochs():
            images, labels = self.data.mixer(images, labels)
        return replace(batch, images=images, labels=labels)

    def evaluate(self) -> list[Scores]:
        """Score the weights, and their moving average where there is one, on the validation split; keep the best.

        Returns:
            Scores that say which weights they are of, the raw ones first.
        """
        scored = [(self.objective, self._score(self.objective, "raw"))]
        if self.averaged is not None:
            scored.append((self.averaged, self._score(self.averaged, "ema")))
        self.keeper.evaluated(self, scored)
        return [scores for _, scores in scored]

    def _score(self, objective: Objective, weights: WeightsKind) -> Scores:
        # Compiled blocks would compile once more for evaluation, and its scores must be those of the plain network.
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        with eager, self.monitor.evaluating(self.data.val.num_images) as on_batch:
            scores = evaluate(
                objective,
                self.keeper.fetching(self, self.data.val.epoch(0)),
                classes=self.data.classes,
                preprocess=self.data.preprocess,
                weights=weights,
                processes=self.processes,
                on_batch=on_batch,
            )
        if not math.isfinite(scores.loss):
            raise RunError(
                f"validation loss is {scores.loss} at step {self.progress.step}: {self.keeper.what_is_safe()}"
            )
        return scores

    def _update(self, loss_sum: float) -> float:
        self.scaler.unscale_(self.optimizer)
        parameters = list(self.objective.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad, norm)
        grad_norm, step = whole(norm).item(), self.progress.step + 1
        # A loss scaler skips the step of an overflown gradient and lowers its scale; without one it is the end.
        if not math.isfinite(loss_sum) or not (math.isfinite(grad_norm) or self.scaler.is_enabled()):
            what = f"loss is {loss_sum}" if not math.isfinite(loss_sum) else f"gradient norm is {grad_norm}"
            raise NonFinite(f"{what} at step {step}")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.wrapped.share_statistics()
        if self.ema is not None:
            self.ema.update(self.objective, step=step)
        return grad_norm

    def _in_unmixed_epochs(self) -> bool:
        steps_per_epoch = math.ceil(len(self.data.train) / self.config.accumulate)
        return self.progress.epoch >= math.ceil(self.total_steps / steps_per_epoch) - self.data.unmixed_epochs

    def _evaluation_is_due(self) -> bool:
        epochs = self.progress.epoch + 1
        return epochs % self.config.evaluate_every_epochs == 0 or self.progress.step >= self.total_steps


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Give the batches `size` at a time; the last group may be shorter."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def _count_correct(outputs: Tensor | None, labels: Tensor) -> int:
    """Count images whose likeliest class is the target's likeliest; 0 where the objective does not classify."""
    if outputs is None:
        return 0
    targets = labels.argmax(dim=1) if labels.ndim == 2 else labels
    return int((outputs.argmax(dim=1) == targets).sum())
