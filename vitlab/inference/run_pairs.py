"""Which runs are compared with which, and in what their configurations differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from vitlab.engine.run_folder import RunFolder, flatten
from vitlab.errors import InputError
from vitlab.models.files import checkpoint_path
from vitlab.parsing import check_yaml

_Configs: TypeAlias = Sequence[tuple[dict[str, Any] | None, ...]]
"""Of each pair the configurations of A and B, None where there is none."""


def pair_up(run_a: str, run_b: str) -> tuple[dict[str, tuple[Path, Path]], tuple[str, ...]]:
    """Give the runs to compare by seed, and lines for the seeds that have no partner."""
    a, b = _seeds_of(Path(run_a)), _seeds_of(Path(run_b))
    if not a and not b:
        checkpoint_path(run_a), checkpoint_path(run_b)
        return {"": (Path(run_a), Path(run_b))}, ()
    for run, seeds, other in ((run_a, a, run_b), (run_b, b, run_a)):
        if not seeds:
            checkpoint_path(run)
            raise InputError(
                f"{run} is one run and {other} a folder of several seeds: give two runs, such as {other}/seed-N, "
                "or two folders"
            )
    shared = sorted(a.keys() & b.keys(), key=lambda name: (len(name), name))
    if not shared:
        raise InputError(
            f"{run_a} has {', '.join(sorted(a))} and {run_b} has {', '.join(sorted(b))}: "
            "train both with some of the same train.seeds"
        )
    alone = [f"{name} has a model file in {run_a} alone" for name in sorted(a.keys() - b.keys())]
    alone += [f"{name} has a model file in {run_b} alone" for name in sorted(b.keys() - a.keys())]
    return {name: (a[name], b[name]) for name in shared}, tuple(alone)


def _seeds_of(run: Path) -> dict[str, Path]:
    """Find the runs of several seeds in a folder; none where it is a run itself, or a file."""
    if RunFolder(run).best.is_file():
        return {}
    return {path.name: path for path in run.glob("seed-*") if RunFolder(path).best.is_file()}


def read_config(run: Path) -> dict[str, Any] | None:
    """Give a run's configuration under dotted keys; None for a bare model file."""
    import yaml

    path = RunFolder(run).config
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        return flatten(yaml.safe_load(text))
    except (yaml.YAMLError, UnicodeDecodeError, OSError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read ({reason}): restore it, or give the model files") from error


def common_root(runs: tuple[str, str], configs: _Configs) -> str:
    """Give the data that all runs name."""
    roots: list[str] = []
    for side, run in enumerate(runs):
        for pair in configs:
            config = pair[side]
            if config is None or "data.root" not in config:
                raise InputError(f"{run} has no config.yaml that names its data: give the images with --data")
            roots.append(str(config["data.root"]))
    if len(set(roots)) > 1:
        raise InputError(f"{runs[0]} was trained on {roots[0]}, {runs[1]} on {roots[-1]}: say which with --data")
    return roots[0]


def differing_fields(configs: _Configs) -> dict[str, tuple[Any, Any]] | None:
    """Give the fields in which a pair of configurations differs."""
    differing: dict[str, tuple[Any, Any]] = {}
    for a, b in configs:
        if a is None or b is None:
            return None
        keys = [key for key in a | b if a.get(key) != b.get(key)]
        differing |= {key: (a.get(key), b.get(key)) for key in keys}
    return differing
