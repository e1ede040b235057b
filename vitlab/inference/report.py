"""`vitlab evaluate --report`: what a model gets right and wrong on a split, as one page.

The network's own probabilities, divided by its temperature, are what the page calls confidence, as in `vitlab predict`.
"""

import base64
import hashlib
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from einops import rearrange
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.datasets import Dataset, Split
from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform
from vitlab.engine.calibration import ImageScores, RiskCoverage, reliability_bins, risk_coverage
from vitlab.engine.conformal import ConformalSets, split_conformal
from vitlab.engine.evaluator import Scores
from vitlab.errors import InputError
from vitlab.inference.attribution import explain_map
from vitlab.inference.check import check_data
from vitlab.inference.html import thumbnail_uri, write_page
from vitlab.inference.overlays import enlarge, overlay
from vitlab.inference.report_figures import confusion_svg, reliability_svg, risk_coverage_svg
from vitlab.inference.scoring import Scored
from vitlab.models.files import ModelFile
from vitlab.models.network import device_of

if TYPE_CHECKING:
    from rich.progress import Progress

MAX_MISTAKES = 24
_PICTURE_SIDE = 224
_EXPLAINED_AT_ONCE = 8
_MAX_PAIRS = 20
_KEPT = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
"""Shares of the images whose thresholds the page lists."""
_DRAWN_CASES, _DRAWN_PICTURES = 5, 4
_HEADLINES = {
    "top1": "top-1",
    "loss": "loss, nats",
    "ece": "calibration error",
    "brier": "Brier score",
    "macro_recall": "macro recall",
    "macro_f1": "macro F1",
}
_IN_PERCENT = ("top", "ece", "macro")


@dataclass(frozen=True)
class Mistake:
    """An image that was taken for another class."""

    path: str
    true: str
    predicted: str
    confidence: float
    true_probability: float
    picture: str
    """What the network saw, a `data:` address."""
    map: str | None
    """The same with the places that spoke for the predicted class; None where the network has no such map."""


@dataclass(frozen=True)
class Confusion:
    """How often one class is taken for another."""

    true: str
    predicted: str
    count: int
    share: float
    """Of the true class's images."""


@dataclass(frozen=True)
class Abstention:
    """What a threshold on the confidence does."""

    threshold: float
    coverage: float
    accuracy: float
    """Share that is right among the images that are answered."""


def write_report(
    folder: Path,
    model: ModelFile,
    scored: Scored,
    scores: Scores,
    result: Mapping[str, Any],
    *,
    conformal_level: float,
    workers: int | None = 0,
    progress: "Progress | None" = None,
) -> Path:
    """Write `index.html`, a page that needs nothing else, and give its path.

    Args:
        folder: made where it is missing.
        model: what was scored; its network is asked once more for the worst mistakes.
        scored: the images.
        scores: what came out.
        result: the same as `vitlab evaluate --json` writes it.
        conformal_level: how often the sets of classes are to hold the true one.
        workers: processes that read; None leaves the number to each part.
        progress: a bar to add tasks to.

    Raises:
        OSError: it cannot be written.
    """
    images = _finite(scores.calibrated_images)
    series = {"confidence": reliability_bins(images.confidence, images.correct)}
    if scores.temperature != 1.0:
        raw = _finite(scores.images)
        series = {"before the temperature": reliability_bins(raw.confidence, raw.correct), **series}
    curve = risk_coverage(images.confidence, images.correct) if len(images.label) else None
    chosen = None if curve is None else curve.most_within(float(curve.risk[-1]) / 2)
    mistakes, note = worst_mistakes(model, scored.split, images)
    dataset = Dataset(classes=model.classes, splits={scored.split.name: scored.split})
    checked = check_data(dataset, workers=workers, progress=progress)
    script = (Path(__file__).parent / "templates" / "sort.js").read_text(encoding="utf-8")
    return write_page(
        folder,
        "report.html",
        title=f"{result['checkpoint']} on {result['data']} ({result['split']})",
        result=result,
        model=model,
        notes=[*scored.log, *([f"note: {scored.note}"] if scored.note else [])],
        headlines=headlines(result),
        confusion=confusion_svg(scores.confusion.numpy(), scores.classes),
        confusions=most_confused(scores.confusion.numpy(), scores.classes),
        reliability=reliability_svg(series),
        risk=None if curve is None else risk_coverage_svg(curve, chosen),
        abstentions=[] if curve is None else [abstention(curve, curve.least_covering(share)) for share in _KEPT],
        chosen=None if curve is None or chosen is None else abstention(curve, chosen),
        sets=conformal_sets(scores, conformal_level),
        level=conformal_level,
        mistakes=mistakes,
        num_images=len(scored.split),
        num_wrong=scores.count - scores.num_correct,
        num_broken=scores.count - len(images.label),
        map_note=note,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        **checked.page_values(cases=_DRAWN_CASES, pictures=_DRAWN_PICTURES),
    )


