"""The two kinds of failure that a command reports in one line instead of a traceback."""


class InputError(ValueError):
    """What the user gave is wrong; the message says what was given, what is needed and what to do. Exit code 2."""


class RunError(RuntimeError):
    """The work failed on its way (disk full, non-finite loss); the message says what, and what is safe. Exit code 1."""
