import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from vitlab.data.preprocess import Preprocess
from vitlab.errors import InputError, Interrupted, RunError
from vitlab.inference import resume, tables
from vitlab.inference.folder import predict_files
from vitlab.inference.predictor import Predictor
from vitlab.inference.tables import Prediction, build_table, describe, predictions_table

# softmax of (1, 0, 0)
HIGH, LOW = np.e / (np.e + 2), 1 / (np.e + 2)


class MeanColor(torch.nn.Module):
    """Logits that one can work out by hand: the mean of each channel."""

    def forward(self, images):
        return images.mean(dim=(2, 3))


@pytest.fixture
def color_predictor(model_file):
    """Calls an image after its strongest channel; batches of three."""
    predictor = Predictor(model_file, device="cpu", batch_size=3)
    predictor.network = MeanColor().eval()
    predictor.classes = ("red", "green", "blue")
    predictor.preprocess = Preprocess(image_size=(2, 3), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return predictor


def paint(path, color="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}[color]).save(path, "PNG")
    return path


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_predict_files_writes_labels_and_probabilities_best_first(color_predictor, tmp_path):
    images = tmp_path / "images"
    paint(images / "b.png", "blue")
    paint(images / "a.png", "green")
    out = tmp_path / "new" / "folder" / "rows.csv"
    result = predict_files(color_predictor, [images], out=out, top_k=2)
    assert (result.count, result.errors, result.ignored, result.rows) == (2, (), 0, ())
    assert out.read_text().splitlines()[0] == "path,error,label_1,probability_1,label_2,probability_2"
    rows = read_csv(out)
    assert [row["path"] for row in rows] == [str(images / "a.png"), str(images / "b.png")]
    assert [(row["error"], row["label_1"], row["label_2"]) for row in rows] == [
        ("", "green", "red"),
        ("", "blue", "red"),
    ]
    for row in rows:
        assert float(row["probability_1"]) == pytest.approx(HIGH, abs=1e-7)
        assert float(row["probability_2"]) == pytest.approx(LOW, abs=1e-7)
        assert len(row["probability_1"]) <= 11  # float32's digits, not those of a double
    assert [path.name for path in out.parent.iterdir()] == ["rows.csv"]


def test_predict_files_gives_a_row_with_an_error_for_an_empty_image(color_predictor, tmp_path):
    images = [paint(tmp_path / f"{index}.png", ("red", "blue")[index % 2]) for index in range(10)]
    images[5].write_bytes(b"")
    result = predict_files(color_predictor, [tmp_path], out=tmp_path / "rows.csv")
    rows = read_csv(tmp_path / "rows.csv")
    assert [row["path"] for row in rows] == [str(image) for image in images]
    assert [row["label_1"] for row in rows] == ["red", "blue", "red", "blue", "red", "", "red", "blue", "red", "blue"]
    assert [row["error"] for row in rows] == [""] * 5 + ["the file is empty"] + [""] * 4
    assert set(list(rows[5].values())[2:]) == {""}
    assert result.count == 9
    assert [(error.path, error.reason) for error in result.errors] == [(str(images[5]), "the file is empty")]


def test_predict_files_goes_on_where_no_image_can_be_read(color_predictor, tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.jpg").write_bytes(b"no image")
    result = predict_files(color_predictor, [tmp_path])
    assert (result.count, len(result.errors)) == (0, 4)
    assert [row.error for row in result.rows] == ["not an image, or its header is damaged"] * 4


def test_predict_files_reports_a_broken_link_as_a_row(color_predictor, tmp_path):
    paint(tmp_path / "b.png")
    (tmp_path / "a.png").symlink_to(tmp_path / "gone.png")
    rows = predict_files(color_predictor, [tmp_path]).rows
    assert [(row.path, bool(row.error)) for row in rows] == [
        (str(tmp_path / "a.png"), True),
        (str(tmp_path / "b.png"), False),
    ]


def test_predict_files_counts_what_it_ignores(color_predictor, tmp_path):
    for name in ("a.JPG", "b.Jpeg", "c.PNG", "d.webp", "e.jpg"):
        paint(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    result = predict_files(color_predictor, [tmp_path])
    assert (result.count, result.ignored) == (5, 1)


def test_predict_files_gives_the_same_rows_in_all_formats(model_file, odd_images, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    images = tmp_path / "images"
    shutil.copytree(odd_images, images)
    (images / "bad.png").write_bytes(b"\x89PNG")
    predictor = Predictor(model_file, batch_size=4)
    for suffix in ("csv", "jsonl", "parquet"):
        predict_files(predictor, [images], out=tmp_path / f"rows.{suffix}", top_k=3)
    lines = read_jsonl(tmp_path / "rows.jsonl")
    assert len(lines) == 31
    assert [line["path"] for line in lines] == sorted(line["path"] for line in lines)
    as_text = [{key: "" if value is None else str(value) for key, value in line.items()} for line in lines]
    assert read_csv(tmp_path / "rows.csv") == as_text
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert str(table.schema.field("probability_3").type) == "float"
    rounded = [
        {key: np.float32(value) if isinstance(value, float) else value for key, value in line.items()} for line in lines
    ]
    assert table.to_pylist() == rounded


def test_predict_files_rows_equal_predict(model_file, odd_images):
    predictor = Predictor(model_file, batch_size=4)
    rows = predict_files(predictor, [odd_images], top_k=7).rows
    expected = Predictor(model_file).predict([row.path for row in rows])
    for row, probabilities in zip(rows, expected, strict=True):
        assert list(row.probabilities) == sorted(row.probabilities, reverse=True)
        given = dict(zip(row.labels, row.probabilities, strict=True))
        np.testing.assert_allclose([given[name] for name in predictor.classes], probabilities, atol=1e-5)


def test_predict_files_rows_do_not_depend_on_workers(model_file, odd_images, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(odd_images, images)
    (images / "ant" / "01a.png").write_bytes(b"")
    predictor = Predictor(model_file, batch_size=4)
    for workers in (0, 2):
        predict_files(predictor, [images], out=tmp_path / f"{workers}.csv", workers=workers)
    assert (tmp_path / "0.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    assert len(read_csv(tmp_path / "0.csv")) == 31


def test_predict_files_names_classes_from_the_checkpoint_alone(model_file, odd_images, tmp_path):
    predictor = Predictor(model_file, batch_size=64)
    everything = {os.path.basename(row.path): row for row in predict_files(predictor, [odd_images]).rows}
    for name in ("elk", "zebra"):  # a folder that holds one class only, under another name, in another place
        alone = tmp_path / f"aardvark-{name}"
        shutil.copytree(odd_images / name, alone / "a")
        rows = predict_files(predictor, [alone]).rows
        assert rows
        for row in rows:
            other = everything[os.path.basename(row.path)]
            assert row.labels == other.labels
            np.testing.assert_allclose(row.probabilities, other.probabilities, atol=1e-5)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_predict_files_disarms_formulas_in_csv_only(color_predictor, tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    name = f"{start}cmd.png"
    paint(tmp_path / name)
    color_predictor.classes = (f"{start}1", "green", "blue")
    for suffix in ("csv", "jsonl"):
        predict_files(color_predictor, [name], out=tmp_path / f"rows.{suffix}")
    row = read_csv(tmp_path / "rows.csv")[0]
    assert (row["path"], row["label_1"]) == (f"'{name}", f"'{start}1")
    line = read_jsonl(tmp_path / "rows.jsonl")[0]
    assert (line["path"], line["label_1"]) == (name, f"{start}1")
    assert line["probability_1"] == pytest.approx(HIGH, abs=1e-7)


def test_predict_files_writes_any_file_name(color_predictor, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    names = ['a,b"c.png', "line\nbreak.png", "\x1b[31mred.png", "жук 猫.png", os.fsdecode(b"caf\xe9.png")]
    try:
        for name in names:
            paint(tmp_path / "images" / name)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    for suffix in ("csv", "jsonl", "parquet"):
        result = predict_files(color_predictor, [tmp_path / "images"], out=tmp_path / f"rows.{suffix}")
        assert result.count == 5
    expected = sorted(names)
    expected[expected.index(os.fsdecode(b"caf\xe9.png"))] = "caf\\xe9.png"
    rows = [*read_csv(tmp_path / "rows.csv"), *read_jsonl(tmp_path / "rows.jsonl")]
    rows += pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [os.path.basename(row["path"]) for row in rows] == expected * 3


def test_predictions_table_shows_nothing_that_a_terminal_obeys():
    rows = [
        Prediction("[bold]\x1b[31mcat\udcff.png", ("[red]cat", "dog\x07"), (0.9312, 0.0688)),
        Prediction("empty.png", error="the file is empty"),
    ]
    output = io.StringIO()
    Console(file=output, force_terminal=True, no_color=True, width=120).print(predictions_table(rows))
    text = output.getvalue()
    assert "[bold]\\x1b[31mcat\\udcff.png" in text
    assert "[red]cat 93.1%  dog\\x07 6.9%" in text
    assert "the file is empty" in text
    assert "\x1b[31m" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("top_k", [3, 5, 10_000])
def test_predict_files_caps_top_k_at_the_number_of_classes(color_predictor, tmp_path, top_k):
    paint(tmp_path / "a.png", "blue")
    rows = predict_files(color_predictor, [tmp_path], top_k=top_k).rows
    assert rows[0].labels == ("blue", "red", "green")
    predict_files(color_predictor, [tmp_path], out=tmp_path / "rows.csv", top_k=top_k)
    assert (tmp_path / "rows.csv").read_text().splitlines()[0].endswith(",label_3,probability_3")


def test_predict_files_gives_equal_classes_in_the_models_order(color_predictor, tmp_path):
    color_predictor.classes = tuple(f"class {index}" for index in range(40))
    color_predictor.network = lambda images: torch.zeros(len(images), 40)
    row = predict_files(color_predictor, [paint(tmp_path / "a.png")], top_k=40).rows[0]
    assert row.labels == color_predictor.classes
    assert row.probabilities == (0.025,) * 40


def test_predict_files_refuses_top_k_below_one(color_predictor, tmp_path):
    with pytest.raises(InputError, match="top_k is 0: give 1 or more"):
        predict_files(color_predictor, [paint(tmp_path / "a.png")], top_k=0)


def test_predict_files_checks_the_output_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "folder.csv").mkdir()
    for name, message in (
        ("rows.txt", r"rows\.txt has an unknown suffix for predictions: end it in \.csv, \.jsonl, \.parquet"),
        ("rows", "unknown suffix"),
        ("folder.csv", r"folder\.csv is a folder: give a file"),
    ):
        with pytest.raises(InputError, match=message):
            predict_files(None, ["not there"], out=tmp_path / name)
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'rows\.parquet needs pyarrow: pip install "vitlab\[parquet\]"'):
        predict_files(None, ["not there"], out=tmp_path / "rows.parquet")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_predict_files_keeps_the_old_file_where_it_fails(color_predictor, tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    images = tmp_path / "images"
    for index in range(7):
        paint(images / f"{index}.png")
    out = tmp_path / "out" / f"rows.{suffix}"
    predict_files(color_predictor, [images], out=out)
    before = out.read_bytes()

    calls = []

    def fail_at_the_third_batch(module, inputs):
        calls.append(inputs)
        if len(calls) == 3:
            raise KeyboardInterrupt

    color_predictor.network.register_forward_pre_hook(fail_at_the_third_batch)
    with pytest.raises(Interrupted, match="the rows of 6 of 7 images are kept"):
        predict_files(color_predictor, [images], out=out)
    assert out.read_bytes() == before
    assert sorted(path.name for path in out.parent.iterdir()) == [f".{out.name}.parts", out.name]


def test_predict_files_says_in_one_line_that_the_disk_is_full(color_predictor, tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    paint(tmp_path / "images" / "a.png")
    with pytest.raises(RunError, match=r"cannot write .*rows\.csv: No space left on device; an earlier file stays"):
        predict_files(color_predictor, [tmp_path / "images"], out=tmp_path / "rows.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images"]


def test_predict_files_does_not_blame_the_output_for_a_failure_elsewhere(color_predictor, tmp_path):
    def fail(module, inputs):
        raise OSError(5, "Input/output error")

    color_predictor.network.register_forward_pre_hook(fail)
    paint(tmp_path / "images" / "a.png")
    with pytest.raises(OSError, match=r"^\[Errno 5\] Input/output error$"):
        predict_files(color_predictor, [tmp_path / "images"], out=tmp_path / "rows.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images"]


def test_predict_files_writes_into_a_folder_that_it_predicts(color_predictor, tmp_path):
    paint(tmp_path / "a.png")
    for _ in range(2):
        assert predict_files(color_predictor, [tmp_path], out=tmp_path / "rows.jsonl").count == 1


def test_predict_files_writes_parquet_in_groups(color_predictor, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    monkeypatch.setattr(tables, "_GROUP_ROWS", 6)
    monkeypatch.setattr(resume, "_PART_ROWS", 4)
    for index in range(14):
        paint(tmp_path / "images" / f"{index:02d}.png")
    predict_files(color_predictor, [tmp_path / "images"], out=tmp_path / "rows.parquet")
    file = pyarrow.parquet.ParquetFile(tmp_path / "rows.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [6, 6, 2]


def test_predict_files_moves_a_given_bar_to_its_end(color_predictor, tmp_path):
    for index in range(5):
        paint(tmp_path / f"{index}.png")
    (tmp_path / "2.png").write_bytes(b"")
    progress = Progress(console=Console(file=io.StringIO()))
    predict_files(color_predictor, [tmp_path], progress=progress)
    assert [(task.completed, task.total) for task in progress.tasks] == [(5, 5)]
    assert re.fullmatch(r"predicting, \d+ images/s", progress.tasks[0].description)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *(
            ("=1+1", "'=1+1"),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("@A1", "'@A1"),
            ("\t=1", "'\t'=1"),
            ("\uff1d1", "'\uff1d1"),
        ),
        *(
            ("a;=1", "a;'=1"),
            ('a; "=1"', 'a; "\'=1"'),
            ("a\n-1", "a\n'-1"),
            ("a=1", "a=1"),
            ("a-b;c", "a-b;c"),
            ("", ""),
        ),
    ],
)
def test_csv_cells_are_harmless_in_any_spreadsheet(name, cell):
    """Some take a semicolon or a tab to part the cells."""
    file = io.BytesIO()
    build_table(Path("rows.csv"), 1).write(file, [Prediction(name, labels=(name,), probabilities=(0.5,))])
    assert list(csv.reader(io.StringIO(file.getvalue().decode(), newline=""))) == [[cell, "", cell, "0.5"]]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_predict_files_abstains_below_a_probability(color_predictor, tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    sure = paint(tmp_path / "images" / "sure.png")
    Image.new("RGB", (5, 4), (255, 200, 0)).save(tmp_path / "images" / "unsure.png")
    out = tmp_path / f"rows.{suffix}"
    result = predict_files(color_predictor, [tmp_path / "images"], out=out, top_k=2, abstain_below=0.5)
    assert (result.count, result.abstained, result.unreadable) == (2, 1, 0)
    rows = read_csv(out) if suffix == "csv" else read_jsonl(out) if suffix == "jsonl" else read_parquet(out)
    assert (rows[0]["path"], rows[0]["label_1"], rows[0]["label_2"]) == (str(sure), "red", "green")
    none = "" if suffix == "csv" else None
    assert (rows[1]["error"], rows[1]["label_1"], rows[1]["label_2"]) == (none, none, "green")
    total = np.e + np.exp(200 / 255) + 1
    shares = np.e / total, np.exp(200 / 255) / total
    assert [float(rows[1][f"probability_{rank}"]) for rank in (1, 2)] == pytest.approx(shares, abs=1e-6)
    rows = predict_files(color_predictor, [tmp_path / "images"], top_k=2, abstain_below=0.5).rows
    assert describe(rows[1]).endswith(f": abstains, the likeliest class has {shares[0]:.1%}  green {shares[1]:.1%}")


def read_parquet(path):
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def test_predict_files_writes_an_embedding_for_each_row(model_file, odd_images, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(odd_images, images)
    (images / "ant" / "01a.png").write_bytes(b"")
    predictor = Predictor(model_file, device="cpu", batch_size=4)
    predict_files(predictor, [images], out=tmp_path / "rows.jsonl", embeddings=tmp_path / "vectors.npy")
    rows, vectors = read_jsonl(tmp_path / "rows.jsonl"), np.load(tmp_path / "vectors.npy")
    assert (vectors.shape, vectors.dtype) == ((31, 16), np.float32)
    head = predictor.network.get_classifier()
    for row, vector in zip(rows, vectors, strict=True):
        assert np.isnan(vector).all() == (row["error"] is not None)
        if row["error"] is None:
            shares = head(torch.from_numpy(vector)).softmax(dim=0)
            assert shares.max().item() == pytest.approx(row["probability_1"], abs=1e-5)
            assert predictor.classes[shares.argmax()] == row["label_1"]


def test_predict_files_gives_embeddings_of_nothing_but_unreadable_images(model_file, tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    predict_files(Predictor(model_file), [tmp_path], out=tmp_path / "r.csv", embeddings=tmp_path / "v.npy")
    assert np.load(tmp_path / "v.npy").shape == (1, 16)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"resume": True}, "--resume goes on with a file of rows: give it with --out"),
        ({"embeddings": Path("v.npy")}, "--embeddings has a row for each of a file: give that with --out"),
        (
            {"out": Path("r.csv"), "embeddings": Path("v.npz")},
            r"--embeddings is v\.npz: give a file that ends in \.npy",
        ),
    ],
)
def test_predict_files_refuses_what_does_not_go_together(wanted, message):
    with pytest.raises(InputError, match=message):
        predict_files(None, ["not there"], **wanted)
