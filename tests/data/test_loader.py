import os

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.config import AugmentConfig
from vitlab.data import loader as module
from vitlab.data.augment import TrainTransform
from vitlab.data.datasets import files_split, load_dataset, load_split
from vitlab.data.images import ImageError, list_images
from vitlab.data.loader import Loader, default_workers
from vitlab.data.preprocess import EvalTransform, Preprocess

GREY = {"channels": 1, "mean": (0.5,), "std": (0.25,)}


def listed(folder):
    """The images of a folder without labels, as prediction reads them."""
    return files_split(list_images([folder])[0])


def eval_transform(size=(16, 12), **fields):
    return EvalTransform(Preprocess(image_size=size, **fields))


def test_loader_takes_more_workers_than_cores_without_a_warning(array_split):
    """Warnings are errors here, and torch has one for that."""
    assert Loader(array_split(), eval_transform(), batch_size=4, workers=1000).workers == 1000


def train_transform():
    augment = AugmentConfig(crop="resized", hflip=0.5, policy="randaugment", color_jitter=0.3, erasing=0.5)
    return TrainTransform(augment, Preprocess(image_size=(16, 12)))


def contents(batches):
    return [(batch.images.numpy().tobytes(), batch.labels.tolist(), batch.indices.tolist()) for batch in batches]


def order(loader, epoch, **options):
    return [index for batch in loader.epoch(epoch, **options) for index in batch.indices.tolist()]


@pytest.fixture
def image_files(tmp_path, write_image):
    """Twenty images in two classes, of which a/03.png is cut to half its bytes."""
    for name in ("a", "b"):
        for number in range(10):
            pixels = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
            path = write_image(tmp_path / name / f"{number:02}.png")
            Image.fromarray(pixels).save(path)
    bad = tmp_path / "a/03.png"
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
    return tmp_path


def test_loader_gives_every_image_once_in_order(make_loader, array_split):
    split, transform = array_split(), eval_transform()
    loader = make_loader(split, transform)
    batches = list(loader.epoch(0))
    assert [len(batch.labels) for batch in batches] == [5, 5, 5, 5, 3]
    assert (len(loader), loader.num_images) == (5, 23)
    assert order(loader, 1) == list(range(23))
    for batch in batches:
        B, C, H, W = batch.images.shape
        assert (C, H, W, batch.images.dtype) == (3, 16, 12, torch.uint8)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert (batch.labels.dtype, batch.indices.dtype) == (torch.int64, torch.int64)
        for row in range(B):
            index = int(batch.indices[row])
            want = transform.preprocess.apply(split.images[index])
            np.testing.assert_array_equal(batch.images[row].permute(1, 2, 0).numpy(), want)
            assert batch.labels[row] == split.labels[index]


def test_loader_gives_greyscale_in_one_channel(make_loader):
    batch = next(make_loader(transform=eval_transform(**GREY)).epoch(0))
    assert batch.images.shape == (5, 1, 16, 12)


def test_loader_shuffles_by_seed_and_epoch(make_loader):
    loader = make_loader(shuffle=True, seed=3)
    first, third = order(loader, 1), order(loader, 3)
    assert sorted(first) == sorted(third) == list(range(23))
    assert first != third
    assert first != list(range(23))
    assert order(make_loader(shuffle=True, seed=3), 3) == third
    assert order(make_loader(shuffle=True, seed=4), 3) != third


def test_loader_resumes_within_an_epoch(make_loader):
    options = {"transform": train_transform(), "shuffle": True, "seed": 1}
    whole = contents(make_loader(**options).epoch(2))
    for start in (0, 1, 4, 5):
        assert contents(make_loader(**options).epoch(2, start_batch=start)) == whole[start:]


def test_loader_augments_each_epoch_anew(make_loader):
    loader = make_loader(transform=train_transform())
    assert contents(loader.epoch(0)) != contents(loader.epoch(1))
    assert contents(loader.epoch(0)) == contents(loader.epoch(0))


