"""Manifests: a CSV or JSON-lines file that lists images with their labels, and perhaps their splits."""

import csv
import io
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.data.images import IMAGE_SUFFIXES
from vitlab.data.splits import SPLIT_NAMES, Dataset, FileSplit, Split, locate_split, match_classes, split_validation
from vitlab.errors import InputError

SUFFIXES = frozenset((".csv", ".jsonl"))
"""What a manifest's name ends in, in any letter case."""

_NEEDED = ("path", "label")
_COLUMNS = (*_NEEDED, "split")
_WHOLE = "all"  # the one part of a manifest without splits

Cells = dict[str, Any]
"""A row's values by column."""


@dataclass(frozen=True)
class Manifest:
    """What a manifest lists, checked."""

    path: Path
    parts: dict[str, dict[str, list[str]]]
    """Images by split and class, both in code-point order; the one split is `all` where the manifest names none."""
    lines: dict[str, int]
    """Line of each image."""
    notes: list[str]

    @property
    def splits(self) -> list[str]:
        """Splits that the manifest names."""
        return [name for name in self.parts if name != _WHOLE]

    def part(self, name: str) -> FileSplit:
        """Give the images of a part, their labels in its own class order."""
        return FileSplit.of_classes(name, self.parts[name])


def is_manifest(path: Path) -> bool:
    """Say whether a path is a file with a manifest's suffix."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def load_manifest(path: Path, *, val_fraction: float, seed: int) -> Dataset:
    """Read a data set for training; see `datasets.load_dataset`."""
    manifest = read_manifest(path)
    if manifest.splits and "train" not in manifest.parts:
        raise InputError(f"{path} has {', '.join(manifest.splits)} but no train split: name the images that train")
    whole = "train" if manifest.splits else _WHOLE
    classes = tuple(manifest.parts[whole])
    if len(classes) < 2:
        raise InputError(f"{path} has only one class to train on, {classes[0]}: list images of two or more")
    others = [name for name in manifest.splits if name != "train"]
    for name in others:
        _check_seen(manifest, name, classes)
    train, notes = manifest.part(whole), [*manifest.notes]
    splits: dict[str, Split] = {"train": train}
    if "val" not in manifest.parts:
        splits, note = split_validation(train, classes, fraction=val_fraction, seed=seed)
        notes.append(note)
    for name in others:
        own = list(manifest.parts[name])
        splits[name], lines = match_classes(manifest.part(name), own, classes, f"{name} of {path}")
        notes += lines
    return Dataset(classes=classes, splits=splits, notes=tuple(notes))


def load_manifest_parts(path: Path) -> Dataset:
    """Read all parts of a manifest as they lie; see `datasets.load_parts`."""
    manifest = read_manifest(path)
    classes = sorted({name for images in manifest.parts.values() for name in images})
    splits = {
        name: match_classes(manifest.part(name), list(images), classes, f"{name} of {path}")[0]
        for name, images in manifest.parts.items()
    }
    return Dataset(classes=tuple(classes), splits=splits, notes=tuple(manifest.notes))


def load_manifest_split(
    path: Path, split: str, *, classes: Sequence[str], val_fraction: float, seed: int
) -> tuple[Split, list[str]]:
    """Read one split for evaluation; see `datasets.load_split`."""
    manifest = read_manifest(path)
    name, is_cut = locate_split(split, manifest.splits, str(path))
    found, lines = match_classes(manifest.part(name), list(manifest.parts[name]), classes, str(path))
    notes = manifest.notes + lines
    if is_cut:
        cut, note = split_validation(found, classes, fraction=val_fraction, seed=seed)
        found = cut[split]
        notes.append(note)
    return found, notes


def _check_seen(manifest: Manifest, name: str, classes: Sequence[str]) -> None:
    unseen = [label for label in manifest.parts[name] if label not in classes]
    if unseen:
        line = min(manifest.lines[image] for image in manifest.parts[name][unseen[0]])
        raise InputError(
            f"{manifest.path} line {line}: {name} holds the class {unseen[0]}, which train lacks ({len(unseen)} such): "
            "both need the same class names"
        )


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Paths are relative to the manifest's folder, or absolute; every file must be there. Labels are text, without the
    space around them. What other files the folder holds does not matter.

    Raises:
        InputError: it is not in UTF-8, lacks a column or lists nothing, or a row is wrong; the message names the line.
    """
    rows = _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path)
    parts: dict[str, dict[str, list[str]]] = {}
    seen: dict[str, _Row] = {}
    others: dict[str, None] = {}
    repeated: list[int] = []
    for line, cells in rows:
        row = _checked_row(cells, line, path)
        others |= dict.fromkeys(name for name in cells if name not in _COLUMNS)
        first = seen.setdefault(os.path.realpath(row.image), row)
        if first is row:
            parts.setdefault(row.split, {}).setdefault(row.label, []).append(row.image)
        else:
            _check_repeated(row, first, path)
            repeated.append(line)
    if not parts:
        raise InputError(f"{path} lists no images: give rows of path and label")
    if len(parts) > 1 and _WHOLE in parts:
        line = next(row.line for row in seen.values() if row.split == _WHOLE)
        raise InputError(f"{path} line {line}: the split is missing, which other rows have: give it to all or to none")
    _check_files(seen.values(), path)
    notes = [f"{path}: other columns ignored: {', '.join(others)}"] if others else []
    if repeated:
        notes.append(f"{path}: {len(repeated)} repeated rows left out, such as line {repeated[0]}")
    order = [name for name in (*dict.fromkeys(SPLIT_NAMES.values()), _WHOLE) if name in parts]
    return Manifest(
        path=path,
        parts={name: {label: sorted(images) for label, images in sorted(parts[name].items())} for name in order},
        lines={row.image: row.line for row in seen.values()},
        notes=notes,
    )


