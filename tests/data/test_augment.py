import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from vitlab.config import AugmentConfig
from vitlab.data.augment import Mixer, TrainTransform, erase
from vitlab.data.policies import Policy
from vitlab.data.preprocess import Preprocess
from vitlab.data.resize import resize
from vitlab.seeds import derive_seed

PLAIN = {"crop": "none", "hflip": 0.0}
GREY = {"channels": 1, "mean": (0.5,), "std": (0.25,)}


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def transform(size=(24, 16), **augment):
    return TrainTransform(AugmentConfig(**PLAIN | augment), Preprocess(image_size=size, crop_fraction=1.0))


def test_train_transform_without_augmentation_is_evaluation_and_imports_nothing():
    code = (
        "import sys, numpy as np\n"
        "from vitlab.config import AugmentConfig\n"
        "from vitlab.data.augment import erase, Mixer, TrainTransform\n"
        "from vitlab.data.preprocess import Preprocess\n"
        "p = Preprocess(image_size=(24, 16)); image = np.arange(30 * 40 * 3, dtype=np.uint8).reshape(30, 40, 3)\n"
        "t = TrainTransform(AugmentConfig(crop='none', hflip=0.0), p)\n"
        "assert not Mixer(AugmentConfig(), 3).enabled\n"
        "assert (t(image, 5) == p.apply(image)).all()\n"
        "sys.exit('albumentations' in sys.modules or 'torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "augment",
    [
        {"hflip": 0.5},
        {"crop": "resized"},
        {"crop": "padded"},
        {"policy": "randaugment"},
        {"policy": "autoaugment"},
        {"color_jitter": 0.4},
        {"erasing": 0.5},
    ],
)
def test_train_transform_is_a_function_of_image_and_seed(augment):
    change, image = transform(**augment), noise(40, 30)
    before = image.copy()
    first = [change(image, seed) for seed in range(12)]
    again = [transform(**augment)(image, seed) for seed in reversed(range(12))][::-1]
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(image, before)
    assert len({result.tobytes() for result in first}) > 1


def test_train_transform_draws_its_changes_independently():
    """Two events of even odds, flip and erasing: each of the four pairs near a quarter, not always both or none."""
    change = transform(hflip=0.5, erasing=0.5)
    image = np.zeros((24, 16, 3), np.uint8)
    image[:, :8], image[:, 8:] = 1, 2  # noise seldom equals these
    counts = dict.fromkeys(itertools.product((False, True), repeat=2), 0)
    for seed in range(1000):
        result = change(image, seed)
        kept = result[np.isin(result, (1, 2)).all(axis=2)]
        flipped = np.median(result[:, :8]) == 2 if len(kept) == 24 * 16 else votes_for_flip(result)
        counts[bool(flipped), len(kept) < 24 * 16] += 1
    assert all(190 <= count <= 310 for count in counts.values()), counts


def votes_for_flip(result):
    left, right = result[:, :8], result[:, 8:]
    return (left == 2).sum() + (right == 1).sum() > (left == 1).sum() + (right == 2).sum()


def test_train_transform_flips_left_and_right():
    image = noise(24, 16)
    results = [transform(hflip=1.0)(image, seed) for seed in range(3)]
    for result in results:
        np.testing.assert_array_equal(result, image[:, ::-1])


def test_train_transform_padded_crop_moves_over_the_mirrored_border():
    image = noise(24, 16)
    bordered = np.pad(image, ((3, 3), (3, 3), (0, 0)), mode="reflect")
    windows = {bordered[y : y + 24, x : x + 16].tobytes(): (y, x) for y in range(7) for x in range(7)}
    change = transform(crop="padded", crop_padding=3)
    seen = {windows[change(image, seed).tobytes()] for seed in range(600)}
    assert len(seen) == 49  # every offset, and nothing else


def test_train_transform_padded_crop_brings_other_sizes_to_the_target_first():
    preprocess = Preprocess(image_size=(24, 16), crop_fraction=0.5, resize_mode="crop")
    change = TrainTransform(AugmentConfig(crop="padded", crop_padding=0, hflip=0.0, erasing=0.0), preprocess)
    image = noise(48, 32)
    whole = Preprocess(image_size=(24, 16), crop_fraction=1.0).apply(image)
    np.testing.assert_array_equal(change(image, 0), whole)


@pytest.mark.parametrize("side", [200, 420])
def test_train_transform_resized_crop_covers_the_asked_area_and_ratio(side):
    # Red holds the row and green the column, so that the corners of the result tell the box.
    rows, columns = np.mgrid[0:side, 0:side] * 200 // side
    image = np.dstack([rows, columns, np.zeros_like(rows)]).astype(np.uint8)
    preprocess = Preprocess(image_size=(100, 100), interpolation="bilinear")
    change = TrainTransform(AugmentConfig(crop="resized", hflip=0.0, crop_min_scale=0.25), preprocess)
    shrunk = change.shrink_for_cache(image)
    assert shrunk.shape == (200, 200, 3)
    areas, ratios = [], []
    for seed in range(300):
        result = change.change(shrunk, seed).astype(float)
        height = (result[-1, :, 0].mean() - result[0, :, 0].mean()) * 100 / 99
        width = (result[:, -1, 1].mean() - result[:, 0, 1].mean()) * 100 / 99
        areas.append(height * width / 200**2)
        ratios.append(width / height)
    assert 0.23 < min(areas) < 0.32
    assert 0.9 < max(areas) < 1.03
    assert 0.72 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.38


