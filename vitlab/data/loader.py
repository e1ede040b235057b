"""Loaders of uint8 batches whose order and augmentation are functions of seed and epoch, and of nothing else.

A key (epoch, index, repeat) says all about a sample, so that worker processes hold no random state: the batches are
the same for any number of workers, and after any interruption.
"""

import ctypes
import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from vitlab.allocator import return_freed_memory
from vitlab.checks import require
from vitlab.data.augment import TrainTransform
from vitlab.data.images import ImageError
from vitlab.data.sampling import Key, KeySampler
from vitlab.data.splits import Split
from vitlab.errors import InputError, RunError
from vitlab.seeds import derive_seed

Transform = Callable[[NDArray[np.uint8], int], NDArray[np.uint8]]
"""(image uint8 (H, W, 3), seed) -> uint8 (h, w, C), always of the same size."""

_MAX_WORKERS = 8


_END_S = 2.0
"""What is waited for an end that was asked for."""

_LEFT_TO_MAIN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class Batch:
    """Images and what is known of them; B counts the images that could be read."""

    images: torch.Tensor
    """From the loader uint8 (B, C, h, w) in channels-last memory."""
    labels: torch.Tensor
    """int64 (B,), -1 where unknown; after mixing, float (B, K)."""
    indices: torch.Tensor
    """Position of each image in the split, int64 (B,)."""
    errors: tuple[ImageError, ...] = ()
    """What could not be read, and is not among the images."""

    def blank(self) -> "Batch":
        """Give a batch of one black image of class 0, for the device and dtype of these, of which there may be none."""
        return replace(
            self,
            images=self.images.new_zeros(1, *self.images.shape[1:]),
            labels=self.labels.new_zeros(1),
            indices=self.indices.new_zeros(1),
            errors=(),
        )

    def pin_memory(self) -> "Batch":
        """Move to page-locked memory; DataLoader calls this."""
        return replace(
            self,
            images=self.images.pin_memory(),
            labels=self.labels.pin_memory(),
            indices=self.indices.pin_memory(),
        )


