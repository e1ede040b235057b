import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from vitlab.engine.figures import (
    confusion_figure,
    confusion_image,
    image_grid,
    load_image,
    plot_confusion,
    plot_results,
    results_figure,
    save_image,
)
from vitlab.errors import InputError


def write_metrics(path, records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def curves(figure):
    """Steps and values of each panel's lines: loss, top-1, rate, speed."""
    return [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] for axes in figure.axes]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_results_figure_draws_each_value_at_its_step(tmp_path):
    records = [
        {"step": 10, "epoch": 1, "train/loss": 2.0, "train/lr": 1e-3, "train/images_per_s": 100.0},
        {"step": 10, "epoch": 1, "val/loss": 1.5, "val/top1": 0.25},
        {"step": 20, "epoch": 2, "train/loss": 1.0, "train/lr": 5e-4, "train/images_per_s": 120.0},
        {"step": 20, "epoch": 2, "val/loss": 1.25, "val/top1": 0.75},
        {"step": 30, "epoch": 3, "val/loss": 1.75, "val/top1": 0.5},
    ]
    figure = results_figure(write_metrics(tmp_path / "metrics.jsonl", records), title="vit on digits")
    loss, top1, rate, speed = curves(figure)
    assert loss == [([10, 20], [2.0, 1.0]), ([10, 20, 30], [1.5, 1.25, 1.75])]
    assert top1[0] == ([10, 20, 30], [25.0, 75.0, 50.0])
    assert top1[1] == ([20], [75.0])  # the star on the best
    assert texts(figure.axes[1]) == ["best: 75.00 % at step 20"]
    assert rate == [([10, 20], [1e-3, 5e-4])]
    assert speed == [([10, 20], [100.0, 120.0])]


def test_results_figure_skips_what_is_not_finite_missing_or_cut_short(tmp_path):
    records = [
        {"step": 1, "val/top1": 0.5},
        {"step": 2, "val/top1": float("nan"), "train/loss": float("inf")},
        {"step": 3, "val/top1": None},
        {"step": 4},
        {"epoch": 9, "val/top1": 0.9},
    ]
    path = write_metrics(tmp_path / "metrics.jsonl", records, tail='[1]\n{"step": 5, "val/top1": 0.')
    figure = results_figure(path, title="gaps")
    loss, top1, _, _ = curves(figure)
    assert loss == []
    assert texts(figure.axes[0]) == ["nothing logged yet"]
    assert top1[0] == ([1], [50.0])


def test_results_figure_keeps_the_later_of_two_values_of_a_step(tmp_path):
    records = [{"step": step, "train/loss": loss} for step, loss in ((10, 3.0), (20, 9.0), (20, 2.0), (15, 2.5))]
    figure = results_figure(write_metrics(tmp_path / "metrics.jsonl", records), title="resumed")
    assert curves(figure)[0] == [([10, 15, 20], [3.0, 2.5, 2.0])]


@pytest.mark.parametrize("records", [[], [{"step": 1, "val/top1": 0.5}], [{"step": 1, "train/images_per_s": 0.0}]])
def test_plot_results_writes_a_picture_of_few_points(tmp_path, records):
    path = write_metrics(tmp_path / "metrics.jsonl", records)
    plot_results(path, tmp_path / "results.png", title=r"$\frac{ on 猫_^$")
    with Image.open(tmp_path / "results.png") as picture:
        picture.load()
        assert picture.size == (1320, 840)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "results.png"]


def test_confusion_figure_colours_by_share_of_the_row_and_writes_counts():
    confusion = np.array([[3, 1, 0], [0, 0, 0], [2, 0, 6]])
    axes = confusion_figure(confusion, ["cat", "dog", "eel"]).axes[0]
    shares = axes.images[0].get_array()
    np.testing.assert_allclose(shares, [[75, 25, 0], [0, 0, 0], [25, 0, 75]])
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert cells == {(0, 0): "3", (1, 0): "1", (0, 2): "2", (2, 2): "6"}  # (column, row): predicted, true
    assert axes.get_title() == "9 of 12 images right (75.0 %)"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "eel"]


