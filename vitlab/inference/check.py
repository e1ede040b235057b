"""`vitlab check`: what is wrong with a data set, seen before any training.

Every image is decoded whole, once. Nothing of the data set is changed.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlab.data.datasets import Dataset, Split, load_parts
from vitlab.data.images import ImageError
from vitlab.data.loader import default_workers
from vitlab.data.splits import SPLIT_NAMES
from vitlab.inference.check_classes import class_findings, count_classes
from vitlab.inference.check_report import Case, CheckReport, Finding, Picture
from vitlab.inference.duplicates import CROP_LIMIT, SIDE, Groups, Match, find_matches
from vitlab.inference.scan import Scan, scan

if TYPE_CHECKING:
    from rich.progress import Progress

    from vitlab.inference.check_model import Judge

_FLAT = 8  # largest difference within a channel of a picture of one colour; JPEG moves a constant by a few
_TINY_SIDE, _TINY_SHARE = 32, 0.25  # a short side below both, pixels and share of the usual one
_LONG = 5  # sides to one another, and this much beyond the usual
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "MPO": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "AVIF": (".avif", ".heic", ".heif", ".hif"),
    "HEIF": (".heic", ".heif", ".hif"),
    "BMP": (".bmp", ".dib"),
    "DIB": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "TGA": (".tga",),
    "ICO": (".ico",),
    "JPEG2000": (".jp2", ".j2k"),
}


@dataclass(frozen=True)
class Images:
    """A data set that was looked at: one row a readable image, over all splits."""

    dataset: Dataset
    splits: NDArray[np.int64]
    """Number of the split of each image, (N,)."""
    rows: NDArray[np.int64]
    """Its place there, (N,)."""
    facts: NDArray[np.void]
    """What was seen, scan.FACTS (N,)."""
    unreadable: tuple[Case, ...]

    def picture(self, image: int) -> Picture:
        """Give an image by its name."""
        split = list(self.dataset.splits.values())[self.splits[image]]
        row = int(self.rows[image])
        return Picture(split.paths[row], split.name, self.dataset.classes[split.labels[row]])

    def read(self, image: int) -> NDArray[np.uint8] | None:
        """Give an image's pixels (H, W, 3); None where it cannot be read any more."""
        return _read(list(self.dataset.splits.values())[self.splits[image]], int(self.rows[image]))


def check_data(
    data: str | Path | Dataset,
    *,
    checkpoint: str | Path | None = None,
    workers: int | None = None,
    device: str = "auto",
    progress: "Progress | None" = None,
) -> CheckReport:
    """Look at every image of a data set and say what is wrong with it.

    Args:
        data: what `load_dataset` takes, or what it gave.
        checkpoint: model file or run folder; with it likely label errors and outliers are looked for.
        workers: processes that decode, each with one thread; None takes one a core, at most 9.
        device: where the model computes.
        progress: a bar to add tasks to.

    Returns:
        The findings: problems first, then hints.

    Raises:
        InputError: there is no such data set, or the model file does not fit it.
        RunError: a process died.
    """
    dataset = _in_order(data if isinstance(data, Dataset) else load_parts(data))
    name = "data set" if isinstance(data, Dataset) else os.fspath(data)
    judge: Judge | None = None
    if checkpoint is not None:  # before the images are read: it may not fit
        from vitlab.inference.check_model import open_judge

        judge = open_judge(checkpoint, dataset, name, device=device)
    workers = default_workers() + 1 if workers is None else workers
    images = look_at(dataset, workers=workers, progress=progress)
    findings = [Finding("unreadable", "images that cannot be read", images.unreadable), *suspicious_files(images)]
    findings += duplicate_findings(images, threads=workers, progress=progress)
    findings += class_findings(dataset)
    notes = [*dataset.notes, *_limits(images)]
    if judge is not None:
        more, lines = judge.findings(workers=workers, progress=progress)
        findings += more
        notes += lines
    findings = sorted((one for one in findings if one.cases), key=lambda finding: not finding.is_problem)
    return CheckReport(
        data=name,
        counts=count_classes(dataset),
        findings=tuple(findings),
        facts=image_facts(images),
        notes=tuple(notes),
        read=partial(read_pictures, dataset),
    )


