"""The house's order: imports run downward only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vitlab"
GROUND = {
    "allocator",
    "checks",
    "config",
    "course_sections",
    "disk",
    "errors",
    "options",
    "parsing",
    "pixel_options",
    "sections",
    "seeds",
    "text",
}
# What each part may import besides itself and the ground.
BELOW = {
    "layers": set(),
    "data": set(),
    "models": {"layers", "data"},
    "engine": {"models", "data", "layers"},
    "inference": {"engine", "models", "data", "layers"},
    "runs": {"inference", "engine", "models", "data", "layers"},
    "printing": {"inference", "engine", "models"},
    "outputs": {"engine"},
    "commands": {"printing", "outputs", "pixel_commands", "runs", "inference", "engine", "models", "data"},
    "pixel_commands": {"outputs", "inference"},
    "cli": set(),
    "__main__": {"cli", "commands", "engine"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


ARCHITECTURES = {"vit", "swin", "davit", "imagegpt", "catalog"}


def imported_modules(path: Path) -> set[str]:
    """Give what a file imports of the package as dotted names under `vitlab`, names of modules and within them alike.

    `from vitlab import __version__` counts as nothing. Forms that would hide what is imported are refused.
    """
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            # It binds `vitlab`, from which any part can be reached afterwards.
            assert not any(name.split(".")[0] == "vitlab" for name in names), f"{path}:{node.lineno}: import vitlab"
        else:
            continue
        modules |= {name.removeprefix("vitlab.") for name in names if name.startswith("vitlab.")}
    return modules - {"__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    parts = {module.split(".")[0] for module in imported_modules(path)}
    if part in GROUND:
        assert parts <= GROUND
    elif part != "__init__":
        assert parts <= BELOW[part] | GROUND | {part}


def test_engine_names_no_architecture():
    for path in (PACKAGE / "engine").glob("*.py"):
        for module in imported_modules(path):
            assert ARCHITECTURES.isdisjoint(module.split(".")), path


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("from vitlab.models.vit import Block", {"models.vit.Block"}),
        ("from vitlab.models import vit", {"models.vit"}),
        ("from vitlab import models", {"models"}),
        ("def late():\n    from vitlab.engine import figures, optim", {"engine.figures", "engine.optim"}),
        ("from vitlab import __version__", set()),
        ("import torch, vitlabels\nfrom torch import nn", set()),
    ],
)
def test_imported_modules_reads_every_form(line, modules, tmp_path):
    (tmp_path / "part.py").write_text(line)
    assert imported_modules(tmp_path / "part.py") == modules


@pytest.mark.parametrize(
    "line", ["import vitlab", "import vitlab.models.vit as v", "from . import x", "from .x import y"]
)
def test_imported_modules_refuses_what_hides_a_part(line, tmp_path):
    (tmp_path / "part.py").write_text(line)
    with pytest.raises(AssertionError, match=r"part\.py:1: (import vitlab|a relative import)"):
        imported_modules(tmp_path / "part.py")
