"""The loop's arithmetic: accumulation, clipping, the rate at each step."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.keeper import Keeper
from vitlab.engine.monitor import Monitor
from vitlab.engine.objectives import Objective, Step
from vitlab.engine.run_folder import RunFolder
from vitlab.engine.trainer import Trainer, TrainingData, count_steps


class Regression(Objective):
    """Mean squared distance of one weight vector to the images' pixels: gradients can be worked by hand."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Identity())
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, batch):
        return Step(loss=(self.weight - batch.images.flatten(1)).square().mean(), outputs=None)


class Batches:
    """A loader's face on a list of batches."""

    def __init__(self, images: torch.Tensor, size: int) -> None:
        self.batches = [
            Batch(images=part, labels=torch.zeros(len(part), dtype=torch.int64), indices=torch.arange(len(part)))
            for part in images.split(size)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch, *, start_batch=0):
        return iter(self.batches[start_batch:])


class NoMixer:
    enabled = False


def run_epoch(tmp_path, images, *, size, accumulate=1, lr=0.5, clip_grad=None, momentum=0.0):
    """Train one epoch with SGD; give the trainer and, for each step, the rate and the gradient that was applied."""
    objective = Regression(images[0].numel())
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.0)
    batches = Batches(images, size)
    config = TrainConfig(epochs=1, batch_size=size, accumulate=accumulate, precision="fp32", device="cpu")
    steps = []
    optimizer.register_step_post_hook(
        lambda *_: steps.append((optimizer.param_groups[0]["lr"], objective.weight.grad.clone()))
    )
    trainer = Trainer(
        objective,
        optimizer,
        lambda step: lr / (step + 1),
        data=TrainingData(
            train=batches,
            val=batches,
            classes=("a", "b"),
            preprocess=Preprocess(image_size=(1, 2), mean=(0.0,), std=(1.0,), channels=1),
            mixer=NoMixer(),
        ),
        config=config,
        clip_grad=clip_grad,
        keeper=Keeper(RunFolder(tmp_path), run={}, save_model=None, every_steps=None),
        monitor=Monitor(
            tmp_path / "metrics.jsonl", log_every_steps=1, total_epochs=1, console=Console(file=io.StringIO())
        ),
    )
    trainer.train_epoch()
    return trainer, steps


def pixels(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, 1, 2), dtype=torch.uint8, generator=generator)


def mean_gradient(images, weight):
    """Gradient of mean((w - x)^2) over images and both pixels: the mean over images of (w - x)."""
    return (weight - images.flatten(1) / 255).mean(dim=0)


def test_last_group_of_micro_batches_weighs_as_much_as_it_holds(tmp_path):
    images = pixels(10)
    trainer, steps = run_epoch(tmp_path, images, size=2, accumulate=2)
    assert trainer.progress.step == len(steps) == 3
    weight = torch.zeros(2)
    for (lr, gradient), group in zip(steps, images.split(4), strict=True):
        torch.testing.assert_close(gradient, mean_gradient(group, weight))
        weight = weight - lr * gradient
    torch.testing.assert_close(trainer.objective.weight.detach(), weight)


def test_unequal_micro_batches_weigh_by_their_images(tmp_path):
    images = pixels(5)
    _, steps = run_epoch(tmp_path, images, size=3, accumulate=2)
    torch.testing.assert_close(steps[0][1], mean_gradient(images, torch.zeros(2)))


def test_accumulation_equals_the_large_batch(tmp_path):
    images = pixels(24)
    whole, steps = run_epoch(tmp_path, images, size=8)
    parts, part_steps = run_epoch(tmp_path, images, size=4, accumulate=2)
    assert [lr for lr, _ in steps] == [lr for lr, _ in part_steps] == [0.5, 0.25, 0.5 / 3]
    torch.testing.assert_close(parts.objective.weight, whole.objective.weight)
    assert parts.progress.loss_sum == pytest.approx(whole.progress.loss_sum)
    assert parts.progress.seen == whole.progress.seen == 24


@pytest.mark.parametrize(("clip_grad", "applied"), [(None, 10.0), (1.0, 1.0), (20.0, 10.0)])
def test_gradient_is_clipped_to_its_norm_and_reported_unclipped(tmp_path, monkeypatch, clip_grad, applied):
    monkeypatch.setattr(
        Regression,
        "forward",
        lambda self, batch: Step(loss=(self.weight * torch.tensor([6.0, 8.0])).sum(), outputs=None),
    )
    reports = []
    make_step = Trainer.train_step
    monkeypatch.setattr(
        Trainer, "train_step", lambda self, batches: reports.append(make_step(self, batches)) or reports[-1]
    )
    _, steps = run_epoch(tmp_path, pixels(1), size=1, clip_grad=clip_grad)
    assert steps[0][1].norm().item() == pytest.approx(applied, rel=1e-4)
    assert reports[0].grad_norm == pytest.approx(10.0)


def test_clipping_sees_the_unscaled_gradient(tmp_path, monkeypatch):
    """With a loss scale of 2**16 the applied norm is still the clip's."""
    monkeypatch.setattr(
        Regression,
        "forward",
        lambda self, batch: Step(loss=(self.weight * torch.tensor([6.0, 8.0])).sum(), outputs=None),
    )
    init = Trainer.__init__

    def with_scaler(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    monkeypatch.setattr(Trainer, "__init__", with_scaler)
    _, steps = run_epoch(tmp_path, pixels(1), size=1, clip_grad=1.0)
    assert steps[0][1].norm().item() == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("batches", "accumulate", "steps", "expected"), [(5, 2, None, 9), (4, 2, None, 6), (1, 8, None, 3), (5, 2, 7, 7)]
)
def test_count_steps_rounds_each_epoch_up(batches, accumulate, steps, expected):
    assert count_steps(TrainConfig(epochs=3, accumulate=accumulate, steps=steps), batches) == expected
