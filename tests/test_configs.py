"""Every shipped configuration parses, builds its network and says where it comes from."""

from pathlib import Path

import pytest
import torch

from vitlab.cli import parse
from vitlab.models.catalog import create_model

CONFIGS = sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml"))


def test_configs_are_found():
    assert len(CONFIGS) >= 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_config_parses_and_builds_its_network(path):
    _, config = parse(["train", "--config", str(path)])
    network = create_model(
        config.model.name,
        num_classes=10,
        image_size=config.model.image_size,
        in_channels=config.data.channels,
        **config.model.overrides,
    ).eval()
    H, W = network.image_size
    with torch.inference_mode():
        assert network(torch.zeros(1, config.data.channels, H, W)).shape == (1, 10)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_config_header_gives_recipe_result_and_command(path):
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert "# Recipe:" in text
    assert "# Result:" in text
    assert f"# Command: vitlab train --config configs/{path.parent.name}/{path.name}" in text