def default_workers() -> int:
    """Give the number of loader processes where none is set: one less than the cores we may use, at most 8.

    Processes that torchrun has started side by side share the cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1, _MAX_WORKERS), 0)


class Loader:
    """Reads, transforms and batches a split, epoch by epoch; one epoch runs at a time.

    An epoch has as many views as there are images, of each image one unless asked otherwise; the last batch may be
    smaller. Worker processes start with the first epoch and stay until `close`.
    """

    def __init__(
        self,
        split: Split,
        transform: Transform,
        *,
        batch_size: int,
        seed: int = 0,
        workers: int | None = 0,
        shuffle: bool = False,
        repeats: int = 1,
        balanced: bool = False,
        on_error: Literal["stop", "skip"] = "stop",
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Set up a loader; nothing is read yet.

        Args:
            split: images and labels.
            transform: applied to each image, with a seed of its own.
            batch_size: images in a batch.
            seed: the run's seed.
            workers: processes that read; 0 reads in this one, None takes `default_workers`.
            shuffle: a new order every epoch; otherwise the split's order.
            repeats: views of an image in a batch, each with a seed of its own; an epoch then shows one image in so
                many (arXiv:1901.09335). More than 1 needs `shuffle`.
            balanced: every class that has images comes equally often in an epoch, and the images of a class equally
                often over the epochs. Needs `shuffle`.
            on_error: at an image that cannot be read, `stop` raises its ImageError, `skip` leaves it out and puts
                the error into the batch.
            part: (place, number of places): give that part of each batch alone, as one of several processes does; it
                may be empty.

        Raises:
            InputError: repeats or balance without `shuffle`.
        """
        require(shuffle or (repeats == 1 and not balanced), "repeats and balanced need a new order: give shuffle=True")
        self.num_images = len(split)
        self.batch_size = batch_size
        self.workers = default_workers() if workers is None else workers
        self.on_error = on_error
        self._keys = KeySampler(
            split.labels, batch_size, seed, shuffle=shuffle, repeats=repeats, balanced=balanced, part=part
        )
        self._close_at_exit: multiprocessing.util.Finalize | None = None
        self._loader = _TorchLoader(
            _Samples(split, transform, seed),
            batch_sampler=self._keys,
            num_workers=self.workers,
            collate_fn=_as_is,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_init_worker,
            persistent_workers=self.workers > 0,
            # Without one of its own, every new iterator draws from the main generator and shifts the training.
            generator=torch.Generator().manual_seed(derive_seed(seed, "loader")),
        )

    def __len__(self) -> int:
        """Give the number of batches in an epoch."""
        return -(-self.num_images // self.batch_size)

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """Give the batches of an epoch.

        Args:
            epoch: number of the epoch, which order and augmentation depend on.
            start_batch: first batch to give; the ones from there on are those of the whole epoch.

        Raises:
            ImageError: an image cannot be read, and `on_error` is `stop`.
            RunError: a worker process died.
        """
        self._keys.epoch, self._keys.start_batch = epoch, start_batch
        batches: Iterator[Batch] | None = None
        while True:
            try:
                batches = self._start() if batches is None else batches
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if self._lost_worker(error):
                    what = "a loader process died, as it does when memory or shared memory (/dev/shm) runs out"
                elif batches is None and isinstance(error, OSError):
                    what = f"loader processes cannot be started ({error.strerror or error})"
                else:
                    raise
                self.close()
                raise RunError(
                    f"{what}: give fewer workers than {self.workers} (0 needs no shared memory), or enlarge it"
                ) from error
            if batch.errors and self.on_error == "stop":
                first = batch.errors[0]
                raise ImageError(first.path, f"{first.reason} (repair it, remove it, or set on_error to skip)")
            yield batch

    def _lost_worker(self, error: Exception) -> bool:
        """Tell the death of a worker from an error inside one, which torch raises again with its traceback."""
        if self.workers == 0 or "in DataLoader worker process" in str(error):
            return False
        if isinstance(error, RuntimeError):
            return "exited unexpectedly" in str(error) or "killed by signal" in str(error)
        return isinstance(error, ConnectionError | EOFError)  # it died while handing over a tensor

    def _start(self) -> Iterator[Batch]:
        """Start an iterator, without the handler that torch installs for dying children.

        That handler raises in the middle of whatever the main process does; left out, the loss shows within seconds
        where a batch is fetched, and `epoch` can say what it means.
        """
        if self.workers == 0:
            return iter(self._loader)
        if self._loader._iterator is None:
            # Before multiprocessing's own exit, which sends SIGTERM and waits: our workers ignore it. A child of
            # multiprocessing runs these too, and nothing of atexit. Weak, so that a forgotten loader is collected.
            self._close_at_exit = multiprocessing.util.Finalize(self, _close, (weakref.ref(self),), exitpriority=0)
            multiprocessing.util.get_temp_dir()  # workers inherit it; one of its own would stay where one is killed
            return_freed_memory()  # else workers hold pages of it that this process then copies one by one
        # Workers are born with signals held back, so that none ends one before `_init_worker` has it ignore them.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_MAIN)
        in_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            return iter(self._loader)
        finally:
            if in_main:
                signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)  # None: not set from Python
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def close(self) -> None:
        """End the worker processes; a later epoch starts new ones."""
        if self._close_at_exit is not None:
            self._close_at_exit.cancel()
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


def _close(reference: "weakref.ref[Loader]") -> None:
    loader = reference()
    if loader is not None:
        loader.close()


class _TorchLoader(DataLoader[Batch]):
    """Torch's loader, which takes more processes than there are cores without a warning: the user asked for them."""

    def check_worker_number_rationality(self) -> None:
        pass

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return super()._get_iterator() if self.num_workers == 0 else _TorchIterator(self)


