"""The pages of `benchmark.py`: Markdown of all rows, a plot, and the README's table."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from measuring import is_rate

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator

MARKERS = ("<!-- performance -->", "<!-- /performance -->")
WORKS = {
    "train_step": "Training step",
    "forward": "Forward pass",
    "sample_batch_1": "Drawing one image",
    "sample_batch_8": "Drawing eight images at once",
    "disk_to_batch": "From files to batches of bytes",
    "epoch": "`vitlab train`, one epoch, start-up included",
    "predict_folder": "`vitlab predict` on a folder, start-up included",
    "cold_start": "Cold start",
    "peak_memory": "Peak memory of a training step beyond weights and gradients",
}
Row = Mapping[str, Any]


def write_pages(record: Mapping[str, Any], docs: Path, readme: Path | None) -> None:
    """Write performance.md and .png into a folder, and the table into the README.

    Raises:
        ValueError: the README lacks the markers.
    """
    notes = docs / "performance_notes.md"
    plot(record, docs / "performance.png")
    (docs / "performance.md").write_text(page(record, notes.read_text() if notes.exists() else ""))
    if readme:
        readme.write_text(put_between(readme.read_text(), summary(record)))


def put_between(text: str, table: str) -> str:
    """Put a table between the markers; all else stays."""
    first, last = MARKERS
    before, opened, rest = text.partition(first)
    _, closed, after = rest.partition(last)
    if not opened or not closed:
        raise ValueError(f"the README has no {first} ... {last}: put these two lines where the table is to stand")
    return f"{before}{first}\n{table}{last}{after}"


def summary(record: Mapping[str, Any]) -> str:
    """Give the table of the main rows: of each subject the fastest precision, beside the best peer."""
    rows = main_rows(record["rows"])
    lines = [
        [
            WORKS[row["work"]],
            subject(row),
            with_unit(row, "ours"),
            f"{with_unit(row, 'theirs')} ({peer(row)})",
            times(row),
        ]
        for row in rows
    ]
    return table(["work", "of", "vitlab", "best of the others", "ratio"], lines)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Choose, of each work and subject on each device, the row of our best precision against the hardest peer."""
    shown = [
        row
        for row in rows
        if row["work"] != "peak_memory"
        and not (row["work"] == "disk_to_batch" and row["mode"] != "training")
        and not (row["work"] == "train_step" and row["mode"] == "compiled")
    ]
    best: dict[tuple[str, ...], Row] = {}
    for row in shown:
        key = (row["device"], row["work"], row["subject"], row["mode"] if row["work"] == "cold_start" else "")
        other = best.get(key)
        if other is None or goodness(row) > goodness(other):
            best[key] = row
    works = list(WORKS)
    return sorted(best.values(), key=lambda row: (row["device"], works.index(row["work"])))


def goodness(row: Row) -> tuple[float, float]:
    """Order rows of one subject: our better figure first, of equal ones that of the hardest peer."""
    ours = row["ours"] if is_rate(row["unit"]) else -row["ours"]
    return ours, -row["ratio"]


def page(record: Mapping[str, Any], notes: str) -> str:
    """Give the whole page."""
    machines = "; ".join(f"{device}: {name}" for device, name in record["machine"].items())
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    rates = "; ".join(
        f"{device} " + ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in of_device.items())
        for device, of_device in record["matrix_rate"].items()
    )
    parts = [
        f"# Performance\n\nWritten by `scripts/benchmark.py` on {record['date']}, all in turns with the others on one "
        f"machine.\n\n- Machine: {machines}\n- Versions: {versions}\n- Matrix products of 2048x2048, billions of "
        f"multiply-adds a second: {rates}\n",
        textwrap.fill(
            "Figures are medians of rounds A B A B, and the ratio is the median of the rounds' ratios, more than 1 "
            "where vitlab is better: more of a rate, less of seconds or MiB; beside it the smallest and the largest. "
            "`timm` is as it comes, `timm best` the best of its settings. The share is that of the machine's matrix "
            "products, a training step counted as three forward passes of all tokens; what ours leaves out of a "
            "ViT's (6 %) and a DaViT's (2.5 %) is counted as made. The scripts' docstrings say what is compared.",
            120,
        )
        + "\n",
        "![Ratios by work, and time and memory over the size of the images](performance.png)\n",
    ]
    for work, title in WORKS.items():
        if rows := [row for row in record["rows"] if row["work"] == work]:
            parts.append(f"## {title}\n\n{all_rows(rows)}")
    if record["growth"]:
        parts.append(f"## Growth with the size of the images\n\n{growth_table(record['growth'])}")
    if notes.strip():
        parts.append(f"## Notes\n\n{notes.strip()}\n")
    parts.append(
        f"## To make it again\n\n    python scripts/benchmark.py --photos PHOTOS --cifar CIFAR\n\n{settings(record)}"
    )
    return "\n".join(parts)


