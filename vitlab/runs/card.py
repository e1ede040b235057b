"""The model card of a finished run: README.md beside its model file, for whoever meets the file without its maker.

It says what the network is, what it learnt from and how, how well it did on which images, what was not tried, and the
lines that use it. Its numbers are those in the model file; nothing is computed anew.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.config import RunConfig
from vitlab.data.datasets import Dataset
from vitlab.disk import replacing
from vitlab.engine.evaluator import percent
from vitlab.engine.run_folder import flatten
from vitlab.engine.statistics import wilson_interval
from vitlab.engine.trainer import Trainer
from vitlab.errors import InputError
from vitlab.inference.check_classes import IMBALANCE, count_classes
from vitlab.models.costs import count_parameters
from vitlab.models.safetensors_file import read_safetensors
from vitlab.text import counted, duration, markdown

# What a card says of the recipe whatever it is; of all else what differs from the defaults.
_ALWAYS = (
    "objective.name",
    "optim.name",
    "optim.lr",
    "optim.weight_decay",
    "optim.schedule",
    "train.batch_size",
    "train.epochs",
    "train.seed",
    "data.val_seed",
)
# What alters no weight, or stands elsewhere in the card.
_LEFT_OUT = (
    *("model.", "monitor.", "data.root", "data.workers", "data.cache", "data.download", "data.mean", "data.std"),
    *("data.resize_mode", "data.crop_fraction", "data.interpolation", "train.run_dir", "train.resume", "train.seeds"),
    *("train.device", "train.checkpoint_every", "train.keep_states", "train.find_lr"),
)
_FEW_IMAGES = 30
"""Validation images of a class below which its interval says little."""
_UNEQUAL = 1.5
"""So many times more images a class must have than another to be worth a line."""
_NAMED_CLASSES = 20

_Table = Sequence[Sequence[str]]


def write_card(trainer: Trainer, config: RunConfig, dataset: Dataset) -> None:
    """Write the card of a run that is finished into its folder, whole or not at all.

    Args:
        trainer: at its end; the best model file and metrics.jsonl lie in its folder.
        config: what was trained.
        dataset: what it was trained on.

    Raises:
        InputError: the model file is gone or damaged.
        OSError: the card cannot be written.
    """
    folder = trainer.keeper.folder
    record = read_safetensors(folder.best).record
    if record is None:
        raise InputError(f"{folder.best} is no model file of vitlab: restore it")
    precision = "float32" if trainer.autocast is None else str(trainer.autocast).removeprefix("torch.")
    text = card_text(
        record,
        folder.read_metrics(),
        config,
        dataset,
        parameters=count_parameters(trainer.objective.network),
        machine=f"{trainer.device.type} in {precision}",
    )
    with replacing(folder.card) as aside:
        aside.write_text(text, encoding="utf-8")


def card_text(
    record: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    config: RunConfig,
    dataset: Dataset,
    *,
    parameters: int,
    machine: str,
) -> str:
    """Give the card, in Markdown.

    Args:
        record: of the best model file.
        rows: lines of metrics.jsonl.
        config: what was trained.
        dataset: what it was trained on.
        parameters: of the network.
        machine: what it was trained on.
    """
    name = markdown(Path(config.data.root).resolve().name if config.data.root != "digits" else "digits")
    parts = [
        [f"# {markdown(record['model']['name'])} on {name}", "", _what(record, config, dataset)],
        _network(record, config, parameters),
        _data(record, config, dataset, name),
        _training(rows, config, dataset, machine),
        _results(record, rows, config),
        _limits(record, config, dataset),
        _use(record, config),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _what(record: Mapping[str, Any], config: RunConfig, dataset: Dataset) -> str:
    size = "{}x{}".format(*record["model"]["config"]["image_size"])
    classes = f"tells {len(dataset.classes)} classes of images apart"
    draws = f"gives each pixel of an image the probabilities of its colours (`{config.objective.name}`)"
    does = [
        text for text, holds in ((classes, config.objective.classifies), (draws, config.objective.generates)) if holds
    ]
    return (
        f"A network that {' and '.join(does)}. It sees images of {size} pixels (height x width). "
        f"Trained with vitlab {record['version']}."
    )


def _network(record: Mapping[str, Any], config: RunConfig, parameters: int) -> list[str]:
    model, seen, metrics = record["model"], record["preprocess"], record["metrics"]
    fields = {key: value for key, value in model["config"].items() if key not in ("num_classes", "image_size")}
    average = "the moving average of the weights" if record["weights"] == "ema" else "the weights as trained"
    weights = config.model.weights
    table = [
        ("architecture", f"{markdown(model['name'])}: {_values(fields)}"),
        ("parameters", f"{parameters:,}"),
        ("images become its input by", _values(seen)),
        ("began from", "fresh weights" if weights is None else f"weights of {markdown(Path(weights).name)}"),
        ("`best.safetensors`", f"{average} after step {metrics['step']:,} (epoch {metrics['epoch']:,})"),
    ]
    return ["## Network", "", *_table(("", ""), table)]


def _data(record: Mapping[str, Any], config: RunConfig, dataset: Dataset, name: str) -> list[str]:
    fingerprint = record["data"]["fingerprint"]
    counts = count_classes(dataset)
    total = [f"{sum(numbers.values()):,}" for numbers in counts.values()]
    hashes = [f"`{fingerprint['sha256'][split][:16]}`" for split in counts]
    lines = ["## Data", "", f"{name}, with these images in its splits:", ""]
    classes = dataset.classes if config.objective.classifies else ()
    rows = [(markdown(label), *(f"{numbers[label]:,}" for numbers in counts.values())) for label in classes]
    lines += _table(("class", *counts), [*rows, ("all", *total), ("sha256, first digits", *hashes)])
    if dataset.splits["val"].is_cut:
        share, seed = config.data.val_fraction, config.data.val_seed
        lines += ["", f"Validation is a share of {share:g} of the training images, cut by class with seed {seed}."]
    lines += ["", "The hash is over labels and pixels, or over labels, names and sizes of image files."]
    return lines


def _training(rows: Sequence[Mapping[str, Any]], config: RunConfig, dataset: Dataset, machine: str) -> list[str]:
    values, default = flatten(config.to_dict()), flatten(RunConfig().to_dict())
    changed = [
        key
        for key in values
        if (not key.startswith(_LEFT_OUT) or key == "model.freeze") and values[key] != default.get(key)
    ]
    shown = [*_ALWAYS, *(key for key in changed if key not in _ALWAYS)]
    last = rows[-1] if rows else {"step": 0, "epoch": 0}
    lines = [
        "## Training",
        "",
        f"{last['step']:,} steps in {counted(last['epoch'], 'epoch')} on {machine}, in about {_time(rows, dataset)} "
        "without the evaluations. `vitlab train --config config.yaml --data.root DATA --train.run_dir NEW` repeats it. "
        "What differs from vitlab's defaults, and some that may not:",
        "",
    ]
    return lines + _table(("setting", "value"), [(f"`{key}`", _cell(values.get(key))) for key in shown])


def _time(rows: Sequence[Mapping[str, Any]], dataset: Dataset) -> str:
    """Give the time of all epochs, in this sitting and in those before, from their speed."""
    images, speeds = len(dataset.splits["train"]), [row.get("train/images_per_s") for row in rows]
    return duration(sum(images / speed for speed in speeds if speed))


def _results(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], config: RunConfig) -> list[str]:
    metrics = record["metrics"]
    evaluations = sum("val/loss" in row for row in rows) or 1
    chosen = f"the best of {evaluations} evaluations" if evaluations > 1 else "the only evaluation"
    lines = [
        "## Results",
        "",
        f"On {metrics['count']:,} validation images, {chosen} of the run. **Validation chose these weights**, so that "
        "the scores lean to the bright side; the run never looked at a test split. In brackets: 95 % intervals over "
        "the choice of images, which say nothing of another training seed.",
        "",
        *_table(("score", "value"), _headline(metrics)),
    ]
    if "per_class" in metrics:
        lines += ["", *_table(("class", "images", "precision", "recall", "F1"), map(_class_row, metrics["per_class"]))]
    if config.objective.classifies:
        lines += ["", "`confusion.png` shows which classes are taken for which."]
    return lines


def _headline(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    count = metrics["count"]
    for key in (key for key in metrics if key.startswith("top")):
        interval = wilson_interval(round(metrics[key] * count), count)
        yield f"top-{key[3:]}", percent(metrics[key], interval)
    yield "loss", f"{metrics['loss']:.4f} nats"
    for key, text in (("nats_per_pixel", "nats a pixel"), ("bits_per_pixel", "bits a pixel")):
        if key in metrics:
            yield text, f"{metrics[key]:.4f}"
    if "ece" in metrics:
        yield "calibration error (ECE)", percent(metrics["ece"])
        yield "Brier score", f"{metrics['brier']:.4f}"


def _class_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    precision, recall, f1 = (
        "-" if row[key] is None else percent(row[key], row.get(f"{key}_interval"), digits=1)
        for key in ("precision", "recall", "f1")
    )
    return markdown(row["class"]), f"{row['count']:,}", precision, recall, f1


def _limits(record: Mapping[str, Any], config: RunConfig, dataset: Dataset) -> list[str]:
    lines = [
        "Nothing but images of this data set was tried. Of other cameras, places or times these numbers say nothing.",
        f"The test split was not scored: `vitlab evaluate best.safetensors --data {_data_name(config)} --split test` "
        "does that, once."
        if "test" in dataset.splits
        else "The data set has no test split, so that no score is of images that had no say in the choice of weights.",
        f"One training seed ({config.train.seed}) was tried in this run; another gives other weights and scores.",
    ]
    if config.objective.classifies:
        lines += _class_limits(record, dataset)
    return ["## Limits", "", *(f"- {line}" for line in lines)]


def _class_limits(record: Mapping[str, Any], dataset: Dataset) -> Iterator[str]:
    counts = count_classes(dataset)
    train = {name: count for name, count in counts["train"].items() if count}
    few = [name for name, count in counts["val"].items() if count < _FEW_IMAGES]
    yield "An image of none of these classes gets one of them all the same; `--abstain_below` names none where unsure."
    least, most = min(train, key=train.__getitem__), max(train, key=train.__getitem__)
    if (ratio := train[most] / train[least]) >= _UNEQUAL:
        grave = ": great imbalance, at the cost of the rare ones" if ratio >= IMBALANCE else ""
        yield (
            f"In training {markdown(most)} has {train[most]:,} images and {markdown(least)} {train[least]:,}, "
            f"{ratio:.1f} times fewer{grave}."
        )
    if few:
        yield f"Fewer than {_FEW_IMAGES} validation images, and so wide intervals: {_some(few)}."
    if untrained := [name for name in dataset.classes if name not in train]:
        yield f"No training image: {_some(untrained)}."
    yield (
        f"`predict` divides the logits by {record.get('temperature', 1.0):.3f}, fitted to the validation images: its "
        "probabilities are as sure as those warrant, and on other images may be too sure. The ECE above is without it."
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_CLASSES:,} more" if len(names) > _NAMED_CLASSES else ""
    return ", ".join(map(markdown, names[:_NAMED_CLASSES])) + more


def _data_name(config: RunConfig) -> str:
    """Give what stands for the data on a command line; a path would name a place of another machine."""
    return "digits" if config.data.root == "digits" else "DATA"


def _use(record: Mapping[str, Any], config: RunConfig) -> list[str]:
    data = _data_name(config)
    lines = [f"vitlab evaluate best.safetensors --data {data}"]
    python = [
        "from vitlab.models.files import load_model",
        "",
        'model = load_model("best.safetensors")  # network, preprocessing, scores',
        "print(model.network.name, model.metrics)",
    ]
    if config.objective.classifies:
        lines += [
            "vitlab predict best.safetensors IMAGES --out rows.csv",
            "vitlab explain best.safetensors IMAGES --out maps",
        ]
        python = [
            "import vitlab",
            "",
            'predictor = vitlab.Predictor("best.safetensors")',
            'probabilities = predictor.predict(["IMAGE"])  # float32 (1, K); rows sum to 1',
            "print(predictor.classes[probabilities[0].argmax()])",
        ]
    if config.objective.generates and record["model"]["config"].get("causal", False):
        lines += ["vitlab sample best.safetensors --count 16 --out samples.png"]
    elif not config.objective.classifies:
        lines += [f"vitlab probe best.safetensors --data {data}"]
    stands = "IMAGES for files and folders, IMAGE for a file" if config.objective.classifies else ""
    stands = ", ".join(part for part in ("DATA for the data set" if data == "DATA" else "", stands) if part)
    return [
        "## Use",
        "",
        f"In this folder{f' ({stands})' if stands else ''}:",
        "",
        *("```sh", *lines, "```", "", "```python", *python, "```", ""),
        "Nothing in the file is run; it is safetensors with a record, and its own hash guards every byte.",
    ]


def _values(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}` {_cell(value)}" for key, value in fields.items())


def _cell(value: Any) -> str:
    """Write a setting: numbers as they are, text escaped."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if re.fullmatch(r"[\w\[\], .+-]*", text) and "_" not in text else markdown(text)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out cells whose text is Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
