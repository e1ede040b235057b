"""Files that are whole at every moment, whatever is killed or pulled out."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk.

    Raises:
        OSError: it is not there, or the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What ends a write where the space or the limit of a file does, without the file's name.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file to write in the folder of `path`; afterwards it takes that name, flushed to the disk.

    At every moment `path` is the old file or the new one, whole. When the body fails, the file aside is removed and
    `path` stays as it was. A link in the place of `path` is replaced, and what it leads to stays. What a killed process
    left aside is hidden, ends in .tmp, which nothing reads, and is overwritten by the next writer.

    Raises:
        OSError: the folder is not there or takes no file, or the disk failed.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.unlink(missing_ok=True)
        aside.touch(exist_ok=False)  # new, never what a link that somebody put there meanwhile leads to
        usual_mode = aside.stat().st_mode & 0o777
        yield aside
        aside.chmod(usual_mode)  # some writers put a new file there of mode 0600, which shuts colleagues out
        flush(aside)
        os.replace(aside, path)
        flush(path.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            error.filename = str(path)
        with suppress(OSError):  # the first failure counts
            aside.unlink(missing_ok=True)
        raise
