"""`sharding=`: how a model in training is sharded over processes, and what that costs each process.

`Sharding.cost` computes memory at rest, peak memory and communication by arithmetic:

    FSDP().cost(8, model_stats(config), tokens=16384, compute_bytes=2).persistent_bytes / 2**30     GiB in each process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from verl.component import BuildContext, Description, component
from verl.engines.parallel_degrees import (
    ParallelDegrees,
    ShardedRole,
    ShardingCost,
    fsdp_cost,
    nearest_ep,
    nearest_layout,
    part_of,
    replicated_cost,
    sharded_stage_cost,
    with_experts_apart,
)
from verl.engines.parallel_dims import DataParallelism, Parallelism, ShardedParallelism
from verl.engines.tensor_parallel import heads_fault
from verl.models.model_stats import ModelStats


@component
class Sharding(Description):
    """Sharding of a model in training.

    Attributes:
        needs_processes: whether the roles run in worker processes that the driver starts.
        call_timeout_s: when no worker has made progress with a call for this many seconds, the run ends with an error
            that names the one that hangs.
    """

    needs_processes: ClassVar[bool] = False
    call_timeout_s: ClassVar[float] = 1800.0

    def degrees(self, world_size: int) -> ParallelDegrees:
        """Sizes of the mesh of `world_size` processes; the other numbers are computed from it."""
        return ParallelDegrees(dp_replicate=world_size)

    def parameter_shards(self, world_size: int) -> int:
        """Number of shards of weights, gradients and optimizer state."""
        _, shards, siblings = self.mesh_sizes(world_size)
        return shards * siblings * self.degrees(world_size).pp

    def build(self, context: BuildContext) -> Parallelism:
        return Parallelism()

    def size_fault(self, world_size: int) -> str | None:
        """Why this sharding does not fit `world_size` processes, beginning with the field's name; None if it does."""
        return None

    def heads_fault(self, heads: int, kv_heads: int, world_size: int) -> str | None:
        """Why attention heads cannot be sharded, beginning with the field's name; None if they can."""
        return None

    def layers_fault(self, layers: int, world_size: int) -> str | None:
        """Why the layers cannot be split into stages, beginning with the field's name; None if they can."""
        return None

    def experts_fault(self, model_type: str, experts: int | None, world_size: int) -> str | None:
        """Why the experts of a layer (None: a model without) cannot be sharded, beginning with the field's name; None
        if they can.
        """
        return None

    def row_share_by_rank(self, world_size: int) -> tuple[int, ...]:
        """Index of the share of rows of each process; processes that work on the same rows have the same index."""
        degrees = self.degrees(world_size)
        return tuple(degrees.row_share(rank) for rank in range(world_size))

    def row_shares(self, world_size: int) -> int:
        """Number of shares that the rows of a batch are split into."""
        return max(self.row_share_by_rank(world_size)) + 1

    def token_shares(self, world_size: int) -> int:
        """Number of shares that the tokens of a batch are split into, by rows and by context parallelism."""
        return self.row_shares(world_size) * self.degrees(world_size).cp

    def micro_batch_tokens(self, budget: int, total: int) -> int:
        """Tokens of a micro-batch of one process, of `total` tokens, where the role allows at most `budget`."""
        return min(budget, total)

    def pipeline_ways(self, world_size: int) -> float:
        """Speed-up of a pass over the rows of a step by pipeline stages, as a factor."""
        return 1.0

    def activation_share(self, micro_batches: int) -> float:
        """Activations that a process keeps for backward with this many micro-batches per step, relative to those of all
        layers for one."""
        return 1.0

    def mesh_sizes(self, world_size: int) -> tuple[int, int, int]:
        """Numbers of replicas, of FSDP shards and of tensor-parallel processes."""
        degrees = self.degrees(world_size)
        return degrees.dp_replicate, degrees.shards, degrees.tp

    def smaller(self) -> Iterator[tuple[str, Sharding]]:
        """(setting, sharding with that setting) pairs that take less device memory."""
        yield from ()

    def cost(
        self,
        world_size: int,
        sizes: ModelStats,
        tokens: int = 0,
        weight_bytes: int = 4,
        compute_bytes: int | None = None,
        trains: bool = True,
        predicted: int | None = None,
    ) -> ShardingCost:
        """Memory and traffic of a role per process.

        Args:
            world_size: number of processes.
            sizes: of the model.
            tokens: tokens of a micro-batch, for the activations that processes exchange.
            weight_bytes: bytes per element at rest, of weights, gradients and each of AdamW's two moments.
            compute_bytes: bytes per element of the dtype of computation; None for `weight_bytes`.
            trains: whether the role has gradients and an optimizer.
            predicted: tokens of a micro-batch whose logits are computed; None for all.
        """
        replicas, shards, siblings = self.mesh_sizes(world_size)
        stages, compute = self.degrees(world_size).pp, compute_bytes or weight_bytes
        return self.role_cost(
            ShardedRole(replicas, shards, siblings, stages, sizes, tokens, weight_bytes, compute, trains, predicted)
        )

    def role_cost(self, role: ShardedRole) -> ShardingCost:
        """`cost` of a role whose place in the mesh is known."""
        return replicated_cost(role)


