import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from vitlab.config import AugmentConfig
from vitlab.data.augment import TrainTransform
from vitlab.data.loader import Loader
from vitlab.data.preprocess import Preprocess
from vitlab.data.sampling import KeySampler, draw_balanced
from vitlab.data.splits import ArraySplit
from vitlab.errors import InputError
from vitlab.seeds import derive_seed

UNEVEN = np.array([0, 1, 0, 2, 0, 1, 0, 0, 1, 0])
MEMBERS = [0, 2, 4, 6, 7, 9], [1, 5, 8], [3]
"""Ten images of three classes."""


def batches(labels=UNEVEN, epoch=0, start_batch=0, batch_size=4, seed=5, **options):
    sampler = KeySampler(labels, batch_size, seed, **{"shuffle": True} | options)
    sampler.epoch, sampler.start_batch = epoch, start_batch
    return list(sampler)


def keys(*args, **options):
    return list(itertools.chain.from_iterable(batches(*args, **options)))


def permutation(count, epoch, seed=5):
    return np.random.Generator(np.random.PCG64(derive_seed(seed, "order", epoch))).permutation(count).tolist()


def test_key_sampler_keeps_or_shuffles_the_order():
    assert keys(shuffle=False, epoch=3) == [(3, index, 0) for index in range(10)]
    assert keys(epoch=3) == [(3, index, 0) for index in permutation(10, 3)]
    assert [len(batch) for batch in batches()] == [4, 4, 2]


def test_key_sampler_repeats_a_part_of_the_images():
    a, b, c, d = permutation(10, 2)[:4]
    # In batches of 4 of a a a b b b c c c d, first views go first.
    want = [[(a, 0), (b, 0), (a, 1), (a, 2)], [(c, 0), (b, 1), (c, 1), (b, 2)], [(d, 0), (c, 2)]]
    assert batches(epoch=2, repeats=3) == [[(2, *view) for view in batch] for batch in want]


def test_key_sampler_repeats_put_no_image_beside_itself():
    """Mixup and cutmix mix each image with its predecessor in the batch."""
    for batch in batches(np.zeros(48, int), batch_size=12, repeats=3):
        indices = [index for _, index, _ in batch]
        assert Counter(indices) == dict.fromkeys(indices, 3)
        assert all(index != before for index, before in zip(indices, np.roll(indices, 1), strict=True))
        assert len(set(batch)) == 12


def test_key_sampler_repeats_show_other_images_in_other_epochs():
    shown = [{index for _, index, _ in keys(np.zeros(60, int), epoch=epoch, repeats=3)} for epoch in range(12)]
    assert {len(indices) for indices in shown} == {20}
    assert len(set().union(*shown)) > 55  # (2/3)^12: one in 130 was never shown


def test_key_sampler_repeats_of_more_than_all_images():
    assert keys(np.zeros(2, int), repeats=3) == [(0, permutation(2, 0)[0], repeat) for repeat in range(2)]


def test_key_sampler_balanced_draws_each_class_equally_often():
    totals = Counter()
    for epoch in range(6):
        drawn = [index for _, index, _ in keys(epoch=epoch, balanced=True)]
        per_class = np.bincount(UNEVEN[drawn], minlength=3).tolist()
        assert sorted(per_class) == [3, 3, 4]
        assert per_class[epoch % 3] == 4  # the odd one goes round
        assert drawn.count(3) == per_class[2]  # the only image of its class
        assert set(Counter(index for index in drawn if UNEVEN[index] == 0).values()) == {1}
        ones = Counter(index for index in drawn if UNEVEN[index] == 1)
        assert sorted(ones.values()) == ([1, 1, 2] if epoch % 3 == 1 else [1, 1, 1])
        totals.update(drawn)
    # 60 draws, 20 of each class: 6 images 3 or 4 times, 3 images 6 or 7 times, one image 20 times.
    counts = [sorted(totals[index] for index in members) for members in MEMBERS]
    assert counts == [[3, 3, 3, 3, 4, 4], [6, 7, 7], [20]]


def test_key_sampler_balanced_sees_all_of_a_class_before_any_again():
    totals = np.zeros(10, int)
    for epoch in range(30):
        np.add.at(totals, [index for _, index, _ in keys(epoch=epoch, balanced=True)], 1)
        assert all(np.ptp(totals[members]) <= 1 for members in MEMBERS)


def test_key_sampler_balanced_counts_the_draws_of_an_image():
    for epoch in range(4):
        drawn = keys(epoch=epoch, balanced=True)
        assert len(set(drawn)) == 10
        only = sorted(repeat for _, index, repeat in drawn if index == 3)
        assert only == list(range(len(only)))
        assert {repeat for _, index, repeat in drawn if UNEVEN[index] == 0} == {0}


