"""The check of an architecture's config: each field against its declared type."""

import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitlab.checks import is_number
from vitlab.errors import InputError
from vitlab.sections import LARGEST_SIDE

_LARGEST = 2**20
_LARGEST_OF = {
    **dict.fromkeys(("image_size", "patch_size", "window_size"), LARGEST_SIDE),
    **dict.fromkeys(("depth", "depths", "mlp_ratio"), 1024),
}
_MOST_STAGES = 16


def conform_fields(config: Any) -> None:
    """Check a frozen config's fields against their types, as values from YAML or a command line need it.

    A list becomes a tuple and a whole number a float where the field says so; nothing else is converted.

    Args:
        config: a dataclass instance; its fields are int, float, bool, str, Literal, tuples of those (of fixed or, as
            `tuple[int, ...]`, any length but 0), or unions of them.

    Raises:
        InputError: a value of another type, or larger than any network needs; the message names the field, the value
            and what it takes. A config may come with a model file, and so from anybody.
    """
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        fitting = [converted for kind in _kinds(hint) if (converted := _convert(value, kind)) is not None]
        if not fitting:
            raise InputError(f"{name} is {value!r}: give {' or '.join(_describe(kind) for kind in _kinds(hint))}")
        _require_sane(name, fitting[0])
        object.__setattr__(config, name, fitting[0])


def _require_sane(name: str, value: Any) -> None:
    """Raise InputError where a number would keep a network's building busy, or overflow its sizes."""
    items, largest = value if isinstance(value, tuple) else (value,), _LARGEST_OF.get(name, _LARGEST)
    if len(items) > _MOST_STAGES:
        raise InputError(f"{name} has {len(items)} values: give at most {_MOST_STAGES}")
    if any(isinstance(item, int | float) and item > largest for item in items):
        raise InputError(f"{name} is {value}: give at most {largest}")


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _convert(value: Any, kind: Any) -> Any:
    """Give the value as the kind holds it, or None where it is of another kind; a bool is never a number here."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            return None
        items = _item_kinds(kind, len(value))
        if len(value) != len(items):
            return None
        converted = tuple(_convert(item, item_kind) for item, item_kind in zip(value, items, strict=True))
        return None if None in converted else converted
    if isinstance(value, bool):
        return value if kind is bool else None
    if kind is float:
        return float(value) if is_number(value) else None
    return value if isinstance(value, kind) else None


def _item_kinds(kind: Any, length: int) -> tuple[Any, ...]:
    """Give the kinds of a tuple's items; `tuple[int, ...]` has as many as the value, but one at least."""
    items = get_args(kind)
    return items[:1] * max(length, 1) if items[-1] is Ellipsis else items


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        number = "one or more" if items[-1] is Ellipsis else len(items)
        return f"{number} values, each {_describe(items[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
