import fcntl
import multiprocessing
import os
import resource
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.config import AugmentConfig
from vitlab.data import cache
from vitlab.data.augment import TrainTransform
from vitlab.data.cache import cache_key, cached, default_folder, free_memory, unchanged
from vitlab.data.datasets import load_split
from vitlab.data.decoders import RULES
from vitlab.data.images import ImageError
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.data.splits import ArraySplit, fingerprint
from vitlab.errors import InputError, RunError

RECORD = Preprocess(image_size=(12, 16))
CLASSES = ["a", "b", "c"]
SIZES = [(20, 24), (13, 40), (31, 17), (12, 16), (50, 60)]  # width, height


@pytest.fixture
def split(tmp_path):
    """Fifteen noisy PNGs of several sizes in three classes, of which one is cut off and one is a ribbon."""
    generator = np.random.default_rng(0)
    for name in CLASSES:
        (tmp_path / "img" / name).mkdir(parents=True)
        for number, (width, height) in enumerate(SIZES):
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "img" / name / f"{number}.png")
    bad = tmp_path / "img/b/1.png"
    bad.write_bytes(bad.read_bytes()[:200])
    Image.new("L", (1_300_000, 1)).save(tmp_path / "img/c/4.png")
    return load_split(tmp_path / "img", "all", classes=CLASSES, val_fraction=0.1, seed=0)[0]


@pytest.fixture
def make(tmp_path):
    """Give a function that caches a split for evaluation; `lines` and `calls` of it say what it said and prepared."""

    def build(split, prepare=RECORD.apply, *, folder=tmp_path / "cache", **options):
        def counted(image):
            build.calls.append(image.shape)
            return prepare(image)

        build.lines, build.progress, build.calls = [], [], []
        defaults = {"preparation": RECORD.to_dict(), "mode": "disk", "workers": 2}
        return cached(
            split,
            counted,
            folder=folder,
            say=build.lines.append,
            on_progress=lambda *counts: build.progress.append(counts),
            **(defaults | options),
        )

    return build


def epochs(split, transform, *, workers=0):
    """The batches of two epochs as plain values."""
    loader = Loader(split, transform, batch_size=4, seed=3, shuffle=True, workers=workers, on_error="skip")
    batches = [batch for epoch in range(2) for batch in loader.epoch(epoch)]
    loader.close()
    return [(b.images.numpy(), b.labels.tolist(), b.indices.tolist(), list(map(str, b.errors))) for b in batches]


def same(left, right):
    return len(left) == len(right) and all(
        np.array_equal(a[0], b[0]) and a[0].dtype == b[0].dtype and a[1:] == b[1:]
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["memory", "disk"])
@pytest.mark.parametrize("crop", ["padded", "none", "resized"])
def test_cached_training_gives_the_batches_of_the_uncached(split, make, crop, mode, workers):
    """Bit for bit, and the same errors; a resized crop too, where no image is large enough to be shrunk."""
    augment = AugmentConfig(crop=crop, crop_min_scale=0.01, color_jitter=0.3, erasing=0.5)
    transform = TrainTransform(augment, RECORD)
    kept = make(split, transform.shrink_for_cache, mode=mode)
    want = epochs(split, transform)
    assert same(epochs(kept, transform.change, workers=workers), want)
    assert sum(len(batch[3]) for batch in want) == (2 if crop == "resized" else 4)
    prepared = len(make.calls)
    assert [kept.read(index).shape[2] for index in range(5)] == [3] * 5
    assert len(make.calls) == prepared  # nothing of it is decoded again


@pytest.mark.parametrize("mode", ["memory", "disk"])
@pytest.mark.parametrize("channels", [1, 3])
def test_cached_evaluation_gives_the_batches_of_the_uncached(split, make, channels, mode):
    grey = {"channels": 1, "mean": (0.5,), "std": (0.5,)}
    record = replace(RECORD, resize_mode="squash", **(grey if channels == 1 else {}))
    kept = make(split, record.apply, mode=mode)
    assert same(epochs(kept, unchanged), epochs(split, EvalTransform(record)))
    assert kept.read(0).shape == (12, 16, channels)
    assert kept.blank().shape == (12, 16, channels)