@pytest.mark.parametrize("batch_size", [1, 7, 23])
def test_loader_augments_an_image_alike_in_any_batch(make_loader, batch_size):
    def images(size):
        loader = make_loader(transform=train_transform(), batch_size=size, seed=2)
        return torch.cat([batch.images for batch in loader.epoch(4)])

    assert torch.equal(images(batch_size), images(5))


def test_loader_gives_the_same_batches_with_any_number_of_workers(make_loader):
    runs = []
    for workers in (0, 1, 2):
        loader = make_loader(transform=train_transform(), shuffle=True, seed=7, workers=workers)
        runs.append([contents(loader.epoch(epoch)) for epoch in range(2)] + [contents(loader.epoch(1, start_batch=3))])
    assert runs[0] == runs[1] == runs[2]


def test_loader_keeps_its_workers_and_recovers_from_an_abandoned_epoch(make_loader):
    loader = make_loader(workers=2, shuffle=True)
    pids = []
    for epoch in range(2):
        batches = loader.epoch(epoch)
        next(batches)
        pids.append([worker.pid for worker in loader._loader._iterator._workers])
        batches.close()
    assert pids[0] == pids[1]
    assert order(loader, 2) == order(make_loader(shuffle=True), 2)


def test_loader_gives_kept_memory_back_before_it_forks(make_loader, monkeypatch):
    """Workers would hold all that is free in this process now, and it would copy each page that it writes again."""
    calls = []
    monkeypatch.setattr(module, "return_freed_memory", lambda: calls.append(None))
    loader = make_loader(workers=1)
    for epoch in range(2):
        list(loader.epoch(epoch))
        assert len(calls) == 1
    list(make_loader(workers=0).epoch(0))
    assert len(calls) == 1


def test_loader_leaves_the_main_generator_alone(make_loader):
    for workers in (0, 1):
        torch.manual_seed(0)
        before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()
        loader = make_loader(transform=train_transform(), shuffle=True, workers=workers)
        for epoch in range(2):
            list(loader.epoch(epoch))
        assert torch.equal(torch.get_rng_state(), before)
        assert np.random.get_state()[1].tolist() == numpy_before


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_stops_at_an_unreadable_image_and_names_it(make_loader, image_files, workers):
    loader = make_loader(listed(image_files), workers=workers, batch_size=3)
    with pytest.raises(ImageError, match="truncated") as caught:
        list(loader.epoch(0))
    assert caught.value.path == str(image_files / "a/03.png")
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_skips_an_unreadable_image_and_says_so(make_loader, image_files, workers):
    loader = make_loader(listed(image_files), workers=workers, batch_size=4, on_error="skip")
    batches = list(loader.epoch(0))
    assert [len(batch.labels) for batch in batches] == [3, 4, 4, 4, 4]
    assert batches[0].indices.tolist() == [0, 1, 2]
    assert [error.path for batch in batches for error in batch.errors] == [str(image_files / "a/03.png")]
    assert len(loader) == 5


def test_loader_changes_no_file_of_the_data(make_loader, image_files):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in image_files.rglob("*.png")}
    list(make_loader(listed(image_files), on_error="skip").epoch(0))
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in image_files.rglob("*.png")} == before


@pytest.mark.parametrize("transform", [eval_transform(), eval_transform(**GREY), train_transform()])
def test_loader_gives_an_empty_batch_where_no_image_is_left(make_loader, image_files, transform):
    (image_files / "a/04.png").write_bytes(b"")
    split = files_split([image_files / "a/03.png", image_files / "a/04.png"])
    batch = next(make_loader(split, transform, on_error="skip").epoch(0))
    assert batch.images.shape == (0, transform.preprocess.channels, 16, 12)
    assert (batch.labels.shape, batch.indices.shape) == ((0,), (0,))
    assert len(batch.errors) == 2