def test_key_sampler_balanced_mixes_the_classes_anew_each_epoch():
    labels = np.arange(60) % 2
    orders = [tuple(labels[index] for _, index, _ in keys(labels, epoch=epoch, balanced=True)) for epoch in range(8)]
    assert len(set(orders)) == 8
    assert all(sum(order) == 30 for order in orders)
    assert all(order[:30] != order[30:] for order in orders)


def test_key_sampler_balanced_repeats_each_draw():
    """Ten views of two to an image: five draws, of which the classes get two, two and one in turn."""
    for epoch in range(6):
        drawn = keys(epoch=epoch, balanced=True, repeats=2)
        assert len(set(drawn)) == 10
        per_class = np.bincount([UNEVEN[index] for _, index, _ in drawn], minlength=3)
        assert sorted(per_class) == [2, 4, 4]
        assert per_class[(5 * epoch + 2) % 3] == 2
        for index, count in Counter(index for _, index, _ in drawn).items():
            assert sorted(repeat for _, i, repeat in drawn if i == index) == list(range(count))
            assert count % 2 == 0


@pytest.mark.parametrize("options", [{}, {"repeats": 3}, {"balanced": True}, {"balanced": True, "repeats": 2}])
def test_key_sampler_is_a_function_of_seed_and_epoch(options):
    whole = batches(epoch=7, **options)
    assert [len(batch) for batch in whole] == [4, 4, 2]
    for start in range(4):
        assert batches(epoch=7, start_batch=start, **options) == whole[start:]
    sampler = KeySampler(UNEVEN, 4, 5, shuffle=True, **options)
    for epoch in (0, 7):  # what came before changes nothing
        sampler.epoch = epoch
        got = list(sampler)
    assert got == whole
    assert batches(epoch=8, **options) != whole
    assert batches(epoch=7, seed=6, **options) != whole
    assert {type(number) for batch in whole for key in batch for number in key} == {int}


def test_draw_balanced_is_one_sequence_whatever_the_stretch():
    whole, _ = draw_balanced(UNEVEN, 5, first=0, count=40)
    assert UNEVEN[whole].tolist() == [number % 3 for number in range(40)]
    for label, members in enumerate(MEMBERS):
        own, size = whole[label::3], len(members)
        assert sorted(own[:size]) == members
        assert (own[size:] == own[:-size]).all()
    for first, count in ((0, 7), (5, 11), (13, 20)):
        indices, draws = draw_balanced(UNEVEN, 5, first=first, count=count)
        assert indices.tolist() == whole[first : first + count].tolist()
        assert draws.tolist() == [indices[:at].tolist().count(index) for at, index in enumerate(indices)]


def test_draw_balanced_orders_a_class_by_seed():
    labels = np.zeros(50, int)
    first, again, other = (draw_balanced(labels, seed, first=0, count=50)[0].tolist() for seed in (1, 1, 2))
    assert first == again
    assert len({tuple(first), tuple(other), tuple(range(50))}) == 3


def test_draw_balanced_leaves_out_classes_without_images():
    indices, draws = draw_balanced(np.array([4, 1, 4]), 0, first=0, count=6)
    assert np.array([4, 1, 4])[indices].tolist() == [1, 4] * 3
    assert draws.tolist() == [0, 0, 1, 0, 2, 1]


def loader(labels, batch_size=6, **options):
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 20, 14, 3), dtype=np.uint8)
    split = ArraySplit(name="train", labels=np.array(labels), paths=["p"] * len(labels), images=images)
    augment = AugmentConfig(crop="resized", policy="randaugment", color_jitter=0.3)
    transform = TrainTransform(augment, Preprocess(image_size=(16, 12)))
    return Loader(split, transform, batch_size=batch_size, seed=5, **options)


def test_loader_repeats_images_with_an_augmentation_each():
    repeated = loader([0] * 23, shuffle=True, repeats=2)
    batches = list(repeated.epoch(1))
    assert (len(repeated), [len(batch.labels) for batch in batches]) == (4, [6, 6, 6, 5])
    shown = permutation(23, 1)
    for number, batch in enumerate(batches[:3]):
        assert batch.indices.tolist() == 2 * shown[3 * number : 3 * number + 3]
        assert len({image.numpy().tobytes() for image in batch.images}) == 6
    tail = list(repeated.epoch(1, start_batch=2))
    assert all(torch.equal(one.images, other.images) for one, other in zip(tail, batches[2:], strict=True))


def test_loader_balances_classes_with_an_augmentation_for_each_draw():
    balanced = loader([0] * 20 + [1] * 3 + [2], shuffle=True, balanced=True)
    batches = list(balanced.epoch(0))
    assert len(balanced) == len(batches) == 4
    assert torch.cat([batch.labels for batch in batches]).bincount().tolist() == [8, 8, 8]
    assert len({image.numpy().tobytes() for batch in batches for image in batch.images}) == 24


@pytest.mark.parametrize("options", [{"repeats": 2}, {"balanced": True}])
def test_loader_repeats_and_balances_only_what_it_shuffles(options):
    with pytest.raises(InputError, match="give shuffle=True"):
        loader([0, 1], **options)
