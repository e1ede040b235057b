"""A model file on a split of a data set: what `evaluate` and `compare` score, and whether the model has seen it."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from vitlab.config import DataConfig, RunConfig
from vitlab.data.datasets import Split, SplitName, fingerprint, load_split
from vitlab.data.images import ImageError
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.data.splits import split_validation
from vitlab.engine.distributed import ALONE, Processes
from vitlab.engine.evaluator import Scores, evaluate
from vitlab.engine.objectives import Objective, build_objective
from vitlab.errors import InputError
from vitlab.models.files import ModelFile
from vitlab.text import counted

TRAINED_ON = "the model was trained on these images"
"""What is said of a model's own training images."""


@dataclass(frozen=True)
class Scored:
    """Images to score a model on, and what is known of their past."""

    split: Split
    """Labels in the model's class order."""
    log: tuple[str, ...]
    """How the split was read."""
    is_own: bool
    """Whether the model's run knew these very images as this split."""
    note: str | None
    """A warning where the model was, or may have been, trained on them."""


def read_split(model: ModelFile, data: str, name: SplitName) -> Scored:
    """Read a split, cut from training as the model's run cut it, and look for it in what the run recorded.

    Raises:
        InputError: there is no such split, or it holds a class that the model does not know.
    """
    run = model.data
    split, log = load_split(
        data,
        name,
        classes=model.classes,
        val_fraction=run.get("val_fraction", DataConfig.val_fraction),
        seed=run.get("seed", DataConfig.val_seed),
    )
    return Scored(split, log, *known_past(model, split))


def known_past(model: ModelFile, split: Split) -> tuple[bool, str | None]:
    """Look for a split in what the model's run recorded.

    Returns:
        Whether the run knew these very images as this split, and a warning where the model was, or may have been,
        trained on them.
    """
    own, name = model.data.get("fingerprint", {"sha256": {}, "counts": {}}), split.name
    now = fingerprint(split, contents="contents" in own)
    digest = now["sha256"][name]
    is_own = all(own[key].get(name) == now[key][name] for key in now.keys() & {"sha256", "contents"})
    trained, fitted = own["sha256"].get("train"), own["counts"].get("train", 0)
    note = None
    if trained == digest:
        note = TRAINED_ON
    elif name in own["sha256"] and not is_own:
        note = f"these are not the {name} images of the model's own run, and it may have seen some"
    elif name == "all" and len(split) == fitted + own["counts"].get("val", 0):
        note = "as many images as the model's run had; if they are the same, it was trained on most of them"
        if trained is not None and trained == _cut_again(model, split):
            note = f"the model was trained on {fitted:,} of these {len(split):,} images"
    return is_own, note


def _cut_again(model: ModelFile, split: Split) -> str | None:
    """Give the hash of the training images that the model's run would have cut from a split; None for no cut."""
    fraction = model.data.get("val_fraction", DataConfig.val_fraction)
    try:
        parts, _ = split_validation(
            split, model.classes, fraction=fraction, seed=model.data.get("seed", DataConfig.val_seed)
        )
    except InputError:  # no class has two images
        return None
    digest: str = fingerprint(parts["train"])["sha256"]["train"]
    return digest


def _objective(model: ModelFile) -> Objective:
    """Give what the weights were trained for, as evaluation sees it; of a file that does not say, classification."""
    config = RunConfig.from_dict({"objective": model.objective}).objective
    return build_objective(config, model.network, class_counts=[1] * len(model.classes))


def score(
    model: ModelFile,
    split: Split,
    *,
    batch_size: int,
    workers: int | None,
    on_error: Literal["stop", "skip"],
    processes: Processes = ALONE,
    on_batch: Callable[[int], None] | None = None,
) -> Scores:
    """Score a model file on a split with its own preprocessing and objective, as it stands and at its temperature.

    Of several processes each scores a part of the images, and gets the scores of all.

    Raises:
        InputError: an image cannot be read and `on_error` is `stop`, or none can.
        RunError: a loader process died.
    """
    loader = Loader(
        split,
        EvalTransform(model.preprocess),
        batch_size=batch_size,
        workers=workers,
        on_error=on_error,
        part=processes.part,
    )
    with closing(loader):
        try:
            return evaluate(
                _objective(model),
                processes.in_step(loader.epoch(0)),
                classes=model.classes,
                preprocess=model.preprocess,
                weights=model.weights,
                temperature=model.temperature,
                processes=processes,
                on_batch=on_batch,
            )
        except ImageError as error:
            if on_error == "stop":
                raise
            raise InputError(
                f"none of {counted(len(split), 'image')} can be read, such as {error}: give images that can"
            ) from error
