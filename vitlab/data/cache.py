"""Prepared images kept from one epoch to the next, in memory or in a file that later runs find again.

A cache holds what stands before anything random: decoded and resized, uint8. As long as that is what a run would do
anyway, training and scores are the same bits with it and without. An image that cannot be prepared is not kept, but
tried anew each time, so that it fails, or works once it is mended, exactly as without a cache.

A file is named for the SHA-256 of all that its pixels depend on: the preparation, the versions of what decodes and
resizes, and path, size and time of change of every image. Where it is found again it is read through once and checked.
"""

import fcntl
import hashlib
import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vitlab.data.decoders import RULES
from vitlab.data.images import ImageError
from vitlab.data.loader import default_workers
from vitlab.data.pixel_store import FORMAT, DamagedStoreError, PixelStore, fill_store, open_store, write_store
from vitlab.data.splits import Split
from vitlab.errors import InputError, RunError

Prepare = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
"""uint8 (H, W, 3) -> uint8 (h, w, C), always the same for the same image."""

_SAMPLED = 16  # images that an estimate rests on
_MEMORY_SHARE = 0.8  # of what is free: the network and the loader need some, too
_BLOCK = 1024  # images checked between two calls of progress


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedSplit(Split):
    """A split whose images are prepared already: `read` gives uint8 (h, w, C) in place of RGB."""

    source: Split
    prepare: Prepare
    store: PixelStore
    rows: NDArray[np.int64]
    """Place of each image in the store."""

    def read(self, index: int) -> NDArray[np.uint8]:
        """Copy the image out; one that is not kept is read and prepared."""
        kept = self.store.read(int(self.rows[index]))
        return _prepared(self.source, index, self.prepare) if kept is None else kept

    def subset(self, name: str, rows: NDArray[np.int64]) -> "CachedSplit":
        """Give the images at `rows`, from the same store."""
        return replace(
            self,
            name=name,
            labels=self.labels[rows],
            paths=[self.paths[row] for row in rows],
            source=self.source.subset(name, rows),
            rows=self.rows[rows],
        )

    def identity(self) -> Iterator[bytes]:
        """Give that of the images themselves."""
        return self.source.identity()

    def contents(self) -> Iterator[bytes]:
        """Give those of the images themselves."""
        return self.source.contents()

    def blank(self) -> NDArray[np.uint8]:
        """Give a prepared image without content."""
        return self.prepare(self.source.blank())


