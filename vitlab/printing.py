"""What the commands print of their results: tables and lines."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from vitlab.text import counted, printable, say

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vitlab.inference.folder import Predictions
    from vitlab.inference.sameness import Sameness
    from vitlab.models.proposals import Proposal


def print_models(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print a row for each network, in a file or a pipe as wide as need be."""
    table = Table()
    for header in ("name", "parameters", "multiply-adds", "size", "top-1 error"):
        table.add_column(header, justify="left" if header == "name" else "right", no_wrap=True)
    for header in ("source of the error", "weights"):
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['macs'] / 1e9:.3f} G",
            "x".join(map(str, row["image_size"])),
            _published_quality(row),
            row["source"] or "-",
            row["weights"] or "-",
        )
    if not console.is_terminal:
        console.width = Measurement.get(console, console.options.update_width(1000), table).maximum
    console.print(table)
    say(
        console,
        "for one image of that size and 1000 classes; top-1 error on ImageNet-1k as published, - where nothing is; "
        "of ImageGPT the nats a pixel",
    )
    say(console, "timm/NAME builds any network of timm; --image_size proposes networks for images of other sizes")


def _published_quality(row: dict[str, Any]) -> str:
    """Give the error of a network, or where there is none its loss of a pixel's colour."""
    if row["top1_error"] is not None:
        return f"{100 * row['top1_error']:g}%"
    return "-" if row["nats_per_pixel"] is None else f"{row['nats_per_pixel']:.4f} nats"


def print_proposals(console: Console, proposals: "list[Proposal]") -> None:
    """Print the lines that train the proposed networks, each below its costs and reason."""
    from vitlab.models.proposals import NUM_CLASSES, describe_size

    for proposal in proposals:
        heading = f"{proposal.architecture} for {describe_size(proposal.image_size)}"
        if proposal.macs is None:
            say(console, f"{heading}: none")
            say(console, f"  {proposal.reason}")
            continue
        say(console, f"{heading}: {proposal.parameters:,} parameters, {proposal.macs / 1e9:.3f} G multiply-adds")
        say(console, f"  {proposal.reason}")
        say(console, f"  {proposal.command()}")
    say(console, "up to 64 pixels small networks, to train from scratch; above, the widths of the named ones")
    say(console, f"parameters are those with {NUM_CLASSES} classes; FOLDER stands for your images")


def print_scores(console: Console, result: dict[str, Any]) -> None:
    """Print the headline, what is known of the classes where there are any, and what could not be read."""
    from vitlab.engine.evaluator import headline

    error = f", error {result['error']:.2%}" if "error" in result else ""
    say(
        console,
        f"{result['split']} split of {result['data']}: {headline(result, result.get('intervals'))}{error}, "
        f"{counted(result['count'], 'image')} ({result['weights']} weights)",
    )
    if "per_class" in result:
        _print_classes(console, result)
    for unread in result["unreadable"]:
        say(console, f"skipped {unread['path']}: {unread['reason']}")
    if result["unreadable"]:
        say(console, f"left out of every count: {counted(len(result['unreadable']), 'image')} that could not be read")


def _print_classes(console: Console, result: dict[str, Any]) -> None:
    """Print means over the classes, what the probabilities are worth, and a row for each class."""
    from vitlab.engine.evaluator import percent

    intervals = result["intervals"]
    say(
        console,
        f"mean over the classes: recall {percent(result['macro_recall'], intervals['macro_recall'])}, "
        f"F1 {percent(result['macro_f1'], intervals['macro_f1'])}",
    )
    say(console, f"calibration error (ECE) {percent(result['ece'], intervals['ece'])}, Brier {result['brier']:.4f}")
    if result["temperature"] != 1.0:
        loss, ece, brier = (result["calibrated"][name] for name in ("loss", "ece", "brier"))
        of = " of the classes" if "bits_per_pixel" in result else ""
        say(
            console,
            f"as predict has it, at the file's temperature {result['temperature']:.3f}: loss{of} {loss:.4f}, "
            f"ECE {ece:.2%}, Brier {brier:.4f}",
        )
    table = Table("class", "images", "precision", "recall", "F1")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result["per_class"]:
        precision, recall, f1 = (
            "-" if row[key] is None else percent(row[key], row.get(f"{key}_interval"), digits=1)
            for key in ("precision", "recall", "f1")
        )
        table.add_row(Text(printable(row["class"])), str(row["count"]), precision, recall, f1)
    console.print(table)
    say(console, "in brackets: 95% intervals over the choice of images")


def print_configs(console: Console, result: dict[str, Any]) -> None:
    """Print what differs in the configurations of two runs, and what was left out."""
    from vitlab.inference.compare import config_table

    if result["config"] is None:
        say(console, "configurations: not compared, a run has no config.yaml")
    elif not result["config"]:
        say(console, "configurations: alike")
    else:
        console.print(config_table(result["config"]))
    for line in result["left_out"]:
        say(console, f"left out: {line}")


def print_comparison(console: Console, result: dict[str, Any]) -> None:
    """Print what differs in the configurations, each score, and who was right where the other was not."""
    from vitlab.engine.evaluator import headline
    from vitlab.inference.compare import pairs_table, points

    print_configs(console, result)
    read = f"{counted(result['count'], 'image')} that all runs could read"
    say(console, f"{result['split']} split of {result['data']}: {read}")
    for pair in result["pairs"]:
        for side in ("a", "b"):
            one = pair[side]
            scores = headline(one, one["intervals"])
            images = counted(one["count"], "image")
            say(console, f"{side.upper()} {one['path']}: {scores}, {images} ({one['weights']} weights)")
    console.print(pairs_table(result))
    seeds = len(result["pairs"])
    of, covers = ("", "the choice of images; another seed may differ by more")
    if seeds > 1:
        of, covers = f", mean of {seeds} seeds", "the choice of images and of seeds"
    difference = points(result["difference"], result["interval"])
    say(console, f"top-1 of A minus B: {difference} points{of}; the 95% interval covers {covers}")


def print_sameness(console: Console, pairs: "Mapping[str, Sameness]", *, identical: bool) -> None:
    """Print at which step two runs part and what differs, of each pair, and the verdict."""
    for name, sameness in pairs.items():
        for line in sameness.lines():
            say(console, f"{name}: {line}" if name else line)
    say(console, "the runs are " + ("identical to the last bit" if identical else "not identical"))


def print_counts(console: Console, result: "Predictions", *, out: "Path | None") -> None:
    """Print how many images became what, and where the rows are."""
    counts = [f"{counted(result.count, 'image')} classified", f"{result.unreadable} unreadable"]
    counts.append(counted(result.ignored, "other file"))
    for number, what in (
        (result.abstained, "without a label"),
        (result.copied, "copied"),
        (result.resumed, "done before"),
        (result.remade, "done again after a change"),
    ):
        counts += [f"{number} {what}"] if number else []
    say(console, ", ".join(counts) + ("" if out is None else f": {out}"))
