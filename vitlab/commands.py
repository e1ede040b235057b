"""What each command does: build the parts from its options, run them, say what came out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vitlab.config import RunConfig
from vitlab.options import (
    CheckOptions,
    CompareOptions,
    EvaluateOptions,
    ExplainOptions,
    ModelsOptions,
    PredictOptions,
    ProbeOptions,
    ReplayOptions,
)
from vitlab.outputs import (
    DIFFERENT,
    FOUND_PROBLEMS,
    SKIPPED_SOME,
    check_folder,
    check_outputs,
    draw_confusion,
    write_json,
)
from vitlab.pixel_commands import complete, palette, sample
from vitlab.printing import (
    print_comparison,
    print_configs,
    print_counts,
    print_models,
    print_proposals,
    print_sameness,
    print_scores,
)
from vitlab.text import counted, progress_bar, say

__all__ = [
    "check",
    "compare",
    "complete",
    "evaluate",
    "explain",
    "models",
    "palette",
    "predict",
    "probe",
    "replay",
    "sample",
    "train",
    "version",
]

if TYPE_CHECKING:
    from vitlab.engine.distributed import Processes


def check(options: CheckOptions) -> int:
    """`vitlab check`: look at every image of a data set, and say what is wrong."""
    from vitlab.engine.device import resolve_device
    from vitlab.inference.check import check_data
    from vitlab.inference.check_report import refuse_inside, require_outside

    console = Console()
    if options.json is not None:
        refuse_inside("json", Path(options.json), options.data)
    check_outputs(json=options.json)
    check_folder("report", options.report)
    resolve_device(options.device)
    if options.report is not None:
        require_outside(Path(options.report), options.data)
    with progress_bar(console) as progress:
        report = check_data(
            options.data,
            checkpoint=options.checkpoint,
            workers=options.workers,
            device=options.device,
            progress=progress,
        )
    report.print(console)
    write_json(console, options.json, report.to_dict(), what="findings")
    if options.report is not None:
        say(console, f"report: {report.write_html(Path(options.report))}")
    return FOUND_PROBLEMS if report.problems else 0


def train(config: RunConfig) -> int:
    """`vitlab train`: train, and name what lies where."""
    from vitlab.engine.run_folder import RunFolder
    from vitlab.runs.training import run_training

    run = run_training(config, console=Console())
    runs = [run] if config.train.seeds is None else [run / f"seed-{seed}" for seed in config.train.seeds]
    rows = [row for folder in runs for row in RunFolder(folder).read_metrics()]
    return SKIPPED_SOME if any("train/unreadable" in row or "val/unreadable" in row for row in rows) else 0


def evaluate(options: EvaluateOptions) -> int:
    """`vitlab evaluate`: score a model file on a split with the file's own preprocessing."""
    from vitlab.engine.distributed import launched

    with launched(options.device) as processes:
        return _evaluate(options, processes)


def _evaluate(options: EvaluateOptions, processes: "Processes") -> int:
    from vitlab.engine.device import resolve_device
    from vitlab.inference.check_report import require_outside
    from vitlab.inference.report import write_report
    from vitlab.inference.scoring import read_split, score
    from vitlab.models.files import load_model

    console = Console(quiet=not processes.is_main)
    check_outputs(json=options.json, confusion=options.confusion)
    check_folder("report", options.report)
    if options.report is not None:
        require_outside(Path(options.report), options.data)
    model = load_model(options.checkpoint, device=resolve_device(options.device))
    if options.confusion is not None or options.report is not None:
        model.require_classes(options.checkpoint)
    scored = read_split(model, options.data, options.split)
    for line in (*scored.log, *([f"note: {scored.note}"] if scored.note else [])):
        say(console, line)
    with progress_bar(console) as progress:
        task = progress.add_task("evaluating", total=len(scored.split))
        scores = score(
            model,
            scored.split,
            batch_size=options.batch_size,
            workers=options.workers,
            on_error=options.on_error,
            processes=processes,
            on_batch=lambda images: progress.advance(task, images),
        )
    if not processes.is_main:
        return 0
    result = {"checkpoint": options.checkpoint, "data": options.data, "split": options.split, **scores.to_dict()}
    print_scores(console, result)
    write_json(console, options.json, result)
    if options.confusion is not None:
        draw_confusion(console, Path(options.confusion), scores)
    if options.report is not None:
        with progress_bar(console) as progress:
            page = write_report(
                Path(options.report),
                model,
                scored,
                scores,
                result,
                conformal_level=options.conformal_level,
                workers=options.workers,
                progress=progress,
            )
        say(console, f"report: {page}")
    return SKIPPED_SOME if scores.errors else 0


def compare(options: CompareOptions) -> int:
    """`vitlab compare`: two runs, or the same seeds of two recipes, on the same images and bit for bit."""
    from vitlab.engine.device import resolve_device
    from vitlab.inference.compare import compare_runs, compare_without_scores

    console = Console()
    check_outputs(json=options.json)
    resolve_device(options.device)
    if bits := compare_without_scores(options):
        result = bits.to_dict()
        print_configs(console, result)
        print_sameness(console, bits.sameness, identical=bits.identical)
        write_json(console, options.json, result)
        return 0 if bits.identical else DIFFERENT
    with progress_bar(console) as progress:
        comparison = compare_runs(options, say=lambda line: say(console, line), progress=progress)
    result = comparison.to_dict()
    print_comparison(console, result)
    print_sameness(console, {pair.name: pair.sameness for pair in comparison.pairs}, identical=comparison.identical)
    write_json(console, options.json, result)
    if comparison.skipped:
        return SKIPPED_SOME
    return 0 if comparison.identical else DIFFERENT