def test_confusion_figure_names_every_class_up_to_120_and_then_every_nth():
    for num_classes, expected in ((21, 21), (120, 120), (300, 100)):
        names = [f"species {i}" for i in range(num_classes)]
        axes = confusion_figure(np.eye(num_classes, dtype=np.int64), names).axes[0]
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert len(labels) == expected
        assert axes.get_xticks()[-1] == (expected - 1) * (num_classes // expected)
        assert labels[-1] == names[axes.get_xticks()[-1]]
        assert not axes.texts


def test_confusion_figure_labels_do_not_overlap_at_102_classes():
    figure = confusion_figure(np.eye(102, dtype=np.int64), [f"flower {i}" for i in range(102)])
    figure.draw_without_rendering()
    labels = figure.axes[0].get_yticklabels()
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(boxes))
    assert boxes[0].height >= 8  # pixels


def test_plot_confusion_gives_the_pixels_of_confusion_image(tmp_path):
    confusion, names = np.array([[5, 1], [2, 4]]), [r"$\frac{_^$", "猫\n\udcff" + "x" * 99]
    image = confusion_image(confusion, names)
    assert image.dtype == np.uint8
    plot_confusion(confusion, names, tmp_path / "confusion.png")
    with Image.open(tmp_path / "confusion.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), image)


def test_confusion_figure_writes_out_characters_the_font_lacks():
    axes = confusion_figure(np.eye(4, dtype=np.int64), ["猫", "犬", "a\x1b[31m", "жук"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["\\u732b", "\\u72ac", "a\\x1b[31m", "жук"]


def test_image_grid_places_enlarged_tiles_in_reading_order():
    images = np.zeros((3, 3, 2, 4), np.uint8)
    images[0, 0, 0, 3] = 255  # red, top right of the first
    images[2, 2, 1, 0] = 255  # blue, bottom left of the third
    grid = image_grid(images, columns=2)
    assert grid.shape == (2 * (48 + 6) + 6, 2 * (96 + 6) + 6, 3)  # zoom 24: 2x4 becomes 48x96
    first, third = grid[6:54, 6:102], grid[60:108, 6:102]
    assert (first[:24, 72:] == (255, 0, 0)).all()
    assert first.sum() == 24 * 24 * 255
    assert (third[24:, :24] == (0, 0, 255)).all()
    assert third.sum() == 24 * 24 * 255
    assert (grid[60:108, 108:] == 255).all()  # no fourth image


def test_image_grid_shows_one_channel_as_grey():
    images = np.array([[[[0, 100], [200, 255]]]], np.uint8)
    grid = image_grid(images)
    assert grid.shape == (108, 108, 3)
    np.testing.assert_array_equal(grid[6 + 24 :: 48, 6 + 24 :: 48][:2, :2, 1], images[0, 0])
    assert (grid[..., 0] == grid[..., 2]).all()


def test_image_grid_leaves_large_images_as_they_are():
    images = np.random.default_rng(0).integers(0, 256, (1, 3, 96, 130), dtype=np.uint8)
    np.testing.assert_array_equal(image_grid(images)[6:102, 6:136], images[0].transpose(1, 2, 0))


def test_image_grid_of_no_images_is_white():
    assert (image_grid(np.zeros((0, 3, 8, 8), np.uint8), []) == 255).all()


def test_image_grid_writes_each_caption_below_its_own_image():
    images = np.zeros((2, 1, 8, 8), np.uint8)
    captions = ["", "猫\udcff $x_1$ " + "w" * 50]
    grid = image_grid(images, captions, columns=2)
    below = grid[6 + 96 :]
    assert (below[:, : 6 + 96] == 255).all()
    ink = np.argwhere((below < 128).any(axis=(0, 2)))
    assert ink.min() >= 108
    assert ink.max() < 108 + 96  # cut to the image's width
    assert (grid[6:102, 6:102] == 0).all()


def test_save_image_leaves_the_old_file_where_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    image = np.random.default_rng(0).integers(0, 256, (2, 5, 3), dtype=np.uint8)
    save_image(path, image)

    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_image(path, 255 - image)
    np.testing.assert_array_equal(load_image(path), image)
    assert list(tmp_path.iterdir()) == [path]


def test_save_image_names_the_suffixes_it_knows(tmp_path):
    with pytest.raises(InputError, match=r"picture\.csv is no name for a picture: end it in \.png or \.jpg"):
        save_image(tmp_path / "picture.csv", np.zeros((2, 2, 3), np.uint8))


def test_figures_leave_pyplot_and_the_backend_alone():
    code = """
import sys, numpy as np, matplotlib
before = matplotlib.rcParams.copy()
from vitlab.engine.figures import confusion_image
confusion_image(np.eye(2, dtype=int), ["a", "b"])
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.rcParams.copy() == before
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
