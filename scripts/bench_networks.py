"""Measure a network's forward pass and training step beside timm's and torchvision's, each in its process, in turns.

Images of noise are on the device already. A training step is the forward pass, the mean cross-entropy, the backward
pass and a step of AdamW, in float32 or under autocast to bf16, without dropout or drop path on either side. A forward
pass of ours has packed weights on a CPU, as in `vitlab evaluate` and `vitlab predict`. `timm` is as it comes, `timm
best` the fastest of its own attention or torch's fused one, in plain or channels-last memory. Compiled, ours is
compiled block by block as `train.compile` does, theirs whole, in plain memory, since the compiler chooses its own;
torchvision is left out, since a whole network takes half a minute to two to compile on two cores.

On two cores a precision of the four default networks takes 4 to 6 minutes, a compiled one 2 to 3 more.

    python scripts/bench_networks.py --models vit_small swin_tiny --precisions bf16
    python scripts/bench_networks.py --models vit_small --works train_step --modes compiled --json compiled.json
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import timm
import timm.optim
import torch
import torch.nn.functional as F
from measuring import Row, Subject, compare, in_turns, matrix_rate, rate, serve, subjects_in_processes, write_rows
from timm.layers import set_fused_attn
from torch import nn
from torchvision.models import swin_t
from torchvision.models.vision_transformer import VisionTransformer
from torchvision.ops import StochasticDepth

from vitlab.config import OptimConfig
from vitlab.engine.compilation import compile_blocks
from vitlab.engine.optim import build_optimizer
from vitlab.engine.packing import pack
from vitlab.models.catalog import create_model
from vitlab.models.costs import count_macs
from vitlab.models.network import Network

Work = Literal["forward", "train_step"]

_CLASSES = 1000
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_tiny_32": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4}),
    "vit_try": ("vit_tiny_patch16_224", {"img_size": 16, "patch_size": 8, "depth": 1}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
    "swin_tiny": ("swin_tiny_patch4_window7_224", {"drop_path_rate": 0.0}),
    "davit_tiny": ("davit_tiny", {}),
}
"""timm's names and arguments; `vit_try` is for tries alone."""
_OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_tiny_32": ("vit_tiny", {"image_size": 32, "patch_size": 4}),
    "vit_try": ("vit_tiny", {"image_size": 16, "patch_size": 8, "depth": 1}),
}
MODELS = ["vit_small", "swin_tiny", "davit_tiny", "vit_tiny_32"]
_MORE = {"vit_tiny_32": 8}
"""So many times as many images in a batch."""
SUBJECTS = ["vitlab", "timm, fused", "timm, unfused", "timm, channels-last", "torchvision"]
_PEERS = {
    "timm": ("timm, fused",),
    "timm best": ("timm, fused", "timm, unfused", "timm, channels-last"),
    "torchvision": ("torchvision",),
}


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(TIMM), default=MODELS, help="(%(default)s)")
    parser.add_argument("--works", nargs="+", choices=["forward", "train_step"], default=["forward", "train_step"])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"], help="(%(default)s)")
    settings = ["fused", "unfused", "channels-last"]
    parser.add_argument("--settings", nargs="+", choices=settings, default=settings, help="timm's (%(default)s)")
    parser.add_argument(
        "--batch", type=int, default=16, help="images, of 32x32 pixels eight times as many (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows (else the terminal)")
    parser.add_argument("--serve", choices=SUBJECTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, partial(prepare, args.serve))
        return
    names = ["vitlab", *(f"timm, {setting}" for setting in args.settings)]
    names += [] if args.modes == ["compiled"] else ["torchvision"]
    with subjects_in_processes(__file__, names) as subjects:
        measure(args, subjects)


def measure(args: argparse.Namespace, subjects: Mapping[str, Subject]) -> None:
    """Measure all that was asked for, and write the rows."""
    device = torch.device(args.device)
    rates = {name: matrix_rate(device, dtype_of(name)) for name in args.precisions}
    rows: list[Row] = []
    for name in args.models:
        for precision in args.precisions:
            for mode in args.modes:
                for work in args.works:
                    batch = args.batch * _MORE.get(name, 1)
                    job = Job(model=name, work=work, precision=precision, mode=mode, batch=batch, device=args.device)
                    rows += rows_of(job, subjects, args.rounds, rates[precision])
                    if args.json:  # what is done stays where a limit of time ends the rest
                        write_rows(rows, args.json)
    if not args.json:
        write_rows(rows, None)