def test_cached_split_is_the_split_to_fingerprints_and_subsets(split, make):
    kept = make(split)
    assert (kept.name, kept.labels.tolist(), kept.paths) == (split.name, split.labels.tolist(), split.paths)
    assert fingerprint(kept) == fingerprint(split)
    rows = np.array([14, 6, 2])
    part = kept.subset("val", rows).subset("test", np.array([2, 0, 1]))
    want = split.subset("test", np.array([2, 14, 6]))
    assert (part.name, part.labels.tolist(), part.paths) == ("test", want.labels.tolist(), want.paths)
    assert fingerprint(part) == fingerprint(want)
    np.testing.assert_array_equal(part.read(0), RECORD.apply(split.read(2)))
    for index, name in ((1, "c/4.png"), (2, "b/1.png")):  # what is not kept is still what it was
        with pytest.raises(ImageError, match=name):
            part.read(index)


def test_cached_split_reports_unreadable_images_as_the_split_itself(split, make):
    kept = make(split)
    with pytest.raises(ImageError) as plain:
        split.read(6)
    with pytest.raises(ImageError) as caught:
        kept.read(6)
    assert (caught.value.path, caught.value.reason) == (plain.value.path, plain.value.reason)
    with pytest.raises(ImageError, match=r"img/c/4\.png: a picture of 1300000x1 pixels is too long"):
        kept.read(14)
    Path(split.paths[6]).write_bytes(Path(split.paths[5]).read_bytes())  # mended while the run goes on
    np.testing.assert_array_equal(kept.read(6), RECORD.apply(split.read(5)))


def test_cached_on_disk_is_found_again_and_nothing_decoded(split, make, tmp_path):
    first = make(split)
    path = tmp_path / "cache" / f"{cache_key(split, RECORD.to_dict())}.cache"
    assert [path] == list((tmp_path / "cache").iterdir())
    assert make.lines == [f"cache: 15 images, 0 MB, in {path}, which may be deleted after the run"]
    assert make.progress == [(done, 15) for done in range(1, 16)]
    again = make(split)
    assert (make.calls, make.progress, len(make.lines)) == ([], [(15, 15)], 1)
    np.testing.assert_array_equal(again.read(4), first.read(4))
    assert not isinstance(again.store.pixels.base, np.ndarray) or not again.store.pixels.flags.writeable


def test_cache_key_changes_with_all_that_the_pixels_depend_on(split, tmp_path, monkeypatch):
    def key(split=split, **fields):
        return cache_key(split, replace(RECORD, **fields).to_dict())

    first = key()
    assert (len(first), key()) == (64, first)
    changes = [
        {"image_size": (16, 12)},
        {"crop_fraction": 0.8},
        {"resize_mode": "pad"},
        {"interpolation": "bilinear"},
        {"channels": 1, "mean": (0.5,), "std": (0.5,)},
    ]
    keys = {key(**change) for change in changes}
    keys |= {key(split.subset("all", np.arange(14))), key(split.subset("all", np.arange(15)[::-1]))}
    path = Path(split.paths[3])
    content, stamp = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(content + b"\0")
    os.utime(path, ns=(stamp, stamp))
    keys.add(key())
    path.write_bytes(content[:-1] + b"\0")  # of the same size
    os.utime(path, ns=(stamp, stamp + 1))
    keys.add(key())
    path.write_bytes(content)
    os.utime(path, ns=(stamp, stamp))
    assert key() == first
    with monkeypatch.context() as patch:
        patch.setattr("PIL.__version__", "0.0")
        keys.add(key())
    assert len(keys - {first}) == len(changes) + 5
    renamed = (tmp_path / "img").rename(tmp_path / "other")
    assert cache_key(load_split(renamed, "all", classes=CLASSES, val_fraction=0.1, seed=0)[0], {}) != first


