import numpy as np
import pytest
from PIL import Image

from vitlab.engine.probe_figure import plot_probe, probe_figure


def draw(layers, shares, *, chosen, test_top1=None, title="t"):
    intervals = [(share - 0.1, share + 0.05) for share in shares]
    return probe_figure(layers, shares, intervals, chosen=chosen, test_top1=test_top1, title=title)


def test_probe_figure_draws_layers_choice_and_test():
    axes = draw([2, 4, 7], [0.5, 0.75, 0.25], chosen=4, test_top1=0.625).axes[0]
    curve, star, test = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert curve == ([2, 4, 7], [50, 75, 25])
    assert star == ([4], [75])
    assert test == ([4], [62.5])
    band = axes.collections[0].get_paths()[0].vertices
    for x, low, high in ((2, 40, 55), (4, 65, 80), (7, 15, 30)):
        ends = band[band[:, 0] == x][:, 1]
        assert (ends.min(), ends.max()) == (pytest.approx(low), pytest.approx(high))
    entries = [text.get_text() for text in axes.get_legend().get_texts()]
    assert entries == ["95 % interval", "validation images", "chosen: layer 4, 75.00 %", "test images: 62.50 %"]


def test_probe_figure_without_a_test_split_has_no_test_point():
    axes = draw([1], [0.5], chosen=1).axes[0]
    assert len(axes.lines) == 2
    assert not any("test" in text.get_text() for text in axes.get_legend().get_texts())


def test_plot_probe_writes_any_title(tmp_path):
    title = "linear probe of /photos/$x_1$/猫\x1b[31m" + "long" * 40
    plot_probe(
        [1, 2], [0.1, 0.2], [(0, 0.2), (0.1, 0.3)], chosen=2, test_top1=0.2, title=title, out_png=tmp_path / "p.png"
    )
    with Image.open(tmp_path / "p.png") as picture:
        assert np.ptp(np.asarray(picture)) == 255