def dtype_of(precision: str) -> torch.dtype:
    """Give what matrices are multiplied in."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def autocast(device: torch.device, precision: str) -> Any:
    """Give the context that a forward pass runs in."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def our_optimizer(network: Network) -> torch.optim.Optimizer:
    """Build AdamW as a run has it."""
    return build_optimizer(OptimConfig(lr=1e-4, weight_decay=0.05), network)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One network at one kind of work."""

    model: str
    work: Work
    precision: str
    mode: str
    batch: int
    device: str


def rows_of(job: Job, subjects: Mapping[str, Subject], rounds: int, ceiling: float) -> list[Row]:
    """Measure the subjects that can do a job, in turns."""
    able = {name: partial(subject.measure, asdict(job)) for name, subject in subjects.items() if can_do(name, job)}
    passes = 3 if job.work == "train_step" else 1
    macs = passes * count_macs(build_ours(job.model))
    rows = compare(
        in_turns(able, rounds=rounds),
        {peer: names for peer, names in _PEERS.items() if peer != "timm best" or len(set(names) & set(able)) > 1},
        unit="images/s",
        work=job.work,
        subject=job.model,
        precision=job.precision,
        mode=job.mode,
        device=torch.device(job.device).type,
    )
    return [replace(row, share=row.ours * macs / ceiling) for row in rows]


def can_do(subject: str, job: Job) -> bool:
    """Say whether a subject can do a job: compiled, none but ours and timm's in plain memory."""
    if subject == "torchvision":
        return job.mode == "eager" and build_torchvision(job.model) is not None
    return job.mode == "eager" or subject != "timm, channels-last"


def prepare(subject: str, **job: Any) -> Callable[[], float]:
    """Build a subject's network, and give what times it once."""
    return Bench(Job(**job)).timing(subject)


class Bench:
    """A job of one subject, ours or a peer's."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, torch.device(job.device)
        side = build_ours(job.model).image_size
        self.images = torch.randn(job.batch, 3, *side, device=self.device)
        self.labels = torch.randint(_CLASSES, (job.batch,), device=self.device)

    def timing(self, subject: str) -> Callable[[], float]:
        """Give what times a subject once."""
        name, job = self.job.model, self.job
        if subject == "vitlab":
            network: nn.Module = build_ours(name)
        elif subject == "torchvision":
            torchvisions = build_torchvision(name)
            assert torchvisions is not None
            network = torchvisions
        else:
            set_fused_attn(subject != "timm, unfused")
            peer, options = TIMM[name]
            network = timm.create_model(peer, num_classes=_CLASSES, **options)
        network = network.to(self.device).train(job.work == "train_step")
        if subject == "timm, channels-last":
            network = network.to(memory_format=torch.channels_last)
            self.images = self.images.to(memory_format=torch.channels_last)
        if job.mode == "compiled":
            compile_blocks(network) if isinstance(network, Network) else network.compile()
        if job.work == "forward":
            if isinstance(network, Network):
                pack(network)
            return lambda: rate(lambda: self._forward(network), job.batch, self.device, least_s=0.5)
        optimizer = self._optimizer(network)
        least_s = 0.0 if self.device.type == "cpu" else 0.3
        return lambda: rate(lambda: self._step(network, optimizer), job.batch, self.device, least_s=least_s)

    def _optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        if isinstance(network, Network):
            return our_optimizer(network)
        made: torch.optim.Optimizer = timm.optim.create_optimizer_v2(network, opt="adamw", lr=1e-4, weight_decay=0.05)
        return made

    def _forward(self, network: nn.Module) -> None:
        with torch.inference_mode(), autocast(self.device, self.job.precision):
            network(self.images)

    def _step(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with autocast(self.device, self.job.precision):
            logits = network(self.images)
        F.cross_entropy(logits.float(), self.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def build_ours(name: str) -> Network:
    """Build our network, with weights that are not at rest."""
    own_name, shape = _OURS.get(name, (name, {}))
    network = create_model(own_name, num_classes=_CLASSES, **shape)
    nn.init.normal_(network.get_classifier().weight, std=0.02)  # type: ignore[arg-type]
    return network


def build_torchvision(name: str) -> nn.Module | None:
    """Build torchvision's network of the same shape, where it has one."""
    if name == "swin_tiny":
        network: nn.Module = swin_t(num_classes=_CLASSES)
        for module in network.modules():
            if isinstance(module, StochasticDepth):
                module.p = 0.0
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
