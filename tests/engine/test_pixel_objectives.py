"""Objectives of pixels: which ones are scored, what the network sees of them, and what is trained."""

import math

import pytest
import torch

from vitlab.config import AugmentConfig, DataConfig, ObjectiveConfig, RunConfig
from vitlab.data.loader import Batch
from vitlab.engine.evaluator import Scores
from vitlab.engine.objectives import Masking, build_objective
from vitlab.errors import InputError
from vitlab.models.catalog import create_model

SHAPE = {"image_size": (3, 5), "num_colors": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}


@pytest.fixture
def build():
    """Build an objective around a small network of random weights."""

    def build(*, fresh=False, causal=True, **settings):
        network = create_model("imagegpt_small", causal=causal, **SHAPE)
        generator = torch.Generator().manual_seed(0)
        for parameter in () if fresh else network.parameters():
            parameter.data.normal_(std=0.3, generator=generator)
        return build_objective(ObjectiveConfig(**settings), network, class_counts=[1] * 4)

    return build


def batch(size=3, first=0):
    images = torch.rand(size + first, 3, 3, 5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = torch.arange(size + first) % 4
    return Batch(images=images[first:], labels=labels[first:], indices=torch.arange(first, size + first))


def color_losses(network, logits, images):
    tokens = network.encode(images)
    return -logits.double().log_softmax(dim=-1).gather(2, tokens.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("name", ["next_pixel", "masked_pixel"])
def test_fresh_network_knows_no_colour(name, build):
    objective = build(fresh=True, name=name, causal=name == "next_pixel", mask_fraction=0.5).train()
    assert objective(batch()).loss.item() == pytest.approx(math.log(8), abs=1e-4)


def test_next_pixel_scores_all_pixels_of_all_images_and_no_class(build):
    objective = build(name="next_pixel").train()
    step = objective(batch())
    losses = color_losses(
        objective.network, objective.network.pixel_logits(objective.network.encode(batch().images)), batch().images
    )
    assert losses.shape == (3, 15)
    assert step.loss.item() == pytest.approx(losses.mean().item(), rel=1e-6)
    assert step.outputs is None
    assert step.parts["nats_per_pixel"] == step.loss


@pytest.mark.parametrize("corruption", ["zero", "bert"])
def test_masked_pixel_scores_what_it_drew_and_means_over_each_image_first(corruption, build, monkeypatch):
    objective = build(name="masked_pixel", causal=False, mask_fraction=0.4, corruption=corruption)
    network, images = objective.network, batch().images
    draws = torch.rand(3, 3, 15, generator=torch.Generator().manual_seed(1))
    draws[0, 0] = 1.0  # nothing of the first image
    draws[:, 1, 3] = torch.tensor([0.1, 0.95, 0.99])  # another colour
    draws[:, 1, 4] = torch.tensor([0.1, 0.85, 0.99])  # the same
    monkeypatch.setattr(Masking, "_draw", lambda self, shape, indices: draws)
    scored, tokens = draws[0] < 0.4, network.encode(images)
    seen, hidden = tokens.clone(), scored.clone()
    if corruption == "bert":
        hidden &= draws[1] < 0.8
        kept_or_random = scored & ~hidden
        seen = torch.where(kept_or_random & (draws[1] >= 0.9), (draws[2] * 8).long(), tokens)
        assert (seen != tokens).any()
        assert (kept_or_random & (draws[1] < 0.9)).any()
    features = network.pixel_features(seen, hidden=hidden, mask_embedding=corruption == "bert")
    losses = color_losses(network, network.color_logits(features), images)
    of_images = [losses[i][scored[i]].mean() if scored[i].any() else losses.new_zeros(()) for i in range(3)]
    assert objective.train()(batch()).loss.item() == pytest.approx(torch.stack(of_images).mean().item(), rel=1e-6)


def test_masked_pixel_draws_as_often_as_it_says_and_evenly():
    drawn = Masking(0.15, "bert")._draw(torch.Size((400, 100)), None)
    assert (drawn[0] < 0.15).float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert drawn.mean(dim=(1, 2)).tolist() == pytest.approx([0.5] * 3, abs=0.01)
    assert torch.corrcoef(drawn.flatten(1)).sub(torch.eye(3)).abs().max() < 0.02


def test_masked_pixel_hides_the_same_pixels_of_an_image_in_every_evaluation(build):
    objective = build(name="masked_pixel", causal=False).eval()
    whole = objective(batch(4)).loss * 4
    parts = objective(batch(1)).loss + objective(batch(3, first=1)).loss * 3
    torch.testing.assert_close(whole, parts)
    other = Batch(images=batch(4).images, labels=batch(4).labels, indices=torch.arange(10, 14))
    assert objective(other).loss * 4 != whole


@pytest.mark.parametrize("causal", [True, False])
def test_joint_is_the_classes_and_the_weighted_pixels(causal, build):
    objective = build(name="joint", causal=causal, generative_weight=0.3).eval()
    pixels = build(name="next_pixel" if causal else "masked_pixel", causal=causal).eval()
    pixels.network.load_state_dict(objective.network.state_dict())
    step, pixel_loss = objective(batch()), pixels(batch()).loss
    logits = objective.network(batch().images)
    class_loss = torch.nn.functional.cross_entropy(logits, batch().labels)
    torch.testing.assert_close(step.loss, class_loss + 0.3 * pixel_loss)
    torch.testing.assert_close(step.outputs, logits)
    torch.testing.assert_close(step.parts, {"class_loss": class_loss, "nats_per_pixel": pixel_loss})


@pytest.mark.parametrize(
    ("name", "causal", "untrained"),
    [
        ("next_pixel", True, "head.weight"),
        ("masked_pixel", False, "head.weight"),
        ("classification", True, "color_head.weight"),
        ("joint", True, None),
        ("joint", False, None),
    ],
)
def test_gradient_reaches_all_that_takes_part(name, causal, untrained, build):
    objective = build(name=name, causal=causal, mask_fraction=0.5).train()
    objective(batch()).loss.backward()
    for parameter, value in objective.network.named_parameters():
        assert value.requires_grad == (parameter != untrained), parameter
        assert (value.grad is not None and bool(value.grad.abs().sum() > 0)) == value.requires_grad, parameter


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"name": "next_pixel", "causal": False}, "give --model.overrides.causal true"),
        ({"name": "masked_pixel", "causal": True}, "give --model.overrides.causal false"),
    ],
)
def test_objectives_name_the_network_that_they_need(settings, line, build):
    with pytest.raises(InputError, match=line):
        build(**settings)


