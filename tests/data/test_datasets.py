import numpy as np
import pytest
from sklearn.datasets import load_digits

from vitlab.data.datasets import files_split, fingerprint, load_dataset, load_split
from vitlab.data.images import ImageError


def test_load_dataset_gives_the_digits_in_three_parts():
    data = load_dataset("digits", val_fraction=0.1, seed=0)
    assert data.classes == tuple("0123456789")
    assert data.native_size == (8, 8)
    sizes = {name: len(split) for name, split in data.splits.items()}
    assert sizes == {"train": 1295, "val": 143, "test": 359}
    assert sum(sizes.values()) == 1797
    for split in data.splits.values():
        assert np.bincount(split.labels, minlength=10).min() > 0


def test_load_dataset_scales_digits_and_keeps_their_labels():
    data, source = load_dataset("digits", val_fraction=0.1, seed=0), load_digits()
    seen = []
    for split in data.splits.values():
        for row, path in enumerate(split.paths):
            index = int(path.removeprefix("digits#"))
            seen.append(index)
            assert split.labels[row] == source.target[index]
            want = np.rint(source.images[index] * 255 / 16)
            np.testing.assert_array_equal(split.read(row), np.dstack([want] * 3))
    assert sorted(seen) == list(range(1797))


def test_load_dataset_keeps_the_digits_test_split_whatever_the_seed():
    parts = [load_dataset("digits", val_fraction=fraction, seed=seed) for fraction, seed in ((0.1, 0), (0.3, 7))]
    assert parts[0].splits["test"].paths == parts[1].splits["test"].paths
    assert parts[0].splits["val"].paths != load_dataset("digits", val_fraction=0.1, seed=1).splits["val"].paths
    assert fingerprint(parts[0])["sha256"]["test"] == fingerprint(parts[1])["sha256"]["test"]


def test_load_split_gives_the_digits_of_training():
    data = load_dataset("digits", val_fraction=0.1, seed=3)
    for name, split in data.splits.items():
        again, notes = load_split("digits", name, classes=data.classes, val_fraction=0.1, seed=3)
        assert again.paths == split.paths
        assert (notes == ()) == (name == "test")


def test_files_split_keeps_the_listed_files_without_labels(tmp_path, write_image):
    split = files_split([tmp_path / "gone.png", write_image(tmp_path / "b.png")])
    assert split.paths == [str(tmp_path / "gone.png"), str(tmp_path / "b.png")]
    assert split.labels.tolist() == [-1, -1]
    assert split.read(1)[0, 0].tolist() == [200, 100, 50]
    with pytest.raises(ImageError, match=r"gone\.png: cannot be opened"):  # gone since it was listed
        split.read(0)
