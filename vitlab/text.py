"""Strings for people: what is safe on a terminal, readable lengths of time, and bars."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_NOT_IN_FILES = frozenset('/\\:*?"<>|`$')

_MARKDOWN = frozenset('!"#$&*:.<>?@[\\]^_`{|}~')


def printable(text: str) -> str:
    """Escape what a terminal would obey or could not encode, such as an escape sequence in a file's name."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def markdown(text: str) -> str:
    """Escape a text for Markdown, so that it reads as it is: no markup, no cell of a table, no HTML, on one line."""
    return "".join(f"\\{char}" if char in _MARKDOWN else char for char in printable(text))


def file_name(text: str, *, longest_bytes: int = 200) -> str:
    """Turn any text into the name of one file: never hidden, never a path, nothing that a shell or terminal would obey.

    Names of two texts may be one. What is harmless stays as it is; of what is too long the suffix stays.
    """
    harmless = "".join(char if char.isprintable() and char not in _NOT_IN_FILES else "_" for char in text)
    harmless = harmless.rstrip(". ")
    stem, _, suffix = harmless.rpartition(".")
    end = f".{suffix}" if stem and len(suffix) <= 10 else ""  # behind a dot in front is no suffix, but a hidden name
    stem = harmless.removesuffix(end).lstrip(" .-") or "_"
    return stem.encode()[: longest_bytes - len(end.encode())].decode(errors="ignore") + end


def counted(count: int, noun: str) -> str:
    """Write a number of things: `1 image`, `12 images`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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
