"""The network that several processes train: whole on each, by DDP, or spread over them, by FSDP2."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitlab.engine.distributed import Processes, naming_lost_peers
from vitlab.models.network import Network

Parallel = Literal["ddp", "fsdp"]


class Wrapped:
    """An objective as its processes call it in training: as it is, in DDP, or sharded by FSDP2.

    Of one process it is the objective itself. With DDP each process holds the whole network, and gradients are
    averaged. With FSDP2 each holds a share of every parameter, gradient and optimizer value; a block is whole while it
    computes.
    """

    def __init__(self, objective: nn.Module, processes: Processes, parallel: Parallel) -> None:
        self.objective, self.processes, self.parallel = objective, processes, parallel
        self._norms = batch_norms(objective)
        self._resting: list[nn.Module] = []
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        if processes.count > 1 and parallel == "ddp":
            # Of a patch embedding of grey images, whose gradient has the strides of another memory format.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            self._ddp = nn.parallel.DistributedDataParallel(objective)
            if next(objective.parameters()).device.type == "cpu":
                self._ddp.register_comm_hook(processes.count, _mean_in_order)

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole network."""
        return self.processes.count > 1 and self.parallel == "fsdp"

    def __call__(self, batch: Any) -> Any:
        """Give the objective's Step of this process's slice.

        Norms over the batch take the running statistics for a single image, which has none of its own.
        """
        for norm in self._resting:
            norm.train()
        self._resting = [norm for norm in self._norms if norm.training] if len(batch.images) == 1 else []
        for norm in self._resting:
            norm.eval()
        return self.objective(batch) if self._ddp is None else self._ddp(batch)

    def syncing(self, is_last: bool) -> AbstractContextManager[None]:
        """Exchange gradients in the backward pass of the last micro-batch alone."""
        if self._ddp is None or is_last:
            return nullcontext()
        held: AbstractContextManager[None] = self._ddp.no_sync()
        return held

    def share_statistics(self) -> None:
        """Give everybody process 0's running statistics of norms over the batch, which are those that files hold."""
        if self.processes.count == 1:
            return
        with naming_lost_peers():
            for norm in self._norms:
                for buffer in norm.buffers():
                    dist.broadcast(buffer, src=0)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Find the norms whose statistics are those of a batch."""
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def _mean_in_order(count: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket over the processes, always in their order.

    A ring adds each element in an order that depends on its place in the bucket, and DDP lays the buckets out anew
    after a run's first step: one that goes on would have other last bits than one that was never interrupted.
    """
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(count)]
    work = dist.all_gather(parts, own, async_op=True)

    def mean(_: Any) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total / count

    future: torch.futures.Future[Tensor] = work.get_future().then(mean)
    return future


def shard(objective: nn.Module, network: Network, device: torch.device) -> None:
    """Shard a network in place by FSDP2: each repeated block by itself, then all that lies outside."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in network.repeated_blocks():
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def is_sharded(tensor: Tensor) -> bool:
    """Say whether a tensor is spread over the processes."""
    return hasattr(tensor, "full_tensor")  # DTensor's alone, whose import takes longer than many a command


def whole(tensor: Tensor) -> Tensor:
    """Give a tensor whole on every process, all of which must ask."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def whole_state(module: nn.Module, processes: Processes) -> dict[str, Tensor]:
    """Give a module's state whole on process 0; a sharded one is gathered on its CPU, one tensor at a time."""
    state = {}
    for name, tensor in module.state_dict().items():
        gathered = whole(tensor.detach())
        if processes.is_main:
            state[name] = gathered.cpu() if is_sharded(tensor) else gathered
    return state
