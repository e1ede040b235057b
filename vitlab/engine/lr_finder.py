"""The learning-rate range test: raise the rate from step to step until the loss runs away.

Source: arXiv:1506.01186, sec. 3.3; rates in geometric steps and the smoothed loss as in fastai.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from vitlab.data.loader import Batch
from vitlab.engine.trainer import Trainer
from vitlab.errors import RunError

LOWEST, HIGHEST, STEPS = 1e-6, 1.0, 100
_SMOOTHING = 0.9
_RUN_AWAY = 3.0
"""The sweep ends where the smoothed loss is this many times its lowest."""
_FEWEST = 10


@dataclass(frozen=True)
class LrCurve:
    """What a sweep gave."""

    rates: list[float]
    losses: list[float]
    """Training loss of the step at each rate."""
    smoothed: list[float]
    """Running average of the losses, corrected for its start."""

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls steepest over the rate's logarithm; None where it never falls."""
        lowest = int(np.argmin(self.smoothed))
        if lowest < 2:
            return None
        slopes = np.gradient(np.array(self.smoothed[: lowest + 1]), np.log(self.rates[: lowest + 1]))
        return self.rates[int(slopes.argmin())] if slopes.min() < 0 else None


def sweep_lr(trial: Trainer) -> LrCurve:
    """Train a copy of a run with ever higher rates.

    Args:
        trial: a trainer of its own, at step 0, which is used up; its schedule is replaced.

    Returns:
        Rates and losses up to the one that ran away.
    """
    trial.schedule = lambda step: LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1))
    trial.objective.train()
    rates: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    average = 0.0
    for group in islice(_groups(trial), STEPS):
        try:
            report = trial.train_step(group)
        except RunError:  # the loss is not finite any more
            break
        if not report.images:
            continue
        average = _SMOOTHING * average + (1 - _SMOOTHING) * report.loss
        rates.append(report.lr)
        losses.append(report.loss)
        smoothed.append(average / (1 - _SMOOTHING ** len(losses)))
        if len(losses) > _FEWEST and smoothed[-1] > _RUN_AWAY * min(smoothed):
            break
    return LrCurve(rates, losses, smoothed)


def _groups(trial: Trainer) -> Iterator[list[Batch]]:
    """Give micro-batches for step after step, epoch after epoch."""
    for epoch in count():
        batches = trial.data.train.epoch(epoch)
        for _ in range(math.ceil(len(trial.data.train) / trial.config.accumulate)):
            yield list(islice(batches, trial.config.accumulate))
