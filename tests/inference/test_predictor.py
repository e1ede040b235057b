import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data.datasets import load_split
from vitlab.data.images import ImageError, read_image
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.engine.evaluator import evaluate
from vitlab.engine.objectives import Classification
from vitlab.errors import InputError
from vitlab.inference.predictor import Predictor
from vitlab.models.files import load_model, save_model


def record_inputs(network):
    """Collect what a network is given, image by image."""
    inputs = []
    network.register_forward_pre_hook(lambda module, args: inputs.extend(args[0].clone()))
    return inputs


def test_predictor_gives_the_softmax_of_the_networks_logits(model_file):
    image = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    model = load_model(model_file)
    pixels = model.preprocess.apply(image).astype(np.float64) / 255
    inputs = ((pixels - (0.5, 0.4, 0.3)) / (0.2, 0.3, 0.4)).transpose(2, 0, 1)[None].astype(np.float32)
    with torch.no_grad():
        logits = model.network(torch.from_numpy(inputs))[0].double().numpy()
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    probabilities = Predictor(model_file, device="cpu").predict([image])
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, expected[None], atol=1e-6)
    assert probabilities.max() > 0.3  # not a uniform row, which would pass anything


def test_predictor_divides_the_logits_by_the_files_temperature(model_file, odd_images, tmp_path):
    model, paths = load_model(model_file), sorted(odd_images.rglob("*.png"))
    described = {"classes": model.classes, "preprocess": model.preprocess, "metrics": {}, "data": {}}
    save_model(tmp_path / "warm.safetensors", model.network, **described, temperature=2.5)
    plain, warm = (Predictor(path, device="cpu").predict(paths) for path in (model_file, tmp_path / "warm.safetensors"))
    powers = plain.astype(np.float64) ** (1 / 2.5)  # softmax(z / T) is softmax(z) to the power of 1 / T, scaled to 1
    np.testing.assert_allclose(warm, powers / powers.sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(warm.argmax(axis=1), plain.argmax(axis=1))
    assert (warm.max(axis=1) < plain.max(axis=1)).all()


def test_predictor_numbers_do_not_depend_on_the_batch_size(model_file, odd_images):
    paths = sorted(odd_images.rglob("*.png"))
    whole = Predictor(model_file, batch_size=64).predict(paths)
    for batch_size in (1, 7):
        np.testing.assert_allclose(Predictor(model_file, batch_size=batch_size).predict(paths), whole, atol=1e-5)
    for row, path in zip(whole, paths, strict=True):
        np.testing.assert_allclose(Predictor(model_file).predict([path])[0], row, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_predictor_sees_the_tensors_of_the_evaluation(model_file, odd_images, batch_size):
    predictor = Predictor(model_file, batch_size=batch_size)
    model = load_model(model_file)
    split, _ = load_split(odd_images, "all", classes=model.classes, val_fraction=0.1, seed=0)
    evaluated = record_inputs(model.network)
    loader = Loader(split, EvalTransform(model.preprocess), batch_size=11)
    scores = evaluate(
        Classification(model.network), loader.epoch(0), classes=model.classes, preprocess=model.preprocess
    )
    predicted = record_inputs(predictor.network)
    probabilities = predictor.predict(split.paths)

    assert len(predicted) == len(evaluated) == 30
    assert all(torch.equal(a, b) for a, b in zip(predicted, evaluated, strict=True))
    model.network.eval()
    with torch.no_grad():
        expected = model.network(torch.stack(evaluated)).softmax(dim=1).numpy()
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    correct = int((probabilities.argmax(axis=1) == split.labels).sum())
    assert correct == round(scores.top1 * scores.count)


def test_predictor_takes_paths_arrays_and_pictures_alike(model_file, odd_images):
    path = max(odd_images.rglob("*.png"), key=lambda path: path.stat().st_size)
    with Image.open(path) as picture:
        rows = Predictor(model_file).predict([path, str(path), read_image(path), picture])
    assert (rows == rows[0]).all()


def test_predictor_turns_pictures_upright(model_file, tmp_path):
    pixels = np.random.default_rng(3).integers(0, 256, (20, 36, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.png"
    Image.fromarray(pixels).save(path, exif=exif)
    with Image.open(path) as picture:
        rows = Predictor(model_file).predict([path, picture, np.rot90(pixels, -1)])
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-7)
    np.testing.assert_allclose(rows[2], rows[0], atol=1e-7)


def test_predictor_of_no_images_gives_no_rows(model_file):
    predictor = Predictor(model_file)
    assert predictor.predict([]).shape == (0, 7)
    assert predictor.predict_batch(torch.zeros(0, 3, 12, 20, dtype=torch.uint8)).shape == (0, 7)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 5), np.uint8), r"image 1 is uint8 \(4, 5\): give a path or RGB pixels as a uint8 array"),
        (np.zeros((4, 5, 4), np.uint8), r"image 1 is uint8 \(4, 5, 4\)"),
        (np.zeros((3, 4, 5), np.uint8), r"image 1 is uint8 \(3, 4, 5\)"),
        (np.zeros((4, 5, 3), np.float32), r"image 1 is float32 \(4, 5, 3\)"),
        (np.zeros((0, 5, 3), np.uint8), r"uint8 \(0, 5, 3\)"),
        (17, "image 1 is int: give a path"),
        (Image.new("I;16", (4, 5)), r"image 1 has mode I;16: give its path"),
    ],
)
def test_predictor_refuses_what_is_no_rgb_image(model_file, image, message):
    with pytest.raises(InputError, match=message):
        Predictor(model_file).predict([np.zeros((4, 5, 3), np.uint8), image])


