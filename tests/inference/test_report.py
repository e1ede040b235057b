"""`vitlab evaluate --report`: what stands on the page, and that names cannot break it."""

import html
import json
import re

import numpy as np
import pytest
import torch

from vitlab.__main__ import main
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.data.splits import ArraySplit
from vitlab.engine.evaluator import Scores
from vitlab.engine.objectives import Step
from vitlab.inference.report import conformal_sets, headlines, most_confused, worst_mistakes, write_report
from vitlab.inference.scoring import Scored
from vitlab.models.catalog import create_model
from vitlab.models.files import load_model, save_model

LIMIT = 15 * 10**6
HOSTILE = '"><script>alert(1)</script>\x1b[2J</table>'


def scores_of(logits, labels, classes, temperature=1.0):
    scores = Scores(classes=classes, temperature=temperature)
    batch = Batch(torch.empty(len(labels), 0), labels, torch.arange(len(labels)))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    scores.add(batch, Step(loss, logits, {}))
    return scores


@pytest.fixture
def model_of(tmp_path):
    """A function from class names to a model of 8 x 8 pixels with random weights."""

    def build(classes):
        torch.manual_seed(0)
        sizes = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
        network = create_model("vit_tiny", num_classes=len(classes), image_size=8, **sizes)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.3)
        path = tmp_path / "model.safetensors"
        preprocess = Preprocess(image_size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
        save_model(path, network, classes=classes, preprocess=preprocess, metrics={}, data={}, temperature=1.5)
        return load_model(path)

    return build


def report_of(model, count, folder, **changes):
    """Write the report of random images and logits; give the page and the scores."""
    generator = torch.Generator().manual_seed(1)
    K = len(model.classes)
    labels = torch.arange(count) % K
    logits = 2 * torch.randn(count, K, generator=generator)
    logits[torch.arange(count), labels] += 3.0
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    names = changes.get("names") or [f"image {i}" for i in range(count)]
    split = ArraySplit(name="val", labels=labels.numpy(), paths=names, images=images)
    scores = scores_of(logits, labels, model.classes, model.temperature)
    result = {"checkpoint": "a run", "data": "some data", "split": "val", **scores.to_dict()}
    page = write_report(folder, model, Scored(split, (), False, None), scores, result, conformal_level=0.9)
    return page.read_text(encoding="utf-8"), scores


def test_report_of_a_thousand_classes_with_long_names_stays_small(model_of, tmp_path):
    classes = tuple(f"class {number} of a very long name {'x' * 60}" for number in range(1000))
    page, _ = report_of(model_of(classes), 2000, tmp_path / "report")
    assert len(page.encode()) < LIMIT / 4
    body = page[page.index('id="per-class"') :]
    assert body[: body.index("</table>")].count("<tr>") == 1001


def test_report_escapes_names_of_classes_and_files(model_of, tmp_path):
    names = [f"{HOSTILE}{number}" for number in range(60)]
    page, _ = report_of(model_of((HOSTILE, "b" + HOSTILE, "c")), 60, tmp_path / "report", names=names)
    assert page.count("<script>") == 1  # the page's own
    assert "\x1b" not in page
    assert html.escape('"><script>alert(1)</script>\\x1b[2J</table>').replace("&quot;", "&#34;") in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    assert "default-src 'none'" in html.unescape(policy)
    assert "script-src 'sha256-" in html.unescape(policy)


@pytest.mark.parametrize("count", [2, 30])
def test_report_of_two_classes_and_few_images_says_what_it_can(model_of, tmp_path, count):
    page, scores = report_of(model_of(("a", "b")), count, tmp_path / "report")
    assert f"{scores.top1:.1%}" in page
    assert 'id="sets"' in page


def test_report_gives_each_class_its_interval_in_one_column(model_of, tmp_path):
    page, scores = report_of(model_of(("a", "b", "c")), 60, tmp_path / "report")
    table = page[page.index('id="per-class"') :]
    heads, *rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")])
    names = re.findall(r"<button type=.button.>(.*?)</button>", heads)
    assert names == ["class", "images", "precision", "recall", "recall, 95 % interval", "F1"]
    for row, known in zip(rows, scores.per_class(), strict=True):
        low, high = known["recall_interval"]
        assert len(re.findall("<td", row)) == len(names)
        assert f'data-value="{low}">{low:.1%} to {high:.1%}'.replace("%", "&nbsp;%") in row


def test_headlines_are_the_scores_with_their_intervals_and_calibrated_values():
    logits = torch.tensor([[2.0, 0, 0], [0, 1.0, 0], [3.0, 0, 0], [0, 0, 1.0]])
    result = scores_of(logits, torch.tensor([0, 1, 2, 2]), ("a", "b", "c"), 2.0).to_dict()
    rows = {name: rest for name, *rest in headlines(result)}
    assert list(rows)[:3] == ["top-1", "top-2", "loss, nats"]
    low, high = result["intervals"]["top1"]
    assert rows["top-1"] == ["75.0%", f"{low:.1%} to {high:.1%}", ""]
    assert rows["loss, nats"][2] == f"{result['calibrated']['loss']:.4f}"
    assert rows["calibration error"][0] == f"{result['ece']:.1%}"


def test_headlines_of_classes_and_pixels_do_not_compare_two_losses():
    result = scores_of(torch.eye(3), torch.tensor([0, 1, 1]), ("a", "b", "c"), 2.0).to_dict() | {"bits_per_pixel": 1.5}
    rows = {name: rest for name, *rest in headlines(result)}
    assert rows["classes and pixels, nats"][2] == ""
    assert rows["bits a pixel"] == ["1.5000", "", ""]
    assert rows["Brier score"][2] == f"{result['calibrated']['brier']:.4f}"


def test_report_counts_the_images_that_were_checked_and_names_what_lists_all(model_of, tmp_path):
    page, _ = report_of(model_of(tuple(f"class {number:02d}" for number in range(40))), 120, tmp_path / "report")
    assert "Of 120 images of this split" in page
    assert re.search(r"and [0-9]+ more; vitlab check --json lists all", page)


def test_conformal_sets_are_those_of_one_process_whatever_their_number():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(41, 4, generator=generator), torch.arange(41) % 4

    def processes(count):
        parts = []
        for place in range(count):
            rows = torch.arange(place, 41, count)
            part = Scores(classes=tuple("abcd"))
            part.add(Batch(torch.empty(len(rows), 0), labels[rows], rows), Step(torch.zeros(()), logits[rows], {}))
            parts.append(part)
        for other in parts[1:]:
            parts[0].absorb(other)
        return conformal_sets(parts[0], 0.8)

    one = processes(1)
    for sets in map(processes, (2, 3)):
        assert sets.threshold == one.threshold
        assert np.array_equal(sets.sizes, one.sizes)
        assert np.array_equal(sets.holds, one.holds)


def test_most_confused_pairs_come_by_count_with_their_share_of_the_true_class():
    pairs = most_confused(np.array([[5, 3, 0], [1, 9, 0], [4, 0, 4]]), ("a", "b", "c"))
    assert [(p.true, p.predicted, p.count, p.share) for p in pairs] == [
        ("c", "a", 4, 0.5),
        ("a", "b", 3, 3 / 8),
        ("b", "a", 1, 0.1),
    ]


def test_worst_mistakes_show_the_images_they_name(model_of):
    model = model_of(("a", "b"))
    logits = torch.tensor([[1.0, 0.0], [4.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 1])
    images = np.zeros((4, 8, 8, 3), np.uint8)
    split = ArraySplit(name="val", labels=labels.numpy(), paths=["w", "x", "y", "z"], images=images)
    mistakes, note = worst_mistakes(model, split, scores_of(logits, labels, model.classes).images)
    assert note is None
    assert [(m.path, m.true, m.predicted) for m in mistakes] == [("x", "b", "a"), ("z", "b", "a")]
    assert mistakes[0].confidence == pytest.approx(1 / (1 + np.exp(-4)))
    assert mistakes[0].true_probability == pytest.approx(1 / (1 + np.exp(4)))
    assert all(m.picture.startswith("data:image/jpeg") and m.map.startswith("data:image/jpeg") for m in mistakes)


def test_evaluate_writes_the_report_of_what_it_scored(model_file, odd_images, tmp_path, capsys):
    line = ["evaluate", str(model_file), "--data", str(odd_images), "--split", "all", "--workers", "0"]
    more = ["--report", str(tmp_path / "report"), "--conformal_level", "0.8", "--json", str(tmp_path / "scores.json")]
    assert main([*line, *more]) == 0
    assert f"report: {tmp_path / 'report' / 'index.html'}" in capsys.readouterr().out
    page = html.unescape((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    result = json.loads((tmp_path / "scores.json").read_text())
    assert f"{result['top1']:.1%}" in page
    assert "asked for were 80.0\xa0%" in page
    wrong = round(result["error"] * result["count"])
    assert f"Of {wrong} mistakes the {min(24, wrong)}" in page
    assert page.count('class="pair"') == min(24, wrong)
    assert "classes with fewer than 10 images in all: 7" in page  # the data check


def test_evaluate_refuses_a_report_inside_the_data_and_a_level_that_is_no_share(model_file, odd_images, capsys):
    line = ["evaluate", str(model_file), "--data", str(odd_images), "--split", "all"]
    assert main([*line, "--report", str(odd_images / "report")]) == 2
    assert "lies in the data set" in capsys.readouterr().err
    assert not (odd_images / "report").exists()
    assert main([*line, "--report", "r", "--conformal_level", "90"]) == 2
    assert "--conformal_level is 90.0: give a share between 0 and 1" in capsys.readouterr().err
