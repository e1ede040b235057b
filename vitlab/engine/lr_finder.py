"""The learning-rate range test: raise the rate from step to step until the loss runs away.

Source: arXiv:1506.01186, sec. 3.3; rates in geometric steps as in fastai. Differs: the loss is averaged over the steps
on both sides, since an average over those before lags half a decade behind.
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
_NEIGHBOURS = 4
"""Steps before, and as many after, that the smoothed loss of a step averages."""
_RUN_AWAY = 3.0
"""The sweep ends where the mean of the last losses is this many times the lowest such mean."""


@dataclass(frozen=True)
class LrCurve:
    """What a sweep gave."""

    rates: list[float]
    losses: list[float]
    """Training loss of the step at each rate."""

    @property
    def smoothed(self) -> list[float]:
        """Mean of the losses around each step; fewer at the ends."""
        window = range(-_NEIGHBOURS, _NEIGHBOURS + 1)
        count = len(self.losses)
        around = ([self.losses[i + k] for k in window if 0 <= i + k < count] for i in range(count))
        return [sum(values) / len(values) for values in around]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls steepest over the rate's logarithm; None where it never falls."""
        lowest = int(np.argmin(self.smoothed)) if self.losses else 0
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
    lowest = math.inf
    for group in islice(_groups(trial), STEPS):
        try:
            report = trial.train_step(group)
        except RunError:  # the loss is not finite any more
            break
        if not report.images:
            continue
        rates.append(report.lr)
        losses.append(report.loss)
        latest = losses[-2 * _NEIGHBOURS - 1 :]
        mean = sum(latest) / len(latest)
        lowest = min(lowest, mean)
        if mean > _RUN_AWAY * lowest:
            break
    return LrCurve(rates, losses)


def _groups(trial: Trainer) -> Iterator[list[Batch]]:
    """Give micro-batches for step after step, epoch after epoch."""
    for epoch in count():
        batches = trial.data.train.epoch(epoch)
        for _ in range(math.ceil(len(trial.data.train) / trial.config.accumulate)):
            yield list(islice(batches, trial.config.accumulate))
