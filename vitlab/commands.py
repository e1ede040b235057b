"""What each command does: build the parts from its options, run them, say what came out."""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vitlab.config import DataConfig, RunConfig, TrainConfig
from vitlab.disk import replacing
from vitlab.errors import InputError
from vitlab.options import EvaluateOptions, ModelsOptions, PredictOptions
from vitlab.text import printable, say

if TYPE_CHECKING:
    from vitlab.data.datasets import Split
    from vitlab.engine.evaluator import Scores
    from vitlab.models.files import ModelFile

SKIPPED_SOME = 3


def train(config: RunConfig) -> int:
    """`vitlab train`: train, and name what lies where."""
    from vitlab.engine.run_folder import RunFolder
    from vitlab.training import run_training

    rows = RunFolder(run_training(config, console=Console())).read_metrics()
    return SKIPPED_SOME if any("train/unreadable" in row or "val/unreadable" in row for row in rows) else 0


def evaluate(options: EvaluateOptions) -> int:
    """`vitlab evaluate`: score a model file on a split with the file's own preprocessing."""
    from vitlab.data.loader import Loader
    from vitlab.data.preprocess import EvalTransform
    from vitlab.engine.device import resolve_device
    from vitlab.engine.evaluator import evaluate as score
    from vitlab.engine.objectives import Classification
    from vitlab.models.files import load_model

    console = Console()
    _check_outputs(options)
    model = load_model(options.checkpoint, device=resolve_device(options.device))
    split = _split_for(model, options, console)
    transform = EvalTransform(model.preprocess)
    loader = Loader(split, transform, batch_size=options.batch_size, workers=options.workers, on_error=options.on_error)
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
    result = {"checkpoint": options.checkpoint, "data": options.data, "split": options.split, **scores.to_dict()}
    _print_scores(console, result)
    _write_scores(console, options, result, scores)
    return SKIPPED_SOME if scores.errors else 0


def _check_outputs(options: EvaluateOptions) -> None:
    """Refuse what cannot be written before the work, not after it."""
    for name, suffix in (("json", ".json"), ("confusion", ".png")):
        path = getattr(options, name)
        if path is not None and (Path(path).suffix.lower() != suffix or Path(path).is_dir()):
            raise InputError(f"--{name} is {path}: give a file that ends in {suffix}")


def _split_for(model: "ModelFile", options: EvaluateOptions, console: Console) -> "Split":
    """Read the split, cut from training as the model's run cut it, and say where it is not the run's own."""
    from vitlab.data.datasets import fingerprint, load_split

    run = model.data
    split, notes = load_split(
        options.data,
        options.split,
        classes=model.classes,
        val_fraction=run.get("val_fraction", DataConfig.val_fraction),
        seed=run.get("seed", TrainConfig.seed),
    )
    for note in notes:
        say(console, note)
    own = run.get("fingerprint", {"sha256": {}, "counts": {}})
    is_own = own["sha256"].get(split.name) == fingerprint(split)["sha256"][split.name]
    if split.name == "train" and is_own:
        say(console, "note: the model was trained on these images")
    elif split.name in own["sha256"] and not is_own:
        say(console, f"note: these are not the {split.name} images of the model's own run, and it may have seen some")
    elif split.name == "all" and len(split) == own["counts"].get("train", 0) + own["counts"].get("val", 0):
        say(
            console,
            "note: as many images as the model's run had; if they are the same, it was trained on most of them",
        )
    return split


def _write_scores(console: Console, options: EvaluateOptions, result: dict[str, Any], scores: "Scores") -> None:
    if options.json is not None:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(options.json)) as aside:
            aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        say(console, f"scores: {options.json}")
    if options.confusion is not None:
        from vitlab.engine.figures import plot_confusion

        Path(options.confusion).parent.mkdir(parents=True, exist_ok=True)
        plot_confusion(scores.confusion.numpy(), scores.classes, Path(options.confusion))
        say(console, f"confusion matrix: {options.confusion}")


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
    from vitlab.engine.evaluator import headline

    say(
        console,
        f"{result['split']} split of {result['data']}: {headline(result)}, error {result['error']:.2%}, "
        f"{result['count']} images ({result['weights']} weights)",
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
