"""Predictions that are interrupted and gone on with: rows, embeddings and copies are those of an unbroken run."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import InputError, Interrupted, RunError
from vitlab.inference import resume
from vitlab.inference.folder import predict_files
from vitlab.inference.predictor import Predictor

FORMATS = ("csv", "jsonl", "parquet")
COUNT = 23


@pytest.fixture
def images(tmp_path):
    """Images of 7 x 9 noise, one of them empty."""
    generator = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for index in range(COUNT):
        pixels = generator.integers(0, 256, (7, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index:03d}.png")
    (tmp_path / "images" / "005.png").write_bytes(b"")
    return tmp_path / "images"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(resume, "_PART_ROWS", 6)


@pytest.fixture
def predict(model_file, images, tmp_path):
    """A function that predicts the images four at a time and is interrupted at a batch, the first is 1."""

    def run(out, *, stop_at=0, failure=KeyboardInterrupt, tta="none", batch_size=4, paths=images, **more):
        predictor = Predictor(model_file, device="cpu", batch_size=batch_size, tta=tta)
        calls = []

        def stop(module, inputs):
            calls.append(len(inputs[0]))
            if len(calls) == stop_at:
                raise failure

        predictor.network.patch_embed.register_forward_pre_hook(stop)
        out = out if isinstance(out, Path) else tmp_path / "out" / out
        result = predict_files(predictor, [paths], out=out, top_k=3, **more)
        return result, sum(calls)

    return run


def rows_of(path):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    return path.read_text(encoding="utf-8").splitlines()


def parts_of(path):
    return path.with_name(f".{path.name}.parts")


@pytest.mark.parametrize("suffix", FORMATS)
def test_resumed_rows_are_those_of_an_unbroken_run(predict, tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    whole, broken = tmp_path / "out" / f"whole.{suffix}", tmp_path / "out" / f"broken.{suffix}"
    more = {"embeddings": tmp_path / "out" / "whole.npy", "abstain_below": 0.6, "tta": "flip"}
    predict(whole, **more)
    more["embeddings"] = tmp_path / "out" / "broken.npy"
    for resuming in (False, True):
        with pytest.raises(Interrupted, match="of 23 images are kept; to go on: the same command with --resume"):
            predict(broken, stop_at=5, resume=resuming, **more)
        assert not broken.exists()
    result, seen = predict(broken, resume=True, **more)
    assert 0 < result.resumed < COUNT
    assert seen < 2 * COUNT  # both views of the rest
    assert (result.count, result.unreadable) == (COUNT - 1, 1)
    assert rows_of(broken) == rows_of(whole)
    assert (tmp_path / "out" / "broken.npy").read_bytes() == (tmp_path / "out" / "whole.npy").read_bytes()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_killed_command_goes_on_to_the_rows_of_an_unbroken_one(model_file, images, tmp_path, suffix):
    """SIGKILL as soon as the first part is there, and what was being written then left half."""
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / "rows" / f"rows.{suffix}"
    script = (
        "import sys, time; from vitlab.inference import resume, predictor; from vitlab.__main__ import main\n"
        "resume._PART_ROWS = 6; predict = predictor.Predictor.predict_batch\n"
        "def slow(self, images): time.sleep(0.2); return predict(self, images)\n"
        "predictor.Predictor.predict_batch = slow; sys.exit(main(sys.argv[1:]))"
    )
    line = ["predict", str(model_file), str(images), "--out", str(out), "--batch_size", "4", "--workers", "0"]
    process = subprocess.Popen([sys.executable, "-c", script, *line], stdout=subprocess.DEVNULL)
    record = parts_of(out) / "record.json"
    while not record.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = len(json.loads(record.read_text())["parts"])
    assert not out.exists()
    for name in (f"part-{done:05d}.{suffix}", f".part-{done:05d}.{suffix}.tmp", ".record.json.tmp"):
        (parts_of(out) / name).write_bytes(b"half a li")
    predictor = Predictor(model_file, device="cpu", batch_size=4)
    result = predict_files(predictor, [images], out=out, resume=True)
    assert result.resumed >= 6
    predict_files(predictor, [images], out=tmp_path / f"whole.{suffix}")
    assert rows_of(out) == rows_of(tmp_path / f"whole.{suffix}")


def test_nothing_stays_beside_a_finished_file(predict, tmp_path):
    predict("rows.csv")
    assert os.listdir(tmp_path / "out") == ["rows.csv"]


def test_a_first_call_that_does_nothing_leaves_nothing(predict, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        predict("rows.csv", stop_at=1)
    assert os.listdir(tmp_path / "out") == []


def test_resume_leaves_a_finished_file_of_the_same_images_as_it_is(predict, images, tmp_path):
    predict("rows.csv", resume=True)
    out = tmp_path / "out" / "rows.csv"
    assert os.listdir(parts_of(out)) == ["record.json"]
    before = out.stat().st_mtime_ns, out.read_bytes()
    result, seen = predict("rows.csv", resume=True)
    assert (result.resumed, result.count, result.unreadable, seen) == (COUNT, COUNT - 1, 1, 0)
    assert (out.stat().st_mtime_ns, out.read_bytes()) == before
    shutil.copy(images / "001.png", images / "099.png")
    result, seen = predict("rows.csv", resume=True)
    assert (result.resumed, seen) == (0, COUNT)
    assert len(rows_of(out)) == 1 + COUNT + 1
    out.write_text("somebody's own\n")
    _, seen = predict("rows.csv", resume=True)
    assert seen == COUNT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tta": "flip"}, "--tta was none, is flip"),
        ({"batch_size": 3}, "--batch_size was 4, is 3"),
        ({"abstain_below": 0.5}, "--abstain_below was None, is 0.5"),
        ({"embeddings": Path("e.npy")}, r"--embeddings was None, is e\.npy"),
        ({"by_class": Path("classes")}, "--by_class was None, is classes"),
    ],
)
def test_resume_refuses_other_options_and_keeps_what_is_done(predict, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4)
    with pytest.raises(InputError, match=rf"rows\.csv was begun otherwise \({message}\): set it back, or leave"):
        predict("rows.csv", resume=True, **change)
    assert predict("rows.csv", resume=True)[0].resumed == 12


def test_resume_refuses_another_model(predict, model_file, tmp_path):
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4)
    record = parts_of(tmp_path / "out" / "rows.csv") / "record.json"
    content = json.loads(record.read_text())
    content["made_with"]["the model"] = "0" * 64
    record.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"the model was 000000000000\.\.\., is [0-9a-f]{12}\.\.\."):
        predict("rows.csv", resume=True)


@pytest.mark.parametrize(("name", "kept"), [("000.png", 0), ("007.png", 0), ("008.png", 8), ("020.png", 12)])
def test_resume_makes_rows_anew_from_the_first_changed_image_on(predict, images, tmp_path, name, kept):
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4)  # parts of 8 and 4
    Image.new("RGB", (8, 8), (1, 200, 3)).save(images / name)
    result, _ = predict("rows.csv", resume=True)
    assert (result.resumed, result.remade) == (kept, 12 - kept)
    predict("whole.csv")
    assert rows_of(tmp_path / "out" / "rows.csv") == rows_of(tmp_path / "out" / "whole.csv")


def test_resume_meets_images_that_came_and_went(predict, images, tmp_path):
    with pytest.raises(RunError):
        predict("rows.csv", stop_at=6, failure=RunError("gone"))  # all but the last, smaller batch
    assert predict("rows.csv", stop_at=0, resume=True)[0].resumed == 20
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4)
    (images / "009.png").unlink()
    shutil.copy(images / "001.png", images / "100.png")
    result, _ = predict("rows.csv", resume=True)
    assert (result.resumed, result.remade) == (8, 4)
    predict("whole.csv")
    assert rows_of(tmp_path / "out" / "rows.csv") == rows_of(tmp_path / "out" / "whole.csv")
    (images / "009.png").write_bytes(b"")
    result, _ = predict("rows.csv", resume=True)  # of a finished file no parts are left to go on from
    assert (result.resumed, result.remade) == (0, 23)


@pytest.mark.parametrize(
    "damage", ["no json", "[]", '{"parts": 3}', '{"made_with": {}, "parts": [{"images": "x"}], "finished": null}']
)
def test_resume_begins_anew_where_the_record_is_damaged(predict, tmp_path, damage):
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4)
    (parts_of(tmp_path / "out" / "rows.csv") / "record.json").write_text(damage)
    assert predict("rows.csv", resume=True)[0].resumed == 0
    assert len(rows_of(tmp_path / "out" / "rows.csv")) == 1 + COUNT


def test_resume_makes_a_part_of_another_size_again(predict, tmp_path):
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4)
    part = parts_of(tmp_path / "out" / "rows.csv") / "part-00001.csv"
    part.write_bytes(part.read_bytes()[:-9])
    assert predict("rows.csv", resume=True)[0].resumed == 8
    predict("whole.csv")
    assert rows_of(tmp_path / "out" / "rows.csv") == rows_of(tmp_path / "out" / "whole.csv")


def test_without_resume_all_begins_anew(predict, tmp_path):
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4)
    assert predict("rows.csv")[0].resumed == 0
    assert os.listdir(tmp_path / "out") == ["rows.csv"]


def test_an_output_that_cannot_be_made_ends_before_the_work(predict, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    vectors = tmp_path / "file" / "vectors.npy"
    with pytest.raises(RunError, match=r"cannot write .*vectors\.npy: (Not a directory|File exists)"):
        predict("rows.csv", stop_at=1, failure=AssertionError, embeddings=vectors)
    assert not parts_of(tmp_path / "out" / "rows.csv").exists()


@contextmanager
def longest_file(size):
    """Let no file grow beyond so many bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_is_one_line_and_what_is_done_is_kept(predict, tmp_path, suffix):
    folder = tmp_path / "out"
    whole, out, embeddings = folder / f"whole.{suffix}", folder / f"rows.{suffix}", folder / "vectors.npy"
    predict(whole, embeddings=folder / "whole.npy")
    too_large = "File too large; an earlier file stays as it was"
    with longest_file(100), pytest.raises(RunError, match=rf"^cannot write .*vectors\.npy: {too_large}$"):
        predict(out, embeddings=embeddings)
    kept = rf"^cannot write .*: {too_large}; the rows of [0-9]+ of 23 images are kept; to go on: the same command with"
    with longest_file(whole.stat().st_size - 1), pytest.raises(RunError, match=kept):
        predict(out, embeddings=embeddings)
    assert not out.exists()
    assert predict(out, embeddings=embeddings, resume=True)[0].resumed > 0
    assert rows_of(out) == rows_of(whole)
    np.testing.assert_array_equal(np.load(embeddings), np.load(folder / "whole.npy"))


def test_two_processes_do_not_write_one_file(predict, tmp_path):
    out = tmp_path / "out" / "rows.csv"
    errors = []

    class OtherError(RuntimeError):
        def __init__(self):
            try:
                predict(out)
            except InputError as error:
                errors.append(str(error))

    with pytest.raises(OtherError):
        predict(out, stop_at=3, failure=OtherError)
    assert errors == [f"{out} is being written by another process: wait for its end"]


def test_parts_do_not_go_where_a_link_leads(predict, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".rows.csv.parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"\.rows\.csv\.parts is a link: remove it, or give another --out"):
        predict("rows.csv")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_copies_of_a_resumed_run_are_those_of_an_unbroken_one(predict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted):
        predict("rows.csv", stop_at=4, by_class=Path("copies"))
    shutil.rmtree(parts_of(tmp_path / "out" / "rows.csv"))  # as where the last rows were copied, and not yet kept
    result, _ = predict("rows.csv", resume=True, by_class=Path("copies"))
    predict("whole.csv", by_class=Path("whole"))
    found = [
        sorted((str(path.relative_to(root)), path.read_bytes()) for path in Path(root).rglob("*") if path.is_file())
        for root in ("copies", "whole")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == result.copied == COUNT - 1
