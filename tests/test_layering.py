"""The house's order: imports run downward only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vitlab"
GROUND = {"config", "errors", "options", "seeds", "text"}
# What each part may import besides itself and the ground.
BELOW = {
    "layers": set(),
    "data": set(),
    "models": {"layers", "data"},
    "engine": {"models", "data", "layers"},
    "inference": {"engine", "models", "data", "layers"},
    "training": {"engine", "models", "data"},
    "commands": {"training", "inference", "engine", "models", "data"},
    "cli": set(),
    "__main__": {"cli", "commands"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vitlab"):
            rest = node.module.split(".")[1:]
            parts |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("vitlab.")}
    return parts


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    parts = imported_parts(path) - {"__version__"}
    if part in GROUND:
        assert parts <= GROUND
    elif part != "__init__":
        assert parts <= BELOW[part] | GROUND | {part}


def test_engine_names_no_architecture():
    names = {"vit", "swin", "davit", "imagegpt", "catalog"}
    for path in (PACKAGE / "engine").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert names.isdisjoint(node.module.split(".")), path
