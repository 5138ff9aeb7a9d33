"""`sharding=`: how a model in training is sharded over processes, and what that costs each process.

`Sharding.cost` computes memory at rest, peak memory and communication by arithmetic:

    FSDP().cost(8, model_stats(config), tokens=16384, compute_bytes=2).resting / 2**30     GiB in each process

Traffic is counted as bytes sent per process with ring algorithms: (k - 1) / k x for an all-gather or a reduce-scatter
of x bytes over k processes, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from verl.component import BuildContext, Description, component
from verl.engines.parallel_degrees import ParallelDegrees, largest_stage, nearest_ep, nearest_layout
from verl.engines.parallel_dims import DataParallelism, Parallelism
from verl.engines.tensor_parallel import exchanged_elements, heads_fault
from verl.models.model_stats import ModelStats


@dataclass(frozen=True)
class ShardingCost:
    """Memory and traffic of one role per process, in bytes.

    Attributes:
        weights, gradients, optimizer: at rest; the last two are 0 for a role that is not trained.
        gathered: weights of other shards that are here during a forward or backward pass.
        whole_gradients: gradients of other shards that are here until the last backward pass of an update.
        generating: the same while responses are generated from the training weights.
        per_micro_batch: sent in the forward and backward pass of one micro-batch.
        per_update: sent in addition once per optimizer step.
        is_offloaded: whether weights, gradients and optimizer state rest in main memory.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    whole_gradients: int = 0
    generating: int = 0
    per_micro_batch: int = 0
    per_update: int = 0
    is_offloaded: bool = False

    @property
    def resting(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    def per_step(self, micro_batches: int, updates: int = 1) -> int:
        """Bytes sent in a training step, without generation and scoring."""
        return micro_batches * self.per_micro_batch + updates * self.per_update


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

    def parts(self, world_size: int) -> tuple[int, ...]:
        """Index of the share of rows of each process; processes that work on the same rows have the same index."""
        degrees = self.degrees(world_size)
        return tuple(degrees.row_share(rank) for rank in range(world_size))

    def row_shares(self, world_size: int) -> int:
        """Number of shares that the rows of a batch are split into."""
        return max(self.parts(world_size)) + 1

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
        """Activations that a process keeps for the backward pass of so many micro-batches of a step, over those of all
        layers for one of them.
        """
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
        compute, stages = compute_bytes or weight_bytes, self.degrees(world_size).pp
        held = _held(sizes, siblings, stages)
        trained = (held if sizes.trained == sizes.parameters else sizes.trained) if trains else 0
        exchanged = exchanged_elements(sizes, siblings, stages, tokens, predicted, trains=trains) * compute
        handed_on = min(stages - 1, 2 if trains else 1) * sizes.hidden * tokens * compute  # states, and their gradients
        is_on_both_ends = stages > 1 and trained > 0 and sizes.tied and sizes.has_head
        of_ends = sizes.vocabulary * sizes.hidden if is_on_both_ends else 0
        return ShardingCost(
            weights=held * weight_bytes // shards + (0 if compute == weight_bytes else held * compute),
            gradients=trained * weight_bytes // shards,
            optimizer=2 * trained * weight_bytes // shards,
            generating=_held(sizes, siblings) * compute if stages > 1 else 0,
            per_micro_batch=int(exchanged) + handed_on,
            per_update=int((2 * _part(replicas) * trained + of_ends) * weight_bytes / shards),
        )


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
    is_fully_sharded: ClassVar[bool] = True

    def smaller(self) -> Iterator[tuple[str, Sharding]]:
        if self.reduce_gradients == "update":
            yield "sharding.reduce_gradients=micro_batch", replace(self, reduce_gradients="micro_batch")
        if not self.cpu_offload:
            yield "sharding.cpu_offload=true", replace(self, cpu_offload=True)

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
        cost = super().cost(world_size, sizes, tokens, weight_bytes, compute_bytes, trains, predicted)
        _, shards, siblings = self.mesh_sizes(world_size)
        compute, held = compute_bytes or weight_bytes, _held(sizes, siblings, self.degrees(world_size).pp)
        rests = {"weights": held * weight_bytes // shards, "is_offloaded": self.cpu_offload}
        if shards == 1:
            return replace(cost, **rests)
        block = (sizes.parameters - sizes.embedding_elements) // max(sizes.layers, 1) // siblings
        ends, twice = held - block * sizes.layers, self.strategy == "FULL_SHARD"
        trained = (held if sizes.trained == sizes.parameters else sizes.trained) if trains else 0
        again = held - ends if twice and trains else 0  # the ends stay from the forward pass to the backward pass
        sent = int(_part(shards) * (held + again) * compute)
        reduced = int(_part(shards) * trained * weight_bytes + cost.per_update)  # within a replica, and over replicas
        once = self.reduce_gradients == "update"
        return replace(
            cost,
            **rests,
            gathered=(ends + block if twice else held) * compute,
            whole_gradients=trained * weight_bytes if once else 0,
            generating=held * compute,
            per_micro_batch=cost.per_micro_batch + sent + (0 if once else reduced),
            per_update=reduced if once else 0,
        )

    def build(self, context: BuildContext) -> Parallelism:
        from verl.engines.parallel_dims import ShardedParallelism

        return ShardedParallelism(
            context,
            self.timeout_s,
            self.degrees(context.world_size),
            fully=True,
            reshard=self.strategy == "FULL_SHARD",
            offload=self.cpu_offload,
            reduces_once=self.reduce_gradients == "update",
        )

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
        from verl.engines.parallel_dims import ShardedParallelism

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


Size = Annotated[int, Field(ge=1)]


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

    tp: Size = 1
    cp: Size = 1
    pp: Size = 1
    dp_replicate: Size = 1
    dp_shard: int = -1
    ep: Size = 1
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
        from verl.engines.expert_parallel import experts_fault

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
        cost = super().cost(world_size, sizes, tokens, weight_bytes, compute_bytes, trains, predicted)
        if self.pp > 1 and self.degrees(world_size).shards > 1:
            cost = self._cost_of_sharded_stage(
                world_size, sizes, tokens, weight_bytes, compute_bytes, trains, predicted
            )
        compute = compute_bytes or weight_bytes
        sent = self.context_elements(sizes, tokens, trains) * compute
        if self.ep > 1 and self.pp > 1:
            sent += self.expert_exchange_elements(sizes, tokens, trains) * compute / self.pp
        if self.ep > 1 and self.pp == 1 and sizes.expert_elements:
            return self._with_experts_apart(cost, world_size, sizes, tokens, weight_bytes, compute, trains, int(sent))
        return replace(cost, per_micro_batch=cost.per_micro_batch + int(sent))

    def _cost_of_sharded_stage(
        self,
        world_size: int,
        sizes: ModelStats,
        tokens: int,
        weight_bytes: int,
        compute_bytes: int | None,
        trains: bool,
        predicted: int | None,
    ) -> ShardingCost:
        """Weights of a stage are gathered once for all micro-batches, gradients reduced once; see `stage_shards`."""
        cost = Sharding.cost(self, world_size, sizes, tokens, weight_bytes, compute_bytes, trains, predicted)
        shards, held = self.degrees(world_size).shards, _held(sizes, self.tp, self.pp)
        cast = 0 if compute_bytes in (None, weight_bytes) else held * (compute_bytes or 0)
        all_train = sizes.trained == sizes.parameters
        trained = (held if all_train else sizes.trained) if trains else 0
        experts = sizes.expert_elements // self.pp if self.ep > 1 else 0  # of a stage, of which a process has 1 / ep
        spared = (experts - experts // self.ep) * (1 + (trains and all_train))
        fewer = _part(shards) * experts - _part(self.degrees(world_size).expert_shards) * experts / self.ep
        sent = _part(shards) * (held + trained) - fewer * (1 + (trains and all_train))
        return replace(
            cost,
            weights=held * weight_bytes // shards,
            gathered=(held + trained - spared) * weight_bytes + cast,
            per_update=cost.per_update + int(sent * weight_bytes),
        )

    def _with_experts_apart(
        self,
        cost: ShardingCost,
        world_size: int,
        sizes: ModelStats,
        tokens: int,
        weight_bytes: int,
        compute: int,
        trains: bool,
        sent: int,
    ) -> ShardingCost:
        """The cost of FSDP, except that experts are gathered only over the processes that have the same experts."""
        degrees, twice = self.degrees(world_size), self.strategy == "FULL_SHARD"
        whole, local = sizes.expert_elements, sizes.expert_elements // self.ep
        spared = (whole - local) // (sizes.expert_layers if twice else 1)
        once, all_train = self.reduce_gradients == "update", trains and sizes.trained == sizes.parameters
        fewer = _part(degrees.shards) * whole - _part(degrees.expert_shards) * local
        reduced = int(fewer * weight_bytes) if all_train else 0
        sent += int(self.expert_exchange_elements(sizes, tokens, trains) * compute)
        sent -= int(fewer * (1 + (twice and trains)) * compute) + (0 if once else reduced)
        return replace(
            cost,
            gathered=cost.gathered - spared * compute,
            whole_gradients=cost.whole_gradients - ((whole - local) * weight_bytes if once and all_train else 0),
            per_micro_batch=cost.per_micro_batch + sent,
            per_update=cost.per_update - (reduced if once else 0),
        )

    def expert_exchange_elements(self, sizes: ModelStats, tokens: int, trains: bool = True) -> float:
        """Elements that a process sends to experts and back for a micro-batch of `tokens` local tokens, if the load of
        the experts is balanced; recomputed activations add half as many.
        """
        once = 2 * tokens * sizes.top_k * _part(self.ep) * sizes.hidden
        return sizes.expert_layers * once * (2 if trains else 1)

    def context_elements(self, sizes: ModelStats, tokens: int, trains: bool = True) -> float:
        """Elements that a process sends for attention in a micro-batch of `tokens` local tokens.

        allgather: keys and values to every other process; in the backward pass again, and their gradients back.
        ulysses: the heads of queries, keys, values and outputs that other processes compute, and all their gradients.
        """
        if self.cp_style == "allgather":
            once = (self.cp - 1) * 2 * sizes.keys * (3 if trains else 1)
        else:
            once = _part(self.cp) * (2 * sizes.attention + 2 * sizes.keys) * (2 if trains else 1)
        return sizes.layers / self.pp * tokens * once / self.tp

    def build(self, context: BuildContext) -> Parallelism:
        from verl.engines.parallel_dims import ShardedParallelism
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
        return ShardedParallelism(
            context,
            self.timeout_s,
            degrees,
            fully=degrees.shards > 1,
            reshard=self.strategy == "FULL_SHARD",
            offload=self.cpu_offload,
            reduces_once=self.reduce_gradients == "update",
            cp_style=self.cp_style,
        )

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
        if self.pp == self.ep == 1:  # what the others refuse to be beside
            yield from super().smaller()

    def activation_share(self, micro_batches: int) -> float:
        is_1f1b = self.pp_schedule == "1f1b" and micro_batches >= self.pp
        return (self.pp if is_1f1b else micro_batches) / self.pp  # under way at a time, of the first stage

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


def usual(world_size: int, per_machine: int = 8) -> dict[str, Sharding]:
    """Shardings that are possible on `world_size` devices, by name, for tables."""
    together = min(per_machine, world_size)
    shardings: dict[str, Sharding] = {"fsdp": FSDP(), "fsdp, SHARD_GRAD_OP": FSDP(strategy="SHARD_GRAD_OP")}
    if world_size > per_machine:
        shardings["hsdp"] = HSDP(replicas=world_size // per_machine)
    shardings["tp"] = TP(tensor_parallel=together)
    if world_size > together:
        shardings["tp_fsdp"] = TPFSDP(tensor_parallel=together)
    return shardings


def _held(sizes: ModelStats, siblings: int, stages: int = 1) -> int:
    """Parameters per process with tensor parallelism and stages; transformers' plans split only a tied embedding."""
    embedding = sizes.vocabulary * sizes.hidden if siblings > 1 and not (sizes.tied and sizes.has_head) else 0
    parameters = sizes.parameters if stages == 1 else largest_stage(sizes, stages)
    return (parameters - embedding) // siblings + embedding


def _part(count: int) -> float:
    return (count - 1) / count
