"""Pictures that are one: hashes as linear maps, candidates as the definition has them, confirmation by detail."""

import cv2
import numpy as np
import pytest

from vitlab.inference import duplicates
from vitlab.inference.duplicates import MIRRORED, PARTS, WHOLE, Groups, View, find_matches, is_same, thumbnail


def photograph(seed, height=150, width=120):
    """Give a smooth picture with fine texture, uint8 (height, width, 3)."""
    generator = np.random.default_rng(seed)
    coarse = cv2.resize(
        generator.integers(0, 256, (7, 6, 3), dtype=np.uint8), (width, height), interpolation=cv2.INTER_CUBIC
    )
    fine = cv2.resize(generator.integers(0, 256, (height // 3, width // 3, 3), dtype=np.uint8), (width, height))
    return cv2.addWeighted(coarse, 0.7, fine, 0.3, 0)


def test_hashes_equal_the_cosine_transform():
    small = thumbnail(photograph(0))
    expected = cv2.dct(small.astype(np.float32))[:8, :8].ravel()[1:]
    # Means over pixels in place of samples at their middles shrink each wave by a known factor.
    waves = np.sinc(np.arange(8) / 64)
    expected = expected * np.outer(waves, waves).ravel()[1:]
    np.testing.assert_allclose(WHOLE.hashes(small[None])[0], expected / np.linalg.norm(expected), atol=1e-5)


def test_hashes_of_a_mirrored_picture_are_those_of_its_mirror():
    small = thumbnail(photograph(1))
    np.testing.assert_allclose(MIRRORED.hashes(small[None]), WHOLE.hashes(small[None, :, ::-1]), atol=1e-6)


def test_hashes_of_a_part_are_near_those_of_the_cut():
    image = photograph(2, 200, 320)
    view = View("crop", top=0.25, left=0.125, size=0.5)
    cut = view.cut(image)
    np.testing.assert_array_equal(cut, image[50:150, 40:200])
    likeness = float((view.hashes(thumbnail(image)[None]) @ WHOLE.hashes(thumbnail(cut)[None]).T)[0, 0])
    assert likeness > 0.99


def test_is_same_knows_a_picture_again_and_no_other():
    image, other = photograph(3), photograph(4)
    small = cv2.resize(image, (70, 90), interpolation=cv2.INTER_AREA)
    assert is_same(image, small, WHOLE)
    assert is_same(image, small[:, ::-1], MIRRORED)
    assert not is_same(image, small[:, ::-1], WHOLE)
    assert not is_same(image, other, WHOLE)
    assert not is_same(image, image[:, :, ::-1], WHOLE)  # other colours


def test_is_same_wants_detail_and_not_shape_alone():
    image = photograph(5)
    background = cv2.resize(cv2.resize(image, (6, 7), interpolation=cv2.INTER_AREA), (120, 150))
    textures = (
        cv2.resize(np.random.default_rng(seed).integers(0, 60, (50, 40, 3), dtype=np.uint8), (120, 150))
        for seed in (1, 2)
    )
    first, second = (cv2.addWeighted(background, 1.0, texture, 1.0, 0) for texture in textures)
    likeness = WHOLE.hashes(thumbnail(first)[None]) @ WHOLE.hashes(thumbnail(second)[None]).T
    assert likeness[0, 0] > 0.95  # a candidate
    assert not is_same(first, second, WHOLE)


def test_find_matches_joins_each_group_once_and_reports_the_view(monkeypatch):
    images = [photograph(seed) for seed in range(10, 22)]
    crop = images[4][8:140, 10:112]
    images += [cv2.resize(images[0], (80, 100)), cv2.resize(images[0], (100, 60)), images[2][:, ::-1], crop]
    images += [np.full((50, 50, 3), 90, np.uint8)] * 2  # without contrast
    thumbnails = np.stack([thumbnail(np.ascontiguousarray(image)) for image in images])
    sizes = np.array([min(image.shape[:2]) for image in images])
    steps = []
    for products in (2**23, 40):  # all in one block, and two rows in a block
        monkeypatch.setattr(duplicates, "_PRODUCTS", products)
        matches = find_matches(
            thumbnails, sizes, images.__getitem__, threads=2, on_progress=lambda done, total: steps.append(done)
        )
        groups = Groups(len(images))
        for match in matches:
            groups.join(match.first, match.second)
        members = {}
        for image in range(len(images)):
            members.setdefault(groups.root(image), []).append(image)
        assert [group for group in members.values() if len(group) > 1] == [[0, 12, 13], [2, 14], [4, 15]]
        assert len(matches) == 4
        assert sorted(match.view.kind for match in matches) == ["crop", "mirrored", "near", "near"]
    assert steps


@pytest.mark.parametrize("count", [0, 1])
def test_find_matches_of_nothing_is_nothing(count):
    thumbnails = np.stack([thumbnail(photograph(1))] * 1)[:count]
    assert find_matches(thumbnails, np.full(count, 99), lambda _: None, threads=1, on_progress=lambda *_: None) == []


def test_parts_lie_within_the_picture():
    assert len(PARTS) == 75
    assert all(0 <= part.top <= 1 - part.size + 1e-9 and 0 <= part.left <= 1 - part.size + 1e-9 for part in PARTS)
