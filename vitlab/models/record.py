"""The record in a model file, as it may be: the kinds of its fields, checked before anything is done with them."""

from typing import Any

from vitlab.checks import is_number

RECORD_KEY = "vitlab"
"""Where the record stands in a safetensors file's metadata."""

_FIELDS: dict[str, type] = {
    "format": int,
    "model": dict,
    "classes": list,
    "preprocess": dict,
    "metrics": dict,
    "weights": str,
    "data": dict,
    "version": str,
    "sha256": str,
}
_LATER_FIELDS: dict[str, type] = {"objective": dict}
"""Files of earlier versions lack them."""


def check_record(record: dict[str, Any]) -> None:
    """Check that a record has its fields, each of its kind; fields that this version does not know are passed over.

    Raises:
        ValueError: a field is missing or of another kind.
    """
    if not isinstance(record, dict):
        raise ValueError("its record is no JSON object")
    if missing := [name for name in _FIELDS if name not in record]:
        raise ValueError(f"its record lacks {', '.join(missing)}")
    for name, kind in (_FIELDS | _LATER_FIELDS).items():
        if name in record and type(record[name]) is not kind:
            raise ValueError(f"its record has a {type(record[name]).__name__} as {name}")
    if not all(isinstance(name, str) for name in record["classes"]):
        raise ValueError("its record has a class whose name is no text")
    if record["weights"] not in ("raw", "ema"):
        raise ValueError("its record does not say whether its weights are raw or ema")
    if record["format"] < 1:
        raise ValueError(f"its record has the format {record['format']}")
    if not is_number(record.get("temperature", 1.0)) or record.get("temperature", 1.0) <= 0:
        raise ValueError(f"its temperature is {record['temperature']!r}")
    _check_model(record["model"])
    _check_data(record["data"])
    _check_objective(record.get("objective", {}), len(record["classes"]))


def _check_model(model: dict[str, Any]) -> None:
    name, config = model.get("name"), model.get("config")
    if not isinstance(name, str) or not isinstance(config, dict):
        raise ValueError("its record names no network with its config")
    size = config.get("image_size")
    if not isinstance(size, list) or len(size) != 2:
        raise ValueError("its record has no image_size of height and width")
    if not all(
        type(number) is int and number > 0 for number in (*size, config.get("num_classes"), config.get("in_channels"))
    ):
        raise ValueError("its record has an image_size, num_classes or in_channels that is no number above 0")


def _check_data(data: dict[str, Any]) -> None:
    fingerprint = data.get("fingerprint", {"counts": {}, "sha256": {}})
    hashes = (fingerprint.get("sha256"), fingerprint.get("contents", {})) if isinstance(fingerprint, dict) else (None,)
    counts = fingerprint.get("counts") if all(isinstance(part, dict) for part in hashes) else None
    if not isinstance(counts, dict) or not all(type(n) is int for n in counts.values()):
        raise ValueError("its record has no counts and hashes as its data's fingerprint")
    fraction, seed = data.get("val_fraction", 0.1), data.get("seed", 0)
    if not is_number(fraction) or not 0 < fraction < 1 or type(seed) is not int or not 0 <= seed < 2**53:
        raise ValueError("its record cuts validation by no share and seed")


def _check_objective(objective: dict[str, Any], num_classes: int) -> None:
    numbers = [objective.get(name, 0.0) for name in ("generative_weight", "mask_fraction", "label_smoothing")]
    texts = [objective.get(name, "") for name in ("name", "corruption")]
    if not all(map(is_number, numbers)) or not all(isinstance(text, str) for text in texts):
        raise ValueError("its record has an objective of other kinds of values")
    weights = objective.get("class_weights", "none")
    if not isinstance(weights, str) and not (isinstance(weights, list) and len(weights) == num_classes):
        raise ValueError(f"its objective does not weigh {num_classes} classes")