def test_loader_reports_an_image_that_the_transform_cannot_take(make_loader, write_image, tmp_path):
    paths = [write_image(tmp_path / "ribbon.png", size=(20000, 1)), write_image(tmp_path / "a.png")]
    loader = make_loader(files_split(paths), eval_transform((224, 224)), on_error="skip")
    batch = next(loader.epoch(0))
    assert len(batch.labels) == 1
    assert str(batch.errors[0]).startswith(f"{paths[0]}: a picture of 20000x1 pixels is too long")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
def test_loader_pins_memory_where_there_is_a_gpu(make_loader, workers):
    batch = next(make_loader(workers=workers).epoch(0))
    assert all(tensor.is_pinned() for tensor in (batch.images, batch.labels, batch.indices))
    assert batch.images.is_contiguous(memory_format=torch.channels_last)


def test_default_workers_leaves_a_core_and_stops_at_eight(monkeypatch, make_loader):
    for cores, want in ((1, 0), (2, 1), (6, 5), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert default_workers() == want
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert make_loader(workers=None).workers == 2


def odd_shapes(root, write_image):
    """Thirty images of odd shapes and kinds in three classes."""
    rng = np.random.default_rng(0)
    for number in range(30):
        height, width = (int(side) for side in rng.integers(5, 400, 2))
        pixels = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
        suffix, options = [(".jpg", {}), (".png", {}), (".webp", {"lossless": True})][number % 3]
        path = root / "abc"[number % 3] / f"{number:02}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        Image.fromarray(pixels).resize((width, height)).save(path, exif=exif, **options)
    return root


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
def test_evaluation_and_prediction_see_the_same_tensors(make_loader, tmp_path, write_image, mode):
    root = odd_shapes(tmp_path, write_image)
    preprocess = Preprocess(image_size=(48, 32), resize_mode=mode)
    labelled, _ = load_split(root, "all", classes=["a", "b", "c"], val_fraction=0.1, seed=0)
    unlabelled = listed(root)
    assert list(labelled.paths) == list(unlabelled.paths)
    seen = []
    for split, size, workers in ((labelled, 7, 0), (unlabelled, 30, 1), (unlabelled, 1, 0)):
        loader = make_loader(split, EvalTransform(preprocess), batch_size=size, workers=workers)
        seen.append(torch.cat([preprocess.normalize(batch.images) for batch in loader.epoch(0)]))
    direct = [torch.from_numpy(preprocess.apply(unlabelled.read(i))).permute(2, 0, 1) for i in range(30)]
    seen.append(preprocess.normalize(torch.stack(direct)))
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_training_evaluation_and_prediction_see_images_upright(make_loader, tmp_path, orientation):
    """A 40x20 JPEG, left red, right blue; orientation 6 shows 20x40, top red, bottom blue."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20, 0], pixels[:, 20:, 2] = 255, 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name in ("x", "y"):
        for number in range(2):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.jpg", exif=exif, quality=95)
    preprocess = Preprocess(image_size=(20, 20), resize_mode="pad", mean=(0.0,) * 3)
    plain = TrainTransform(AugmentConfig(crop="none", hflip=0.0), preprocess)
    data = load_dataset(tmp_path, val_fraction=0.5, seed=0)
    evaluated, _ = load_split(tmp_path, "val", classes=data.classes, val_fraction=0.5, seed=0)
    red_at = {1: (10, 2), 2: (10, 17), 3: (10, 17), 4: (10, 2), 5: (2, 10), 6: (2, 10), 7: (17, 10), 8: (17, 10)}
    blue_at = {o: (19 - y, x) if o >= 5 else (y, 19 - x) for o, (y, x) in red_at.items()}
    for split, transform in (
        (data.splits["train"], plain),
        (evaluated, EvalTransform(preprocess)),
        (listed(tmp_path), EvalTransform(preprocess)),
    ):
        image = next(make_loader(split, transform).epoch(0)).images[0]
        assert image[:, *red_at[orientation]].tolist() == pytest.approx([255, 0, 0], abs=8)
        assert image[:, *blue_at[orientation]].tolist() == pytest.approx([0, 0, 255], abs=8)