class _TorchIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, which ends its workers without torch's event.

    That event has a lock which a worker that died may have held, and whoever takes it then waits without end. Ours are
    asked by a number that has none, and killed where they do not end soon: a worker killed as it hands over a batch may
    leave the batch in /dev/shm.
    """

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self._leaving = cast(_Samples, loader.dataset).leaving
        self._leaving.value = False
        try:
            super().__init__(loader)
        except BaseException:
            self._shutdown_workers()
            raise

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        self._workers_status[worker_id] = False  # which torch does under that lock

    def _shutdown_workers(self) -> None:
        if getattr(self, "_shutdown", False):
            return
        self._shutdown = True
        if getattr(self, "_worker_pids_set", False):  # before they end, else torch takes it for a loss
            torch._C._remove_worker_pids(id(self))
            self._worker_pids_set = False
        workers, queues = getattr(self, "_workers", ()), getattr(self, "_index_queues", ())
        try:
            if hasattr(self, "_pin_memory_thread"):  # reads what workers send: without end, where one died as it wrote
                self._pin_memory_thread_done_event.set()
                self._worker_result_queue.put((None, None))
                self._pin_memory_thread.join(_END_S)
            self._leaving.value = True
            for queue in queues:
                queue.put((0, ()))  # wakes one that waits for something to read
            deadline = time.monotonic() + _END_S
            for worker in workers:
                worker.join(max(deadline - time.monotonic(), 0.0))
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join(_END_S)  # one that the system holds in a read of a disk does not end even so
            for queue in (*queues, getattr(self, "_worker_result_queue", None)):
                if queue is not None:
                    queue.cancel_join_thread()
                    queue.close()


class _Samples(TorchDataset[Batch]):
    """Turns keys into a batch, in a worker or in the main process."""

    def __init__(self, split: Split, transform: Transform, seed: int) -> None:
        self.split, self.transform, self.seed = split, transform, seed
        self.leaving = multiprocessing.RawValue(ctypes.c_bool, False)
        """Whether workers are to end; shared with them."""

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        self._leave_if_asked()
        pixels: list[NDArray[np.uint8]] = []
        read: list[int] = []
        errors: list[ImageError] = []
        for epoch, index, repeat in keys:
            self._leave_if_asked()
            try:
                pixels.append(self._load(index, derive_seed(self.seed, "augment", epoch, index, repeat)))
                read.append(index)
            except ImageError as error:
                errors.append(error)
        # Where no image tells the size, a blank one does.
        images = np.stack(pixels or [self.transform(self.split.blank(), 0)])[: len(read)]
        return Batch(
            images=rearrange(torch.from_numpy(images), "b h w c -> b c h w"),  # a view: channels-last memory
            labels=torch.from_numpy(self.split.labels[read]),
            indices=torch.tensor(read, dtype=torch.int64),
            errors=tuple(errors),
        )

    def _leave_if_asked(self) -> None:
        if self.leaving.value and multiprocessing.parent_process():
            raise KeyboardInterrupt  # what torch's loop takes for a quiet end

    def _load(self, index: int, seed: int) -> NDArray[np.uint8]:
        if isinstance(self.transform, TrainTransform):
            image, full_size = self.split.read_shrunk(index, partial(self.transform.shrink, seed=seed))
            transform: Transform = partial(self.transform, full_size=full_size)
        else:
            image, transform = self.split.read(index), self.transform
        try:
            return transform(image, seed)
        except InputError as error:  # pixels that the transform cannot take, such as a ribbon
            raise ImageError(self.split.paths[index], str(error)) from None


def _as_is(batch: Any) -> Any:
    return batch


def _init_worker(worker: int) -> None:
    """Give a worker one thread, and leave signals to the main process.

    Ctrl-C and a group's SIGTERM reach workers too; ending before the main process has saved its state, they would
    take the last batches, and the emergency save, with them. They end when it closes them or is gone.
    """
    import cv2

    for number in _LEFT_TO_MAIN:
        signal.signal(number, signal.SIG_IGN)
    # A batch that cannot be handed over, as where /dev/shm is full, would only be printed, and waited for without end.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_at_once)  # type: ignore[attr-defined]
    threading.Thread(target=_end_with_main_process, daemon=True).start()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


def _end_at_once(error: Exception, what: object) -> None:
    os._exit(1)


def _end_with_main_process() -> None:
    # Torch's workers look for it too, but every five seconds and only between batches.
    if main := multiprocessing.parent_process():
        main.join()
        os._exit(1)
