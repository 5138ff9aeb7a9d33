"""How a model in training is spread over processes, and the sums that the processes take together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
from torch import Tensor, nn

from verl.description import BuildContext, Description


class Parallel:
    """This process among the data-parallel ones. Alone, every sum is what it was.

    Attributes:
        rank, world_size: this process's number, and how many there are.
    """

    rank = 0
    world_size = 1

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Named numbers, each added up over all processes; a process may lack names that another one has."""
        return dict(values)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up each parameter's gradient over all processes, in place."""

    def close(self) -> None:
        """Leave the group of processes."""


class TorchParallel(Parallel):
    """Data parallelism over torch.distributed: each process holds the whole model and a share of the rows.

    Losses are normalised by counts over the whole batch before the backward pass, so gradients are added, not
    averaged, and a process without rows takes part with zeros.
    """

    bucket_bytes = 25 * 2**20

    def __init__(self, context: BuildContext, timeout_s: float):
        import torch.distributed as dist

        self.rank, self.world_size = context.rank, context.world_size
        self.device = torch.device(context.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            backend="nccl" if self.device.type == "cuda" else "gloo",
            init_method=os.environ.get("VERL_RENDEZVOUS", "env://"),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.dist = dist

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        everyone: list[dict[str, float]] = [{} for _ in range(self.world_size)]
        self.dist.all_gather_object(everyone, dict(values))
        names = dict.fromkeys(name for given in everyone for name in given)
        return {name: sum(given.get(name, 0.0) for given in everyone) for name in names}

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for bucket in self._buckets(parameters):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            self.dist.all_reduce(flat)
            for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(total.view_as(grad))

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[Tensor]]:
        bucket, size = [], 0
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            if bucket and (bucket[0].dtype != grad.dtype or size >= self.bucket_bytes):
                yield bucket
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.numel() * grad.element_size()
        if bucket:
            yield bucket

    def close(self) -> None:
        if self.dist.is_initialized():
            self.dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Sharding(Description):
    """How a model in training is divided.

    Attributes:
        needs_processes: whether the roles live in processes of their own, which the driver starts.
    """

    needs_processes: ClassVar[bool] = False

    def parameter_shards(self, world_size: int) -> int:
        """Parts that weights, gradients and optimizer state are divided into."""
        return 1

    def build(self, context: BuildContext) -> Parallel:
        return Parallel()


@dataclass(frozen=True, kw_only=True)
class NoSharding(Sharding):
    """One process holds everything: the driver's own."""


@dataclass(frozen=True, kw_only=True)
class DDP(Sharding):
    """Data parallelism: every process holds the whole model and trains on its share of the rows.

    Args:
        timeout_s: how long a process waits for its siblings in one collective operation.
    """

    timeout_s: float = 600.0
    needs_processes: ClassVar[bool] = True

    def faults(self) -> Iterator[str]:
        if self.timeout_s <= 0:
            yield f"timeout_s is {self.timeout_s}: must be above 0."

    def build(self, context: BuildContext) -> Parallel:
        return TorchParallel(context, self.timeout_s)
