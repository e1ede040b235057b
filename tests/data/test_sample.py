"""Samples of a split: which images, in which order, and what becomes of those that cannot be read."""

import numpy as np
import pytest

from vitlab.data import sample
from vitlab.data.images import ImageError
from vitlab.data.preprocess import Preprocess
from vitlab.data.sample import read_sample
from vitlab.data.splits import ArraySplit, FileSplit

PREPROCESS = Preprocess(image_size=(4, 6), resize_mode="squash")


def numbered_split(count):
    """Give images of 4x6 pixels, the n-th all n."""
    images = np.repeat(np.arange(count, dtype=np.uint8), 4 * 6 * 3).reshape(count, 4, 6, 3)
    return ArraySplit(name="train", labels=np.zeros(count, np.int64), paths=list(map(str, range(count))), images=images)


def draw(split, *, max_images=30, seed=0, workers=0, preprocess=PREPROCESS, on_error="stop", calls=None):
    images, errors = read_sample(
        split,
        preprocess,
        max_images=max_images,
        seed=seed,
        workers=workers,
        on_error=on_error,
        on_images=lambda done, total: None if calls is None else calls.append((done, total)),
    )
    return images, errors


def test_read_sample_draws_different_images_in_their_order_by_the_seed_alone():
    split = numbered_split(200)
    calls = []
    images, errors = draw(split, max_images=150, calls=calls)
    numbers = images[:, 0, 0, 0].astype(int)
    assert images.shape == (150, 4, 6, 3)
    assert (np.diff(numbers) > 0).all()
    assert (images == numbers[:, None, None, None]).all()
    assert errors == ()
    assert calls == [(64, 150), (128, 150), (150, 150)]
    assert np.array_equal(draw(split, max_images=150, workers=2)[0], images)
    assert not np.array_equal(draw(split, max_images=150, seed=1)[0], images)


def test_read_sample_takes_all_where_there_are_fewer():
    assert draw(numbered_split(7))[0][:, 0, 0, 0].tolist() == list(range(7))


def test_read_sample_prepares_the_images(monkeypatch):
    grey = Preprocess(image_size=(2, 3), resize_mode="squash", channels=1, mean=(0.5,), std=(0.5,))
    images, _ = draw(numbered_split(5), preprocess=grey)
    assert images.shape == (5, 2, 3, 1)
    monkeypatch.setattr(sample, "_MAX_BYTES", 3 * (2 * 3) + 5)
    assert len(draw(numbered_split(5), preprocess=grey)[0]) == 3


def test_read_sample_stops_at_or_skips_an_unreadable_image(tmp_path, write_image):
    paths = [str(write_image(tmp_path / f"{number}.png", (number, 0, 0))) for number in range(5)]
    (tmp_path / "2.png").write_bytes(b"damaged")
    split = FileSplit(name="train", labels=np.zeros(5, np.int64), paths=paths)
    with pytest.raises(ImageError, match=r"2\.png"):
        draw(split)
    calls = []
    images, errors = draw(split, on_error="skip", calls=calls)
    assert images[:, 0, 0, 0].tolist() == [0, 1, 3, 4]
    assert [error.path for error in errors] == [paths[2]]
    assert calls == [(5, 5)]
