"""What each command does: build the parts from its options, run them, say what came out."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vitlab.config import RunConfig
from vitlab.options import EvaluateOptions, ModelsOptions, PredictOptions
from vitlab.text import printable, say

SKIPPED_SOME = 3


def train(config: RunConfig) -> int:
    """`vitlab train`: train, and name what lies where."""
    from vitlab.training import run_training

    run_training(config, console=Console())
    return 0


def evaluate(options: EvaluateOptions) -> int:
    """`vitlab evaluate`: score a model file on a split with the file's own preprocessing."""
    from vitlab.data.datasets import load_split
    from vitlab.data.loader import Loader
    from vitlab.data.preprocess import EvalTransform
    from vitlab.engine.device import resolve_device
    from vitlab.engine.evaluator import evaluate as score
    from vitlab.engine.objectives import Classification
    from vitlab.models.files import load_model

    console = Console()
    model = load_model(options.checkpoint, device=resolve_device(options.device))
    split, notes = load_split(
        options.data,
        options.split,
        classes=model.classes,
        val_fraction=model.data["val_fraction"],
        seed=model.data["seed"],
    )
    for note in notes:
        say(console, note)
    loader = Loader(
        split,
        EvalTransform(model.preprocess),
        batch_size=options.batch_size,
        workers=options.workers,
        on_error=options.on_error,
    )
    with closing(loader), _progress(console) as progress:
        task = progress.add_task("evaluating", total=len(split))
        scores = score(
            Classification(model.network),
            loader.epoch(0),
            classes=model.classes,
            preprocess=model.preprocess,
            weights=model.weights,
            on_batch=lambda images: progress.advance(task, images),
        )
    result = {"checkpoint": str(options.checkpoint), "data": options.data, "split": options.split, **scores.to_dict()}
    _print_scores(console, result)
    if options.json is not None:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        say(console, f"scores: {options.json}")
    if options.confusion is not None:
        from vitlab.engine.figures import plot_confusion

        Path(options.confusion).parent.mkdir(parents=True, exist_ok=True)
        plot_confusion(scores.confusion.numpy(), model.classes, Path(options.confusion))
        say(console, f"confusion matrix: {options.confusion}")
    return SKIPPED_SOME if scores.errors else 0


def predict(options: PredictOptions) -> int:
    """`vitlab predict`: classify files and folders, a row an image, sorted by path."""
    from vitlab.inference.folder import check_out, describe, predict_files, predictions_table
    from vitlab.inference.predictor import Predictor

    console = Console()
    out = None if options.out is None else Path(options.out)
    check_out(out)
    predictor = Predictor(options.checkpoint, device=options.device, batch_size=options.batch_size)
    with _progress(console) as progress:
        result = predict_files(
            predictor, options.paths, out=out, top_k=options.top_k, workers=options.workers, progress=progress
        )
    if out is None and console.is_terminal:
        console.print(predictions_table(result.rows))
    elif out is None:
        for row in result.rows:
            say(console, describe(row))
    for error in result.errors if out is not None else ():
        say(console, f"unreadable: {error}")
    counts = [f"{result.count} images classified", f"{len(result.errors)} unreadable", f"{result.ignored} other files"]
    say(console, ", ".join(counts) + ("" if out is None else f": {out}"))
    return SKIPPED_SOME if result.errors else 0


def models(options: ModelsOptions) -> int:
    """`vitlab models`: list the networks with their parameters at the native size and 1000 classes."""
    import torch

    from vitlab.models.catalog import create_model, list_models

    rows = []
    for name in list_models():
        with torch.device("meta"):
            network = create_model(name)
        count = sum(parameter.numel() for parameter in network.parameters())
        rows.append((name, count, network.image_size))
    if options.json:
        keys = ("name", "parameters", "image_size")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return 0
    table = Table("name", "parameters", "native size")
    for name, count, (height, width) in rows:
        table.add_row(name, f"{count:,}", f"{height}x{width}")
    Console().print(table)
    return 0


def version(_: None) -> int:
    """`vitlab --version`: the versions and the machine, for bug reports."""
    import platform
    from importlib.metadata import version as version_of

    import torch

    from vitlab import __version__

    print(f"vitlab {__version__}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    for package in (
        "torch",
        "torchvision",
        "timm",
        "albumentations",
        "opencv-python-headless",
        "pillow",
        "tensorboard",
    ):
        print(f"{package} {version_of(package)}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"threads {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"GPUs: {', '.join(gpus) or 'none'}")
    return 0


def _print_scores(console: Console, result: dict[str, Any]) -> None:
    """Print the headline in percent, and a row for each class."""
    tops = "  ".join(f"top-{key[3:]} {result[key]:.2%}" for key in result if key.startswith("top"))
    say(
        console,
        f"{result['split']} split of {result['data']}: {tops}  error {result['error']:.2%}  "
        f"loss {result['loss']:.4f}  {result['count']} images  ({result['weights']} weights)",
    )
    table = Table("class", "images", "precision", "recall", "F1")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result["per_class"]:
        ratios = ("-" if row[key] is None else f"{row[key]:.1%}" for key in ("precision", "recall", "f1"))
        table.add_row(Text(printable(row["class"])), str(row["count"]), *ratios)
    console.print(table)
    for error in result["unreadable"]:
        say(console, f"skipped {error['path']}: {error['reason']}")
    if result["unreadable"]:
        say(console, f"{len(result['unreadable'])} images could not be read and are in no count")


def _progress(console: Console) -> Progress:
    """Make a bar with the time left for a terminal, which shows nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
