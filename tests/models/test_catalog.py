import dataclasses
import json

import pytest
import torch

from vitlab.errors import InputError
from vitlab.models.catalog import create_model, list_models
from vitlab.models.vit import ViTConfig

# Exact, with 1000 classes; every name needs a row.
PARAMETERS = {
    "vit_tiny": 5_717_416,
    "vit_small": 22_050_664,
    "vit_base": 86_567_656,
    "vit_large": 304_326_632,
    "vit_huge": 632_045_800,
    "swin_tiny": 28_288_354,
    "swin_small": 49_606_258,
    "swin_base": 87_768_224,
    "swin_large": 196_532_476,
    "davit_tiny": 28_360_168,
    "davit_small": 49_745_896,
    "davit_base": 87_954_408,
    "davit_large": 196_811_752,
    "davit_huge": 348_922_856,
    "davit_giant": 1_406_470_120,
    "imagegpt_small": 77_083_648,
    "imagegpt_medium": 456_181_760,
    "imagegpt_large": 1_363_786_752,
    "imagegpt_xlarge": 6_804_510_720,
}
VARIANTS = [
    ("vit_small", {"patch_size": 32}, 22_878_952),
    ("vit_base", {"patch_size": 32}, 88_224_232),
    ("vit_base", {"image_size": 384}, 86_859_496),
    ("vit_large", {"patch_size": 32}, 306_535_400),
    ("vit_large", {"patch_size": 14}, 304_203_752),
    ("vit_large", {"image_size": 384}, 304_715_752),
    ("swin_base", {"image_size": 384, "window_size": 12}, 87_903_584),
]


def count(name, **fields):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(name, **fields).parameters())


def test_every_name_has_a_row_of_its_parameter_count():
    assert set(PARAMETERS) == set(list_models())


@pytest.mark.parametrize("name", list_models())
def test_create_model_gives_the_published_parameter_count(name):
    assert count(name) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "fields", "expected"), VARIANTS)
def test_create_model_gives_the_published_parameter_count_of_variants(name, fields, expected):
    assert count(name, **fields) == expected


@pytest.mark.parametrize("name", list_models())
def test_create_model_names_the_network_and_its_native_size(name):
    with torch.device("meta"):
        network = create_model(name, num_classes=3)
    assert network.name == name
    side = 32 if name.startswith("imagegpt") else 384 if name == "davit_large" else 224
    assert network.image_size == (side, side)
    assert network.num_classes == 3


def test_create_model_rebuilds_from_the_config_that_json_carried():
    fields = {"image_size": (8, 12), "patch_size": (4, 2), "in_channels": 1, "num_classes": 3, "embed_dim": 6}
    network = create_model("vit_small", depth=2, mlp_ratio=3, pool="mean", norm="post", **fields)
    config = json.loads(json.dumps(network.config_dict()))
    again = create_model(network.name, **config)
    assert again.config_dict() == network.config_dict() == config
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == {
        name: tensor.shape for name, tensor in network.state_dict().items()
    }
    assert (config["image_size"], config["depth"], config["mlp_ratio"]) == ([8, 12], 2, 3.0)


def test_create_model_takes_a_side_and_a_list():
    fields = {"patch_size": 4, "embed_dim": 6, "depth": 1}
    assert create_model("vit_tiny", image_size=8, **fields).image_size == (8, 8)
    assert create_model("vit_tiny", image_size=[8, 12], **fields).image_size == (8, 12)


@pytest.mark.parametrize("name", ["vit_tiney", "swin-tiny", "imagegpt"])
def test_create_model_lists_the_names_and_the_nearest(name):
    with pytest.raises(InputError) as error:
        create_model(name)
    message = str(error.value)
    assert message.startswith(f"unknown model {name}")
    assert message.endswith("Valid are " + ", ".join(list_models()))
    assert "\n" not in message
    assert ("did you mean vit_tiny?" in message) == (name == "vit_tiney")


def test_create_model_lists_the_fields_and_the_nearest():
    with pytest.raises(InputError, match=r"^unknown vit_tiny field dept: did you mean depth\? Valid are ") as error:
        create_model("vit_tiny", dept=3)
    valid = str(error.value).partition("Valid are ")[2].split(", ")
    arguments = {"image_size", "num_classes", "in_channels"}  # these have a name of their own
    assert set(valid) == {field.name for field in dataclasses.fields(ViTConfig)} - arguments


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": "six"}, "depth is 'six': give a whole number"),
        ({"depth": 1.5}, "depth is 1.5: give a whole number"),
        ({"depth": True}, "depth is True: give a whole number"),
        ({"depth": None}, "depth is None: give a whole number"),
        ({"mlp_ratio": "4"}, "mlp_ratio is '4': give a number"),
        ({"drop_rate": float("nan")}, "drop_rate is nan: give a number"),
        ({"qkv_bias": 1}, "qkv_bias is 1: give true or false"),
        ({"pool": ["cls"]}, r"pool is \['cls'\]: give one of 'cls', 'mean'"),
        ({"patch_size": [4]}, r"patch_size is \[4\]: give a whole number or 2 values, each a whole number"),
        ({"image_size": (8, 1.5)}, r"image_size is \(8, 1.5\): give a whole number or 2 values, each a whole number"),
        ({"num_classes": "7"}, "num_classes is '7': give a whole number"),
    ],
)
def test_create_model_refuses_values_of_another_type(fields, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        create_model("vit_tiny", **fields)
