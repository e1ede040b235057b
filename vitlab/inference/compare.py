"""Two runs on the same images: which is better, how sure that is, and whether they are the same to the last bit.

A pair of runs is compared image by image. With several seeds each pair of the same seed is, and then their mean. The
difference is always top-1 of A minus top-1 of B.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.data.datasets import SplitName, fingerprint
from vitlab.data.splits import match_classes
from vitlab.engine.device import resolve_device
from vitlab.engine.evaluator import Scores, percent
from vitlab.engine.statistics import Interval, mcnemar, mean_difference_interval, paired_difference_interval
from vitlab.errors import InputError
from vitlab.inference.run_pairs import common_root, differing_fields, pair_up, read_config
from vitlab.inference.sameness import Sameness, compare_bits
from vitlab.inference.scoring import Scored, read_split, score
from vitlab.models.files import ModelFile, load_model
from vitlab.models.sources import read_record
from vitlab.options import CompareOptions
from vitlab.sections import PIXELS_ALONE
from vitlab.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

_SIDES = ("A", "B")
_Say = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """Two runs of one seed, or simply two runs."""

    name: str
    """`seed-N`; empty where no seeds are compared."""
    paths: tuple[Path, Path]
    scores: tuple[Scores, Scores]
    sameness: Sameness


@dataclass(frozen=True)
class Comparison:
    """What `compare_runs` found."""

    runs: tuple[str, str]
    data: str
    split: SplitName
    pairs: tuple[Pair, ...]
    verdicts: NDArray[np.int8]
    """Of each pair, side and image of the split (S, 2, N): 1 right, 0 wrong, -1 where the image could not be read."""
    config: dict[str, tuple[Any, Any]] | None
    """Fields that differ, None where one lacks them; None altogether where a run has no configuration beside it."""
    left_out: tuple[str, ...]
    """Seeds that have no partner."""

    @property
    def skipped(self) -> bool:
        """Whether some images could not be read."""
        return any(scores.errors for pair in self.pairs for scores in pair.scores)

    @property
    def identical(self) -> bool:
        """Whether the runs have the same losses and weights to the last bit."""
        return all(pair.sameness.identical for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain JSON values; fractions, not percent."""
        read = self.verdicts[:, :, (self.verdicts >= 0).all(axis=(0, 1))] == 1  # (S, 2, images that all could read)
        pairs = [self._pair_dict(pair, *right) for pair, right in zip(self.pairs, read, strict=True)]
        differences = read[:, 0].astype(np.float64) - read[:, 1]  # (S, N)
        several = len(pairs) > 1
        return {
            "a": self.runs[0],
            "b": self.runs[1],
            "data": self.data,
            "split": self.split,
            "count": read.shape[2],
            "config": None if self.config is None else {key: list(values) for key, values in self.config.items()},
            "left_out": list(self.left_out),
            "identical": self.identical,
            "pairs": pairs,
            "difference": float(differences.mean()),
            "interval": list(mean_difference_interval(differences)) if several else pairs[0]["interval"],
        }

    @staticmethod
    def _pair_dict(pair: Pair, right_a: NDArray[np.bool_], right_b: NDArray[np.bool_]) -> dict[str, Any]:
        """Describe a pair by who got which of the images (N,) right."""
        both, neither = int((right_a & right_b).sum()), int((~right_a & ~right_b).sum())
        only_a, only_b = int((right_a & ~right_b).sum()), int((~right_a & right_b).sum())
        interval: Interval = paired_difference_interval(both, only_a, only_b, neither)
        long = ("classes", "per_class", "confusion")
        sides = [
            {"path": str(path), **{key: value for key, value in scores.to_dict().items() if key not in long}}
            for path, scores in zip(pair.paths, pair.scores, strict=True)
        ]
        return {
            "name": pair.name,
            "a": sides[0],
            "b": sides[1],
            "both_right": both,
            "only_a_right": only_a,
            "only_b_right": only_b,
            "neither_right": neither,
            "mcnemar_p": mcnemar(only_a, only_b),
            "difference": (only_a - only_b) / len(right_a),
            "interval": list(interval),
            "sameness": pair.sameness.to_dict(),
        }


