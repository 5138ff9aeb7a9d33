"""How a model in training is spread over processes: the options of `sharding=`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from verl.component import BuildContext, Description
from verl.engines.parallel import Parallel, TorchParallel


@dataclass(frozen=True, kw_only=True)
class Sharding(Description):
    """How a model in training is divided.

    Attributes:
        needs_processes: whether the roles live in processes of their own, which the driver starts.
        call_timeout_s: when no process has made progress with a call for so long, the one that stands still is named,
            and all are ended.
    """

    needs_processes: ClassVar[bool] = False
    call_timeout_s: ClassVar[float] = 1800.0

    def parameter_shards(self, world_size: int) -> int:
        """Parts that weights, gradients and optimizer state are divided into."""
        return 1

    def build(self, context: BuildContext) -> Parallel:
        return Parallel()

    def size_fault(self, world_size: int) -> str | None:
        """Why this cannot be done with so many processes; opens with the field's name."""
        return None

    def heads_fault(self, heads: int, kv_heads: int, world_size: int) -> str | None:
        """Why a model with so many attention heads cannot be divided; opens with the field's name."""
        return None

    def parts(self, world_size: int) -> tuple[int, ...]:
        """Of each process, the number of the share of rows that it works on; some may work on one share together."""
        return tuple(range(world_size))


@dataclass(frozen=True, kw_only=True)
class NoSharding(Sharding):
    """One process holds everything: the driver's own."""


@dataclass(frozen=True, kw_only=True)
class _Processes(Sharding):
    """Several processes.

    Args:
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    timeout_s: float = 600.0
    call_timeout_s: float = 1800.0  # type: ignore[misc]
    needs_processes: ClassVar[bool] = True

    def faults(self) -> Iterator[str]:
        for name in ("timeout_s", "call_timeout_s"):
            if getattr(self, name) <= 0:
                yield f"{name} is {getattr(self, name)}: must be above 0."


@dataclass(frozen=True, kw_only=True)
class DDP(_Processes):
    """Data parallelism: every process holds the whole model and trains on its share of the rows.

    Args:
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    def build(self, context: BuildContext) -> Parallel:
        return TorchParallel(context, self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class FSDP(_Processes):
    """Fully sharded data parallelism: each process holds a part of all weights, gradients and optimizer state.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stages 3 and 2), as FSDP2 of torch does it.

    Args:
        strategy: FULL_SHARD lets go of a block's weights after its forward pass and gathers them again for the
            backward pass; SHARD_GRAD_OP keeps them until then: more memory, a third less traffic.
        cpu_offload: weights, gradients and optimizer state rest in main memory, where the optimizer steps too.
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"
    cpu_offload: bool = False

    def build(self, context: BuildContext) -> Parallel:
        return self._parallel(context, self.sizes(context.world_size))

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        """Replicas, shards of each, tensor-parallel siblings of each."""
        return 1, world_size, 1

    def parameter_shards(self, world_size: int) -> int:
        _, shards, siblings = self.sizes(world_size)
        return shards * siblings

    def _parallel(self, context: BuildContext, sizes: tuple[int, int, int]) -> Parallel:
        from verl.engines.sharded import ShardedParallel

        reshard = self.strategy == "FULL_SHARD"
        return ShardedParallel(context, self.timeout_s, sizes, fully=True, reshard=reshard, offload=self.cpu_offload)


@dataclass(frozen=True, kw_only=True)
class HSDP(FSDP):
    """FSDP within each of several replicas: gathering stays within a replica, gradients are added up over them.

    Args:
        replicas: each holds the model once, divided over its processes. See `FSDP` for the others.
    """

    replicas: int = 2

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.replicas < 1:
            yield f"replicas is {self.replicas}: must be at least 1."

    def size_fault(self, world_size: int) -> str | None:
        return _division_fault("replicas", self.replicas, world_size)

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        return self.replicas, world_size // self.replicas, 1


@dataclass(frozen=True, kw_only=True)
class TP(_Processes):
    """Tensor parallelism: each process computes a part of every linear layer, on the same rows as its siblings.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3. Which layer is cut how is transformers' plan of the model.

    Args:
        tensor_parallel: processes that hold the model together; it must divide the number of key-value heads. null:
            all of the run. With more processes than that, each such group has a share of the rows.
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    tensor_parallel: int | None = None

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            yield f"tensor_parallel is {self.tensor_parallel}: must be at least 1, or null for all processes."

    def size_fault(self, world_size: int) -> str | None:
        return _division_fault("tensor_parallel", self.tensor_parallel or world_size, world_size)

    def heads_fault(self, heads: int, kv_heads: int, world_size: int) -> str | None:
        from verl.engines.tensor_parallel import heads_fault

        fault = heads_fault(heads, kv_heads, self.tensor_parallel or world_size)
        return None if fault is None else f"tensor_parallel {fault}"

    def parameter_shards(self, world_size: int) -> int:
        return self.tensor_parallel or world_size

    def parts(self, world_size: int) -> tuple[int, ...]:
        return tuple(rank // (self.tensor_parallel or world_size) for rank in range(world_size))

    def build(self, context: BuildContext) -> Parallel:
        from verl.engines.sharded import ShardedParallel

        tensors = self.tensor_parallel or context.world_size
        return ShardedParallel(context, self.timeout_s, (context.world_size // tensors, 1, tensors), fully=False)


@dataclass(frozen=True, kw_only=True)
class TPFSDP(FSDP):
    """Tensor parallelism within groups of processes, and FSDP across the groups.

    Args:
        tensor_parallel: processes of a group, next to each other; see `TP`. See `FSDP` for the others.
    """

    tensor_parallel: int = 2

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.tensor_parallel < 1:
            yield f"tensor_parallel is {self.tensor_parallel}: must be at least 1."

    def size_fault(self, world_size: int) -> str | None:
        return _division_fault("tensor_parallel", self.tensor_parallel, world_size)

    def heads_fault(self, heads: int, kv_heads: int, world_size: int) -> str | None:
        from verl.engines.tensor_parallel import heads_fault

        fault = heads_fault(heads, kv_heads, self.tensor_parallel)
        return None if fault is None else f"tensor_parallel {fault}"

    def parts(self, world_size: int) -> tuple[int, ...]:
        return tuple(rank // self.tensor_parallel for rank in range(world_size))

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        return 1, world_size // self.tensor_parallel, self.tensor_parallel


def _division_fault(name: str, size: int, world_size: int) -> str | None:
    if world_size % size == 0:
        return None
    fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return (
        f"{name} is {size}: it does not divide the {world_size} processes of trainer.n_gpus_per_node x "
        f"trainer.nnodes; {', '.join(map(str, fitting))} would."
    )
