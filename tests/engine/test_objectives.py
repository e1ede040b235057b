"""Losses against hand-worked values."""

import math

import pytest
import torch
from torch import nn

from vitlab.config import ObjectiveConfig
from vitlab.data.loader import Batch
from vitlab.engine.objectives import Classification, balanced_weights, build_objective
from vitlab.errors import InputError
from vitlab.models.catalog import create_model


class Given(nn.Module):
    """A network whose logits are its images."""

    def forward(self, images):
        return images


def batch(logits, labels):
    return Batch(images=torch.tensor(logits), labels=torch.tensor(labels), indices=torch.arange(len(labels)))


LOGITS = [[math.log(4), 0.0, 0.0], [0.0, math.log(2), 0.0], [0.0, 0.0, 0.0]]  # true-class shares 4/6, 2/4, 1/3
LABELS = [0, 1, 2]


def test_classification_is_the_mean_negative_log_probability():
    loss = Classification(Given()).train()(batch(LOGITS, LABELS)).loss
    assert loss.item() == pytest.approx(-(math.log(4 / 6) + math.log(1 / 2) + math.log(1 / 3)) / 3)


def test_class_weights_multiply_each_image_and_divide_by_the_number_of_images():
    objective = Classification(Given(), class_weights=torch.tensor([3.0, 1.0, 0.5])).train()
    expected = -(3 * math.log(4 / 6) + math.log(1 / 2) + 0.5 * math.log(1 / 3)) / 3
    assert objective(batch(LOGITS, LABELS)).loss.item() == pytest.approx(expected)


def test_class_weights_make_the_loss_of_a_batch_the_sum_of_its_parts():
    objective = Classification(Given(), class_weights=torch.tensor([3.0, 1.0, 0.5])).train()
    whole = objective(batch(LOGITS, LABELS)).loss
    parts = objective(batch(LOGITS[:1], LABELS[:1])).loss + 2 * objective(batch(LOGITS[1:], LABELS[1:])).loss
    torch.testing.assert_close(whole, parts / 3)


def test_class_weights_weigh_each_share_of_a_mixed_target():
    objective = Classification(Given(), class_weights=torch.tensor([3.0, 1.0, 0.5])).train()
    mixed = batch(LOGITS[:1], [[0.25, 0.75, 0.0]])
    assert objective(mixed).loss.item() == pytest.approx(-(3 * 0.25 * math.log(4 / 6) + 0.75 * math.log(1 / 6)))


def test_evaluation_knows_neither_class_weights_nor_smoothing():
    plain = Classification(Given()).eval()(batch(LOGITS, LABELS)).loss
    changed = Classification(Given(), label_smoothing=0.3, class_weights=torch.tensor([3.0, 1.0, 0.5])).eval()
    assert changed(batch(LOGITS, LABELS)).loss == plain


def test_balanced_weights_are_one_over_the_share_and_one_on_average():
    weights = balanced_weights([6, 3, 1, 0])
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3, 0.0])
    assert (weights * torch.tensor([6, 3, 1, 0])).sum().item() / 10 == pytest.approx(1.0)


def test_build_objective_takes_a_weight_for_each_class():
    network = create_model("vit_tiny", num_classes=3, image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    balanced = build_objective(ObjectiveConfig(class_weights="balanced"), network, class_counts=[2, 1, 1])
    assert balanced.class_weights.tolist() == pytest.approx([2 / 3, 4 / 3, 4 / 3])
    listed = build_objective(ObjectiveConfig(class_weights=(1.0, 2.0, 3.0)), network, class_counts=[2, 1, 1])
    assert listed.class_weights.tolist() == [1.0, 2.0, 3.0]
    assert not any("class_weights" in name for name in listed.state_dict())
    with pytest.raises(InputError, match=r"objective.class_weights has 2 numbers for 3 classes: give one for each"):
        build_objective(ObjectiveConfig(class_weights=(1.0, 2.0)), network, class_counts=[2, 1, 1])


def test_frozen_parts_stay_in_evaluation_mode():
    network = create_model(
        "vit_tiny", num_classes=3, image_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=1, drop_path_rate=0.5
    )
    network.blocks[0].requires_grad_(False)
    Classification(network).train()
    assert not any(module.training for module in network.blocks[0].modules())
    assert all(module.training for module in network.blocks[1].modules())
    assert network.training


def test_dropout_beside_frozen_parts_is_off():
    network = create_model(
        "vit_tiny", num_classes=3, image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1, drop_rate=0.5
    )
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    objective = Classification(network).train()
    images = torch.randn(4, 3, 8, 8)
    assert torch.equal(network.forward_features(images), network.forward_features(images))
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    objective.train()
    assert not torch.equal(network.forward_features(images), network.forward_features(images))