def _in_order(dataset: Dataset) -> Dataset:
    """Put the splits in the order of a run, whatever order their folders have."""
    order = list(dict.fromkeys(SPLIT_NAMES.values()))
    names = sorted(dataset.splits, key=lambda name: order.index(name) if name in order else len(order))
    return replace(dataset, splits={name: dataset.splits[name] for name in names})


def read_pictures(dataset: Dataset, paths: Collection[str]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Give path and pixels (H, W, 3) of those pictures of a data set that can be read."""
    for split in dataset.splits.values():
        for row, path in enumerate(split.paths):
            if path in paths and (image := _read(split, row)) is not None:
                yield path, image


def look_at(dataset: Dataset, *, workers: int, progress: "Progress | None" = None) -> Images:
    """Decode every image of every split."""
    total = sum(map(len, dataset.splits.values()))
    task = None if progress is None else progress.add_task("looking at images", total=total)
    advance: Callable[[int], None] = (
        (lambda count: None) if progress is None or task is None else partial(progress.advance, task)
    )
    scans: list[Scan] = []
    unreadable: list[Case] = []
    for split in dataset.splits.values():
        scans.append(scan(split, workers=workers, on_images=advance))
        labels = dict(zip(split.paths, split.labels.tolist(), strict=True)) if scans[-1].errors else {}
        unreadable += [
            Case((Picture(error.path, split.name, dataset.classes[labels[error.path]]),), error.reason)
            for error in scans[-1].errors
        ]
    return Images(
        dataset=dataset,
        splits=np.repeat(np.arange(len(scans)), [len(one.rows) for one in scans]),
        rows=np.concatenate([one.rows for one in scans]),
        facts=np.concatenate([one.facts for one in scans]),
        unreadable=tuple(unreadable),
    )


def suspicious_files(images: Images) -> Iterator[Finding]:
    """Find pictures of one colour, far smaller or longer than the others, and names that contradict the content."""
    facts = images.facts
    if not len(facts):
        return
    short, long = np.minimum(facts["height"], facts["width"]), np.maximum(facts["height"], facts["width"])
    aspects = long / short
    sizes = [
        f"{height}x{width} (height x width)" for height, width in zip(facts["height"], facts["width"], strict=True)
    ]
    tiny = (short < _TINY_SIDE) & (short < _TINY_SHARE * np.median(short))
    stretched = (aspects >= _LONG) & (aspects >= _LONG / 2 * np.median(aspects))
    yield Finding("one_color", "pictures of one colour", _cases(images, facts["spread"] <= _FLAT))
    yield Finding("tiny_image", "pictures far smaller than the others", _cases(images, tiny, sizes))
    yield Finding(
        "extreme_aspect", "pictures far longer than wide, or wider than long", _cases(images, stretched, sizes)
    )
    formats = facts["format"].astype(str).tolist()
    wrong = np.array([_contradicts(images.picture(i).path, name) for i, name in enumerate(formats)])
    yield Finding(
        "wrong_suffix", "files whose suffix is another format's", _cases(images, wrong, [f"is {f}" for f in formats])
    )


def duplicate_findings(images: Images, *, threads: int, progress: "Progress | None" = None) -> list[Finding]:
    """Find equal files and pictures that are one, and sort them by what they spoil.

    A group is a leak where it lies in several splits, and a conflict where it has several labels; both at once is
    listed twice. What is neither is a plain duplicate.
    """
    exact, near = duplicate_groups(images, threads=threads, progress=progress)
    findings = []
    for name, what, cases in (("exact", "identical files", exact), ("near", "almost identical pictures", near)):
        leaks = tuple(case for case in cases if len({picture.split for picture in case.pictures}) > 1)
        conflicts = tuple(case for case in cases if len({picture.label for picture in case.pictures}) > 1)
        plain = tuple(case for case in cases if case not in set(leaks) | set(conflicts))
        findings += [
            Finding(f"{name}_leak", f"{what} in several splits (leaks)", leaks),
            Finding(f"{name}_conflict", f"{what} under several labels", conflicts),
            Finding(f"{name}_duplicate", f"{what} within a split and class", plain),
        ]
    return findings


def duplicate_groups(
    images: Images, *, threads: int, progress: "Progress | None" = None
) -> tuple[list[Case], list[Case]]:
    """Give the groups of equal files, and those that are held together by likeness."""
    facts = images.facts
    _, firsts, inverse = np.unique(facts["digest"], return_index=True, return_inverse=True)
    groups = Groups(len(facts))
    for image, kind in enumerate(inverse.tolist()):
        groups.join(image, int(firsts[kind]))
    stay = np.sort(firsts)  # of equal files one is compared
    task = None if progress is None else progress.add_task("comparing pictures", total=None)

    def on_progress(done: int, total: int) -> None:
        if progress is not None and task is not None:
            progress.update(task, completed=done, total=total)

    matches = find_matches(
        facts["thumbnail"][stay],
        np.minimum(facts["height"], facts["width"])[stay].astype(np.int64),
        lambda row: images.read(int(stay[row])),
        threads=threads,
        on_progress=on_progress,
    )
    for match in matches:
        groups.join(int(stay[match.first]), int(stay[match.second]))
    members: dict[int, list[int]] = {}
    for image in range(len(facts)):
        members.setdefault(groups.root(image), []).append(image)
    edges: dict[int, list[Match]] = {}
    for match in matches:
        edges.setdefault(groups.root(int(stay[match.first])), []).append(match)
    exact: list[Case] = []
    near: list[Case] = []
    for root, group in members.items():
        if len(group) > 1:
            case = Case(tuple(map(images.picture, group)), _how(edges.get(root, [])))
            (near if root in edges else exact).append(case)
    return exact, near


def image_facts(images: Images) -> dict[str, Counter[str]]:
    """Count sizes, colour modes, formats and orientations; of images that are no files, sizes alone."""
    facts = images.facts
    sizes = np.char.add(np.char.add(facts["height"].astype(str), "x"), facts["width"].astype(str))
    counts = {"sizes, height x width": Counter(sizes.tolist())}
    for name, key in (("colour modes", "mode"), ("formats", "format"), ("EXIF orientations", "orientation")):
        values = facts[key].astype(str).tolist()
        if any(facts["format"].tolist()) and (key != "orientation" or set(values) != {"1"}):
            counts[name] = Counter(value or "unknown" for value in values)
    return counts if len(facts) else {}


def _read(split: Split, row: int) -> NDArray[np.uint8] | None:
    try:
        return split.read(row)
    except ImageError:
        return None


def _limits(images: Images) -> list[str]:
    """Say what was not looked for."""
    facts, notes = images.facts, []
    small = int((np.minimum(facts["height"], facts["width"]) < SIDE).sum())
    if small:
        images_are = "1 image is" if small == 1 else f"{small:,} images are"
        notes.append(f"{images_are} under {SIDE} pixels a side and compared byte by byte alone")
    if len(facts) > CROP_LIMIT:
        notes.append(f"crops were not looked for: {len(facts):,} images are more than {CROP_LIMIT:,}")
    return notes


def _cases(images: Images, chosen: NDArray[np.bool_], notes: list[str] | None = None) -> tuple[Case, ...]:
    rows = np.flatnonzero(chosen).tolist()
    return tuple(Case((images.picture(row),), notes[row] if notes else "") for row in rows)


def _contradicts(path: str, content: str) -> bool:
    suffix = os.path.splitext(path)[1].lower()
    known = {suffix for suffixes in _SUFFIXES.values() for suffix in suffixes}
    return suffix in known and content in _SUFFIXES and suffix not in _SUFFIXES[content]


def _how(matches: list[Match]) -> str:
    words = {"near": "re-encoded, resized or taken twice", "mirrored": "mirrored", "crop": "cropped"}
    kinds = {match.view.kind for match in matches}
    return ", ".join(word for kind, word in words.items() if kind in kinds)
