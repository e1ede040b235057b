"""`vitlab` and `python -m vitlab`: run a command, and turn its ending into an exit code.

0 done; 1 failed; 2 the user's input is wrong; 3 finished, but some images could not be read; 4 compared and different;
130 interrupted; 141 whoever read the output has gone.
"""

import atexit
import errno
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from vitlab.errors import Finished, InputError, Interrupted, RunError, is_told_here
from vitlab.text import printable

_WRONG_PATH = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP}
_AFTER_MAIN_S = 3.0
_WITHOUT_READER = 128 + signal.SIGPIPE
"""What a shell shows of `cat` or `git` in front of `| head`."""
_OUT_OF_MEMORY = (
    "memory is full: give fewer images at a time (train.batch_size with more train.accumulate, "
    "or --batch_size), or train.grad_checkpointing true"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a class name must not end a run on a terminal without UTF-8
            stream.reconfigure(errors="backslashreplace")
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # else Python looks through all of torch for garbage as it ends, for up to two seconds
    try:
        with _ended_by_signals():
            return _run(sys.argv[1:] if arguments is None else arguments)
    except Finished as error:  # all that was asked for is there: a scheduler that starts the job again is content
        return _end(error, 0)
    except InputError as error:
        return _end(error, 2)
    except Interrupted as error:
        return _end(error, 130)
    except RunError as error:
        return _end(error, 1)
    except RuntimeError as error:
        from vitlab.engine.device import is_out_of_memory  # not before: it imports torch, as what failed here has

        if not is_out_of_memory(error):
            raise
        return _end(error, 1, f"{_OUT_OF_MEMORY} ({str(error).partition('.')[0]})")
    except KeyboardInterrupt as error:
        return _end(error, 130, "interrupted")
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):  # else it is rich's
            raise
        # The reader of our output has gone, as after `| head`; a second failure while Python flushes is silenced.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _WITHOUT_READER
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _end(error, 2 if error.errno in _WRONG_PATH else 1, f"{error.strerror or error}{where}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 end a command as Ctrl-C does; while it fits, training has ways of its own."""
    if threading.current_thread() is not threading.main_thread():  # signals belong to whoever runs us
        yield
        return
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a process that we have forked ends as any other
        os.kill(os.getpid(), number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set from Python


def _run(arguments: Sequence[str]) -> int:
    from vitlab import cli

    try:
        name, options = cli.parse(arguments)
    except SystemExit:  # help was printed
        sys.stdout.flush()
        raise
    if name == "help":
        print(options, end="")
        code = 0
    else:
        from vitlab import commands
        from vitlab.allocator import keep_freed_memory

        keep_freed_memory()
        code = int(getattr(commands, name)(options))
    sys.stdout.flush()  # here, where a failure is told in one line
    return code


def _end(error: BaseException, code: int, message: str | None = None) -> int:
    """Print how a command ended, by default what the error says, and give its code; of several processes one prints."""
    if is_told_here(error):
        rank = os.environ.get("RANK", "0")
        who = "" if rank == "0" else f" process {rank}:"
        print(f"vitlab:{who} {printable(message or str(error))}", file=sys.stderr)
    elif not hasattr(error, "teller"):  # a launcher ends all at the first that ends, which is to be process 0
        time.sleep(_AFTER_MAIN_S)
    return code


if __name__ == "__main__":
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # an interpreter that ends around the threads of a process group may abort
        code = 0 if code == 3 else code  # torchrun takes all but 0 for a failure, and would make the same again
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
