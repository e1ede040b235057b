"""The kinds of ending that a command reports in one line instead of a traceback."""

import difflib
import os
from collections.abc import Iterable

_MANY = 40
"""So many names can still be read in a message."""


class InputError(ValueError):
    """What the user gave is wrong; the message says what was given, what is needed and what to do. Exit code 2."""


class Finished(InputError):  # noqa: N818 - an ending, not an error
    """The run that was asked for has been made already, to its end."""


class RunError(RuntimeError):
    """The work failed on its way (disk full, non-finite loss); the message says what, and what is safe. Exit code 1."""


class PeerLost(RunError):  # noqa: N818 - what became of another
    """Another process of the run has ended, and this one cannot go on without it."""


class NonFinite(RunError):  # noqa: N818 - what it says of a number
    """A loss or gradient is infinite or not a number."""


class Interrupted(RuntimeError):  # noqa: N818 - an ending, not an error
    """A signal ended the run after its state was saved. Exit code 130."""


def leave_telling(error: BaseException, rank: int | None) -> None:
    """Note which of several processes reports an ending that they share; None where its cause is reported already."""
    error.teller = rank  # type: ignore[attr-defined]


def is_told_here(error: BaseException) -> bool:
    """Say whether this process reports an ending: the one that was settled on, else process 0."""
    teller: int | None = getattr(error, "teller", 0)
    return int(os.environ.get("RANK", "0")) == teller


def unknown_name(what: str, given: str, valid: Iterable[str]) -> InputError:
    """Make the error for a name that is none of the valid ones: it lists them, or the like ones of very many."""
    names = list(valid)
    nearest = difflib.get_close_matches(given, names, n=5)
    hint = f" did you mean {nearest[0]}?" if nearest else ""
    if len(names) > _MANY:
        others = f" Alike are {', '.join(nearest[1:])};" if nearest[1:] else ""
        return InputError(f"unknown {what} {given}:{hint}{others} there are {len(names):,}")
    return InputError(f"unknown {what} {given}:{hint} Valid are {', '.join(names)}")
