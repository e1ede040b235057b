import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

from vitlab.data.pixel_store import DamagedStoreError, fill_store, open_store, write_store

SHAPES = [(3, 5, 3), (0, 0, 0), (7, 2, 1), (1, 1, 3), (0, 0, 0)]


def images(shapes=SHAPES):
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def fill(pictures, *, expected=0, limit=10**6):
    return fill_store(pictures, expected=expected, limit=limit)


def check(store, wanted):
    assert len(store) == len(wanted)
    assert store.is_whole(0, len(wanted))
    for row, image in enumerate(wanted):
        kept = store.read(row)
        if image.size:
            np.testing.assert_array_equal(kept, image)
            kept[:] = 0  # the caller's to change
            np.testing.assert_array_equal(store.read(row), image)
        else:
            assert kept is None


@pytest.mark.parametrize("expected", [0, 10, 62, 10_000])  # less, exactly and more than they take
def test_fill_store_keeps_images_of_several_sizes(expected):
    store = fill(iter(images()), expected=expected)
    check(store, images())
    assert len(store.pixels) == 3 * 5 * 3 + 7 * 2 + 3


def test_fill_store_stops_at_its_limit():
    fill(images(), limit=62)
    with pytest.raises(MemoryError):
        fill(images(), limit=61)


@pytest.mark.parametrize("shapes", [SHAPES, [(0, 0, 0)] * 2, []])
def test_write_store_maps_what_it_wrote(tmp_path, shapes):
    check(write_store(tmp_path / "a.cache", iter(images(shapes))), images(shapes))
    check(open_store(tmp_path / "a.cache"), images(shapes))
    assert [path.name for path in tmp_path.iterdir()] == ["a.cache"]


def test_write_store_leaves_nothing_of_half_a_file(tmp_path):
    def broken():
        yield from images()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_store(tmp_path / "a.cache", broken())
    assert list(tmp_path.iterdir()) == []


def test_open_store_finds_every_changed_bit(tmp_path):
    """In header and index at once, in the pixels when they are checked."""
    path = tmp_path / "a.cache"
    write_store(path, images())
    whole = path.read_bytes()
    header, pixels = 64, 62
    assert len(whole) == header + pixels + 16 * len(SHAPES)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        if header <= place < header + pixels:
            assert not open_store(path).is_whole(0, len(SHAPES))
        else:
            with pytest.raises(DamagedStoreError):
                open_store(path)


def test_is_whole_looks_at_the_images_it_is_asked_for(tmp_path):
    path = tmp_path / "a.cache"
    write_store(path, images())
    content = bytearray(path.read_bytes())
    content[64 + 50] ^= 4  # in the third image
    path.write_bytes(content)
    store = open_store(path)
    assert [store.is_whole(row, row + 1) for row in range(5)] == [True, True, False, True, True]
    assert not store.is_whole(2, 99)


def test_open_store_refuses_files_of_another_length_or_name(tmp_path):
    path = tmp_path / "a.cache"
    write_store(path, images())
    whole = path.read_bytes()
    for content in (b"", whole[:63], whole[:64], whole[:-1], whole + b"\0"):
        path.write_bytes(content)
        with pytest.raises(DamagedStoreError):
            open_store(path)
    path.write_bytes(whole)
    with pytest.raises(DamagedStoreError, match="index was changed"):
        open_store(path.rename(tmp_path / "b.cache"))
    with pytest.raises(FileNotFoundError):
        open_store(path)


def test_store_in_memory_is_shared_with_spawned_processes_and_not_copied():
    store = fill(images())
    first, second = (ForkingPickler.loads(ForkingPickler.dumps(store)) for _ in range(2))
    check(first, images())
    store.pixels[0] ^= 255
    for other in (first, second):
        assert other.pixels[0] == store.pixels[0]


def test_store_in_a_file_is_mapped_again_by_spawned_processes(tmp_path):
    store = write_store(tmp_path / "a.cache", images([(300, 400, 3)]))
    content = pickle.dumps(store)
    assert len(content) < 1000
    check(pickle.loads(content), images([(300, 400, 3)]))
