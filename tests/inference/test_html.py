"""Reports as one page: what is escaped, and how pictures are put in."""

import base64

import cv2
import numpy as np
import pytest
from jinja2 import UndefinedError

from vitlab.inference.html import render, thumbnail_uri


def test_thumbnail_uri_holds_a_small_jpeg_of_the_right_colours():
    image = np.zeros((300, 100, 3), np.uint8)
    image[:150, :, 0], image[150:, :, 2] = 255, 255  # red above blue
    head, _, data = thumbnail_uri(image, side=60).partition(",")
    assert head == "data:image/jpeg;base64"
    small = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
    assert small.shape == (60, 20, 3)
    assert np.abs(small[10, 10].astype(int) - (255, 0, 0)).max() < 12
    assert np.abs(small[50, 10].astype(int) - (0, 0, 255)).max() < 12


def test_thumbnail_uri_enlarges_nothing_and_takes_ribbons():
    for shape in ((5, 7), (1, 5000)):
        data = thumbnail_uri(np.full((*shape, 3), 9, np.uint8)).partition(",")[2]
        small = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
        assert small.shape[:2] == ((5, 7) if shape == (5, 7) else (1, 128))


def test_render_escapes_and_misses_nothing():
    page = render("page.html", title="<b>\x1b&\udcff")
    assert "<title>&lt;b&gt;\\x1b&amp;\\udcff</title>" in page
    assert "prefers-color-scheme: dark" in page
    with pytest.raises(UndefinedError):
        render("page.html")
