import random
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vitlab.config import AugmentConfig
from vitlab.data.augment import TrainTransform
from vitlab.data.crops import Box, Geometry, draw_box
from vitlab.data.images import read_image, read_shrunk
from vitlab.data.loader import Loader
from vitlab.data.preprocess import Preprocess
from vitlab.data.resize import resize_torch
from vitlab.data.splits import FileSplit


def geometry(size=(24, 16), **fields):
    given = {"crop": "resized", "min_scale": 0.25, "padding": 4, "hflip": 0.0, "interpolation": "bilinear"}
    return Geometry(size=size, **given | fields)


@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (60, 400)])
def test_draw_box_has_torchvisions_distribution(shape):
    ours = [draw_box(*shape, 0.08, random.Random(seed)) for seed in range(4000)]
    torch.manual_seed(0)
    crop, image = v2.RandomResizedCrop(10, (0.08, 1.0)), torch.zeros(1, *shape)
    theirs = [crop.make_params([image]) for _ in range(4000)]
    for name in ("top", "left", "height", "width"):
        mine, other = np.array([getattr(box, name) for box in ours]), np.array([box[name] for box in theirs])
        for share in (0.1, 0.5, 0.9):
            assert abs(np.quantile(mine, share) - np.quantile(other, share)) < 0.04 * max(shape), (name, share)


@pytest.mark.parametrize(("shape", "want"), [((10, 1000), Box(0, 493, 10, 13)), ((1000, 9), Box(494, 0, 12, 9))])
def test_draw_box_takes_the_centre_of_a_ribbon(shape, want):
    assert draw_box(*shape, 0.9, random.Random(0)) == want


@pytest.mark.parametrize("shape", [(301, 403), (1000, 800), (64, 64)])
def test_geometry_draws_the_smallest_scale_that_leaves_enough(shape):
    scales = set()
    for seed in range(200):
        box, scale = geometry().draw(*shape, random.Random(seed))
        scales.add(scale)
        small = box.at(scale)
        assert small.height >= 24
        assert small.width >= 16
        assert (small.top * scale, small.left * scale) == (box.top, box.left)
        assert box.top + box.height in (scale * (small.top + small.height), shape[0])
        assert box.left + box.width in (scale * (small.left + small.width), shape[1])
        if scale < 8:  # a box is widened to whole pixels of its scale, by less than one at each end
            assert box.height - 2 * scale < 2 * scale * 24 or box.width - 2 * scale < 2 * scale * 16
    assert scales == {(64, 64): {1, 2}, (301, 403): {4, 8}, (1000, 800): {8}}[shape]


def test_geometry_cuts_the_box_that_it_draws():
    image = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    for seed in range(20):
        box, _ = geometry().draw(90, 70, random.Random(seed))
        part = image[box.top : box.top + box.height, box.left : box.left + box.width]
        want = resize_torch(part, 24, 16, "bilinear")
        np.testing.assert_array_equal(geometry().change(image, random.Random(seed)), want)
        np.testing.assert_array_equal(geometry(hflip=1.0).change(image, random.Random(seed)), want[:, ::-1])


@pytest.fixture
def photograph_files(photographs, tmp_path):
    paths = []
    for index, image in enumerate(photographs):
        paths.append(str(tmp_path / f"{index:02}.jpg"))
        exif = Image.Exif()
        exif[0x0112] = 1 + index % 8
        Image.fromarray(image).save(paths[-1], quality=92, exif=exif)
    return paths


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "level"), [((100, 90), 1.0), ((64, 70), 1.5)])
def test_train_transform_reads_smaller_files_with_nearly_the_same_result(photograph_files, size, level, interpolation):
    """The mean difference in levels of 255; the README's figures."""
    change = TrainTransform(AugmentConfig(crop="resized"), Preprocess(image_size=size, interpolation=interpolation))
    differences, smaller = [], 0
    for path in photograph_files:
        for seed in range(4):
            image, full_size = read_shrunk(path, partial(change.shrink, seed=seed))
            whole = read_image(path)
            assert full_size == whole.shape[:2]
            smaller += image.shape != whole.shape
            differences.append(np.abs(change(image, seed, full_size).astype(int) - change(whole, seed)).mean())
    assert smaller > len(differences) // 3
    assert np.mean(differences) < level


def test_loader_reads_smaller_files_alike_with_any_number_of_workers(photograph_files):
    split = FileSplit(name="train", labels=np.zeros(len(photograph_files), np.int64), paths=photograph_files)
    change = TrainTransform(AugmentConfig(crop="resized"), Preprocess(image_size=(64, 70)))
    batches = []
    for workers in (0, 2):
        loader = Loader(split, change, batch_size=5, seed=3, shuffle=True, workers=workers)
        batches.append(torch.cat([batch.images for batch in loader.epoch(1)]))
        loader.close()
    assert torch.equal(*batches)


def test_train_transform_asks_for_whole_files_where_no_resized_crop_shrinks():
    for crop in ("padded", "none"):
        change = TrainTransform(AugmentConfig(crop=crop), Preprocess(image_size=(24, 16)))
        assert {change.shrink(800, 900, seed) for seed in range(20)} == {1}
    assert TrainTransform(AugmentConfig(crop="resized"), Preprocess(image_size=(224, 224))).shrink(384, 512, 0) == 1