def test_predictor_refuses_one_image_in_place_of_a_list(model_file, odd_images):
    with pytest.raises(InputError, match=r"images is one str: give a list, such as \[image\]"):
        Predictor(model_file).predict(str(odd_images))


def test_predictor_names_a_file_it_cannot_read(model_file, tmp_path):
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ImageError, match=r"empty\.jpg: the file is empty"):
        Predictor(model_file).predict([tmp_path / "empty.jpg"])


def test_predictor_refuses_a_batch_size_below_one(model_file):
    with pytest.raises(InputError, match="batch_size is 0: give 1 or more"):
        Predictor(model_file, batch_size=0)


def test_predictor_takes_a_run_folder_for_its_best_file(model_file, tmp_path, odd_images):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(model_file, run / "best.safetensors")
    (run / "last.safetensors").write_bytes(b"not this one")
    paths = sorted(odd_images.rglob("*.png"))[:3]
    np.testing.assert_array_equal(Predictor(run).predict(paths), Predictor(model_file).predict(paths))


def test_predictor_leaves_torchs_state_alone(model_file, odd_images):
    paths = sorted(odd_images.rglob("*.png"))[:3]

    def state():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_rng_state().tolist(),
        )

    before = state()
    Predictor(model_file).predict(paths)
    assert state() == before


def test_predictor_computes_in_float32_inside_a_callers_autocast(model_file, odd_images):
    predictor = Predictor(model_file, device="cpu")
    paths = sorted(odd_images.rglob("*.png"))
    plain = predictor.predict(paths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(predictor.predict(paths), plain)


def test_predictor_imports_nothing_that_only_training_needs(model_file, odd_images):
    code = f"""
import sys
from pathlib import Path
from vitlab.inference.predictor import Predictor
from vitlab.inference.folder import predict_files
result = predict_files(Predictor({str(model_file)!r}), [{str(odd_images)!r}])
assert result.count == 30
heavy = {{"albumentations", "timm", "matplotlib", "sklearn", "tensorboard", "transformers", "pyarrow"}}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_flip_gives_the_mean_of_an_image_and_its_mirror_image(model_file):
    images = torch.randint(0, 256, (3, 3, 12, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain, mirrored = (Predictor(model_file).predict_batch(batch) for batch in (images, images.flip(-1)))
    flipped = Predictor(model_file, tta="flip").predict_batch(images)
    assert np.abs(plain - mirrored).max() > 0.01
    np.testing.assert_allclose(flipped, (plain + mirrored) / 2, atol=1e-6)


@pytest.mark.parametrize("tta", ["none", "flip"])
def test_embeddings_come_with_the_probabilities_of_predict(model_file, tta):
    predictor = Predictor(model_file, tta=tta)
    images = torch.randint(0, 256, (3, 3, 12, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    probabilities, embeddings = predictor.embed_batch(images)
    np.testing.assert_array_equal(probabilities, predictor.predict_batch(images))
    views = [images, images.flip(-1)] if tta == "flip" else [images]
    with torch.inference_mode():
        inputs = [predictor.preprocess.normalize(view) for view in views]
        tokens = [predictor.network.forward_features(view)[:, 0] for view in inputs]
        expected = torch.stack([predictor.network.fc_norm(token) for token in tokens]).mean(dim=0)
    np.testing.assert_allclose(embeddings, expected.numpy(), atol=1e-6)
