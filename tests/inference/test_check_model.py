"""What a model says of its data: doubted labels, outliers, and what it was trained on."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data.datasets import fingerprint, load_dataset, load_parts
from vitlab.errors import InputError
from vitlab.inference.check import check_data
from vitlab.inference.check_model import doubtful, far_out, too_weak
from vitlab.models.files import load_model, save_model


def test_doubtful_follows_confident_learning_by_hand():
    probabilities = np.array(
        [[0.9, 0.1, 0.0], [0.7, 0.2, 0.1], [0.2, 0.8, 0.0], [0.1, 0.8, 0.1], [0.3, 0.4, 0.3], [0.5, 0.4, 0.1]],
        dtype=np.float32,
    )
    labels = np.array([0, 0, 0, 1, 1, 1])
    # Thresholds: class 0 (.9 + .7 + .2) / 3 = .6, class 1 (.8 + .4 + .4) / 3 = .533, class 2 has no image.
    assert doubtful(probabilities, labels).tolist() == [-1, -1, 1, -1, -1, -1]
    labels = np.array([0, 1, 0, 1, 1, 1])  # thresholds .55 and (.2 + .8 + .4 + .4) / 4 = .45
    assert doubtful(probabilities, labels).tolist() == [-1, 0, 1, -1, -1, -1]


def test_doubtful_agrees_with_the_definition_at_random():
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.full(4, 0.5), 200).astype(np.float32)
    labels = generator.integers(0, 4, 200)
    thresholds = [probabilities[labels == k, k].mean() for k in range(4)]
    expected = []
    for row, label in zip(probabilities, labels, strict=True):
        passed = {k: row[k] for k in range(4) if row[k] >= thresholds[k]}
        best = max(passed, key=passed.get, default=label)
        expected.append(-1 if best == label else best)
    assert doubtful(probabilities, labels).tolist() == expected


def test_far_out_tells_a_stray_from_a_crowd():
    generator = np.random.default_rng(1)
    crowd = np.concatenate([center + 0.3 * generator.normal(size=(60, 8)) for center in generator.normal(size=(2, 8))])
    stray = 4 * generator.normal(size=(1, 8))
    deviations = far_out(np.concatenate([crowd, stray]).astype(np.float32))
    assert deviations.argmax() == 120
    assert deviations[120] > 6
    assert np.median(deviations) == pytest.approx(0, abs=0.1)


def test_check_with_a_model_doubts_a_wrong_label_of_validation_alone(color_folder, finished_run, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(color_folder, root)
    red, blue = (
        np.random.default_rng(seed).normal(color, 40, (14, 18, 3))
        for seed, color in ((90, (200, 40, 30)), (91, (30, 40, 200)))
    )
    Image.fromarray(np.clip(red, 0, 255).astype(np.uint8)).save(root / "val/blue/wrong.png")
    Image.fromarray(np.clip(blue, 0, 255).astype(np.uint8)).save(root / "train/red/wrong.png")
    report = check_data(root, checkpoint=finished_run, workers=0, device="cpu")
    doubted = [case.pictures[0].path for case in report.find("label_error")]
    assert f"{root}/val/blue/wrong.png" in doubted  # train was changed, so that nothing tells what the model saw
    assert untold("train, val") in report.notes
    report = check_data(color_folder, checkpoint=finished_run, workers=0, device="cpu")
    assert "labels of train are not judged: the model was trained on these images" in report.notes
    assert not any("labels of val" in note or "labels of test" in note for note in report.notes)
    assert all(case.pictures[0].split != "train" for case in report.find("label_error"))
    assert not any(finding.kind == "outlier" for finding in report.problems)


def untold(splits):
    return (
        f"labels of {splits}: which of these images the model was trained on cannot be told; those are judged in "
        "sample, where wrong labels stay unseen: there may be more than are listed"
    )


def test_check_with_a_model_says_that_a_part_of_its_data_is_judged_in_sample(color_folder, finished_run, tmp_path):
    for name in ("blue", "green", "red"):
        (tmp_path / "part" / name).mkdir(parents=True)
        for number in range(9):
            shutil.copy(color_folder / "train" / name / f"{number:03d}.png", tmp_path / "part" / name)
    report = check_data(tmp_path / "part", checkpoint=finished_run, workers=0, device="cpu")
    assert [note for note in report.notes if "labels" in note] == [untold("all")]


def test_check_with_a_model_judges_what_its_run_kept_for_validation(color_folder, finished_run, tmp_path):
    flat = shutil.copytree(color_folder / "train", tmp_path / "flat")
    wrong = np.clip(np.random.default_rng(7).normal((30, 40, 200), 40, (14, 18, 3)), 0, 255).astype(np.uint8)
    for number in range(13):  # every red image is blue, in training and in validation alike
        Image.fromarray(np.roll(wrong, number, axis=0)).save(flat / f"red/{number:03d}.png")
    data = load_dataset(flat, val_fraction=0.3, seed=5)
    model = load_model(finished_run)
    origin = {"val_fraction": 0.3, "seed": 5, "fingerprint": fingerprint(data)}
    fields = {"classes": model.classes, "preprocess": model.preprocess, "metrics": {}, "data": origin}
    save_model(tmp_path / "m.safetensors", model.network, **fields)
    report = check_data(flat, checkpoint=tmp_path / "m.safetensors", workers=0, device="cpu")
    assert [note for note in report.notes if "labels" in note] == [
        "labels of all: judged are the 12 images that the model's run kept for validation; it was trained on the "
        "other 27"
    ]
    doubted = {case.pictures[0].path for case in report.find("label_error")}
    kept = data.splits["val"].paths
    assert doubted <= set(kept)
    assert {case.pictures[0].split for case in report.find("label_error")} <= {"all"}


def test_check_with_a_model_takes_a_data_set_in_memory(color_folder, finished_run):
    report = check_data(load_parts(color_folder), checkpoint=finished_run, workers=0, device="cpu")
    assert "labels of train are not judged: the model was trained on these images" in report.notes


def test_check_with_a_network_that_guesses_doubts_no_label(color_folder, finished_run, tmp_path):
    model = load_model(finished_run)
    with torch.no_grad():
        model.network.get_classifier().weight.zero_()  # always the class of the largest bias
    fields = {name: getattr(model, name) for name in ("classes", "preprocess", "metrics", "data")}
    save_model(tmp_path / "weak.safetensors", model.network, **fields)
    report = check_data(color_folder, checkpoint=tmp_path / "weak.safetensors", workers=0, device="cpu")
    assert report.find("label_error") == ()
    why = "the network gives {} of {} and chance would give {}, so that it is too weak"
    assert f"labels of val are not judged: {why.format(5, 15, 5)}" in report.notes
    assert f"labels of test are not judged: {why.format(4, 12, 4)}" in report.notes


def test_too_weak_counts_agreement_beyond_chance():
    labels = np.repeat([0, 1], [90, 10])
    largest = np.tile(np.float32([0.8, 0.2]), (100, 1))
    assert too_weak(largest, labels) == "the network gives 90 of 100 and chance would give 90, so that it is too weak"
    fair = np.eye(2, dtype=np.float32)[np.concatenate([np.repeat([0, 1], [80, 10]), np.ones(10, np.int64)])]
    assert too_weak(fair, labels) is None  # 90 of 100 as well, of which 74 would be chance
    assert too_weak(largest[:0], labels[:0]) is None


def test_too_weak_is_a_network_that_contradicts_most_labels():
    labels = np.repeat(np.arange(10), 30)
    answers = np.where(np.arange(300) % 30 < 9, labels, (labels + 1 + np.arange(300) % 7) % 10)
    sure = np.eye(10, dtype=np.float32)[answers]
    assert too_weak(sure, labels) == "the network contradicts 210 of 300, so that it is too weak"


def test_check_with_a_model_goes_on_where_a_split_holds_nothing_to_see(color_folder, finished_run, tmp_path):
    root = shutil.copytree(color_folder, tmp_path / "data")
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"no image")
    shutil.rmtree(root / "test")
    (root / "test").mkdir()
    report = check_data(root, checkpoint=finished_run, workers=0, device="cpu")
    assert len(report.find("unreadable")) == 15
    assert [case.note for case in report.find("empty_split")] == ["test"]
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"no image")
    report = check_data(root, checkpoint=finished_run, workers=0, device="cpu")
    assert len(report.find("unreadable")) == 54
    assert report.find("outlier") == report.find("label_error") == report.notes == ()


def test_check_refuses_a_model_before_it_reads_images(color_folder, model_file, monkeypatch):
    monkeypatch.setattr("vitlab.inference.check.look_at", lambda *arguments, **options: pytest.fail("images were read"))
    with pytest.raises(InputError, match="the model knows 7"):
        check_data(color_folder, checkpoint=model_file, workers=0, device="cpu")


def test_check_with_a_model_of_other_classes_is_refused(color_folder, model_file):
    with pytest.raises(InputError, match="holds 3 classes, the model knows 7"):
        check_data(color_folder, checkpoint=model_file, workers=0, device="cpu")
