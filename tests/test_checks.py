from types import SimpleNamespace

import pytest

from vitlab import checks
from vitlab.errors import InputError

NAN = float("nan")


@pytest.mark.parametrize(
    ("check", "fitting", "wrong", "wanted"),
    [
        (checks.require_positive, [1, 0.5, None, (8, 12)], [0, -1, NAN, True, "7", (8, 0)], "give more than 0"),
        (checks.require_not_negative, [0, 2.5, None], [-1, NAN, False, float("inf")], "give 0 or more"),
        (checks.require_fractions, [0, 0.3, 1], [-0.1, 1.1, NAN, None], "give a number from 0 to 1"),
        (checks.require_shares, [0.1, 1], [0, 1.1, NAN, None, "0.9"], "give more than 0, at most 1"),
    ],
)
def test_number_checks_name_the_field_and_what_it_may_be(check, fitting, wrong, wanted):
    for value in fitting:
        check(SimpleNamespace(first=value, second=value), "first", "second")
    for value in wrong:
        config = SimpleNamespace(first=fitting[0], second=value)
        with pytest.raises(InputError) as error:
            check(config, "first", "second")
        assert str(error.value) == f"second is {value!r}: {wanted}"
        with pytest.raises(InputError) as error:
            check(config, "first", "second", section="optim")
        assert str(error.value) == f"optim.second is {value!r}: {wanted}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": (0.5, NAN, 0.5)}, "data.mean is (0.5, nan, 0.5): give a number for each channel"),
        ({"std": 0.5}, "data.std is 0.5: give a number for each channel"),
        ({"channels": 1, "mean": (0.5, 0.5, 0.5)}, "data.mean has 3 values for data.channels 1: give one for each"),
        ({"std": (1.0, 0.0, 1.0)}, "data.std is (1.0, 0.0, 1.0): give numbers above 0"),
    ],
)
def test_require_channel_statistics_wants_a_number_a_channel(change, message):
    config = {"channels": 3, "mean": (0.0, 0.1, 0.2), "std": (1.0, 2.0, 3.0)}
    checks.require_channel_statistics(SimpleNamespace(**config), section="data")
    with pytest.raises(InputError) as error:
        checks.require_channel_statistics(SimpleNamespace(**(config | change)), section="data")
    assert str(error.value) == message


@pytest.mark.parametrize(("value", "divisor", "fitting"), [(30, 4, "28 or 32"), (3, 4, "4"), (9, 4, "8 or 12")])
def test_require_multiple_names_the_nearest(value, divisor, fitting):
    checks.require_multiple("side", 2 * divisor, "patch", divisor)
    with pytest.raises(InputError) as error:
        checks.require_multiple("side", value, "patch", divisor)
    assert str(error.value) == f"side {value} is not a multiple of patch {divisor}: use {fitting}"


def test_require_passes_or_raises_its_message():
    checks.require(True, "unused")
    with pytest.raises(InputError, match=r"^give more$"):
        checks.require(False, "give more")


def test_require_at_most_takes_numbers_up_to_the_limit_and_none():
    config = SimpleNamespace(few=3, many=4, several=(1, 4), none=None)
    checks.require_at_most(config, "few", "none", most=3)
    for name, value in (("many", "4"), ("several", r"\(1, 4\)")):
        with pytest.raises(InputError, match=rf"^part\.{name} is {value}: give at most 3$"):
            checks.require_at_most(config, name, most=3, section="part")
