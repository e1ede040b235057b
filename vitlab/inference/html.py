"""Reports as one HTML page that needs nothing else: no network, no file beside it.

A report's own template lies in `templates/` and extends `page.html`, which has the shell and the styles for light and
dark. What a template shows is escaped, since names of files and classes are as hostile as they like; of scripts a
browser runs only one whose hash the page's policy names.
"""

import base64
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from vitlab.disk import replacing
from vitlab.text import printable

PAGE_NAME = "index.html"
THUMBNAIL_SIDE = 128
"""Longest side of a small picture on a page, in pixels."""

_QUALITY = 80


def write_page(folder: Path, template: str, **values: Any) -> Path:
    """Write a report into a folder, which is made where it is missing, and give its path.

    Args:
        folder: where `index.html` goes.
        template: name of a file in `templates/`.
        **values: what the template shows; `title` is the page's.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / PAGE_NAME) as aside:
        aside.write_text(render(template, **values), encoding="utf-8")
    return folder / PAGE_NAME


def render(template: str, **values: Any) -> str:
    """Fill a template of `templates/`; every value is escaped, and an unknown one is an error.

    Templates show names through the filter `printable`, which escapes control characters and halves of characters.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vitlab.inference"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment.get_template(template).render(**values)


def thumbnail_uri(image: NDArray[np.uint8], *, side: int = THUMBNAIL_SIDE) -> str:
    """Give an image (H, W, 3), RGB, as a JPEG of at most `side` pixels a side, inside a `data:` address."""
    H, W = image.shape[:2]
    scale = min(1.0, side / max(H, W))
    size = max(1, round(W * scale)), max(1, round(H * scale))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    _, data = cv2.imencode(".jpg", small[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return f"data:image/jpeg;base64,{base64.b64encode(data.tobytes()).decode('ascii')}"
