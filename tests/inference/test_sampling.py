import itertools
import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch

from vitlab.errors import InputError
from vitlab.inference import sampling
from vitlab.inference.sampling import ColorChoice, beam_search, complete, sample
from vitlab.models.catalog import create_model

N, V = 24, 16
LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, 3.0], [5.0, 1.0, 4.0, 2.0, 3.0]])


def tokens_of(batch, seed=1):
    return torch.randint(V, (batch, N), generator=torch.Generator().manual_seed(seed))


def log_likelihood(network, tokens):
    """Give each image's log-probability by the whole network, in nats."""
    logs = network.pixel_logits(tokens).double().log_softmax(dim=-1)
    return logs.gather(-1, tokens[..., None]).squeeze(-1).sum(dim=1)


def test_sample_draws_what_the_uncached_network_would(random_imagegpt):
    """The same random numbers, and a full pass for each pixel."""
    network = random_imagegpt()
    numbers, choice = sampling._random_numbers(7, 5, N), ColorChoice(temperature=0.8, top_k=9, top_p=0.9)
    tokens = torch.zeros(5, N, dtype=torch.int64)
    for pixel in range(N):
        probabilities = choice.probabilities(network.pixel_logits(tokens)[:, pixel])
        tokens[:, pixel] = sampling._pick(probabilities, numbers[:, pixel])
    drawn = sample(network, count=5, seed=7, temperature=0.8, top_k=9, top_p=0.9, precision="fp32")
    assert torch.equal(drawn, tokens)
    assert len(tokens.unique(dim=0)) == 5


def test_sample_at_temperature_0_is_the_greedy_picture_of_the_uncached_network(random_imagegpt):
    network = random_imagegpt()
    tokens = torch.zeros(1, N, dtype=torch.int64)
    for pixel in range(N):
        tokens[:, pixel] = network.pixel_logits(tokens)[:, pixel].argmax(dim=-1)
    for choice in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"temperature": 1e-300}):
        assert torch.equal(sample(network, count=2, precision="fp32", **choice), tokens.repeat(2, 1)), choice
    assert len(tokens.unique()) > 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("num_given", [0, 1, 11, N - 1, N])
def test_sample_gives_given_pixels_back(random_imagegpt, precision, num_given):
    network, given = random_imagegpt(), tokens_of(3)[:, :num_given]
    drawn = sample(network, count=3, given=given, precision=precision, batch_size=2)
    assert drawn.shape == (3, N)
    assert torch.equal(drawn[:, :num_given], given)
    assert torch.equal(sample(network, count=2, given=given[1], precision=precision)[:, :num_given], given[[1, 1]])


def test_sample_does_not_depend_on_the_batch_or_the_count(random_imagegpt):
    network = random_imagegpt().double()
    draw = partial(sample, network, precision="fp32")
    drawn = draw(count=7, seed=3)
    assert torch.equal(draw(count=7, seed=3), drawn)
    assert torch.equal(draw(count=7, seed=3, batch_size=2), drawn)
    assert torch.equal(draw(count=3, seed=3, batch_size=1), drawn[:3])
    assert not torch.equal(draw(count=7, seed=4), drawn)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    draw(count=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_complete_completes_each_image_alike_wherever_it_stands(random_imagegpt):
    network, given = random_imagegpt().double(), tokens_of(3)[:, :10]
    done = complete(network, given, count=4, seed=2, precision="fp32")
    assert done.shape == (3, 4, N)
    assert torch.equal(done[..., :10], given[:, None].expand(-1, 4, -1))
    assert torch.equal(complete(network, given[[2]], count=2, seed=2, batch_size=1, precision="fp32"), done[[2], :2])
    assert torch.equal(sample(network, count=4, given=given[1], seed=2, precision="fp32"), done[1])
    assert len(done.flatten(0, 1).unique(dim=0)) == 12


def test_complete_of_no_images_is_empty(random_imagegpt):
    done = complete(random_imagegpt(), torch.empty(0, 5, dtype=torch.int64), count=2)
    assert done.shape == (0, 2, N)


@pytest.mark.parametrize("choice", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6, "temperature": 2.0}])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_sample_draws_the_next_colour_as_often_as_its_probability(random_imagegpt, choice, precision):
    network = random_imagegpt()
    given = tokens_of(1)[0, : N - 1]
    probabilities = ColorChoice(**choice).probabilities(network.pixel_logits(tokens_of(1))[:, -1])[0].numpy()
    count = 4000
    last = sample(network, count=count, given=given, precision=precision, batch_size=count, **choice)[:, -1]
    frequencies = np.bincount(last.numpy(), minlength=V)
    possible = probabilities > 0
    assert frequencies[~possible].sum() == 0
    assert scipy.stats.chisquare(frequencies[possible], count * probabilities[possible]).pvalue > 1e-3


