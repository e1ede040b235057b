"""The quick part of a data check, which opens next to no file: classes and their sizes, and copies between splits."""

import os
from collections.abc import Iterator

import numpy as np

from vitlab.data.images import hash_file
from vitlab.data.splits import Dataset, FileSplit
from vitlab.inference.check_report import Case, Finding, Picture

TINY_CLASS = 10
"""Training images below which a class is tiny."""

IMBALANCE = 10
"""How many times the smallest class the largest may be."""

_MOST_FILES, _MOST_BYTES = 2000, 2**26  # read for copies: well under a second


def count_classes(dataset: Dataset) -> dict[str, dict[str, int]]:
    """Count the images of each class by split."""
    K = len(dataset.classes)
    counts = {name: np.bincount(split.labels, minlength=K).tolist() for name, split in dataset.splits.items()}
    return {name: dict(zip(dataset.classes, numbers, strict=True)) for name, numbers in counts.items()}


def class_findings(dataset: Dataset) -> list[Finding]:
    """Find empty and tiny classes, classes of very unequal size, and classes that some splits lack."""
    counts = count_classes(dataset)
    fitted = "train" if "train" in counts else next(iter(counts))
    largest = max(counts[fitted].values())
    empty = [name for name in dataset.classes if not any(numbers[name] for numbers in counts.values())]
    lacking = [
        Case((), f"{split} has no image of {name}")
        for split, numbers in counts.items()
        for name in dataset.classes
        if not numbers[name] and name not in empty and any(numbers.values())
    ]
    tiny = {name: count for name, count in counts[fitted].items() if 0 < count < TINY_CLASS}
    smallest = min((count for count in counts[fitted].values() if count), default=0)
    findings = [
        Finding("empty_split", "splits without an image", _cases(n for n, v in counts.items() if not any(v.values()))),
        Finding("empty_class", "classes without an image", _cases(empty)),
        Finding("missing_class", "classes that a split lacks", tuple(lacking)),
        Finding(
            "tiny_class",
            f"classes with fewer than {TINY_CLASS} images in {fitted}",
            _cases(f"{name} has {count}" for name, count in tiny.items()),
        ),
    ]
    if smallest and largest >= IMBALANCE * smallest:
        low, high = (next(n for n, count in counts[fitted].items() if count == c) for c in (smallest, largest))
        note = f"{high} has {largest:,}, {low} {smallest:,}: data.sampling balanced or objective.class_weights may help"
        findings.append(Finding("imbalance", f"classes of very unequal size in {fitted}", _cases([note])))
    filled = [name for name in dataset.classes if name not in empty]
    if len(filled) < 2:
        note = f"only {', '.join(filled) or 'empty ones'}"
        findings.append(Finding("one_class", "fewer than two classes: there is nothing to tell apart", _cases([note])))
    return [finding for finding in findings if finding.cases]


def quick_lines(dataset: Dataset, root: str) -> list[str]:
    """Say in a line each what a run should know of its data before it begins.

    Classes that validation or test lack are in the data set's own notes.
    """
    lines = [
        f"{finding.title}: {'; '.join(case.note for case in finding.cases[:3])}"
        + (f" and {len(finding.cases) - 3} more" if len(finding.cases) > 3 else "")
        for finding in class_findings(dataset)
        if finding.kind not in ("missing_class", "empty_split", "one_class")
    ]
    if copies := shared_files(dataset):
        first = " = ".join(f"{picture.path} ({picture.split})" for picture in copies[0].pictures)
        lines.append(
            f"images in several splits, which makes scores too good: {len(copies)}, such as {first}; "
            f"vitlab check {root} lists all"
        )
    return lines


def shared_files(dataset: Dataset) -> list[Case]:
    """Find files that lie in several splits with the same bytes; nothing where too many would have to be read.

    Only files of equal size are read.
    """
    by_size: dict[int, list[Picture]] = {}
    for split in dataset.splits.values():
        if isinstance(split, FileSplit):
            for path, label in zip(split.paths, split.labels.tolist(), strict=True):
                size = os.path.getsize(path) if os.path.isfile(path) else -1
                by_size.setdefault(size, []).append(Picture(path, split.name, dataset.classes[label]))
    alike = {
        size: pictures
        for size, pictures in by_size.items()
        if size > 0 and len({picture.split for picture in pictures}) > 1
    }
    count = sum(map(len, alike.values()))
    if count > _MOST_FILES or sum(size * len(pictures) for size, pictures in alike.items()) > _MOST_BYTES:
        return []
    by_content: dict[bytes, list[Picture]] = {}
    for picture in (picture for pictures in alike.values() for picture in pictures):
        if (content := hash_file(picture.path)) is not None:
            by_content.setdefault(content, []).append(picture)
    return [
        Case(tuple(pictures)) for pictures in by_content.values() if len({picture.split for picture in pictures}) > 1
    ]


def _cases(notes: Iterator[str] | list[str]) -> tuple[Case, ...]:
    return tuple(Case((), note) for note in notes)
