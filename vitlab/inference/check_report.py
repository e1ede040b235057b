"""What a check of a data set found: values, and how they are printed, written and drawn."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitlab.errors import InputError
from vitlab.inference.html import THUMBNAIL_SIDE, thumbnail_uri, write_page
from vitlab.text import printable, say

_PRINTED_CASES = 5
_PRINTED_PICTURES = 4
_DRAWN_CASES = 60
_DRAWN_PICTURES = 12


@dataclass(frozen=True)
class Picture:
    """An image of the data set."""

    path: str
    split: str
    label: str


@dataclass(frozen=True)
class Case:
    """One instance of a finding: the images that it is about, and what is to be said of them."""

    pictures: tuple[Picture, ...]
    note: str = ""

    def describe(self) -> str:
        """Give the case as a line, a large group shortened."""
        shown = [f"{picture.path} ({picture.split}, {picture.label})" for picture in self.pictures[:_PRINTED_PICTURES]]
        more = [f"{len(self.pictures) - len(shown)} more"] if len(self.pictures) > len(shown) else []
        return ": ".join(part for part in (" = ".join(shown + more), self.note) if part)


@dataclass(frozen=True)
class Finding:
    """Something that a check found."""

    kind: str
    """Its name in JSON."""
    title: str
    """What it is, in a few words."""
    cases: tuple[Case, ...]
    is_problem: bool = True
    """Whether the data set should be mended, or its owner only know."""


@dataclass(frozen=True)
class CheckReport:
    """All that a check found."""

    data: str
    counts: Mapping[str, Mapping[str, int]]
    """Images of each class, by split."""
    findings: tuple[Finding, ...]
    facts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """How many images have each size, colour mode, format and orientation."""
    notes: tuple[str, ...] = ()
    """How the data set was read, and what was not looked for."""
    read: Callable[[Collection[str]], Iterable[tuple[str, NDArray[np.uint8]]]] = lambda paths: ()
    """Gives path and pixels (H, W, 3) of those of the paths that can be read."""

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What should be mended."""
        return tuple(finding for finding in self.findings if finding.is_problem)

    def find(self, kind: str) -> tuple[Case, ...]:
        """Give the cases of one kind of finding; none where it was not found."""
        return tuple(case for finding in self.findings if finding.kind == kind for case in finding.cases)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values for JSON."""
        return {
            "data": self.data,
            "counts": {split: dict(counts) for split, counts in self.counts.items()},
            "problems": [_plain(finding) for finding in self.findings if finding.is_problem],
            "hints": [_plain(finding) for finding in self.findings if not finding.is_problem],
            "facts": {name: dict(counts) for name, counts in self.facts.items()},
            "notes": list(self.notes),
        }

    def print(self, console: Console) -> None:
        """Print the counts, the facts, each finding with its first cases, and what the verdict rests on."""
        console.print(self._counts_table())
        for name, counts in self.facts.items():
            say(console, f"{name}: {describe_counts(counts)}")
        for finding in self.findings:
            say(console, f"{'problem' if finding.is_problem else 'hint'}: {finding.title}: {len(finding.cases):,}")
            for case in finding.cases[:_PRINTED_CASES]:
                say(console, f"  {case.describe()}")
            if len(finding.cases) > _PRINTED_CASES:
                say(console, f"  and {len(finding.cases) - _PRINTED_CASES:,} more: --json lists all")
        for note in self.notes:
            say(console, f"note: {note}")
        found = len(self.problems)
        kinds = f"{found} kind{'' if found == 1 else 's'} of problem" if found else "no problem"
        say(console, f"{self.data}: {kinds} found")

    def write_html(self, folder: Path) -> Path:
        """Write `index.html`, one page that needs nothing else, and give its path.

        Args:
            folder: made where it is missing.

        Raises:
            OSError: it cannot be written.
        """
        return write_page(
            folder,
            "check.html",
            title=f"Check of {self.data}",
            classes=self._class_rows(),
            facts={name: describe_counts(counts) for name, counts in self.facts.items()},
            **self.page_values(cases=_DRAWN_CASES, pictures=_DRAWN_PICTURES),
        )

    def page_values(self, *, cases: int, pictures: int) -> dict[str, Any]:
        """Give what the template `findings.html` shows: of each finding so many cases, of each case so many pictures.

        The title of a finding that has more says how many.
        """
        shown = {
            picture.path
            for finding in self.findings
            for case in finding.cases[:cases]
            for picture in case.pictures[:pictures]
        }
        thumbnails, enlarged = {}, set()
        for path, image in self.read(shown):
            thumbnails[path] = thumbnail_uri(image)
            if max(image.shape[:2]) < THUMBNAIL_SIDE:
                enlarged.add(path)
        return {
            "report": self,
            "thumbnails": thumbnails,
            "enlarged": enlarged,
            "drawn_cases": cases,
            "drawn_pictures": pictures,
        }

    def _class_rows(self) -> list[tuple[str, list[int]]]:
        names = next(iter(self.counts.values()))
        return [(name, [counts[name] for counts in self.counts.values()]) for name in names]

    def _counts_table(self) -> Table:
        table = Table("class", *self.counts)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, counts in self._class_rows():
            table.add_row(Text(printable(name)), *(f"{count:,}" for count in counts))
        table.add_section()
        table.add_row("all", *(f"{sum(counts.values()):,}" for counts in self.counts.values()))
        return table


def refuse_inside(name: str, path: Path, data: str) -> None:
    """Refuse to write into a data set, where a page would be taken for a class, and a file of that name be lost.

    Raises:
        InputError: the path of the option `name` lies there.
    """
    root = Path(data).resolve()
    if root.is_dir() and path.resolve().is_relative_to(root):
        raise InputError(f"--{name} {path} lies in the data set {data}, where nothing is changed: give another place")


def require_outside(folder: Path, data: str) -> None:
    """Make the folder of a report, which may not lie in the data set.

    Raises:
        InputError: it lies there, or nothing can be written into it.
    """
    refuse_inside("report", folder, data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--report {folder} cannot be made ({error.strerror}): give another place") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"--report {folder} cannot be written, it is read-only: give another place")


def describe_counts(counts: Mapping[str, int], most: int = 6) -> str:
    """Give the most frequent values with their counts in a line: `512x384 (770), 384x512 (7)`."""
    ranked: Sequence[tuple[str, int]] = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ranked[most:])
    return ", ".join(f"{value} ({count:,})" for value, count in ranked[:most]) + (
        f" and {len(ranked) - most} others ({rest:,})" if rest else ""
    )


def _plain(finding: Finding) -> dict[str, Any]:
    cases = [
        {
            "images": [
                {"path": picture.path, "split": picture.split, "class": picture.label} for picture in case.pictures
            ],
            "note": case.note,
        }
        for case in finding.cases
    ]
    return {"kind": finding.kind, "title": finding.title, "count": len(cases), "cases": cases}
