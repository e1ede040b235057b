"""Files that commands write besides their main results."""

import json as json_format
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vitlab.disk import replacing
from vitlab.errors import InputError
from vitlab.text import say

if TYPE_CHECKING:
    from vitlab.engine.evaluator import Scores

SKIPPED_SOME = FOUND_PROBLEMS = 3
DIFFERENT = 4
_FILE_SUFFIXES = {".png", ".jpg", ".jpeg", ".html", ".json", ".md", ".csv", ".txt", ".npz", ".pdf"}


def check_outputs(
    *,
    json: str | None = None,
    confusion: str | None = None,
    plot: str | None = None,
    palette: str | None = None,
    picture: str | None = None,
    npy: str | None = None,
) -> None:
    """Refuse what cannot be written before the work, not after it."""
    pictures = (("confusion", confusion, ".png"), ("plot", plot, ".png"), ("out", picture, ".png"))
    arrays = (("out", palette, ".npy"), ("npy", npy, ".npy"))
    for name, path, suffix in (("json", json, ".json"), *pictures, *arrays):
        if path is not None and (Path(path).suffix.lower() != suffix or Path(path).is_dir()):
            raise InputError(f"--{name} is {path}: give a file that ends in {suffix}")
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"--{name} {path} cannot be written ({error.strerror}): give another place") from None
            if not os.access(Path(path).parent, os.W_OK):
                raise InputError(f"--{name} {path} cannot be written, its folder is read-only: give another place")


def check_folder(name: str, path: str | None) -> None:
    """Refuse what no folder can be written to before the work; an empty name would be the folder where we are."""
    if path is None:
        return
    if path == "":
        raise InputError(f"--{name} is empty: give a folder, and . for the current one")
    if Path(path).suffix.lower() in _FILE_SUFFIXES and not Path(path).is_dir():
        raise InputError(f"--{name} is {path}, and a folder of several files is written: give a name without a suffix")
    nearest = next(place for place in (Path(path), *Path(path).absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "read-only" if nearest.is_dir() else "a file"
        raise InputError(f"--{name} {path} cannot be written in ({nearest} is {what}): give another folder")


def write_json(console: Console, path: str | None, result: dict[str, Any], *, what: str = "scores") -> None:
    """Write plain values where a file is asked for, and say so."""
    if path is None:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as aside:
        aside.write_text(json_format.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(console, f"{what}: {path}")


def draw_confusion(console: Console, path: Path, scores: "Scores") -> None:
    """Draw the confusion matrix as a file, and say so."""
    from vitlab.engine.figures import plot_confusion

    path.parent.mkdir(parents=True, exist_ok=True)
    plot_confusion(scores.confusion.numpy(), scores.classes, path)
    say(console, f"confusion matrix: {path}")
