"""The report's figures: numbers at the places where they belong, every name escaped, one size whatever the classes."""

import base64
import xml.etree.ElementTree as ET

import cv2
import numpy as np
import pytest

from vitlab.engine.calibration import ReliabilityBin, RiskCoverage
from vitlab.inference.report_figures import confusion_svg, reliability_svg, risk_coverage_svg

HOSTILE = '<script>alert("1")</script>&'


def parts(svg, tag):
    return ET.fromstring(svg).iter(tag)


def test_confusion_of_few_classes_has_a_cell_for_each_count_with_its_share_as_depth():
    svg = confusion_svg(np.array([[8, 2, 0], [0, 0, 0], [3, 0, 1]]), ("a", "b", HOSTILE))
    cells = [(c.get("x"), c.get("y"), c.get("fill-opacity")) for c in parts(svg, "rect") if c.get("class") == "cell"]
    # x is the predicted class, y the true one, in cells of 36; depth is the root of the share of the row
    assert cells == [("0", "0", "0.89"), ("36", "0", "0.45"), ("0", "72", "0.87"), ("72", "72", "0.50")]
    counts = [text.text for text in parts(svg, "text") if text.get("class").startswith("count")]
    assert counts == ["8", "2", "3", "1"]
    titles = [title.text for title in parts(svg, "title")]
    assert titles[0] == "Confusion matrix of 3 classes"
    assert titles[3] == f"{HOSTILE} taken for a: 3 (75.0%)"
    assert "<script>" not in svg


@pytest.mark.parametrize("count", [21, 100, 1000, 2500])
def test_confusion_of_many_classes_is_a_heat_map_with_names_that_fit(count):
    confusion = np.diag(np.full(count, 9))
    confusion[count - 1, 0] = 27
    svg = confusion_svg(confusion, tuple(f"a class with a long name {i}" for i in range(count)))
    (image,) = parts(svg, "image")
    data = np.frombuffer(base64.b64decode(image.get("href").partition(",")[2]), np.uint8)
    depth = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)[..., 3]
    assert depth.shape == ((count, count) if count <= 1000 else (834, 834))
    assert depth[-1, 0] == round(255 * 0.75**0.5)  # true class downward, predicted to the right
    assert depth[0, 0] == 255
    assert depth[0, -1] == 0
    names = [text for text in parts(svg, "text") if text.get("class") == "tick"]
    assert 40 <= len(names) <= 80
    assert max(len(name.text) for name in names) <= 18
    assert len(svg) < 100_000


def test_reliability_puts_each_bin_where_its_confidence_and_accuracy_are():
    bins = [ReliabilityBin(40, 10, 0.5), ReliabilityBin(10, 9, 0.9)]
    svg = reliability_svg({"before": [ReliabilityBin(50, 25, 0.75)], HOSTILE: bins})
    dots = [(float(dot.get("cx")), float(dot.get("cy")), dot.get("class")) for dot in parts(svg, "circle")]
    # the panel is 380 wide and 290 high, y from the top
    assert dots == [(285, 145, "other dot"), (190, 217.5, "main dot"), (342, 29, "main dot")]
    whiskers = [path.get("d") for path in parts(svg, "path") if "whisker" in path.get("class")]
    assert len(whiskers) == 2  # of the main ones
    assert whiskers[0].startswith("M190.0 ")
    assert [title.text for title in parts(svg, "title")][2] == f"{HOSTILE}: 40 images, 50.0% sure, 25.0% right"
    assert "<script>" not in svg


def test_risk_coverage_marks_the_threshold():
    curve = RiskCoverage(np.array([0.9, 0.5, 0.2]), np.array([0.25, 0.5, 1.0]), np.array([0.0, 0.1, 0.4]))
    svg = risk_coverage_svg(curve, 1)
    (dot,) = parts(svg, "circle")
    assert (float(dot.get("cx")), float(dot.get("cy"))) == (190, 217.5)  # half of 380; a quarter of 0.4 up
    (line,) = (path.get("d") for path in parts(svg, "path") if path.get("class") == "main line")
    assert line == "M95.0 290.0L190.0 217.5L380.0 0.0"
    ticks = [text.text for text in parts(svg, "text") if text.get("class") == "tick"]
    assert ticks[1::2] == ["0 %", "8 %", "16 %", "24 %", "32 %", "40 %"]
    assert not list(parts(risk_coverage_svg(curve, None), "circle"))


def test_risk_coverage_without_a_mistake_has_a_scale():
    curve = RiskCoverage(np.array([0.9]), np.array([1.0]), np.array([0.0]))
    ticks = [text.text for text in parts(risk_coverage_svg(curve, None), "text") if text.get("class") == "tick"]
    assert ticks[-1] == "1 %"


def test_figures_of_many_images_stay_small():
    count = 50_000
    curve = RiskCoverage(np.linspace(1, 0, count), np.arange(1, count + 1) / count, np.linspace(0, 0.24, count))
    assert len(risk_coverage_svg(curve, count // 2)) < 12_000