def compare_runs(options: CompareOptions, *, say: _Say, progress: "Progress | None" = None) -> Comparison:
    """Score two runs, or two folders of runs of several seeds, on the same images.

    Args:
        options: the runs, and the images: by default the test split of the data that both were trained on, or its
            validation split where it has none.
        say: told in a line what was chosen, and what limits the comparison.
        progress: a bar to add tasks to.

    Raises:
        InputError: a run or the data is not there, classes differ, the images are not the same, or one model may have
            been trained on the other's validation images.
    """
    runs = (options.run_a, options.run_b)
    members, left_out = pair_up(*runs)
    configs = [tuple(map(read_config, paths)) for paths in members.values()]
    data = options.data or common_root(runs, configs)
    first = next(iter(members))
    split = options.split or _default_split(load_model(members[first][0]), data, say)
    pairs: list[Pair] = []
    verdicts: list[NDArray[np.int8]] = []
    images: dict[str, Any] | None = None
    told: set[str] = set()
    for name, paths in members.items():
        a, b = (load_model(path, device=resolve_device(options.device)) for path in paths)
        _check_classes(runs, a, b)
        scored = _read_same(a, b, data, split)
        images = images or fingerprint(scored[0].split)
        if fingerprint(scored[0].split) != images:
            raise InputError(
                f"{name} has other {split} images of {data} than {first}: compare on --split test, "
                "or train all seeds with the same data.val_seed"
            )
        _tell(scored, told, say)
        scores_a, scores_b = (
            _score(options, model, own, f"{side} {name}".strip(), progress)
            for side, model, own in zip(_SIDES, (a, b), scored, strict=True)
        )
        pairs.append(Pair(name, paths, (scores_a, scores_b), compare_bits(*paths)))
        verdicts.append(np.stack([_verdicts(scores, len(scored[0].split)) for scores in (scores_a, scores_b)]))
    return Comparison(runs, data, split, tuple(pairs), np.stack(verdicts), differing_fields(configs), left_out)


@dataclass(frozen=True)
class Bits:
    """Runs compared bit for bit, and not by their scores."""

    config: Mapping[str, Sequence[Any]] | None
    """The fields of the configurations that differ; None where a run has none."""
    left_out: tuple[str, ...]
    """What had no partner."""
    sameness: Mapping[str, Sameness]
    """Of each pair."""

    @property
    def identical(self) -> bool:
        """Whether no bit differs in any pair."""
        return all(sameness.identical for sameness in self.sameness.values())

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain JSON values."""
        config = None if self.config is None else {key: list(values) for key, values in self.config.items()}
        pairs = [{"name": name, "sameness": sameness.to_dict()} for name, sameness in self.sameness.items()]
        return {"config": config, "left_out": list(self.left_out), "identical": self.identical, "pairs": pairs}


def compare_without_scores(options: CompareOptions) -> Bits | None:
    """Compare runs of which one knows no classes, so that there is nothing to count; None where all know some."""
    members, left_out = pair_up(options.run_a, options.run_b)
    records = [read_record(path) or {} for paths in members.values() for path in paths]
    if all(record.get("objective", {}).get("name") not in PIXELS_ALONE for record in records):
        return None
    configs = [tuple(map(read_config, paths)) for paths in members.values()]
    sameness = {name: compare_bits(*paths) for name, paths in members.items()}
    return Bits(differing_fields(configs), left_out, sameness)


def _score(options: CompareOptions, model: ModelFile, own: Scored, label: str, progress: "Progress | None") -> Scores:
    task = None if progress is None else progress.add_task(label, total=len(own.split))
    return score(
        model,
        own.split,
        batch_size=options.batch_size,
        workers=options.workers,
        on_error=options.on_error,
        on_batch=None if progress is None or task is None else partial(progress.advance, task),
    )


def pairs_table(result: Mapping[str, Any]) -> "Table":
    """Give the pairs of a `Comparison.to_dict()` as a table: who was right alone, and the difference in points."""
    from rich.table import Table
    from rich.text import Text

    several = len(result["pairs"]) > 1
    table = Table(*(["seed"] if several else []), "A", "B", "A only", "B only", "McNemar", "A - B in points")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[-1].no_wrap = False  # in a narrow terminal two lines, not three dots
    for pair in result["pairs"]:
        alone = (str(pair["only_a_right"]), str(pair["only_b_right"]), f"{pair['mcnemar_p']:.2g}")
        tops = (percent(pair[side]["top1"]) for side in ("a", "b"))
        name = [Text(printable(pair["name"].removeprefix("seed-")))] if several else []
        table.add_row(*name, *tops, *alone, points(pair["difference"], pair["interval"]))
    if several:
        means = (percent(float(np.mean([pair[side]["top1"] for pair in result["pairs"]]))) for side in ("a", "b"))
        table.add_section()
        table.add_row("mean", *means, "", "", "", points(result["difference"], result["interval"]))
    return table


def config_table(config: Mapping[str, Sequence[Any]]) -> "Table":
    """Give the fields that differ as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table("field", "A", "B")
    for key, values in config.items():
        table.add_row(*(Text(printable(str(cell))) for cell in (key, *values)))
    return table