def test_objectives_of_pixels_refuse_other_networks():
    network = create_model("vit_tiny", num_classes=3, image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    with pytest.raises(InputError, match="vit_tiny does not give the colours of pixels: take an ImageGPT"):
        build_objective(ObjectiveConfig(name="joint"), network, class_counts=[1] * 3)


@pytest.mark.parametrize("field", ["mixup", "cutmix", "erasing"])
@pytest.mark.parametrize("name", ["next_pixel", "masked_pixel", "joint"])
def test_invented_colours_are_refused(name, field):
    with pytest.raises(InputError, match=rf"would make up colours for the network to learn.*{name}: leave them out"):
        RunConfig(objective=ObjectiveConfig(name=name), augment=AugmentConfig(**{field: 0.5}))


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": {"label_smoothing": 0.1}},
        {"objective": {"class_weights": "balanced"}},
        {"data": {"sampling": "balanced"}},
    ],
)
def test_settings_of_classes_are_refused_where_none_are_trained(sections):
    with pytest.raises(InputError, match=r"classes, and objective.name is next_pixel: leave"):
        RunConfig(
            objective=ObjectiveConfig(name="next_pixel", **sections.get("objective", {})),
            data=DataConfig(**sections.get("data", {})),
        )


@torch.no_grad()
def test_scores_mean_the_parts_over_images_and_give_bits(build):
    objective = build(name="joint").eval()
    scores = Scores(classes=tuple("abcd"))
    for part in (batch(1), batch(3, first=1)):
        scores.add(part, objective(part))
    whole = objective(batch(4))
    summary = scores.summary()
    assert summary["class_loss"] == pytest.approx(whole.parts["class_loss"].item(), rel=1e-6)
    assert summary["nats_per_pixel"] == pytest.approx(whole.parts["nats_per_pixel"].item(), rel=1e-6)
    assert summary["bits_per_pixel"] == pytest.approx(summary["nats_per_pixel"] / math.log(2))
    assert summary["loss"] == pytest.approx(whole.loss.item(), rel=1e-6)
