"""Checks of numbers that a user gave. Each raises InputError that names the field, what it is and what it may be.

`section` is where a field of a run's configuration stands, and goes before its name: `optim.lr`.
"""

from types import UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from vitlab.errors import InputError, unknown_name

LARGEST = 2.0**53
"""No number that a user means is larger; floats count whole numbers exactly up to here."""


def require(condition: bool, message: str) -> None:
    """Raise InputError with the message unless the condition holds."""
    if not condition:
        raise InputError(message)


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value is a number of sane size; True, False, infinities and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST


def require_values(config: Any, *, section: str) -> None:
    """Require that no field is None that does not take None, and that a text is one of its field's choices.

    A bare `key:` in YAML gives None.
    """
    for name, hint in get_type_hints(type(config)).items():
        value, kinds = getattr(config, name), get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if value is None and type(None) not in kinds:
            raise InputError(f"{_label(section, name)} is empty: give a value, or leave it out")
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if isinstance(value, str) and choices and str not in kinds and value not in choices:
            raise unknown_name(_label(section, name), value, map(str, choices))


def require_positive(config: object, *names: str, section: str = "") -> None:
    """Require numbers above 0; of a tuple all, and None passes."""
    for name in names:
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        fits = value is None or all(is_number(number) and number > 0 for number in numbers)
        require(fits, f"{_label(section, name)} is {value!r}: give more than 0")


def require_not_negative(config: object, *names: str, section: str = "") -> None:
    """Require numbers of 0 or more; of a tuple all, and None passes."""
    for name in names:
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        fits = value is None or all(is_number(number) and number >= 0 for number in numbers)
        require(fits, f"{_label(section, name)} is {value!r}: give 0 or more")


def require_at_most(config: object, *names: str, most: int, section: str = "") -> None:
    """Require whole numbers up to `most`, of a tuple all, and None passes: beyond it a run would take all there is."""
    for name in names:
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        fits = all(number is None or number <= most for number in numbers)
        require(fits, f"{_label(section, name)} is {value}: give at most {most:,}")


def require_fractions(config: object, *names: str, section: str = "") -> None:
    """Require numbers from 0 to 1, of a tuple all."""
    for name in names:
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        fits = all(is_number(number) and 0 <= number <= 1 for number in numbers)
        require(fits, f"{_label(section, name)} is {value!r}: give a number from 0 to 1")


def require_shares(config: object, *names: str, section: str = "") -> None:
    """Require numbers above 0, at most 1."""
    for name in names:
        value = getattr(config, name)
        fits = is_number(value) and 0 < value <= 1
        require(fits, f"{_label(section, name)} is {value!r}: give more than 0, at most 1")


def require_channel_statistics(config: Any, *, section: str = "", may_lack: bool = False) -> None:
    """Require that `mean` and `std` are tuples of a number for each of `channels`, those of `std` above 0.

    With `may_lack` None passes.
    """
    for name in ("mean", "std"):
        label, values = _label(section, name), getattr(config, name)
        if may_lack and values is None:
            continue
        require(
            isinstance(values, tuple) and all(map(is_number, values)),
            f"{label} is {values!r}: give a number for each channel",
        )
        require(
            len(values) == config.channels,
            f"{label} has {len(values)} values for {_label(section, 'channels')} {config.channels}: give one for each",
        )
    lowest = 1.0 if config.std is None else min(config.std)
    require(lowest > 0, f"{_label(section, 'std')} is {config.std}: give numbers above 0")


def require_multiple(what: str, value: int, of: str, divisor: int) -> None:
    """Require that a number is a multiple of another; the message names the nearest that are."""
    below = value - value % divisor
    fitting = f"{below} or {below + divisor}" if below else f"{divisor}"
    require(below == value, f"{what} {value} is not a multiple of {of} {divisor}: use {fitting}")


def _label(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
