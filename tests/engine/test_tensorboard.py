"""Events as TensorBoard reads them, and the cut on resume."""

import json

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from vitlab.engine.tensorboard import EventLog, cut_metrics, write_embeddings


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(folder, tag):
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_events_are_what_tensorboard_reads(tmp_path):
    log = EventLog(tmp_path)
    log.hparams({"optim.lr": 0.5, "model.name": "vit_tiny", "train.steps": None}, ("val/top1",))
    log.text("config", "lr: 0.5")
    log.scalars(1, {"train/loss": 2.5})
    log.scalars(2, {"train/loss": 1.25})
    image = np.zeros((4, 6, 3), np.uint8)
    image[..., 0] = 255
    log.image(2, "train/batch", image)
    log.close()
    assert points(tmp_path, "train/loss") == [(1, 2.5), (2, 1.25)]
    events = read(tmp_path)
    (picture,) = events.Images("train/batch")
    assert (picture.step, picture.height, picture.width) == (2, 4, 6)
    assert "config/text_summary" in events.Tags()["tensors"]
    settings = events.PluginTagToContent("hparams")
    assert set(settings) == {"_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"}
    start = HParamsPluginData.FromString(settings["_hparams_/session_start_info"]).session_start_info.hparams
    assert start["optim.lr"].number_value == 0.5
    assert start["model.name"].string_value == "vit_tiny"
    assert start["train.steps"].string_value == "None"
    assert [path.is_file() for path in tmp_path.iterdir()] == [True]


def test_events_after_the_kept_step_are_cut_and_written_once(tmp_path):
    log = EventLog(tmp_path)
    for step in range(1, 7):
        log.scalars(step, {"train/loss": step / 2})
    log.close()
    log = EventLog(tmp_path, keep_steps=4)
    for step in range(5, 8):
        log.scalars(step, {"train/loss": step * 10.0})
    log.close()
    assert points(tmp_path, "train/loss") == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 50.0), (6, 60.0), (7, 70.0)]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("missing", [1, 5, 20])
def test_events_survive_a_record_cut_short(tmp_path, missing):
    log = EventLog(tmp_path)
    for step in (1, 2, 3):
        log.scalars(step, {"train/loss": float(step)})
    log.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-missing])
    log = EventLog(tmp_path, keep_steps=3)
    log.scalars(4, {"train/loss": 4.0})
    log.close()
    assert points(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (4, 4.0)]


def test_metrics_are_cut_to_the_kept_step_and_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "epoch": step} for step in (10, 20, 30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4', encoding="utf-8")
    cut_metrics(path, 20)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:2]
    cut_metrics(tmp_path / "missing.jsonl", 20)


def test_embeddings_of_hostile_names_stay_one_row_an_image(tmp_path):
    images = np.arange(3 * 2 * 4 * 3, dtype=np.uint8).reshape(3, 2, 4, 3)
    names = [("a\tb", "x\ny"), ("\udcff", "<b>"), ("c", "z")]
    write_embeddings(tmp_path, np.array([[1.5, -2], [0.25, 3], [1e-8, 4]], np.float32), names, images)
    assert (tmp_path / "embeddings-names.tsv").read_text() == "class\timage\na\\tb\tx\\ny\n\\udcff\t<b>\nc\tz\n"
    np.testing.assert_allclose(np.loadtxt(tmp_path / "embeddings.tsv"), [[1.5, -2], [0.25, 3], [1e-8, 4]])
    with Image.open(tmp_path / "embeddings.png") as grid:
        pixels = np.asarray(grid)
    assert pixels.shape == (4, 8, 3)
    assert np.array_equal(pixels[:2, 4:], images[1])
    assert np.array_equal(pixels[2:, :4], images[2])