def test_train_transform_resized_crop_shrinks_without_aliasing():
    image = np.random.default_rng(0).integers(0, 2, (256, 256, 3), dtype=np.uint8) * 255
    change = TrainTransform(
        AugmentConfig(crop="resized", hflip=0.0, crop_min_scale=1.0), Preprocess(image_size=(32, 32))
    )
    assert change(image, 0).std() < 25  # a mean of 8x8 values; sampling single ones leaves above 60


def test_train_transform_auto_chooses_the_crop_by_size():
    assert transform((64, 64), crop="auto").crop == "padded"
    assert transform((65, 32), crop="auto").crop == "resized"


def test_train_transform_jitter_changes_color_and_keeps_position():
    image = np.full((24, 16, 3), (180, 90, 60), np.uint8)
    results = np.stack([transform(color_jitter=0.4)(image, seed) for seed in range(50)])
    assert np.ptp(results, axis=(1, 2)).max() == 0  # one colour stays one colour
    assert np.ptp(results[:, 0, 0], axis=0).min() > 40
    assert (results[:, 0, 0, 0] > results[:, 0, 0, 1]).all()  # no hue: red stays the strongest


def test_train_transform_erases_with_noise():
    image = np.full((64, 64, 3), 100, np.uint8)
    shares = []
    for seed in range(60):
        result = transform((64, 64), erasing=1.0)(image, seed)
        changed = (result != 100).any(axis=2)
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        box = result[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert changed.sum() > 0.95 * box.shape[0] * box.shape[1]
        shares.append(box.shape[0] * box.shape[1] / 64**2)
        assert box.std() > 50
    assert 0.01 < min(shares) < max(shares) < 0.36


@pytest.mark.parametrize("crop", ["resized", "padded", "none"])
def test_train_transform_gives_greyscale(crop):
    preprocess = Preprocess(image_size=(24, 16), **GREY)
    augment = AugmentConfig(crop=crop, policy="randaugment", color_jitter=0.4, erasing=0.5)
    change = TrainTransform(augment, preprocess)
    results = [change(noise(40, 30), seed) for seed in range(20)]
    assert {(result.shape, result.dtype.name) for result in results} == {((24, 16, 1), "uint8")}
    assert len({result.tobytes() for result in results}) > 15


def test_train_transform_survives_pickling():
    change = transform(crop="resized", hflip=0.5, policy="randaugment", color_jitter=0.3, erasing=0.5)
    image = noise(50, 40)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(change))(image, 9), change(image, 9))


@pytest.mark.parametrize("name", ["randaugment", "autoaugment"])
def test_train_transform_applies_the_policy_after_the_flip_and_before_color_and_erasing(name):
    image = noise(24, 16)
    policy = Policy(AugmentConfig(policy=name), small=True)
    for seed in range(20):
        after = policy(image, derive_seed(seed, "policy"))
        flipped = policy(image[:, ::-1], derive_seed(seed, "policy"))
        np.testing.assert_array_equal(transform(policy=name, hflip=1.0)(image, seed), flipped)
        for rest in ({"color_jitter": 0.4}, {"erasing": 1.0}, {"color_jitter": 0.4, "erasing": 1.0}):
            np.testing.assert_array_equal(transform(policy=name, **rest)(image, seed), transform(**rest)(after, seed))


def test_train_transform_policy_disturbs_no_other_change():
    image, options = noise(60, 50), {"crop": "resized", "hflip": 0.5}
    for seed in range(10):
        cut = transform(**options)(image, seed)
        with_policy = transform(policy="randaugment", **options)(image, seed)
        policy = Policy(AugmentConfig(policy="randaugment"), small=True)
        np.testing.assert_array_equal(with_policy, policy(cut, derive_seed(seed, "policy")))


@pytest.mark.parametrize(("size", "small"), [((64, 64), True), ((65, 32), False)])
def test_train_transform_takes_auto_augment_by_size(size, small):
    image, policy = noise(*size), Policy(AugmentConfig(policy="autoaugment"), small=small)
    for seed in range(20):
        want = policy(image, derive_seed(seed, "policy"))
        np.testing.assert_array_equal(transform(size, policy="autoaugment")(image, seed), want)


