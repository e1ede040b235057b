"""What a model says of its data: doubted labels, outliers, and what it was trained on."""

import shutil

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import InputError
from vitlab.inference.check import check_data
from vitlab.inference.check_model import doubtful, far_out


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
    assert "labels of train: these are not the train images of the model's own run, and it may have seen some" in (
        report.notes
    )
    report = check_data(color_folder, checkpoint=finished_run, workers=0, device="cpu")
    assert "labels of train not doubted: the model was trained on these images" in report.notes
    assert not any("labels of val" in note for note in report.notes)
    assert all(case.pictures[0].split != "train" for case in report.find("label_error"))
    assert not any(finding.kind == "outlier" for finding in report.problems)


def test_check_with_a_model_of_other_classes_is_refused(color_folder, model_file):
    with pytest.raises(InputError, match="holds 3 classes, the model knows 7"):
        check_data(color_folder, checkpoint=model_file, workers=0, device="cpu")