def headlines(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Give name, value, interval and calibrated value of each score, the last two empty where there is none."""
    names = {key: f"top-{key[3:]}" for key in result if key.startswith("top")} | _HEADLINES
    known = {} if result["temperature"] == 1.0 else dict(result["calibrated"])
    if "bits_per_pixel" in result:  # the temperature is of the classes alone
        names |= {"loss": "classes and pixels, nats", "bits_per_pixel": "bits a pixel"}
        known.pop("loss", None)
    rows = []
    for key, name in names.items():
        form = "{:.1%}" if key.startswith(_IN_PERCENT) else "{:.4f}"
        interval = " to ".join(form.format(end) for end in result["intervals"].get(key, ()))
        rows.append((name, form.format(result[key]), interval, form.format(known[key]) if key in known else ""))
    return rows


def most_confused(confusion: NDArray[np.int64], classes: tuple[str, ...]) -> list[Confusion]:
    """Give the pairs of classes that are confused most often, at most 20."""
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    totals = np.maximum(confusion.sum(axis=1), 1)
    flat = np.argsort(-wrong, axis=None, kind="stable")[:_MAX_PAIRS]
    rows, columns = (places.tolist() for places in np.unravel_index(flat, wrong.shape))
    return [
        Confusion(classes[row], classes[column], int(wrong[row, column]), float(wrong[row, column] / totals[row]))
        for row, column in zip(rows, columns, strict=True)
        if wrong[row, column]
    ]


def abstention(curve: RiskCoverage, row: int) -> Abstention:
    """Say what one threshold of a curve does."""
    return Abstention(float(curve.threshold[row]), float(curve.coverage[row]), 1 - float(curve.risk[row]))


def conformal_sets(scores: Scores, level: float) -> ConformalSets | None:
    """Make conformal sets from the images' logits, half of which set the threshold; None of fewer than two images.

    Of a split so large that its logits were not all kept, every m-th image takes part.
    """
    logits, labels = scores.logits.tensors()
    finite = logits.isfinite().all(dim=1)
    if int(finite.sum()) < 2:
        return None
    shares = (logits[finite].double() / scores.temperature).softmax(dim=1)
    return split_conformal(shares.numpy(), labels[finite].numpy(), level=level)


def worst_mistakes(model: ModelFile, split: Split, images: ImageScores) -> tuple[list[Mistake], str | None]:
    """Read the images whose true class was given the least probability, and explain them.

    Returns:
        At most 24, the worst first, and a line where the network has no maps.
    """
    worst = images.at(images.worst_mistakes(MAX_MISTAKES))
    part = split.subset(split.name, worst.index)
    loader = Loader(part, EvalTransform(model.preprocess), batch_size=_EXPLAINED_AT_ONCE, workers=0, on_error="skip")
    mistakes, note = [], None
    with closing(loader):
        for batch in loader.epoch(0) if len(part) else ():
            maps = None
            if note is None and len(batch.images):
                try:
                    maps = _explain(model, batch.images)
                except InputError as error:
                    note = str(error)
            pictures = rearrange(batch.images, "b c h w -> b h w c").contiguous().numpy()
            for place, (index, picture) in enumerate(zip(batch.indices.tolist(), pictures, strict=True)):
                shown = None if maps is None else thumbnail_uri(overlay(picture, maps[place]), side=_PICTURE_SIDE)
                mistakes.append(
                    Mistake(
                        path=part.paths[index],
                        true=model.classes[worst.label[index]],
                        predicted=model.classes[worst.predicted[index]],
                        confidence=float(worst.confidence[index]),
                        true_probability=math.exp(-worst.nll[index]),
                        picture=thumbnail_uri(enlarge(picture), side=_PICTURE_SIDE),
                        map=shown,
                    )
                )
    return mistakes, note


def _finite(images: ImageScores) -> ImageScores:
    """Leave out images whose logits are not numbers."""
    return images.at(np.flatnonzero(images.predicted >= 0))


def _explain(model: ModelFile, images: Tensor) -> NDArray[np.float32]:
    inputs = model.preprocess.normalize(images.to(device_of(model.network)))
    maps: NDArray[np.float32] = explain_map(model.network, inputs).cpu().numpy()
    return maps