def predict(options: PredictOptions) -> int:
    """`vitlab predict`: classify files and folders, a row an image, sorted by path."""
    from vitlab.engine.distributed import launched

    with launched(options.device) as processes:
        return _predict(options, processes)


def _predict(options: PredictOptions, processes: "Processes") -> int:
    from vitlab.inference.folder import check_outputs as check_rows
    from vitlab.inference.folder import predict_files
    from vitlab.inference.predictor import Predictor
    from vitlab.inference.tables import describe, predictions_table

    console = Console(quiet=not processes.is_main)
    check_folder("by_class", options.by_class)
    out, embeddings, by_class = (
        None if path is None else Path(path) for path in (options.out, options.embeddings, options.by_class)
    )
    check_rows(out=out, embeddings=embeddings, resume=options.resume)
    predictor = Predictor(options.checkpoint, device=options.device, batch_size=options.batch_size, tta=options.tta)
    with progress_bar(console) as progress:
        result = predict_files(
            predictor,
            options.paths,
            out=out,
            top_k=options.top_k,
            abstain_below=options.abstain_below,
            embeddings=embeddings,
            by_class=by_class,
            resume=options.resume,
            workers=options.workers,
            processes=processes,
            progress=progress,
        )
    if result.rows and console.is_terminal:
        console.print(predictions_table(result.rows))
    else:
        for row in result.rows:
            say(console, describe(row))
    for error in result.errors if not result.rows else ():
        say(console, f"unreadable: {error}")
    print_counts(console, result, out=out)
    return SKIPPED_SOME if result.unreadable else 0


def probe(options: ProbeOptions) -> int:
    """`vitlab probe`: fit classifiers on the features of each layer, choose on validation, score on the test split."""
    from vitlab.engine.device import resolve_device
    from vitlab.inference.probe import probe_layers
    from vitlab.models.files import load_model

    console = Console()
    check_outputs(json=options.json, plot=options.plot)
    model = load_model(options.checkpoint, device=resolve_device(options.device))
    with progress_bar(console) as progress:
        report = probe_layers(model, options, say=lambda line: say(console, line), progress=progress)
    console.print(report.table())
    say(console, "in brackets: 95% intervals over the choice of images")
    say(console, report.verdict())
    for error in report.errors:
        say(console, f"skipped {error}")
    write_json(console, options.json, report.to_dict())
    if options.plot is not None:
        report.plot(Path(options.plot))
        say(console, f"picture: {options.plot}")
    return SKIPPED_SOME if report.errors else 0


def explain(options: ExplainOptions) -> int:
    """`vitlab explain`: maps of what a network looks at, as pictures and arrays in a folder."""
    from vitlab.engine.device import resolve_device
    from vitlab.inference.explain import explain_files
    from vitlab.models.files import load_model

    console = Console()
    check_folder("out", options.out)
    model = load_model(options.checkpoint, device=resolve_device(options.device))
    with progress_bar(console) as progress:
        result = explain_files(
            model,
            options.images,
            Path(options.out),
            target=options.class_,
            layer_numbers=options.layer_numbers(),
            batch_size=options.batch_size,
            workers=options.workers,
            progress=progress,
        )
    for line in (*(f"note: {note}" for note in result.notes), *(f"unreadable: {error}" for error in result.errors)):
        say(console, line)
    say(console, f"{counted(result.count, 'image')} explained, {len(result.errors)} unreadable: {options.out}")
    return SKIPPED_SOME if result.errors else 0


def replay(options: ReplayOptions) -> int:
    """`vitlab replay`: make a piece of a run again, and say whether the bits agree."""
    from vitlab.runs.replay import replay as make_again

    console = Console()
    outcome = make_again(options.state, root=options.data)
    for line in outcome.lines:
        say(console, line)
    if outcome.first_step == outcome.last_step:
        verdict = "the step fails again, alike" if outcome.agrees else "the step does not fail as it did"
    else:
        steps = f"steps {outcome.first_step + 1} to {outcome.last_step}"
        verdict = f"{steps}: " + ("all bits agree" if outcome.agrees else "the bits differ")
    say(console, verdict)
    return 0 if outcome.agrees else DIFFERENT


def models(options: ModelsOptions) -> int:
    """`vitlab models`: list the networks and what is published of them, or propose networks for sizes of images."""
    if options.image_size:
        from vitlab.models.proposals import propose

        proposals = [proposal for size in options.sizes() for proposal in propose(size)]
        if options.json:
            print(json.dumps([proposal.to_dict() for proposal in proposals], indent=1))
        else:
            print_proposals(Console(), proposals)
        return 0
    from vitlab.models.published import describe_models

    rows = describe_models()
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_models(Console(), rows)
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
        "simplejpeg",
        "tensorboard",
    ):
        print(f"{package} {version_of(package)}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"threads {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"GPUs: {', '.join(gpus) or 'none'}")
    return 0