def all_rows(rows: Sequence[Row]) -> str:
    """Give a table of the rows of one work."""
    columns = [
        "of",
        "precision",
        "mode",
        "device",
        "vitlab",
        "peer",
        "theirs",
        "ratio",
        "least to most",
        "share",
        "note",
    ]
    return table(
        columns,
        [
            [
                row["subject"],
                row["precision"],
                row["mode"],
                row["device"],
                with_unit(row, "ours"),
                row["peer"],
                number(row["theirs"]),
                times(row),
                " to ".join(map(number, row["spread"])),
                f"{row['share']:.0%}" if row["share"] is not None else "",
                row["note"],
            ]
            for row in rows
        ],
    )


def growth_table(points: Sequence[Row]) -> str:
    """Give a table of the points of growth."""
    return table(
        ["network", "precision", "images", "pixels a side", "s a step", "MiB"],
        [
            [
                point["subject"],
                point["precision"],
                str(point["batch_size"]),
                str(point["image_size"]),
                number(point["step_s"]),
                number(point["peak_mib"]),
            ]
            for point in points
        ],
    )


def settings(record: Mapping[str, Any]) -> str:
    """Give a table of the parts."""
    rows = [
        [name, f"`scripts/{part['command']}`", part["date"], f"{part['duration_s'] / 60:.1f}"]
        for name, part in record["settings"].items()
    ]
    return table(["part", "command", "date", "minutes"], rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Give a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def subject(row: Row) -> str:
    """Say what a row is about in the README."""
    more = [row["precision"] if row["precision"] != "uint8" else "", row["mode"] if row["work"] == "cold_start" else ""]
    device = row["device"] if row["device"] != "cpu" else ""
    return ", ".join(filter(None, [row["subject"], *more, device]))


def peer(row: Row) -> str:
    """Name a row's peer without its settings."""
    name: str = row["peer"]
    return name.removesuffix(" best")


def with_unit(row: Row, column: str) -> str:
    """Give a figure with its unit."""
    return f"{number(row[column])} {row['unit']}"


def number(value: float) -> str:
    """Give three digits, or all before the point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def times(row: Row) -> str:
    """Give a ratio."""
    return f"{number(row['ratio'])} x"


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios by work, and below the growth of time and memory."""
    has_growth = bool(record["growth"])
    figure = plt.figure(figsize=(10, 10 if has_growth else 6), layout="constrained")
    grid = figure.add_gridspec(2 if has_growth else 1, 2, height_ratios=[3, 2] if has_growth else None)
    plot_ratios(figure.add_subplot(grid[0, :]), record["rows"])
    if has_growth:
        for column, (key, label) in enumerate((("step_s", "seconds a step"), ("peak_mib", "peak memory, MiB"))):
            plot_growth(figure.add_subplot(grid[1, column]), record["growth"], key, label)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_ratios(axes: Any, rows: Sequence[Row]) -> None:
    """Draw a point for each row; the points of one work lie one above the other in the order of the tables."""
    works = [work for work in WORKS if any(row["work"] == work for row in rows)]
    peers = sorted({row["peer"] for row in rows})
    for color, name in enumerate(peers):
        points = []
        for line, work in enumerate(works):
            of_work = [row for row in rows if row["work"] == work]
            for place, row in enumerate(of_work):
                if row["peer"] == name:
                    points.append((row["ratio"], line + 0.8 * ((place + 0.5) / len(of_work) - 0.5)))
        axes.plot(*zip(*points, strict=True), "o", markersize=5, alpha=0.8, color=f"C{color}", label=name)
    for line in range(1, len(works)):
        axes.axhline(line - 0.5, color="0.9", linewidth=0.8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50], labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(works)), labels=[textwrap.fill(WORKS[work].replace("`", ""), 30) for work in works])
    axes.invert_yaxis()
    axes.set_xlabel("how many times better vitlab is (right of 1)")
    axes.legend()


def plot_growth(axes: Any, points: Sequence[Row], key: str, label: str) -> None:
    """Draw a line for each network."""
    for name in dict.fromkeys(point["subject"] for point in points):
        line = [point for point in points if point["subject"] == name]
        sizes = [point["image_size"] for point in line]
        axes.plot(sizes, [point[key] for point in line], "o-", label=f"{name}, batch of {line[0]['batch_size']}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = sorted({point["image_size"] for point in points})
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks], fontsize=7)
    axes.set_xlabel("pixels a side")
    axes.set_ylabel(label)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)  # beside lines, not over them