def test_sample_never_draws_the_start_token(random_imagegpt):
    """Nor any colour that there is not, even where a random number is as near to 1 as can be."""
    network = random_imagegpt()
    drawn = sample(network, count=300, temperature=1e6, batch_size=300)
    assert set(drawn.unique().tolist()) == set(range(V))
    highest = torch.tensor([math.nextafter(1, 0)], dtype=torch.float64)
    for total in (0.1, 1.0, 1.5, 1.9999999, 3.0):
        probabilities = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64) * total
        assert sampling._pick(probabilities, highest).tolist() == [3]
        assert sampling._pick(probabilities, torch.zeros(1, dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        ({"top_k": 5}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        ({"top_k": 900}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        ({"top_k": 3}, [[0, 1, 0, 1, 1], [1, 0, 1, 0, 1]]),
        ({"top_k": 1}, [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]),
        ({"temperature": 0}, [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]),
        ({"top_p": 0}, [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]),
        ({"top_p": 1e-9}, [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]),
        ({"top_p": 0.7}, [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
        ({"top_p": 1}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        ({"top_p": 0.9, "top_k": 3}, [[0, 1, 0, 1, 1], [1, 0, 1, 0, 0]]),
        ({"top_p": 0.5, "temperature": 1e15}, [[0, 1, 0, 1, 1], [1, 0, 1, 0, 1]]),
    ],
)
def test_color_choice_leaves_the_colours_that_may_be_drawn(choice, expected):
    kept = torch.tensor(expected, dtype=torch.float64)
    probabilities = ColorChoice(**choice).probabilities(LOGITS)
    temperature = choice.get("temperature", 1) or 1
    weights = (LOGITS.double() / temperature).exp() * kept
    torch.testing.assert_close(probabilities, weights / weights.sum(dim=1, keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: give 0 for the likeliest colours, or up to 1e15"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1: give a number of colours, or 0 for all"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_p": 1.01}, "top_p is 1.01: give a number from 0 to 1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"count": 0}, "count is 0: give 1 or more images"),
        ({"batch_size": 0}, "batch_size is 0: give 1 or more"),
        ({"given": torch.zeros(N + 1, dtype=torch.int64)}, "given is of shape .25,.: give up to 24 first pixels"),
        ({"given": torch.zeros(3, 5, dtype=torch.int64)}, "given has the first pixels of 3 images for a count of 2"),
        ({"given": torch.zeros(5)}, "given is torch.float32: give int64 tokens"),
        ({"given": torch.tensor([3, V])}, "given has tokens from 3 to 16, the palette has colours 0 to 15"),
        ({"given": torch.tensor([-1])}, "given has tokens from -1 to -1"),
    ],
)
def test_sample_refuses_what_is_out_of_range(random_imagegpt, choice, message):
    with pytest.raises(InputError, match=message):
        sample(random_imagegpt(), **({"count": 2} | choice))


@pytest.mark.parametrize("draw", [sample, lambda network, count: beam_search(network, width=count)])
def test_sampling_refuses_networks_that_cannot_draw(random_imagegpt, draw):
    vit = create_model("vit_tiny", image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    with pytest.raises(InputError, match="vit_tiny cannot draw images"):
        draw(vit, count=1)
    with pytest.raises(InputError, match="is not causal"):
        draw(random_imagegpt(causal=False), count=1)


def test_sample_tells_each_step(random_imagegpt):
    told = []
    sample(random_imagegpt(), count=5, given=torch.tensor([1, 2, 3]), batch_size=3, on_step=told.append)
    assert told == [3] * (N - 3) + [2] * (N - 3)


@pytest.mark.parametrize("num_given", [0, 2])
def test_beam_search_of_full_width_finds_the_likeliest_of_all_images(random_imagegpt, num_given):
    network = random_imagegpt(image_size=(2, 2), num_colors=3).double()
    given = torch.tensor([2, 1])[:num_given]
    images = torch.tensor(list(itertools.product(range(3), repeat=4)))
    images = images[(images[:, :num_given] == given).all(dim=1)]
    prefix = network.pixel_logits(images).log_softmax(-1).gather(-1, images[..., None])[:, :num_given].sum(dim=(1, 2))
    values = log_likelihood(network, images) - prefix
    best = values.argsort(descending=True)
    assert (values[best][:-1] - values[best][1:]).min() > 1e-6
    everything = beam_search(network, width=10**6, given=given, precision="fp32")
    assert torch.equal(everything.tokens, images[best])
    torch.testing.assert_close(everything.log_probabilities, values[best], rtol=0, atol=1e-10)
    enough = beam_search(network, width=3 ** (3 - num_given), given=given, precision="fp32")
    assert torch.equal(enough.tokens[0], images[best[0]])


def test_beam_search_of_width_1_is_greedy_and_wider_ones_find_no_less(random_imagegpt):
    network = random_imagegpt().double()
    greedy = sample(network, count=1, temperature=0, precision="fp32")
    found = {width: beam_search(network, width=width, precision="fp32") for width in (1, 5, 40)}
    assert torch.equal(found[1].tokens, greedy)
    for width, beams in found.items():
        assert len(beams.tokens.unique(dim=0)) == width
        assert (beams.log_probabilities.diff() <= 0).all()
        torch.testing.assert_close(beams.log_probabilities, log_likelihood(network, beams.tokens), rtol=0, atol=1e-9)
    assert found[40].log_probabilities[0] > found[1].log_probabilities[0] + 0.1


def test_beam_search_keeps_given_pixels_and_finds_one_whole_image_as_it_is(random_imagegpt):
    network, image = random_imagegpt(), tokens_of(1)[0]
    assert torch.equal(beam_search(network, width=4, given=image[:9]).tokens[:, :9], image[:9].expand(4, -1))
    whole = beam_search(network, width=4, given=image)
    assert torch.equal(whole.tokens, image[None])
    assert whole.log_probabilities.tolist() == [0.0]
    with pytest.raises(InputError, match="the width of the beam is 0: give 1 or more"):
        beam_search(network, width=0)
    with pytest.raises(InputError, match="a beam goes on from one image's first pixels"):
        beam_search(network, width=2, given=image[None])


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_sample_in_lower_precision_is_as_likely_as_in_float32(random_imagegpt, precision):
    """By float32's judgement, nats a pixel: three standard errors of such a mean are .06."""
    network = random_imagegpt(embed_dim=64, depth=4, num_heads=4)
    exact, rounded = (
        log_likelihood(network, sample(network, count=200, precision=kind, batch_size=200)).mean() / N
        for kind in ("fp32", precision)
    )
    assert abs(exact - rounded) < 0.06
