"""What a probe found: as a table, as JSON, as a picture, and in a sentence."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.data.images import ImageError
from vitlab.engine.evaluator import percent
from vitlab.engine.probe_figure import plot_probe
from vitlab.engine.statistics import Interval, wilson_interval
from vitlab.options import ProbeMethod

if TYPE_CHECKING:
    from rich.table import Table

SETTINGS: dict[ProbeMethod, str] = {"linear": "C", "knn": "k"}
"""What validation chooses of each method's classifier."""


@dataclass(frozen=True)
class Candidate:
    """A classifier on the features of one layer, and how many validation images it gets right."""

    layer: int
    value: float
    """Its C or k."""
    num_correct: int


def best_candidate(candidates: Iterable[Candidate]) -> Candidate:
    """Give the one with most validation images right, of equals the first."""
    return max(candidates, key=lambda candidate: candidate.num_correct)


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What `probe_layers` found."""

    checkpoint: str
    data: str
    method: ProbeMethod
    seed: int
    classes: tuple[str, ...]
    widths: dict[int, int]
    """Numbers in the features of each layer."""
    counts: dict[str, int]
    """Images of each split that could be read."""
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    test_correct: int | None
    """Test images that the chosen classifier gets right; None where there is no test split."""
    notes: tuple[str, ...]
    """What the network may have seen of the images."""
    errors: tuple[ImageError, ...]

    def best_of(self, layer: int) -> Candidate:
        """Give the best of a layer."""
        return best_candidate(candidate for candidate in self.candidates if candidate.layer == layer)

    def val_top1(self, candidate: Candidate) -> tuple[float, Interval]:
        """Give the share of validation images that are right, and its interval over the choice of the images."""
        count = self.counts["val"]
        return candidate.num_correct / count, wilson_interval(candidate.num_correct, count)

    def score(self) -> tuple[str, float, Interval]:
        """Give the split that the chosen classifier is scored on, top-1 and its interval; of `val` it is optimistic."""
        if self.test_correct is None:
            return ("val", *self.val_top1(self.chosen))
        count = self.counts["test"]
        return "test", self.test_correct / count, wilson_interval(self.test_correct, count)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain JSON values; fractions, not percent."""
        setting = SETTINGS[self.method]
        split, top1, interval = self.score()
        rows = []
        for layer, width in self.widths.items():
            best = self.best_of(layer)
            val_top1, val_interval = self.val_top1(best)
            grid = [
                {setting: candidate.value, "val_top1": self.val_top1(candidate)[0]}
                for candidate in self.candidates
                if candidate.layer == layer
            ]
            rows.append(
                {
                    "layer": layer,
                    "features": width,
                    setting: best.value,
                    "val_top1": val_top1,
                    "val_interval": list(val_interval),
                    "grid": grid,
                }
            )
        return {
            "checkpoint": self.checkpoint,
            "data": self.data,
            "method": self.method,
            "seed": self.seed,
            "classes": list(self.classes),
            "counts": self.counts,
            "layers": rows,
            "chosen": {"layer": self.chosen.layer, setting: self.chosen.value},
            "split": split,
            "top1": top1,
            "interval": list(interval),
            "optimistic": split == "val",
            "notes": list(self.notes),
            "unreadable": [{"path": error.path, "reason": error.reason} for error in self.errors],
        }

    def table(self) -> "Table":
        """Give a row for each layer: its best classifier on validation, and the chosen one's test score."""
        from rich.table import Table

        setting = SETTINGS[self.method]
        split, top1, interval = self.score()
        table = Table("layer", "features", setting, "validation top-1", *(["test top-1"] if split == "test" else []))
        for column in table.columns:
            column.justify = "right"
        for layer, width in self.widths.items():
            best = self.best_of(layer)
            is_chosen = layer == self.chosen.layer
            test = [percent(top1, interval) if is_chosen else ""] if split == "test" else []
            style = "bold" if is_chosen else None
            table.add_row(str(layer), str(width), f"{best.value:g}", percent(*self.val_top1(best)), *test, style=style)
        return table

    def verdict(self) -> str:
        """Say in a line what was chosen, how good it is, and how far to trust the figure."""
        setting = SETTINGS[self.method]
        split, top1, interval = self.score()
        choice = f"layer {self.chosen.layer} with {setting} {self.chosen.value:g}"
        what = f"{choice}, chosen on {self.counts['val']:,} val images"
        if split == "test":
            return f"{what}: top-1 {percent(top1, interval)} of {self.counts['test']:,} test images"
        return f"{what}: top-1 {percent(top1, interval)} of the same images, so optimistic: there is no test split"

    def plot(self, out_png: Path) -> None:
        """Draw validation top-1 over the layers."""
        _, top1, _ = self.score()
        shares = [self.val_top1(self.best_of(layer)) for layer in self.widths]
        plot_probe(
            list(self.widths),
            [share for share, _ in shares],
            [interval for _, interval in shares],
            chosen=self.chosen.layer,
            test_top1=None if self.test_correct is None else top1,
            title=f"{self.method} probe of {self.checkpoint} on {self.data}",
            out_png=out_png,
        )