def points(difference: float, interval: Sequence[float]) -> str:
    """Write a difference of two shares in percentage points with its interval: `+1.11 (-0.61 to +2.90)`."""
    low, high = interval
    return f"{100 * difference:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def _check_classes(runs: tuple[str, str], a: ModelFile, b: ModelFile) -> None:
    if set(a.classes) == set(b.classes):
        return
    sides = zip(runs, (sorted(set(a.classes) - set(b.classes)), sorted(set(b.classes) - set(a.classes))), strict=True)
    alone = "; ".join(f"only {run} knows {', '.join(names[:5])}" for run, names in sides if names)
    raise InputError(
        f"the classes differ ({len(a.classes)} and {len(b.classes)}): {alone}; compare models of the same classes"
    )


def _default_split(model: ModelFile, data: str, say: _Say) -> SplitName:
    """Choose the test split; else validation; else, of images that are not divided and not the model's own, all."""
    try:
        read_split(model, data, "test")
    except InputError:
        val = read_split(model, data, "val")  # where that is missing too, it says what is wrong
        if val.split.is_cut and not val.is_own:
            with suppress(InputError):
                read_split(model, data, "all")
                say(f"{data} has no test split: comparing on all images")
                return "all"
        bias = ", which chose the epoch of a run that validated on it: its score is a little high"
        say(f"{data} has no test split: comparing on val{bias if val.is_own else ''}")
        return "val"
    return "test"


def _read_same(a: ModelFile, b: ModelFile, data: str, name: SplitName) -> tuple[Scored, Scored]:
    """Read a split for both models, and refuse images that would favour one of them.

    Where validation is a cut of the training images, a model that did not validate on it may have been trained on it.
    """
    of_a, of_b = read_split(a, data, name), read_split(b, data, name)
    relabelled, _ = match_classes(of_b.split, b.classes, a.classes, data)
    remedy = (
        "compare on --split test, on --split all of images that neither was trained on, or train both with the same "
        "data.val_fraction and data.val_seed"
    )
    if fingerprint(relabelled) != fingerprint(of_a.split):
        raise InputError(
            f"the {name} split of {data} is another cut for A ({len(of_a.split)} images) than for B "
            f"({len(of_b.split)}), so that each may have been trained on the other's: {remedy}"
        )
    strangers = [side for side, scored in zip(_SIDES, (of_a, of_b), strict=True) if not scored.is_own]
    if name == "val" and strangers and of_a.split.is_cut:
        raise InputError(
            f"{' and '.join(strangers)} did not validate on this cut of {data} and may have been trained on some of "
            f"its images: {remedy}"
        )
    return of_a, of_b


def _tell(scored: tuple[Scored, Scored], told: set[str], say: _Say) -> None:
    """Say how the images were read and what they may have been used for, each line once."""
    notes = [f"note: {side}: {own.note}" for side, own in zip(_SIDES, scored, strict=True) if own.note]
    for line in (*scored[0].log, *notes):
        if line not in told:
            told.add(line)
            say(line)


def _verdicts(scores: Scores, count: int) -> NDArray[np.int8]:
    """Say of each image of the split whether it was right, int8 (N,); -1 where it could not be read."""
    verdicts = np.full(count, -1, np.int8)
    verdicts[scores.images.index] = scores.images.correct
    return verdicts