@pytest.mark.parametrize("fields", [{}, GREY])
@pytest.mark.parametrize("crop", ["resized", "padded", "none"])
def test_train_transform_changes_what_it_prepared(crop, fields):
    preprocess = Preprocess(image_size=(24, 16), crop_fraction=0.8, **fields)
    augment = AugmentConfig(crop=crop, policy="randaugment", color_jitter=0.4, erasing=0.5)
    change, image = TrainTransform(augment, preprocess), noise(40, 30)
    prepared = change.prepare(image)
    fixed = {
        "resized": preprocess.to_channels(image),
        "padded": Preprocess(image_size=(24, 16), crop_fraction=1.0, **fields).apply(image),
        "none": preprocess.apply(image),
    }
    np.testing.assert_array_equal(prepared, fixed[crop])
    prepared.flags.writeable = False  # as a cache holds it
    for seed in range(10):
        np.testing.assert_array_equal(change.change(prepared, seed), change(image, seed))


@pytest.mark.parametrize(
    ("min_scale", "shape", "want"),
    [
        (0.25, (200, 300), (48, 72)),  # 24 / sqrt(1/4) = 48
        (0.25, (300, 50), (288, 48)),
        (0.25, (48, 100), (48, 100)),
        (0.25, (30, 1000), (30, 1000)),
        (0.08, (170, 340), (85, 170)),  # 24 / sqrt(0.08) = 84.9
        (1.0, (240, 120), (48, 24)),
    ],
)
@pytest.mark.parametrize("fields", [{}, GREY])
def test_train_transform_shrinks_for_a_cache_to_what_the_smallest_crop_needs(min_scale, shape, want, fields):
    preprocess, image = Preprocess(image_size=(16, 24), **fields), noise(*shape)
    change = TrainTransform(AugmentConfig(crop="resized", crop_min_scale=min_scale), preprocess)
    expected = resize(preprocess.to_channels(image), *want, "bicubic")
    shrunk = change.shrink_for_cache(image)
    np.testing.assert_array_equal(shrunk, expected)
    assert change.change(shrunk, 3).shape == (16, 24, preprocess.channels)


@pytest.mark.parametrize("crop", ["padded", "none"])
def test_train_transform_caches_the_network_size_for_other_crops(crop):
    change, image = transform(crop=crop), noise(300, 200)
    np.testing.assert_array_equal(change.shrink_for_cache(image), change.prepare(image))
    assert change.prepare(image).shape == (24, 16, 3)


def mixed(batch, seed=0, **augment):
    torch.manual_seed(seed)
    images = torch.arange(batch, dtype=torch.float32)[:, None, None, None].expand(batch, 3, 8, 6).clone()
    labels = torch.arange(batch) % 4
    return images, labels, *Mixer(AugmentConfig(**augment), num_classes=4)(images, labels)


@pytest.mark.parametrize("augment", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_mixer_labels_weigh_what_the_images_hold(batch, augment):
    for seed in range(8):
        images, labels, out, soft = mixed(batch, seed, **augment)
        assert out.shape == images.shape
        assert soft.dtype == torch.float32
        torch.testing.assert_close(soft.sum(1), torch.ones(batch))
        # Image i holds the value i, its predecessor i - 1: the mean of the mix tells the share of each.
        own = torch.nn.functional.one_hot(labels, 4).float()
        values, before = images[:, 0, 0, 0], images[:, 0, 0, 0].roll(1)
        share = ((out.mean((1, 2, 3)) - before) / (values - before + (batch == 1))).nan_to_num(1.0)
        want = share[:, None] * own + (1 - share[:, None]) * own.roll(1, 0)
        torch.testing.assert_close(soft, want if batch > 1 else own, atol=1e-5, rtol=0)


def test_mixer_takes_mixup_and_cutmix_at_even_odds():
    cut = 0
    for seed in range(300):
        _, _, out, _ = mixed(2, seed, mixup=1.0, cutmix=1.0)
        cut += bool((out == out.round()).all())  # cutmix keeps values, mixup blends them
    assert 120 <= cut <= 180


def test_mixer_draws_from_the_global_generator_alone():
    first, again, other = (mixed(4, seed, mixup=0.8, cutmix=0.8)[2] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_mixer_off_gives_hard_labels_and_an_empty_batch_passes():
    images, labels, out, soft = mixed(5)
    assert torch.equal(out, images)
    assert torch.equal(soft, torch.nn.functional.one_hot(labels, 4).float())
    for augment in ({}, {"mixup": 0.8}, {"cutmix": 0.8}):
        _, _, out, soft = mixed(0, **augment)
        assert (out.shape, soft.shape) == ((0, 3, 8, 6), (0, 4))


@pytest.mark.parametrize("size", [(4, 64), (16, 256), (64, 4), (1, 16), (9, 7)])
def test_erase_fills_one_rectangle_of_the_published_area_or_nothing(size):
    image = np.full((*size, 3), 255, dtype=np.uint8)
    shares = []
    for seed in range(200):
        erased = erase(image, np.random.Generator(np.random.PCG64(seed)))
        rows, columns = np.nonzero((erased != 255).any(axis=2))
        assert (image == 255).all()
        if len(rows):
            # Noise is 255 in all three channels once in 16 million pixels: the bounding box is the rectangle.
            box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
            assert box == len(rows)
            shares.append(box / (size[0] * size[1]))
    assert all(share < 0.4 for share in shares)
    if size == (9, 7):
        assert 0.1 < np.mean(shares) < 0.25
