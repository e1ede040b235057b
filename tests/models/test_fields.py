from dataclasses import dataclass

import pytest

from vitlab.errors import InputError
from vitlab.models.fields import conform_fields
from vitlab.models.swin import SwinConfig
from vitlab.models.vit import ViTConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    size: int | tuple[int, int] = 4
    depths: tuple[int, ...] = (2, 6)
    ratios: tuple[float, ...] = (4.0,)

    def __post_init__(self):
        conform_fields(self)


@pytest.mark.parametrize("given", [[3], [1, 2, 3], (5, 5)])
def test_conform_fields_takes_lists_of_any_length_as_tuples(given):
    assert Shape(depths=given).depths == tuple(given)
    assert Shape(size=[2, 3]).size == (2, 3)


def test_conform_fields_makes_the_whole_numbers_of_a_list_floats():
    ratios = Shape(ratios=[4, 2.5]).ratios
    assert ratios == (4.0, 2.5)
    assert all(isinstance(ratio, float) for ratio in ratios)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": 2}, "depths is 2: give one or more values, each a whole number"),
        ({"depths": []}, r"depths is \[\]: give one or more values, each a whole number"),
        ({"depths": [2, True]}, r"depths is \[2, True\]: give one or more values, each a whole number"),
        ({"depths": "26"}, "depths is '26': give one or more values, each a whole number"),
        ({"ratios": (4, None)}, r"ratios is \(4, None\): give one or more values, each a number"),
        ({"size": (2, 3, 4)}, r"size is \(2, 3, 4\): give a whole number or 2 values, each a whole number"),
        ({"size": ()}, r"size is \(\): give a whole number or 2 values, each a whole number"),
    ],
)
def test_conform_fields_refuses_other_values(fields, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Shape(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 1025}, "depth is 1025: give at most 1024"),
        ({"embed_dim": 2**20 + 1}, "embed_dim is 1048577: give at most 1048576"),
        ({"image_size": (8, 8193)}, r"image_size is \(8, 8193\): give at most 8192"),
        ({"mlp_ratio": 1025.0}, r"mlp_ratio is 1025\.0: give at most 1024"),
    ],
)
def test_conform_fields_refuses_more_than_any_network_needs(fields, message):
    with pytest.raises(InputError, match=message):
        ViTConfig(**fields)


def test_conform_fields_refuses_more_stages_than_any_network_has():
    with pytest.raises(InputError, match="depths has 17 values: give at most 16"):
        SwinConfig(depths=(1,) * 17, num_heads=(1,) * 17)
