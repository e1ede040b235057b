import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import v2

from vitlab.config import AugmentConfig
from vitlab.data.policies import Policy


def rand_augment(**augment):
    return Policy(AugmentConfig(policy="randaugment", **augment), small=True)


def noise(channels=3, height=24, width=18):
    return np.random.default_rng(0).integers(20, 230, (height, width, channels), dtype=np.uint8)


def published(picture, strength):
    """The 14 operations at a strength from 0 to 1, written in Pillow; those of two signs twice."""
    width, height = picture.size
    bilinear, grey = Image.Resampling.BILINEAR, (128,) * len(picture.getbands())

    def affine(*coefficients):
        return picture.transform(picture.size, Image.Transform.AFFINE, coefficients, bilinear, fillcolor=grey)

    results = {
        "identity": [picture],
        "autocontrast": [ImageOps.autocontrast(picture)],
        "equalize": [ImageOps.equalize(picture)],
        "posterize": [ImageOps.posterize(picture, round(8 - 4 * strength))],
        "solarize": [ImageOps.solarize(picture, 255 * (1 - strength))],
    }
    signed = (-strength, strength)
    results["rotate"] = [picture.rotate(30 * s, bilinear, fillcolor=grey) for s in signed]
    results["shear x"] = [affine(1, 0.3 * s, 0, 0, 1, 0) for s in signed]
    results["shear y"] = [affine(1, 0, 0, 0.3 * s, 1, 0) for s in signed]
    results["translate x"] = [affine(1, 0, int(150 / 331 * width * s), 0, 1, 0) for s in signed]
    results["translate y"] = [affine(1, 0, 0, 0, 1, int(150 / 331 * height * s)) for s in signed]
    for name in ("Brightness", "Color", "Contrast", "Sharpness"):
        results[name] = [getattr(ImageEnhance, name)(picture).enhance(1 + 0.9 * s) for s in signed]
    return {(name, i): np.array(one) for name, found in results.items() for i, one in enumerate(found)}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [10.0, 9.0, 4.37])
def test_rand_augment_applies_the_published_operations_equally_often(channels, magnitude):
    image = noise(channels)
    known = published(Image.fromarray(image if channels == 3 else image[:, :, 0]), magnitude / 10)
    if channels == 1:
        assert (known.pop(("Color", 0)) == known.pop(("Color", 1))).all()  # nothing, as identity does
    policy = rand_augment(policy_ops=1, policy_magnitude=magnitude)
    counts = dict.fromkeys(known, 0)
    for seed in range(1400):
        result = policy(image, seed)
        assert (result.shape, result.dtype) == (image.shape, np.uint8)
        difference = {name: np.abs(result.reshape(one.shape).astype(int) - one).max() for name, one in known.items()}
        nearest = min(difference, key=difference.__getitem__)
        assert difference[nearest] <= 1
        counts[nearest] += 1
    for (name, _), count in counts.items():
        expected = 100 if (name, 1) not in known else 50
        expected += 100 * (channels == 1 and name == "identity")
        assert abs(count - expected) < 4.5 * expected**0.5, counts


@pytest.mark.parametrize(("num_ops", "expected"), [(1, 12 / 14), (2, (12 / 14) ** 2), (5, (12 / 14) ** 5)])
def test_rand_augment_chains_operations_and_rests_at_strength_0(num_ops, expected):
    """Only autocontrast and equalize have no strength, so all others leave the image."""
    policy, image = rand_augment(policy_ops=num_ops, policy_magnitude=0.0), noise()
    unchanged = sum((policy(image, seed) == image).all() for seed in range(600))
    assert abs(unchanged / 600 - expected) < 0.06


class Recorder:
    """Stands for the operation and notes the strength that is set."""

    def __init__(self):
        self.seen, self.magnitude = [], -1

    def __call__(self, picture):
        self.seen.append(self.magnitude / 100)
        return picture


def strengths(monkeypatch, **augment):
    policy, recorder = rand_augment(policy_ops=2, **augment), Recorder()
    monkeypatch.setattr(policy, "_transform", recorder)
    for seed in range(1000):
        policy(noise(), seed)
    return np.array(recorder.seen).reshape(1000, 2)


def test_rand_augment_draws_the_strength_anew_for_each_operation(monkeypatch):
    seen = strengths(monkeypatch, policy_magnitude=5.0, policy_magnitude_std=0.5)
    assert abs(seen.mean() - 5) < 0.05
    assert abs(seen.std() - 0.5) < 0.04
    assert abs(np.corrcoef(seen.T)[0, 1]) < 0.12


def test_rand_augment_holds_the_strength_between_0_and_10(monkeypatch):
    for mean, bound in ((9.5, 10.0), (0.5, 0.0)):
        seen = strengths(monkeypatch, policy_magnitude=mean, policy_magnitude_std=1.0)
        assert (seen.min(), seen.max())[mean > 5] == bound
        assert 0.25 < (seen == bound).mean() < 0.37  # a normal value lies half a deviation out 31 times of 100


def test_rand_augment_without_deviation_has_one_strength(monkeypatch):
    assert set(strengths(monkeypatch, policy_magnitude=4.37).flat) == {4.37}


def test_rand_augment_shows_the_drawn_strength_in_the_pixels():
    """On the grey of the border only brightness changes anything up to strength 5: by 0.09 for each unit."""
    policy = rand_augment(policy_ops=1, policy_magnitude=3.0, policy_magnitude_std=0.4)
    image = np.full((12, 10, 3), 128, np.uint8)
    values = np.array([policy(image, seed)[0, 0, 0] for seed in range(3000)], dtype=float)
    assert all(np.ptp(policy(image, seed)) == 0 for seed in range(100))
    found = np.abs(values[values != 128] / 128 - 1) / 0.09
    assert 150 < len(found) < 280  # 3000 / 14 = 214
    assert abs(found.mean() - 3) < 0.1
    assert abs(found.std() - 0.4) < 0.08


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_auto_augment_takes_the_policy_of_the_size(small, channels):
    image = noise(channels, 40, 30)
    picture = Image.fromarray(image if channels == 3 else image[:, :, 0])
    policy = Policy(AugmentConfig(policy="autoaugment"), small=small)
    pairs = v2.AutoAugmentPolicy.CIFAR10 if small else v2.AutoAugmentPolicy.IMAGENET
    peer = v2.AutoAugment(pairs, interpolation=v2.InterpolationMode.BILINEAR, fill=128)
    results = [policy(image, seed) for seed in range(100)]
    for seed, result in enumerate(results):
        torch.manual_seed(seed)
        np.testing.assert_array_equal(result, np.array(peer(picture)).reshape(image.shape))
    assert len({result.tobytes() for result in results}) > 20


@pytest.mark.parametrize("name", ["randaugment", "autoaugment"])
def test_policy_is_a_function_of_image_and_seed_and_leaves_global_streams_alone(name, monkeypatch):
    def fail(seed):
        raise AssertionError("the GPU was seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    image = noise()
    image.flags.writeable = False
    policy = Policy(AugmentConfig(policy=name, policy_magnitude_std=0.5), small=True)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = [policy(image, seed) for seed in range(20)]
    again = [pickle.loads(pickle.dumps(policy))(image, seed) for seed in reversed(range(20))][::-1]
    np.testing.assert_array_equal(first, again)
    assert all(result.flags.writeable for result in first)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
