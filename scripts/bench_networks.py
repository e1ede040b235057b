"""Measure a network's forward pass and training step beside timm's and torchvision's, in turns, in one process.

Images of noise are on the device already. A training step is the forward pass, the mean cross-entropy, the backward
pass and a step of AdamW, in float32 or under autocast to bf16. `timm` is as it comes, `timm best` the fastest of its
own attention or torch's fused one, in plain or channels-last memory. Compiled, ours is compiled block by block as
`train.compile` does, theirs whole.

    python scripts/bench_networks.py --models vit_small swin_tiny --precisions bf16
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import timm
import timm.optim
import torch
import torch.nn.functional as F
from measuring import Row, compare, in_turns, matrix_rate, rate, write_rows
from timm.layers import set_fused_attn
from torch import Tensor, nn
from torchvision.models import swin_t
from torchvision.models.vision_transformer import VisionTransformer

from vitlab.config import OptimConfig
from vitlab.engine.compilation import compile_blocks
from vitlab.engine.optim import build_optimizer
from vitlab.models.catalog import create_model
from vitlab.models.costs import count_macs
from vitlab.models.network import Network

Work = Literal["forward", "train_step"]

_CLASSES = 1000
_TIMM = {
    "vit_tiny_32": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
    "swin_tiny": ("swin_tiny_patch4_window7_224", {}),
    "davit_tiny": ("davit_tiny", {}),
}
_BATCH = {"vit_tiny_32": 128}
_PEERS = {
    "timm": ("timm, fused",),
    "timm best": ("timm, fused", "timm, unfused", "timm, channels-last"),
    "torchvision": ("torchvision",),
}


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(_TIMM), default=list(_TIMM), help="(%(default)s)")
    parser.add_argument("--works", nargs="+", choices=["forward", "train_step"], default=["forward", "train_step"])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"], help="(%(default)s)")
    parser.add_argument("--batch", type=int, help="images (16, of 32x32 pixels 128)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows (else the terminal)")
    args = parser.parse_args()
    device = torch.device(args.device)
    rates = {name: matrix_rate(device, _dtype(name)) for name in args.precisions}
    rows = []
    for name in args.models:
        for precision in args.precisions:
            for mode in args.modes:
                for work in args.works:
                    batch = args.batch or _BATCH.get(name, 16)
                    bench = Bench(name, work, precision, mode, batch, device)
                    rows += bench.rows(args.rounds, rates[precision])
    write_rows(rows, args.json)


def _dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


class Bench:
    """One network at one kind of work, ours and the peers'."""

    def __init__(self, name: str, work: Work, precision: str, mode: str, batch: int, device: torch.device) -> None:
        self.name, self.work, self.precision, self.mode, self.device = name, work, precision, mode, device
        self.images = torch.randn(batch, 3, *([32, 32] if name.endswith("_32") else [224, 224]), device=device)
        self.labels = torch.randint(_CLASSES, (batch,), device=device)

    def rows(self, rounds: int, matrix_rate: float) -> list[Row]:
        """Measure in turns."""
        ours = build_ours(self.name)
        figures = in_turns(self._subjects(ours), rounds=rounds)
        passes = 3 if self.work == "train_step" else 1
        macs = passes * count_macs(ours)
        rows = compare(
            figures,
            _PEERS,
            unit="images/s",
            work=self.work,
            subject=self.name,
            precision=self.precision,
            mode=self.mode,
            device=self.device.type,
        )
        return [Row(**vars(row) | {"share": row.ours * macs / matrix_rate}) for row in rows]

    def _subjects(self, ours: Network) -> dict[str, Callable[[], float]]:
        subjects = {"vitlab": self._measure(ours, is_ours=True)}
        for setting in ("fused", "unfused", "channels-last"):
            set_fused_attn(setting != "unfused")
            peer = self._build_timm()
            images = self.images
            if setting == "channels-last":
                peer, images = peer.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
            subjects[f"timm, {setting}"] = self._measure(peer, images=images)
        torchvisions = build_torchvision(self.name)
        if torchvisions is not None:
            subjects["torchvision"] = self._measure(torchvisions)
        return subjects

    def _build_timm(self) -> nn.Module:
        name, options = _TIMM[self.name]
        network: nn.Module = timm.create_model(name, num_classes=_CLASSES, **options)
        return network

    def _measure(
        self, network: nn.Module, *, images: Tensor | None = None, is_ours: bool = False
    ) -> Callable[[], float]:
        """Give what times a network once."""
        network = network.to(self.device).train(self.work == "train_step")
        images = self.images if images is None else images
        if self.mode == "compiled":
            if isinstance(network, Network):
                compile_blocks(network)
            else:
                network.compile()
        if self.work == "forward":
            return lambda: rate(lambda: self._forward(network, images), len(images), self.device, least_s=1.0)
        optimizer = self._optimizer(network)
        return lambda: rate(lambda: self._step(network, optimizer, images), len(images), self.device)

    def _optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        if isinstance(network, Network):
            return build_optimizer(OptimConfig(lr=1e-4, weight_decay=0.05), network)
        made: torch.optim.Optimizer = timm.optim.create_optimizer_v2(network, opt="adamw", lr=1e-4, weight_decay=0.05)
        return made

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _forward(self, network: nn.Module, images: Tensor) -> None:
        with torch.inference_mode(), self._autocast():
            network(images)

    def _step(self, network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
        with self._autocast():
            logits = network(images)
        F.cross_entropy(logits.float(), self.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def build_ours(name: str) -> Network:
    """Build our network, with weights that are not at rest."""
    small = {"image_size": 32, "patch_size": 4} if name.endswith("_32") else {}
    network = create_model(name.removesuffix("_32"), num_classes=_CLASSES, **small)
    nn.init.normal_(network.get_classifier().weight, std=0.02)  # type: ignore[arg-type]
    return network


def build_torchvision(name: str) -> nn.Module | None:
    """Build torchvision's network of the same shape, where it has one."""
    if name == "swin_tiny":
        network: nn.Module = swin_t(num_classes=_CLASSES)
        return network
    shapes = {"vit_tiny_32": (32, 4, 3, 192), "vit_small": (224, 16, 6, 384), "vit_base": (224, 16, 12, 768)}
    if name not in shapes:
        return None
    side, patch, heads, dim = shapes[name]
    vit: nn.Module = VisionTransformer(
        image_size=side, patch_size=patch, num_layers=12, num_heads=heads, hidden_dim=dim, mlp_dim=4 * dim,
        num_classes=_CLASSES,
    )  # fmt: skip
    return vit


if __name__ == "__main__":
    main()
