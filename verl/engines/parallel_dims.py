"""The parallel dimensions of one training process: data-parallel replicas, FSDP shards, tensor-parallel ranks.

The process mesh of `verl.engines.parallel_degrees` is used for three purposes:

weights  pp x replicate x shard x tensor     shard = dp_shard x cp: FSDP shards over all processes with different tokens
experts  pp x replicate x expert_shard x expert x tensor     shard = expert_shard x expert (ep)
tokens   rows over dp_replicate x dp_shard, tokens of a row over cp; ranks along cp and tp have the same rows

`Parallelism` is a single process; in `DataParallelism` each process holds the whole model, in `ShardedParallelism` a
shard of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from verl.component import BuildContext
from verl.engines.fsdp import free_gathered_parameters, gathered, load_own_slices, shard_fully
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.tensor_parallel import (
    EXPERT,
    EXPERT_SHARD,
    OwnModuleShards,
    divide_experts,
    experts_gathered,
    shard_over,
)
from verl.errors import ConfigError
from verl.model_paths.context_attention import ContextGroup, ContextStyle
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import head_of
from verl.models.own_module import OwnModule, TPRank
from verl.models.parallel_info import Autocast, ParallelInfo
from verl.ops.resharding.dtensor import is_divided, local, mesh_dims, tensor_layout
from verl.ops.resharding.layout import Mesh
from verl.utils.progress import report

BUCKET_BYTES = 25 * 2**20  # of tensors, per process, in one collective operation
T = TypeVar("T", bound=Tensor)
STAGE, REPLICATE, SHARD, TENSOR = "pp", "replicate", "shard", "tensor"  # dimensions of the mesh of weights


class Parallelism:
    """Position of this process in the mesh, and its collective operations. This base class is a single process, where
    they change nothing.

    Attributes:
        rank, world_size: rank of this process, and number of processes.
        device: the device of computation and of collective operations.
        mesh: process mesh with the dimensions `pp`, `replicate`, `shard` and `tensor`.
        context: the context-parallel group, whose processes have different tokens of the same rows; None without it.
        needs_equal_micro_batches: whether every forward pass is collective, so that all processes run equally many.
        divides_weights: whether `shard_model` leaves a process with only a shard of the model.
        least_micro_batches: micro-batches that the rows of a step are split into at least, if they have enough tokens.
        tp_rank: the tensor-parallel rank and size that a user-defined module is built for.
        routers_are_whole: whether each process has the router decisions of all layers for its tokens.
    """

    rank = 0
    world_size = 1
    device = torch.device("cpu")
    mesh = Mesh(())
    context: ContextGroup | None = None
    needs_equal_micro_batches = False
    divides_weights = False
    least_micro_batches = 1
    tp_rank = TPRank()
    routers_are_whole = True

    @property
    def shares_tokens(self) -> bool:
        """Whether rows are split over processes by tokens (context parallelism)."""
        return self.context is not None

    def shard_model(self, model: nn.Module, autocast: Autocast = None) -> None:
        """Shard a model, in place. `autocast` is the dtype that it will compute in; None for that of its weights."""

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums of named numbers over the data-parallel processes; a name may be missing in some of them."""
        return dict(values)

    def sum_of_tokens(self, x: Tensor) -> Tensor:
        """Sum of a tensor over the processes with different tokens (data and context parallel)."""
        return x

    def of_each(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """Named numbers of each data-parallel process, by rank."""
        return [dict(values)]

    def most(self, count: int) -> int:
        """The maximum of a number over the processes."""
        return count

    def run_micro_batches(
        self,
        micros: Iterable[MicroBatch],
        forward: Callable[[MicroBatch], Tensor | None],
        computing: Callable[[], AbstractContextManager[None]],
        *,
        model: nn.Module,
        trains: bool = False,
    ) -> None:
        """Run a function of the model over micro-batches, one after another.

        Args:
            micros: the micro-batches of one step.
            forward: calls the model once; returns a loss if `trains`.
            computing: makes a context that all forward and backward passes run in: `computing_in`, entered once, since
                it casts every weight.
            model: the model that `forward` calls.
            trains: also run the backward pass, which accumulates gradients.
        """
        with computing():
            for micro in micros:
                value = forward(micro)
                if trains:
                    assert value is not None
                    value.backward()
                report()

    def from_last_stage(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Named tensors of the last pipeline stage, broadcast to all stages."""
        return results

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """All-reduce (sum) each gradient over the data-parallel processes, in place."""

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        """Scale gradients down to a global L2 norm of at most `limit`, in place. Returns the norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)

    def assert_siblings_agree(self, x: Tensor) -> None:
        """Assert that the processes that work on the same rows have computed the same integers."""

    def close(self) -> None:
        """Destroy the process group."""


def buckets(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Consecutive tensors of one dtype that travel together, about `BUCKET_BYTES` each."""
    bucket, size = [], 0
    for x in tensors:
        if bucket and (bucket[0].dtype != x.dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(x)
        size += x.numel() * x.element_size()
    if bucket:
        yield bucket


class DataParallelism(Parallelism):
    """Data parallelism over torch.distributed: each process holds the whole model and a share of the rows.

    Losses are divided by counts over the whole batch before the backward pass, so gradients are summed, not
    averaged, and a process without rows contributes zeros.
    """

    alone_bytes = 2**19  # larger gradients are reduced in place, smaller ones in buckets

    def __init__(self, context: BuildContext, timeout_s: float):
        import torch.distributed as dist

        self.rank, self.world_size = context.rank, context.world_size
        self.mesh = Mesh(((STAGE, 1), (REPLICATE, context.world_size), (SHARD, 1), (TENSOR, 1)))
        self.device = torch.device(context.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.timeout = timedelta(seconds=timeout_s)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group(
                # NCCL cannot reduce offloaded gradients and Python objects, which are in main memory
                backend="cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                init_method=os.environ.get("VERL_RENDEZVOUS", "env://"),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self.timeout,
            )
        self.dist = dist
        self.data_group: Any = None  # the processes with different rows: all of them
        self.gradient_group: Any = None  # the processes whose gradients of a weight are summed: all of them

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        everyone = self.of_each(values)
        names = dict.fromkeys(name for of_rank in everyone for name in of_rank)
        return {name: sum(of_rank.get(name, 0.0) for of_rank in everyone) for name in names}

    def of_each(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        everyone: list[dict[str, float]] = [{} for _ in range(self.dist.get_world_size(self.data_group))]
        self.dist.all_gather_object(everyone, dict(values), group=self.data_group)
        return everyone

    def sum_of_tokens(self, x: Tensor) -> Tensor:
        total = x.clone()
        self.dist.all_reduce(total, group=self.gradient_group)
        return total

    def most(self, count: int) -> int:
        largest = torch.tensor([count], device=self.device)
        self.dist.all_reduce(largest, op=self.dist.ReduceOp.MAX)
        return int(largest)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self.sum_over(parameters, self.gradient_group)

    def sum_over(self, parameters: Iterable[nn.Parameter], group: Any) -> None:
        """All-reduce (sum) the gradients of the local parts of some parameters over a process group."""
        large, small = [], []
        for grad in self._gradients(parameters):
            (large if grad.nbytes >= self.alone_bytes else small).append(grad)  # by size only: all must agree
        sums = [grad.contiguous() for grad in large]
        pending: list[Any] = [self.dist.all_reduce(total, group=group, async_op=True) for total in sums]
        for bucket in buckets(small):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            self.dist.all_reduce(flat, group=group)
            for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(total.view_as(grad))
            report()
        for work, grad, total in zip(pending, large, sums, strict=True):
            work.wait()
            report()
            if total is not grad:
                grad.copy_(total)

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
        """Local gradients of all trained parameters; zeros where a parameter was not used."""
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                yield local(parameter.grad)

    def close(self) -> None:
        if self._owns_group and self.dist.is_initialized():
            self.dist.destroy_process_group()


class ShardedParallelism(DataParallelism):
    """Process mesh with replicas, FSDP shards, context, expert and tensor parallelism.

    Args:
        degrees: sizes of the mesh.
        fully: shard weights, gradients and optimizer state along `shard`; otherwise they are replicated along it.
        reshard: see `shard_fully`.
        offload: keep shards in main memory.
        reduces_once: with `fully`, reduce gradients after the last micro-batch of an update, not after each.
        cp_style: see `verl.model_paths.context_attention`.
    """

    divides_weights = True

    def __init__(
        self,
        context: BuildContext,
        timeout_s: float,
        degrees: ParallelDegrees,
        *,
        fully: bool,
        reshard: bool = True,
        offload: bool = False,
        reduces_once: bool = False,
        cp_style: ContextStyle = "allgather",
    ):
        super().__init__(context, timeout_s)
        assert degrees.world_size == self.world_size, (degrees, self.world_size)
        self.degrees = degrees
        names = (STAGE, REPLICATE, SHARD, TENSOR)
        sizes = (degrees.pp, degrees.dp_replicate, degrees.shards, degrees.tp)
        self.mesh, self._expert_mesh = Mesh(tuple(zip(names, sizes, strict=True))), None
        if degrees.ep > 1:
            by_expert = ((EXPERT_SHARD, degrees.expert_shards), (EXPERT, degrees.ep))
            dims = (*self.mesh.dims[:2], *by_expert, *self.mesh.dims[3:])
            self.mesh = Mesh(dims, joined=((SHARD, (EXPERT_SHARD, EXPERT)),))
            self._expert_mesh = self._new_mesh(dims)
        self.fully, self.reshard, self.offload = fully, reshard, offload
        self.reduces_once = fully and reduces_once
        self.needs_equal_micro_batches = fully
        self.routers_are_whole = degrees.tp == 1 and degrees.pp == 1
        self._device_mesh = self._new_mesh(tuple(zip(names, sizes, strict=True)))
        self._sibling_group = self._device_mesh[TENSOR].get_group()
        stage = self.world_size // degrees.pp  # ranks of a stage are consecutive
        if degrees.tp > 1 or degrees.pp > 1:
            self.gradient_group = self._group(lambda rank: (rank // stage, rank % degrees.tp))
        self.data_group = self.gradient_group
        if degrees.cp > 1:
            self.data_group = self._group(lambda rank: (rank // stage, rank % degrees.siblings))
            self._sibling_group = self._group(lambda rank: rank // degrees.siblings)
            ranks, group = degrees.context_ranks(self.rank), self._group(degrees.context_ranks)
            self.context = ContextGroup(group, len(ranks), ranks.index(self.rank), cp_style)
        self._partial_over_tensor: set[int] = set()  # ids of parameters
        if degrees.tp > 1:
            tensors = self._device_mesh[TENSOR]
            self.tp_rank = TPRank(tensors.get_local_rank(), degrees.tp, tensors.get_group())
        self._own_modules: dict[int, OwnModuleShards] = {}  # by id of the model

    def _new_mesh(self, dims: Sequence[tuple[str, int]]) -> Any:
        """The device mesh with these dimensions. Its groups have the time limit of this run: those that
        `torch.distributed.init_device_mesh` creates have that of torch."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(self.world_size).view([size for _, size in dims])
        groups = []
        for dim, (_, size) in enumerate(dims):
            lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
            line_of = {rank: number for number, line in enumerate(lines) for rank in line}
            groups.append(self.dist.group.WORLD if size == self.world_size else self._group(line_of.__getitem__))
        names = tuple(name for name, _ in dims)
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    def _group(self, key: Callable[[int], Any]) -> Any:
        """The process group of all ranks with the same key as this one. Collective: all processes create all groups."""
        ranks: dict[Any, list[int]] = {}
        for rank in range(self.world_size):
            ranks.setdefault(key(rank), []).append(rank)
        return self.dist.new_subgroups_by_enumeration(list(ranks.values()), timeout=self.timeout)[0]

    def shard_model(self, model: nn.Module, autocast: Autocast = None) -> None:
        """See `Parallelism.shard_model`. A head on a backbone (a critic's) is small and is not sharded."""
        core: Any = head_of(model).backbone
        if isinstance(core, OwnModule) and self.mesh.extent(TENSOR) > 1:
            self._lay_out(core)
            return
        partial = shard_over(core, self._device_mesh[TENSOR]) if self.mesh.extent(TENSOR) > 1 else []
        experts = [] if self._expert_mesh is None else divide_experts(core, self._expert_mesh[EXPERT])
        if self.fully:
            replicated = self.mesh.extent(REPLICATE) > 1
            shard_fully(
                core,
                self._device_mesh[(REPLICATE, SHARD) if replicated else SHARD],
                experts=experts,
                expert_mesh=self._expert_mesh
                and self._expert_mesh[(REPLICATE, EXPERT_SHARD) if replicated else EXPERT_SHARD],
                reshard=self.reshard,
                compute_dtype=getattr(torch, autocast) if autocast else None,
                offload=self.offload,
                pin=self.device.type == "cuda",
            )
        if (files := getattr(core, "weight_files", None)) is not None:
            storage = torch.device("cpu") if self.offload else self.device
            load_own_slices(core, files, self.device, storage)
            del core.weight_files
        if not self.fully:
            model.to(self.device)
        elif model is not core:  # FSDP has moved the core to the device
            for head in (child for child in model.children() if child is not core):
                head.to(self.device)
        named = dict(core.named_parameters())
        self._partial_over_tensor |= {id(named[name]) for name in partial}
        whole = functools.partial(self._gathered, core, experts) if self.fully else contextlib.nullcontext
        model.parallel_info = replace(  # type: ignore[assignment]
            self._info(),
            casts_weights=self.fully and autocast is not None,
            gathered=whole,
            free_gathered_parameters=functools.partial(free_gathered_parameters, core) if self.fully else lambda: None,
        )

    def _info(self) -> ParallelInfo:
        siblings = self.degrees.siblings
        first = self.rank // siblings * siblings
        return ParallelInfo(
            device=self.device,
            mesh=self.mesh,
            rank=self.rank,
            siblings=tuple(range(first, first + siblings)),
            sibling_group=self._sibling_group,
            layout_of=tensor_layout,
            local=local,
            generation_groups=() if self.context is None else (self.context.group,),
            tensor_group=self._device_mesh[TENSOR].get_group() if self.mesh.extent(TENSOR) > 1 else None,
            timeout=self.timeout,
        )

    def _lay_out(self, model: OwnModule) -> None:
        """Register a user-defined module that was built for this rank."""
        if self.fully:
            raise ConfigError(
                f"sharding.tp is {self.degrees.tp}: the weights of a {type(model.module).__name__}, which shards "
                "itself, cannot be sharded by dp_shard or cp as well. Set dp_shard=1 and use dp_replicate."
            )
        parts = self._own_modules[id(model)] = OwnModuleShards(model, self._device_mesh[TENSOR])
        self._partial_over_tensor |= {id(p) for p in parts.summed}
        model.parallel_info = replace(self._info(), gathered=parts.running)  # type: ignore[assignment]

    def run_micro_batches(
        self,
        micros: Iterable[MicroBatch],
        forward: Callable[[MicroBatch], Tensor | None],
        computing: Callable[[], AbstractContextManager[None]],
        *,
        model: nn.Module,
        trains: bool = False,
    ) -> None:
        parts = self._own_modules.get(id(model))
        if trains and self.reduces_once:
            micros = self._reducing_after_last(micros, head_of(model).backbone)
        with contextlib.nullcontext() if parts is None else parts.running(trains):
            super().run_micro_batches(micros, forward, computing, model=model, trains=trains)

    @staticmethod
    def _reducing_after_last(micros: Iterable[MicroBatch], core: Any) -> Iterator[MicroBatch]:
        """The micro-batches, of which the backward pass of the last alone reduces gradients."""
        micros = iter(micros)
        following = next(micros, None)
        while following is not None:
            micro, following = following, next(micros, None)
            core.set_requires_gradient_sync(following is None)  # otherwise whole gradients are accumulated
            yield micro

    @contextlib.contextmanager
    def _gathered(self, core: nn.Module, experts: list[nn.Module]) -> Iterator[None]:
        with gathered(core, self.reshard), experts_gathered(experts):
            yield

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Parallelism.sum_gradients`; FSDP has reduced those of its weights already."""
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:  # first: a process without rows has zeros in the layout of the parameter
            if p.grad is not None and is_divided(p.grad) and p.grad.placements != p.placements:  # type: ignore
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        by_fsdp = {SHARD, EXPERT_SHARD}
        self.sum_over([p for p in trained if by_fsdp.isdisjoint(mesh_dims(p))], self.gradient_group)
        partial = [p for p in trained if id(p) in self._partial_over_tensor]
        if partial:
            self.sum_over(partial, self._device_mesh[TENSOR].get_group())

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        """See `Parallelism.clip`: squares of local parts, divided by the number of processes that hold the part,
        summed over all processes.
        """
        # some launches for each kind, not for each
        alike: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
        for p in parameters:
            if p.grad is not None and (grad := local(p.grad)).numel():
                alike.setdefault((grad.device, grad.dtype, self._holders(p)), []).append(grad)
        sums = [torch.zeros((), dtype=torch.float64, device=self.device)]
        for (_, _, holders), grads in alike.items():
            squares = torch.stack(torch.ops.aten._foreach_norm.Scalar(grads)).double().square()
            sums.append((squares.sum() / holders).to(self.device))
        total = torch.stack(sums).sum()
        self.dist.all_reduce(total)
        norm = total.sqrt()
        if limit is not None:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for (device, dtype, _), grads in alike.items():
                torch.ops.aten._foreach_mul_.Tensor(grads, scale.to(device, dtype))
        return norm

    def _holders(self, x: Tensor) -> int:
        """Number of processes that hold the same part of a parameter as this one."""
        return self.world_size // math.prod(self.mesh.extent(name) for name, _ in tensor_layout(x).splits)

    def assert_siblings_agree(self, x: Tensor) -> None:
        assert self.siblings_agree(x), "processes that work on the same rows have sampled different tokens"

    def siblings_agree(self, x: Tensor) -> bool:
        """Whether all processes that work on the same rows have these integers. Collective; all get the same answer."""
        if self.degrees.siblings == 1:
            return True
        flat = x.reshape(-1).to(self.device, torch.int64)
        digest = (flat * torch.arange(1, len(flat) + 1, device=self.device)).sum().reshape(1)
        digests = [torch.empty_like(digest) for _ in range(self.degrees.siblings)]
        self.dist.all_gather(digests, digest, group=self._sibling_group)
        return all(torch.equal(other, digest) for other in digests)
