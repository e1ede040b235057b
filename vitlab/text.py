"""Strings for people: what is safe on a terminal, readable lengths of time, and bars."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def printable(text: str) -> str:
    """Escape what a terminal would obey or could not encode, such as an escape sequence in a file's name."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def duration(seconds: float) -> str:
    """Write a length of time as `0:07`, `12:34` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def say(console: "Console", line: str) -> None:
    """Print one line as it is: no markup, no colours of its own, no wrapping, nothing that a terminal would obey."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def progress_bar(console: "Console") -> "Progress":
    """Make a bar with the time left for a terminal, which shows nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