def test_cache_key_of_arrays_covers_their_pixels():
    images = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)

    def key(labels):
        return cache_key(ArraySplit(name="train", labels=labels, paths=["p"] * 4, images=images), {})

    first = key(np.arange(4))
    assert key(np.zeros(4, dtype=np.int64)) == first
    images[3, 4, 5, 2] ^= 1
    assert key(np.arange(4)) != first


@pytest.mark.parametrize("place", ["header", "pixels", "index", "end"])
def test_cached_builds_a_damaged_file_anew_and_says_so(split, make, tmp_path, place):
    want = make(split).read(7)
    (path,) = (tmp_path / "cache").iterdir()
    content = bytearray(path.read_bytes())
    whole = bytes(content)
    if place == "end":
        del content[-5:]
    else:
        content[{"header": 20, "pixels": 64 + 7 * 12 * 16 * 3 - 1, "index": len(content) - 3}[place]] ^= 16
    path.write_bytes(content)
    kept = make(split)
    assert len(make.lines) == 2
    assert make.lines[0].startswith(f"cache {path} is damaged (")
    assert make.lines[0].endswith("): it is built anew")
    np.testing.assert_array_equal(kept.read(7), want)
    assert path.read_bytes() == whole


def build_beside(split, folder, barrier, results):
    calls = []

    def prepare(image):
        calls.append(image.shape)
        time.sleep(0.02)
        return RECORD.apply(image)

    barrier.wait()
    quiet = {"say": lambda line: None, "on_progress": lambda done, total: None}
    kept = cached(split, prepare, preparation={}, mode="disk", folder=folder, workers=1, **quiet)
    results.put((len(calls), [kept.read(row).tobytes() for row in range(4)]))


def test_cached_is_built_once_by_processes_that_start_together(split, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = split, tmp_path / "cache", barrier, results
    builders = [context.Process(target=build_beside, args=arguments) for _ in range(3)]
    for builder in builders:
        builder.start()
    got = [results.get(timeout=30) for _ in builders]
    for builder in builders:
        builder.join()
        assert builder.exitcode == 0
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cache"]  # no lock, nothing aside
    assert sorted(calls > 0 for calls, _ in got) == [False, False, True]
    want = [RECORD.apply(split.read(row)).tobytes() for row in range(4)]
    assert all(pixels == want for _, pixels in got)


@pytest.mark.parametrize("removes", [False, True])
def test_cached_waits_for_who_builds_and_says_so_once(split, tmp_path, removes):
    """Whether the other removes its lock, as it does, or was killed."""
    path = tmp_path / "cache" / f"{cache_key(split, {})}.cache"
    path.parent.mkdir()
    lock = path.with_name(f".{path.name}.lock")
    other = lock.open("a")
    fcntl.flock(other, fcntl.LOCK_EX)
    lines = []

    def say(line):
        lines.append(line)
        if removes:
            lock.unlink(missing_ok=True)
        other.close()

    options = {"folder": path.parent, "workers": 1, "on_progress": lambda done, total: None}
    kept = cached(split, RECORD.apply, preparation={}, mode="disk", say=say, **options)
    assert lines[0] == f"cache: waiting for the process that builds {path}"
    assert len(lines) == 2
    np.testing.assert_array_equal(kept.read(0), RECORD.apply(split.read(0)))
    assert list(path.parent.iterdir()) == [path]


def test_cached_overwrites_what_a_killed_builder_left(split, make, tmp_path):
    name = f"{cache_key(split, RECORD.to_dict())}.cache"
    (tmp_path / "cache").mkdir()
    for left in (f".{name}.tmp", f".{name}.lock"):
        (tmp_path / "cache" / left).write_bytes(b"half of it")
    make(split)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [name]


def test_cached_says_in_one_line_where_nothing_can_be_kept(split, make, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        InputError, match=r"no cache can be kept in .*file/deep \(Not a directory\): give a data\.cache_dir"
    ):
        make(split, folder=tmp_path / "file" / "deep")

    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    make(split)
    monkeypatch.setattr(cache, "_alone", refuse)
    make(split)  # what is there needs no right to write
    with pytest.raises(InputError, match=r"no cache can be kept in .*cache \(Permission denied\)") as caught:
        make(split, preparation={})
    assert "\n" not in str(caught.value)


def test_cached_removes_half_a_file_where_the_disk_is_full(split, make, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(RunError, match=r"\.cache cannot be written \(File too large\): free some, or") as caught:
            make(split)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_cached_says_beforehand_that_the_disk_does_not_suffice(split, make, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2000})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(RunError, match=r"takes about 0 MB, and 0 MB are free"):
        make(split)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("free", "fits"), [(9_360, True), (9_350, False)])