@dataclass(frozen=True)
class _Row:
    line: int
    image: str
    label: str
    split: str


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path} line {line}: the text is not UTF-8: save the file as UTF-8") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, Cells]]:
    """Give each row's first line and its cells by the header's names; empty lines count for nothing."""
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    header: list[str] = []
    line = 1
    try:
        for cells in reader:
            start, line = line, reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = [name.strip().lower() for name in cells]
                if len(set(header)) < len(header) or not set(_NEEDED) <= set(header):
                    raise InputError(
                        f"{path} line {start}: the header is {', '.join(header)}: "
                        "name the columns path and label, and perhaps split, each once"
                    )
                continue
            if len(cells) != len(header):
                raise InputError(f"{path} line {start}: {len(cells)} cells under a header of {len(header)}: mend it")
            yield start, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InputError(f"{path} line {line}: is no CSV ({error}): mend its quotes") from None


def _json_rows(path: Path) -> Iterator[tuple[int, Cells]]:
    """Give each line's number and its object, numbers as the text they are written in."""
    for line, content in enumerate(_read_text(path).split("\n"), start=1):  # splitlines has a dozen ends of lines
        if not content.strip():
            continue
        try:
            cells = json.loads(content, parse_int=str, parse_float=str, parse_constant=str)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "too deep")
            raise InputError(f"{path} line {line}: is no JSON ({reason}): give one object a line") from None
        if not isinstance(cells, dict) or not set(_NEEDED) <= cells.keys():
            raise InputError(f'{path} line {line}: give an object such as {{"path": "a.jpg", "label": "cat"}}')
        yield line, cells


def _checked_row(cells: Cells, line: int, path: Path) -> _Row:
    for name in _COLUMNS:
        value = cells.get(name, "none")
        if not isinstance(value, str) or "\0" in value or not _encodes(value):
            raise InputError(f"{path} line {line}: {name} is {json.dumps(value)}: give text")
        if not value.strip():
            raise InputError(f"{path} line {line}: {name} is empty: fill it, or remove the row")
    split = _WHOLE
    if "split" in cells:
        given = cells["split"].strip()
        if given.lower() not in SPLIT_NAMES:
            raise InputError(f"{path} line {line}: split is {given}: give one of {', '.join(SPLIT_NAMES)}")
        split = SPLIT_NAMES[given.lower()]
    return _Row(line, os.path.join(path.parent, cells["path"]), cells["label"].strip(), split)


def _encodes(text: str) -> bool:
    """Say whether a text can be written as UTF-8; JSON may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_repeated(row: _Row, first: _Row, path: Path) -> None:
    where = f"{path} line {row.line}: {row.image}"
    if row.label != first.label:
        raise InputError(f"{where} is labelled {row.label}, and {first.label} in line {first.line}: keep one of them")
    if row.split != first.split:
        raise InputError(
            f"{where} is in {row.split}, and in {first.split} in line {first.line}: "
            "an image that trains must not score; keep one of them"
        )


def _check_files(rows: Collection[_Row], path: Path) -> None:
    missing = [row for row in rows if not os.path.isfile(row.image)]
    if not missing:
        return
    where, image = f"{path} line {missing[0].line}", missing[0].image
    if os.path.exists(image):
        raise InputError(f"{where}: {image} is a folder, or another thing that is no file: list image files")
    twin = next((image + suffix for suffix in sorted(IMAGE_SUFFIXES) if os.path.exists(image + suffix)), None)
    raise InputError(
        f"{where}: {image} does not exist ({len(missing)} of {len(rows)} images missing): "
        + (f"perhaps {twin} was meant" if twin else f"give paths that are absolute or relative to {path.parent}")
    )
