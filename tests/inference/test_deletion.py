"""Maps find what networks look at: deleting what they rank highest hurts more than deleting at random."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from vitlab.data.preprocess import Preprocess
from vitlab.models.catalog import create_model


@pytest.fixture(scope="module")
def deletion_test():
    path = Path(__file__).parents[2] / "scripts" / "deletion_test.py"
    spec = importlib.util.spec_from_file_location("deletion_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["deletion_test"] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    yield module
    del sys.modules["deletion_test"]


def test_what_a_map_ranks_highest_matters_more_than_chance(deletion_test):
    """The script's Swin, which learns fastest, trained for 80 steps, on images that it did not see."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8)[:, None]
    images = pixels.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    labels = torch.from_numpy(digits.target)
    preprocess = Preprocess(image_size=(16, 16), mean=(0.31,), std=(0.37,), channels=1)
    inputs = preprocess.normalize(images)
    name, size, overrides = deletion_test.NETWORKS["Swin"]
    torch.manual_seed(0)
    network = create_model(name, num_classes=10, image_size=size, in_channels=1, **overrides)
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    for _ in range(80):
        chosen = torch.randint(1500, (64,))
        loss = F.cross_entropy(network(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rows = deletion_test.rows("Swin", network.eval(), preprocess, images[1500:], labels[1500:], draws=5)
    (row,) = (row for row in rows if row.map == "gradient")
    assert row.top_tenth > 1.5 * row.random_tenth + 4 * row.standard_error