def unchanged(image: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
    """Be the transform of a loader whose images need no other than their preparation."""
    return image


def cached(
    split: Split,
    prepare: Prepare,
    *,
    preparation: Mapping[str, Any],
    mode: Literal["memory", "disk"],
    folder: Path | None,
    workers: int | None,
    say: Callable[[str], None],
    on_progress: Callable[[int, int], None],
) -> CachedSplit:
    """Prepare every image of a split once.

    Args:
        split: the images.
        prepare: what becomes of each.
        preparation: everything that `prepare` depends on, as JSON holds it.
        mode: `memory`, which worker processes share, or `disk`, a file that stays.
        folder: where such files lie; None takes `default_folder`.
        workers: threads that prepare; None takes `default_workers`.
        say: shows a line of the log: where the cache is, why it is built anew, what is waited for.
        on_progress: called with the images done and in all.

    Returns:
        The split of prepared images.

    Raises:
        InputError: memory does not suffice, or nothing can be kept in the folder.
        RunError: the disk is full or failed.
    """
    builder = _Builder(split, prepare, max(1, default_workers() if workers is None else workers), on_progress)
    if mode == "memory":
        store, where = builder.in_memory(), "in memory"
    else:
        path = (folder or default_folder()) / f"{cache_key(split, preparation)}.cache"
        store, where = _find_or_build(path, builder, say), f"in {path}, which may be deleted after the run"
    say(f"cache: {len(store)} images, {_megabytes(len(store.pixels))}, {where}")
    rows = np.arange(len(split), dtype=np.int64)
    return CachedSplit(
        name=split.name, labels=split.labels, paths=split.paths, source=split, prepare=prepare, store=store, rows=rows
    )


def default_folder() -> Path:
    """Give `vitlab` in the user's cache folder, which XDG_CACHE_HOME names where it is set."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "vitlab"


def cache_key(split: Split, preparation: Mapping[str, Any]) -> str:
    """Hash all that the prepared pixels depend on, to 64 hexadecimal digits."""
    import PIL

    from vitlab import __version__

    try:  # without it HEIF files cannot be read
        heif = metadata.version("pillow-heif")
    except metadata.PackageNotFoundError:
        heif = ""
    jpeg = metadata.version("simplejpeg")
    versions = [FORMAT, RULES, __version__, PIL.__version__, jpeg, heif, np.__version__, torch.__version__]
    digest = hashlib.sha256(json.dumps([versions, dict(preparation)], sort_keys=True).encode())
    for stamp in split.stamps():
        digest.update(b"\0%d\0" % len(stamp))
        digest.update(stamp)
    return digest.hexdigest()


def _prepared(split: Split, index: int, prepare: Prepare) -> NDArray[np.uint8]:
    """Read and prepare one image, or raise ImageError."""
    image = split.read(index)
    try:
        return np.ascontiguousarray(prepare(image))
    except InputError as error:  # pixels that the preparation cannot take, such as a ribbon
        raise ImageError(split.paths[index], str(error)) from None


@dataclass(frozen=True)
class _Builder:
    """What a cache is filled with, and how."""

    split: Split
    prepare: Prepare
    workers: int
    on_progress: Callable[[int, int], None]

    def in_memory(self) -> PixelStore:
        """Fill memory."""
        expected, limit = self._estimate(), round(_MEMORY_SHARE * free_memory())
        try:
            if expected > limit:
                raise MemoryError
            with closing(self._images()) as images:
                return fill_store(images, expected=expected, limit=limit)
        except MemoryError:
            raise InputError(
                f"data.cache memory takes about {_megabytes(expected)} for {len(self.split)} images, and may take "
                f"{_megabytes(limit)}, {_MEMORY_SHARE:.0%} of what is free: set data.cache to disk or none"
            ) from None

    def on_disk(self, path: Path) -> PixelStore:
        """Write a file."""
        expected, free = self._estimate(), shutil.disk_usage(path.parent).free
        advice = "free some, or set data.cache_dir to a larger disk or data.cache to none; the data set is untouched"
        if expected > free:
            raise RunError(
                f"cache {path} takes about {_megabytes(expected)}, and {_megabytes(free)} are free: {advice}"
            )
        try:
            with closing(self._images()) as images:
                return write_store(path, images)
        except OSError as error:
            raise RunError(f"cache {path} cannot be written ({error.strerror}): {advice}") from error

    def _estimate(self) -> int:
        """Estimate the bytes in all from a few images, spread over the classes."""
        rows = np.unique(np.linspace(0, len(self.split) - 1, _SAMPLED).astype(np.int64))
        return round(np.mean([self._one(row).size for row in rows.tolist()]) * len(self.split))

    def _images(self) -> Generator[NDArray[np.uint8], None, None]:
        """Give the images in order, prepared by threads: decoding and resizing leave Python's lock free."""
        total = len(self.split)
        pending: deque[Future[NDArray[np.uint8]]] = deque()
        with warnings.catch_warnings(), ThreadPoolExecutor(self.workers) as pool:
            # Decoding silences warnings on its own, but each thread would restore what it found, another's silence too.
            warnings.simplefilter("ignore")
            try:
                for index in range(total):
                    pending.append(pool.submit(self._one, index))
                    if len(pending) > 4 * self.workers:
                        yield pending.popleft().result()
                        self.on_progress(index + 1 - len(pending), total)
                while pending:
                    yield pending.popleft().result()
                    self.on_progress(total - len(pending), total)
            finally:
                pool.shutdown(cancel_futures=True)

    def _one(self, index: int) -> NDArray[np.uint8]:
        try:
            return _prepared(self.split, index, self.prepare)
        except ImageError:  # not kept: `read` tries it again, and the loader reports it
            return np.empty((0, 0, 0), dtype=np.uint8)


def _find_or_build(path: Path, builder: _Builder, say: Callable[[str], None]) -> PixelStore:
    try:
        try:
            return _open_checked(path, builder)
        except (FileNotFoundError, DamagedStoreError):
            path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path, say):
            try:
                return _open_checked(path, builder)  # another process has built it meanwhile
            except FileNotFoundError:
                pass
            except DamagedStoreError as error:
                say(f"cache {path} is damaged ({error}): it is built anew")
            return builder.on_disk(path)
    except OSError as error:
        raise InputError(
            f"no cache can be kept in {path.parent} ({error.strerror}): "
            "give a data.cache_dir that can be written, or set data.cache to memory or none"
        ) from error


def _open_checked(path: Path, builder: _Builder) -> PixelStore:
    """Open a file and read it through: far quicker than decoding, and the first epoch finds it in memory."""
    store = open_store(path)
    total = len(store)
    starts = range(0, total, _BLOCK)
    with ThreadPoolExecutor(builder.workers) as pool:
        for start, is_whole in zip(starts, pool.map(store.is_whole, starts, (s + _BLOCK for s in starts)), strict=True):
            if not is_whole:
                raise DamagedStoreError(f"pixels of images {start} to {min(start + _BLOCK, total) - 1} were changed")
            builder.on_progress(min(start + _BLOCK, total), total)
    return store


@contextmanager
def _alone(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time build a file, and others wait for it."""
    lock = path.with_name(f".{path.name}.lock")
    has_waited = False
    while True:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_waited:
                    say(f"cache: waiting for the process that builds {path}")
                has_waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(lock, file):  # who held it before has removed it, and others may have made a new one
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    """Say whether an open file is still the one that a path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def free_memory() -> int:
    """Estimate the bytes of memory that may still be taken, by this machine's and the container's limit."""
    try:
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(meminfo["MemAvailable"].split()[0]) * 1024
    except OSError:  # not on Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group, limit, used in (("", "memory.max", "anon"), ("memory", "memory.limit_in_bytes", "total_rss")):
        folder = Path("/sys/fs/cgroup", group)
        with suppress(OSError, ValueError, KeyError):  # another kind of group, or no limit: `max`
            usage = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, int((folder / limit).read_text()) - int(usage[used]))
    return max(free, 0)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