@component
class NoSharding(Sharding):
    """No sharding: the driver process holds the whole model."""


@component
class _Processes(Sharding):
    """Base of shardings over several processes.

    Args:
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    timeout_s: PositiveFloat = 600.0
    call_timeout_s: PositiveFloat = 1800.0  # type: ignore[misc]
    needs_processes: ClassVar[bool] = True


@component
class DDP(_Processes):
    """Data parallelism: every process holds the whole model and trains on its share of the rows.

    Args:
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    def build(self, context: BuildContext) -> Parallelism:
        return DataParallelism(context, self.timeout_s)


@component
class FSDP(_Processes):
    """Fully sharded data parallelism: each process holds a part of all weights, gradients and optimizer state.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stages 3 and 2), as FSDP2 of torch does it.

    Args:
        strategy: FULL_SHARD frees a block's weights after its forward pass and gathers them again for the backward
            pass; SHARD_GRAD_OP keeps them until then: more memory, a third less traffic.
        cpu_offload: weights, gradients and optimizer state rest in main memory, where the optimizer step runs too.
        reduce_gradients: `micro_batch` reduces gradients in the backward pass of each micro-batch; `update` accumulates
            whole gradients in each process and reduces them in the last backward pass of an update: less traffic, for
            memory of the size of all trained weights of a process.
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"
    cpu_offload: bool = False
    reduce_gradients: Literal["micro_batch", "update"] = "micro_batch"

    def smaller(self) -> Iterator[tuple[str, Sharding]]:
        if self.reduce_gradients == "update":
            yield "sharding.reduce_gradients=micro_batch", replace(self, reduce_gradients="micro_batch")
        if not self.cpu_offload:
            yield "sharding.cpu_offload=true", replace(self, cpu_offload=True)

    def role_cost(self, role: ShardedRole) -> ShardingCost:
        return fsdp_cost(
            role,
            frees_blocks=self.strategy == "FULL_SHARD",
            reduces_once=self.reduce_gradients == "update",
            is_offloaded=self.cpu_offload,
        )

    def build(self, context: BuildContext) -> Parallelism:
        return self._sharded(context, fully=True)

    def _sharded(self, context: BuildContext, **options: Any) -> ShardedParallelism:
        options |= {"reshard": self.strategy == "FULL_SHARD", "offload": self.cpu_offload}
        options["reduces_once"] = self.reduce_gradients == "update"
        return ShardedParallelism(context, self.timeout_s, self.degrees(context.world_size), **options)

    def degrees(self, world_size: int) -> ParallelDegrees:
        return ParallelDegrees(dp_shard=world_size)


@component
class HSDP(FSDP):
    """Hybrid FSDP: weights are sharded within each replica, and gradients are all-reduced over the replicas.

    Args:
        replicas: number of replicas, each with the whole model sharded over its processes. See `FSDP` for the others.
    """

    replicas: PositiveInt = 2

    def size_fault(self, world_size: int) -> str | None:
        return _division_fault("replicas", self.replicas, world_size)

    def degrees(self, world_size: int) -> ParallelDegrees:
        return ParallelDegrees(dp_replicate=self.replicas, dp_shard=world_size // self.replicas)


@component
class TP(_Processes):
    """Tensor parallelism: each process computes a part of every linear layer, on the same rows as its siblings.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3. Layers are split by the tensor-parallel plan that
    transformers has for the model.

    Args:
        tensor_parallel: processes that split each layer; it must divide the number of key-value heads. null for all
            processes of the run. With fewer, each group of `tensor_parallel` processes works on its share of the rows.
        timeout_s: how long a process waits for its siblings in one collective operation.
        call_timeout_s: how long the driver waits for processes that make no progress; that of trainer.placement, if it
            has one, goes first.
    """

    tensor_parallel: PositiveInt | None = None

    def size_fault(self, world_size: int) -> str | None:
        return _division_fault("tensor_parallel", self.tensor_parallel or world_size, world_size)

    def heads_fault(self, heads: int, kv_heads: int, world_size: int) -> str | None:
        fault = heads_fault(heads, kv_heads, self.tensor_parallel or world_size)
        return None if fault is None else f"tensor_parallel {fault}"

    def build(self, context: BuildContext) -> Parallelism:
        return ShardedParallelism(context, self.timeout_s, self.degrees(context.world_size), fully=False)

    def degrees(self, world_size: int) -> ParallelDegrees:
        tensors = self.tensor_parallel or world_size
        return ParallelDegrees(dp_replicate=world_size // tensors, tp=tensors)


@component
class TPFSDP(FSDP):
    """Tensor parallelism within groups of processes, and FSDP across the groups.

    Args:
        tensor_parallel: processes of a group, with consecutive ranks; see `TP`. See `FSDP` for the others.
    """

    tensor_parallel: PositiveInt = 2

    def size_fault(self, world_size: int) -> str | None:
        return _division_fault("tensor_parallel", self.tensor_parallel, world_size)

    def heads_fault(self, heads: int, kv_heads: int, world_size: int) -> str | None:
        fault = heads_fault(heads, kv_heads, self.tensor_parallel)
        return None if fault is None else f"tensor_parallel {fault}"

    def degrees(self, world_size: int) -> ParallelDegrees:
        return ParallelDegrees(dp_shard=world_size // self.tensor_parallel, tp=self.tensor_parallel)


@component
class Parallel(FSDP):
    """Every kind of parallelism on one mesh: pp x dp_replicate x dp_shard x cp x tp processes.

    The other shardings are special cases of it. Weights, gradients and optimizer state of a stage are sharded over
    dp_shard x cp (FSDP) and over tp; rows are split over dp_replicate x dp_shard, the tokens of a row over cp.

    Args:
        tp: size of tensor parallelism; it must divide the key-value heads. See `TP`.
        cp: size of context parallelism: processes with different tokens of the same rows. Only attention communicates.
        pp: number of pipeline stages.
        dp_replicate: number of replicas, each sharded by itself; see `HSDP`.
        dp_shard: FSDP shards, each on different rows; -1 for what the other sizes leave.
        ep: size of expert parallelism: each process holds some experts of every layer, and tokens are sent to the
            experts that they are routed to. It must divide dp_shard x cp, and the experts of a layer.
        cp_style: `allgather` gathers keys and values of all tokens layer by layer, for any number of heads; `ulysses`
            exchanges tokens for heads by all-to-all, and cp must divide the number of heads.
        pp_schedule: order of forward and backward passes: `1f1b` keeps the activations of at most pp micro-batches,
            `gpipe` those of all.
        pp_micro_batches: micro-batches that the rows of an update are split into at least; null: 4 x pp. With m
            micro-batches each stage is busy m / (m + pp - 1) of the time. See `FSDP` for the others.
    """

    tp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1
    dp_replicate: PositiveInt = 1
    dp_shard: int = -1
    ep: PositiveInt = 1
    cp_style: Literal["allgather", "ulysses"] = "allgather"
    pp_schedule: Literal["gpipe", "1f1b"] = "1f1b"
    pp_micro_batches: PositiveInt | None = None

    def faults(self) -> Iterator[str]:
        if self.dp_shard < 1 and self.dp_shard != -1:
            yield f"dp_shard is {self.dp_shard}: must be at least 1, or -1 for what the other sizes leave."
        if self.pp > 1 and self.cpu_offload:
            yield f"cpu_offload is true: cannot be combined with pp={self.pp}. Set cpu_offload=false or pp=1."
        if self.ep > 1 and self.tp > 1:
            yield f"ep is {self.ep}: cannot be combined with tensor parallelism (tp is {self.tp}). Set ep=1 or tp=1."

    def size_fault(self, world_size: int) -> str | None:
        sizes, others = self._wanted(), self._product()
        if self.dp_shard == -1 and world_size % others == 0:
            return self._ep_fault(self.degrees(world_size))
        if self.dp_shard != -1 and others * self.dp_shard == world_size:
            return self._ep_fault(self.degrees(world_size))
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        first = next((name for name, size in sizes.items() if size > 1), "dp_shard")
        count = others if self.dp_shard == -1 else others * self.dp_shard
        why = "does not divide" if self.dp_shard == -1 else "is not"
        return (
            f"{first} is {sizes[first]}: {product} is {count}, which {why} the {world_size} processes of "
            f"trainer.n_gpus_per_node x trainer.nnodes. {self._nearest(world_size)}"
        )

    def heads_fault(self, heads: int, kv_heads: int, world_size: int) -> str | None:
        def fits(degrees: ParallelDegrees) -> bool:
            if heads_fault(heads, kv_heads, degrees.tp) is not None:
                return False
            return self.cp_style != "ulysses" or heads // degrees.tp % degrees.cp == 0

        if (fault := heads_fault(heads, kv_heads, self.tp)) is not None:
            return f"tp {fault} {self._nearest(world_size, fits)}"
        if self.cp_style == "ulysses" and heads // self.tp % self.cp:
            return (
                f"cp is {self.cp}: with cp_style=ulysses it must divide the {heads // self.tp} heads of each process "
                f"({heads} heads, tp {self.tp}). {self._nearest(world_size, fits)} Or set cp_style=allgather."
            )
        return None

    def layers_fault(self, layers: int, world_size: int) -> str | None:
        if self.pp <= layers:
            return None
        nearest = self._nearest(world_size, lambda degrees: degrees.pp <= layers)
        return f"pp is {self.pp}: the model has {layers} layers, and every stage needs at least one. {nearest}"

    def _ep_fault(self, degrees: ParallelDegrees) -> str | None:
        if degrees.shards % self.ep == 0:
            return None
        nearest = replace(degrees, ep=nearest_ep(degrees.shards, degrees.shards, self.ep))
        return (
            f"ep is {self.ep}: it does not divide dp_shard x cp, which is {degrees.shards}. "
            f"The nearest layout that fits: {nearest.overrides('sharding.')}."
        )

    def experts_fault(self, model_type: str, experts: int | None, world_size: int) -> str | None:
        if self.ep == 1:
            return None
        from verl.engines.tensor_parallel import experts_fault

        if (fault := experts_fault(model_type, experts, self.ep)) is None:
            return None
        degrees, is_tried = self.degrees(world_size), experts_fault(model_type, experts, 1) is None
        fits = nearest_ep(degrees.shards, experts, self.ep) if experts and is_tried else 1
        nearest = replace(degrees, ep=fits)
        return f"ep {fault} The nearest layout that fits: {nearest.overrides('sharding.')}."

    def degrees(self, world_size: int) -> ParallelDegrees:
        shard = world_size // self._product() if self.dp_shard == -1 else self.dp_shard
        return ParallelDegrees(
            pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=shard, cp=self.cp, tp=self.tp, ep=self.ep
        )

    def role_cost(self, role: ShardedRole) -> ShardingCost:
        cost = sharded_stage_cost(role, self.ep) if self.pp > 1 and role.shards > 1 else super().role_cost(role)
        if self.ep > 1 and self.pp == 1:
            frees_blocks, reduces_once = self.strategy == "FULL_SHARD", self.reduce_gradients == "update"
            cost = with_experts_apart(cost, role, self.ep, frees_blocks=frees_blocks, reduces_once=reduces_once)
        sent = self.context_elements(role.sizes, role.tokens, role.trains)
        sent += self.expert_exchange_elements(role.sizes, role.tokens, role.trains) / self.pp
        return replace(cost, per_micro_batch=cost.per_micro_batch + int(sent * role.compute_bytes))

    def expert_exchange_elements(self, sizes: ModelStats, tokens: int, trains: bool = True) -> float:
        """Elements that a process sends to experts and back for a micro-batch of `tokens` local tokens, if the load of
        the experts is balanced; recomputed activations add half as many.
        """
        once = 2 * tokens * sizes.top_k * part_of(self.ep) * sizes.hidden
        return sizes.expert_layers * once * (2 if trains else 1)

    def context_elements(self, sizes: ModelStats, tokens: int, trains: bool = True) -> float:
        """Elements that a process sends for attention in a micro-batch of `tokens` local tokens.

        allgather: keys and values to every other process; in the backward pass again, and their gradients back.
        ulysses: the heads of queries, keys, values and outputs that other processes compute, and all their gradients.
        """
        if self.cp_style == "allgather":
            once = (self.cp - 1) * 2 * sizes.keys * (3 if trains else 1)
        else:
            once = part_of(self.cp) * (2 * sizes.attention + 2 * sizes.keys) * (2 if trains else 1)
        return sizes.layers / self.pp * tokens * once / self.tp

    def build(self, context: BuildContext) -> Parallelism:
        from verl.engines.pipeline_parallelism import PipelineParallelism

        degrees = self.degrees(context.world_size)
        if degrees.pp > 1:
            return PipelineParallelism(
                context,
                self.timeout_s,
                degrees,
                schedule=self.pp_schedule,
                least_micro_batches=self.least_micro_batches,
                cp_style=self.cp_style,
            )
        return self._sharded(context, fully=degrees.shards > 1, cp_style=self.cp_style)

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches that the rows of an update are split into at least."""
        return 1 if self.pp == 1 else self.pp_micro_batches or 4 * self.pp

    def micro_batch_tokens(self, budget: int, total: int) -> int:
        return min(budget, -(-total // self.least_micro_batches))

    def pipeline_ways(self, world_size: int) -> float:
        count = self.least_micro_batches
        return self.pp * count / (count + self.pp - 1)

    def smaller(self) -> Iterator[tuple[str, Sharding]]:
        if self.pp == self.ep == 1:  # settings that cannot be combined with the others
            yield from super().smaller()

    def activation_share(self, micro_batches: int) -> float:
        is_1f1b = self.pp_schedule == "1f1b" and micro_batches >= self.pp
        return (self.pp if is_1f1b else micro_batches) / self.pp  # in progress at the same time, in the first stage

    def _wanted(self) -> dict[str, int]:
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "cp": self.cp, "tp": self.tp}
        return sizes if self.dp_shard == -1 else sizes | {"dp_shard": self.dp_shard}

    def _product(self) -> int:
        return self.pp * self.dp_replicate * self.cp * self.tp

    def _nearest(self, world_size: int, fits: Callable[[ParallelDegrees], bool] = lambda degrees: True) -> str:
        layout = nearest_layout(world_size, self._wanted(), fits)
        return "" if layout is None else f"The nearest layout that fits: {layout.overrides('sharding.')}."


def _division_fault(name: str, size: int, world_size: int) -> str | None:
    if world_size % size == 0:
        return None
    fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return (
        f"{name} is {size}: it does not divide the {world_size} processes of trainer.n_gpus_per_node x "
        f"trainer.nnodes; {', '.join(map(str, fitting))} would."
    )
