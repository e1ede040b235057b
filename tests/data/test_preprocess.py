import dataclasses
import json

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.data.resize import crop_center, resize, resize_center
from vitlab.errors import InputError

GREY = {"channels": 1, "mean": (0.5,), "std": (0.25,)}
TIMM_MODE = {"crop": "center", "squash": "squash", "pad": "border"}


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def timm_pixels(preprocess, image):
    """Evaluate with timm's transform; uint8 (h, w, C)."""
    transform = create_transform(
        (preprocess.channels, *preprocess.image_size),
        interpolation=preprocess.interpolation,
        mean=preprocess.mean,
        std=preprocess.std,
        crop_pct=preprocess.crop_fraction if preprocess.resize_mode == "crop" else 1.0,
        crop_mode=TIMM_MODE[preprocess.resize_mode],
        normalize=False,
    )
    picture = Image.fromarray(image)
    return transform(picture if preprocess.channels == 3 else picture.convert("L")).permute(1, 2, 0).numpy()


def assert_pixels_of_timm(preprocess, images):
    values = wrong = largest = 0
    for image in images:
        ours, theirs = preprocess.apply(image), timm_pixels(preprocess, image)
        assert ours.shape == theirs.shape == (*preprocess.image_size, preprocess.channels)
        difference = np.abs(ours.astype(int) - theirs)
        values, wrong = values + difference.size, wrong + (difference > 1).sum()
        largest = max(largest, difference.max())
    if preprocess.interpolation == "bilinear":
        assert largest <= 1
    else:
        assert largest <= 2
        assert wrong / values < 1e-5


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("size", [(224, 224), (192, 160), (96, 256)])
def test_preprocess_gives_timms_pixels_of_photographs(photographs, size, mode, interpolation):
    preprocess = Preprocess(image_size=size, resize_mode=mode, interpolation=interpolation, crop_fraction=0.875)
    assert_pixels_of_timm(preprocess, photographs[::2])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("size", [(32, 32), (224, 224), (64, 48)])
def test_preprocess_gives_timms_pixels_of_small_images(cifar_jpegs, size, mode, interpolation):
    images = [np.array(Image.open(path)) for path in sorted(cifar_jpegs.glob("*/000*.jpg"))[:24]]
    assert_pixels_of_timm(Preprocess(image_size=size, resize_mode=mode, interpolation=interpolation), images)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("shape", [(60, 300), (300, 60), (40, 400), (400, 40), (31, 500), (1, 1), (3, 200), (97, 101)])
