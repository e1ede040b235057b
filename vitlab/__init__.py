"""Train, evaluate, run and watch vision transformers on your own image folders."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.inference.predictor import Predictor
    from vitlab.models.catalog import create_model, list_models
    from vitlab.models.weights import load_weights
    from vitlab.runs.training import run_training as train

__version__ = "0.1.0"
__all__ = ["Predictor", "create_model", "list_models", "load_weights", "train"]

# Where each public name lives; imported when first used, so that `import vitlab` costs nothing.
_HOMES = {
    "Predictor": ("vitlab.inference.predictor", "Predictor"),
    "create_model": ("vitlab.models.catalog", "create_model"),
    "list_models": ("vitlab.models.catalog", "list_models"),
    "load_weights": ("vitlab.models.weights", "load_weights"),
    "train": ("vitlab.runs.training", "run_training"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlab' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