def test_cached_in_memory_refuses_more_than_is_free(split, make, monkeypatch, free, fits):
    """Thirteen images of 12x16 pixels are 7,488 bytes, 80 % of 9,360."""
    monkeypatch.setattr(cache, "free_memory", lambda: free)
    if fits:
        assert len(make(split, mode="memory").store.pixels) == 7488
        assert make.lines == ["cache: 15 images, 0 MB, in memory"]
    else:
        message = r"data\.cache memory takes about 0 MB for 15 images, and may take 0 MB, 80% of what is free: set"
        with pytest.raises(InputError, match=message):
            make(split, mode="memory")


def test_free_memory_is_at_most_the_machines():
    assert 0 < free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_default_folder_follows_the_xdg_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert default_folder() == tmp_path / "elsewhere/vitlab"
    for value in ("", "relative"):  # which the specification has ignored
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_folder() == tmp_path / ".cache/vitlab"


class Interleaved(ArraySplit):
    """Two images read by two threads that silence warnings, the second from before the first's end until after it."""

    def read(self, index):
        image = super().read(index)
        if threading.current_thread() is threading.main_thread():  # for the estimate
            return image
        assert index == 0 or first_in.wait(20)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (first_in, second_in)[index].set()
            assert (second_in, first_out)[index].wait(20)
        if index == 0:
            first_out.set()
        return image


first_in, second_in, first_out = (threading.Event() for _ in range(3))


def test_building_leaves_the_filters_of_warnings_as_they_were(make):
    images = np.zeros((2, 12, 16, 3), dtype=np.uint8)
    split = Interleaved(name="train", labels=np.array([0, 1]), paths=["p0", "p1"], images=images)
    before = list(warnings.filters)
    make(split, mode="memory")
    assert second_in.is_set()
    assert warnings.filters == before


def test_building_ends_its_threads_and_removes_its_file_after_a_fault(split, make, tmp_path):
    def fail(image):
        if len(make.calls) > 20:  # past the estimate
            raise ZeroDivisionError
        return RECORD.apply(image)

    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        make(split, fail)
    assert threading.active_count() == threads
    assert list((tmp_path / "cache").iterdir()) == []


def test_shared_memory_of_a_spawned_worker_needs_no_copy(split, make):
    """As torch's loader starts workers where they do not inherit the memory of their parent."""
    kept = make(split, mode="memory")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=_flip_first_byte, args=(kept.store, queue))
    before = int(kept.store.pixels[0])
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert int(kept.store.pixels[0]) == before ^ 255


def _flip_first_byte(store, queue):
    store.pixels[0] ^= 255


def test_cache_key_changes_with_the_rules_of_reading(split, monkeypatch):
    first = cache_key(split, {})
    monkeypatch.setattr("vitlab.data.cache.RULES", RULES + 1)
    assert cache_key(split, {}) != first