def test_preprocess_gives_timms_pixels_of_odd_shapes(shape, mode, interpolation):
    if int(PIL.__version__.split(".")[0]) < 13 and shape[0] > shape[1]:
        pytest.skip("Pillow before 13 resizes tall images in the other order")
    soft = Image.fromarray(noise(-(-shape[0] // 12), -(-shape[1] // 12))).resize(shape[::-1], Image.Resampling.BILINEAR)
    assert_pixels_of_timm(
        Preprocess(image_size=(64, 64), resize_mode=mode, interpolation=interpolation), [np.array(soft)]
    )


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
def test_preprocess_gives_timms_pixels_in_greyscale(photographs, mode):
    assert_pixels_of_timm(Preprocess(image_size=(96, 128), resize_mode=mode, **GREY), photographs[:3])


@pytest.mark.parametrize("shape", [(400, 200), (401, 200), (402, 200), (500, 130), (130, 500)])
@pytest.mark.parametrize("target", [(200, 100), (199, 100), (201, 101), (128, 128)])
def test_resize_changes_the_order_of_axes_where_pillow_13_does(shape, target):
    if int(PIL.__version__.split(".")[0]) < 13:
        pytest.skip("Pillow before 13 always takes the width first")
    image = noise(*shape)
    pillow = np.asarray(Image.fromarray(image).resize(target[::-1], Image.Resampling.BICUBIC)).astype(int)
    difference = np.abs(resize(image, *target, "bicubic") - pillow)
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.02  # in the other order at least a tenth


@pytest.mark.parametrize("shape", [(300, 60), (60, 300), (32, 32), (200, 100)])
def test_resize_equals_pillow_where_an_image_grows_or_is_small(shape):
    if int(PIL.__version__.split(".")[0]) < 13 and shape[0] > shape[1]:
        pytest.skip("Pillow before 13 resizes tall images in the other order")
    image = noise(*shape)
    pillow = np.asarray(Image.fromarray(image).resize((160, 256), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(resize(image, 256, 160, "bicubic"), pillow)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(512, 384), (384, 512), (701, 250), (250, 701), (257, 255), (130, 2000), (100, 90)])
@pytest.mark.parametrize("channels", [3, 1])
def test_resize_center_is_the_centre_of_the_whole_to_the_bit(shape, interpolation, channels):
    image = noise(*shape)[:, :, :channels]
    for resized in ((249, 249), (shape[0] * 199 // 211, shape[1] * 199 // 211), (shape[0] // 2, shape[1] - 7), shape):
        height, width = max(1, resized[0] * 2 // 3), max(1, resized[1] * 5 // 6)
        whole = crop_center(resize(image, *resized, interpolation), height, width)
        np.testing.assert_array_equal(resize_center(image, resized, height, width, interpolation), whole)


def test_preprocess_apply_does_not_depend_on_threads_or_change_its_input():
    image = noise(301, 223)
    before = image.copy()
    preprocess = Preprocess(image_size=(128, 96))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(preprocess.apply(image).tobytes())
    torch.set_num_threads(1)
    assert len(set(results)) == 1
    np.testing.assert_array_equal(image, before)


def test_preprocess_apply_reads_read_only_and_strided_images():
    image = noise(50, 40)
    image.setflags(write=False)
    preprocess = Preprocess(image_size=(24, 24))
    view = np.ascontiguousarray(image.transpose(1, 0, 2)).transpose(1, 0, 2)
    np.testing.assert_array_equal(preprocess.apply(image), preprocess.apply(view))


def test_preprocess_pad_fills_with_the_mean_color():
    preprocess = Preprocess(image_size=(8, 8), resize_mode="pad", mean=(0.2, 0.4, 0.485))
    padded = preprocess.apply(np.zeros((4, 8, 3), np.uint8))
    assert padded[[0, 1, 6, 7]].reshape(-1, 3).tolist() == [[51, 102, 124]] * 32
    assert padded[2:6].max() == 0


def test_preprocess_pad_keeps_a_row_of_the_thinnest_image():
    padded = Preprocess(image_size=(8, 8), resize_mode="pad").apply(np.zeros((1, 400, 3), np.uint8))
    assert (padded == 0).all(axis=(1, 2)).sum() == 1


def test_preprocess_refuses_a_ribbon_that_would_fill_memory():
    with pytest.raises(InputError, match="too long to be resized"):
        Preprocess(image_size=(224, 224)).apply(np.zeros((1, 20000, 3), np.uint8))
    squash = Preprocess(image_size=(224, 224), resize_mode="squash")
    assert squash.apply(np.zeros((1, 20000, 3), np.uint8)).shape == (224, 224, 3)


def test_preprocess_normalize_matches_hand_values_and_keeps_memory_format():
    preprocess = Preprocess(image_size=(1, 2), mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    images = torch.tensor([[[[0, 255]], [[51, 102]], [[0, 204]]]], dtype=torch.uint8)
    want = torch.tensor([[[[-1.0, 1.0]], [[-0.2, 0.6]], [[0.0, 0.8]]]])
    torch.testing.assert_close(preprocess.normalize(images), want, rtol=0, atol=1e-6)
    batch = torch.zeros((2, 3, 5, 4), dtype=torch.uint8).to(memory_format=torch.channels_last)
    assert preprocess.normalize(batch).is_contiguous(memory_format=torch.channels_last)


def test_preprocess_normalize_equals_timms_tensor(photographs):
    preprocess = Preprocess(image_size=(224, 224), interpolation="bicubic")
    picture = Image.fromarray(photographs[0])
    theirs = create_transform((3, 224, 224), interpolation="bicubic", crop_pct=0.9)(picture)
    pixels = torch.from_numpy(timm_pixels(preprocess, photographs[0])).permute(2, 0, 1)[None]
    torch.testing.assert_close(preprocess.normalize(pixels)[0], theirs, rtol=0, atol=1e-6)


def test_preprocess_refuses_images_of_other_channels():
    with pytest.raises(InputError, match=r"uint8 \(4, 4, 4\): give RGB"):
        Preprocess(image_size=(4, 4)).apply(np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(InputError, match="give RGB as uint8"):
        Preprocess(image_size=(4, 4)).apply(np.zeros((4, 4, 3), np.float32))
    with pytest.raises(InputError, match=r"give uint8 \(batch, 1, height, width\)"):
        Preprocess(image_size=(4, 4), **GREY).normalize(torch.zeros((2, 3, 4, 4), dtype=torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 4, "mean": (0.5,) * 4, "std": (0.5,) * 4}, "channels is 4"),
        ({"channels": 1}, "mean has 3 values for channels 1"),
        ({"std": (0.1, 0.2)}, "std has 2 values for channels 3"),
        ({"std": (0.1, 0.0, 0.1)}, "above 0"),
        ({"mean": (0.1, float("nan"), 0.1)}, "give a number for each channel"),
        ({"image_size": 224}, "image_size is 224"),
        ({"image_size": (224, 0)}, "image_size is"),
        ({"image_size": [224, 224]}, "image_size is"),
        ({"resize_mode": "fit"}, "choose one of crop, squash, pad"),
        ({"interpolation": "nearest"}, "choose one of bilinear, bicubic"),
        ({"crop_fraction": 0}, "crop_fraction is 0"),
        ({"crop_fraction": None}, "crop_fraction is None"),
        ({"crop_fraction": "0.9"}, "crop_fraction is '0.9'"),
        ({"crop_fraction": 1.5}, "crop_fraction is 1.5"),
    ],
)
def test_preprocess_checks_its_fields(change, message):
    with pytest.raises(InputError, match=message):
        Preprocess(**{"image_size": (8, 8)} | change)


def test_preprocess_survives_json():
    preprocess = Preprocess(image_size=(96, 128), resize_mode="pad", interpolation="bilinear", **GREY)
    record = json.loads(json.dumps(preprocess.to_dict()))
    assert Preprocess.from_dict(record) == preprocess
    assert set(record) == {field.name for field in dataclasses.fields(Preprocess)}


def test_preprocess_from_dict_names_missing_and_unknown_keys():
    record = Preprocess(image_size=(8, 8)).to_dict()
    record["crop_pct"] = record.pop("crop_fraction")
    with pytest.raises(InputError, match=r"lacks \['crop_fraction'\] and has the unknown \['crop_pct'\]"):
        Preprocess.from_dict(record)


def test_eval_transform_is_the_record_whatever_the_seed():
    image, preprocess = noise(20, 30), Preprocess(image_size=(16, 12))
    transform = EvalTransform(preprocess)
    np.testing.assert_array_equal(transform(image, 1), preprocess.apply(image))
    np.testing.assert_array_equal(transform(image, 2), preprocess.apply(image))
