"""The ranks as processes of torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from engine.device.base import Device
from engine.shard import Ranks, Shard

_INTERFACE_VARIABLE, _LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"


class ProcessRanks(Ranks):
    """Tensors on the CPU go by gloo, over the loopback interface: it would otherwise listen where the host's name leads. Those on CUDA
    devices, of which each rank has its own, go by NCCL."""

    def __init__(self, meeting: str, shard: Shard, timeout_s: float, device: Device | None = None) -> None:
        """Returns when all ranks have found each other through the file `meeting`. Raises RuntimeError when they do not come, as later does
        each method when another rank has died or has not come to it within `timeout_s`."""
        self.shard = shard
        os.environ[_INTERFACE_VARIABLE] = _LOOPBACK
        store = FileStore(meeting, shard.size)
        backend = "gloo"
        if device is not None and device.is_cuda:
            torch.cuda.set_device(device.torch_device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.size, timeout=timedelta(seconds=timeout_s))

    def add(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def join(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        parts = [Shard(rank, self.shard.size).of(columns) for rank in range(self.shard.size)]
        # All parts of a gather have one shape: the widest's.
        width = max(part.stop - part.start for part in parts)
        padded = x.new_zeros(len(x), width)
        padded[:, : x.shape[1]] = x
        gathered = [torch.empty_like(padded) for _ in parts] if self.shard.rank == 0 else None
        dist.gather(padded, gathered)
        if gathered is None:
            return x
        return torch.cat([own[:, : part.stop - part.start] for own, part in zip(gathered, parts, strict=True)], 1)

    def least(self, number: int) -> int:
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """What `x` is at rank 0; elsewhere it has the shape and dtype, and is overwritten."""
        dist.broadcast(x, 0)
        return x

    def close(self) -> None:
        dist.destroy_process_group()
