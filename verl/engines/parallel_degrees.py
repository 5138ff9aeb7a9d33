"""Sizes of the process mesh, one per kind of parallelism, and what each process then holds and sends. Arithmetic only.

rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t

pp            pipeline stages
dp_replicate  replicas of a stage, each on different rows
dp_shard      FSDP shards of weights, gradients and optimizer state, each on different rows
cp            context parallelism: processes with different tokens of the same rows; FSDP shards over dp_shard x cp
tp            tensor parallelism: processes that split each layer, on the same tokens
ep            expert parallelism: neighbours among the dp_shard x cp processes that split the experts of a layer; the
              dp_shard x cp / ep processes with the same experts shard them by FSDP

Traffic is counted as bytes sent per process with ring algorithms: (k - 1) / k x for an all-gather or a reduce-scatter
of x bytes over k processes, and twice that for an all-reduce.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from verl.engines.tensor_parallel import exchanged_elements
from verl.models.model_stats import ModelStats

OF_WORLD = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # their product is the number of processes


@dataclass(frozen=True, kw_only=True)
class ParallelDegrees:
    """Sizes of the mesh; see the module."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, name) for name in OF_WORLD)

    @property
    def shards(self) -> int:
        """Number of FSDP shards of the weights of a stage."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Number of FSDP shards of the experts that one process runs."""
        return self.shards // self.ep

    @property
    def row_shares(self) -> int:
        """Number of shares that the rows of a batch are split into."""
        return self.dp_replicate * self.dp_shard

    @property
    def siblings(self) -> int:
        """Number of processes of a stage that work on the same rows; their ranks are consecutive."""
        return self.cp * self.tp

    def row_share(self, rank: int) -> int:
        """Index of the share of rows that a rank works on; it is the same on all stages."""
        within = rank % (self.world_size // self.pp) if self.pp > 1 else rank
        return within // self.siblings

    def context_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks of the context-parallel group of a rank, in order of their tokens."""
        first = rank - rank // self.tp % self.cp * self.tp
        return tuple(first + position * self.tp for position in range(self.cp))

    def overrides(self, prefix: str = "") -> str:
        """Sizes above 1 as command-line overrides."""
        assignments = [f"{prefix}{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != 1]
        return " ".join(assignments) or f"{prefix}dp_shard=1"


def layouts(world_size: int) -> Iterator[ParallelDegrees]:
    """All meshes of `world_size` processes, without expert parallelism."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for sizes in itertools.product(divisors, repeat=len(OF_WORLD) - 1):
        product = math.prod(sizes)
        if world_size % product == 0:
            pp, replicate, cp, tp = sizes
            yield ParallelDegrees(pp=pp, dp_replicate=replicate, dp_shard=world_size // product, cp=cp, tp=tp)


def nearest_ep(shards: int, experts: int, wanted: int) -> int:
    """The valid size of expert parallelism closest to `wanted`: it divides both `shards` and `experts`."""
    fitting = [n for n in range(1, shards + 1) if shards % n == 0 and experts % n == 0]
    return min(fitting, key=lambda n: (abs(math.log2(n / wanted)), n))


def nearest_layout(
    world_size: int, wanted: dict[str, int], fits: Callable[[ParallelDegrees], bool] = lambda degrees: True
) -> ParallelDegrees | None:
    """The mesh of `world_size` processes whose sizes are closest, by ratio, to the wanted ones.

    Args:
        world_size: number of processes.
        wanted: size by name; a size that is not named may have any value.
        fits: a further condition on the mesh.
    """

    def distance(degrees: ParallelDegrees) -> tuple[float, ...]:
        apart = [abs(math.log2(getattr(degrees, name) / size)) for name, size in wanted.items()]
        return (sum(apart), degrees.dp_replicate, degrees.pp, degrees.tp, degrees.cp)

    return min((degrees for degrees in layouts(world_size) if fits(degrees)), key=distance, default=None)


def stage_bounds(costs: Sequence[float], num_stages: int, last: float = 0.0) -> list[int]:
    """Split layers into consecutive stages so that the largest cost of a stage is minimal.

    Args:
        costs: cost of each layer.
        num_stages: number of stages, at most the number of layers.
        last: cost of the output head, which the last stage has in addition.
    Returns:
        Index of the first layer of each stage, then the number of layers.
    """
    count = len(costs)
    assert count >= num_stages
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        head = last if stage == num_stages else 0.0
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                worst = max(best[stage - 1][start], prefix[stop] - prefix[start] + head)
                if worst < best[stage][stop]:
                    best[stage][stop], cut[stage][stop] = worst, start
    bounds = [count]
    for stage in range(num_stages, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    return bounds[::-1]


def largest_stage(sizes: ModelStats, num_stages: int) -> int:
    """Parameters of the largest stage: the embedding is on the first, the head on the last, tied or not."""
    block = (sizes.parameters - sizes.embedding_elements) // max(sizes.layers, 1)
    table = sizes.vocabulary * sizes.hidden
    bounds = stage_bounds([float(block)] * sizes.layers, num_stages, float(table))
    counts = [(stop - start) * block for start, stop in itertools.pairwise(bounds)]
    return max(counts[0] + table, counts[-1] + table, *counts)


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
    def persistent_bytes(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def per_step(self, micro_batches: int, updates: int = 1) -> int:
        """Bytes sent in a training step, without generation and scoring."""
        return micro_batches * self.per_micro_batch + updates * self.per_update


@dataclass(frozen=True)
class ShardedRole:
    """A role and the mesh that it is sharded over.

    Attributes:
        replicas, shards, siblings, stages: replicas of a stage, its FSDP shards, its tensor-parallel processes, and the
            number of pipeline stages.
        sizes, tokens, weight_bytes, compute_bytes, trains, predicted: see `Sharding.cost`.
    """

    replicas: int
    shards: int
    siblings: int
    stages: int
    sizes: ModelStats
    tokens: int
    weight_bytes: int
    compute_bytes: int
    trains: bool
    predicted: int | None

    @property
    def held(self) -> int:
        """Parameters of a process before FSDP shards them."""
        return _held(self.sizes, self.siblings, self.stages)

    @property
    def trains_all(self) -> bool:
        return self.trains and self.sizes.trained == self.sizes.parameters

    @property
    def trained(self) -> int:
        """Trained parameters of a process before FSDP shards them."""
        return self.held if self.trains_all else self.sizes.trained * self.trains


def replicated_cost(role: ShardedRole) -> ShardingCost:
    """Shards are whole in each process during passes: tensor parallelism, stages and replicas, without FSDP."""
    sizes, compute, weight_bytes = role.sizes, role.compute_bytes, role.weight_bytes
    exchanged = exchanged_elements(sizes, role.siblings, role.stages, role.tokens, role.predicted, trains=role.trains)
    handed_on = min(role.stages - 1, 1 + role.trains) * sizes.hidden * role.tokens * compute  # states, their gradients
    is_on_both_ends = role.stages > 1 and role.trained > 0 and sizes.tied and sizes.has_head
    of_ends = sizes.vocabulary * sizes.hidden if is_on_both_ends else 0
    return ShardingCost(
        weights=role.held * weight_bytes // role.shards + (0 if compute == weight_bytes else role.held * compute),
        gradients=role.trained * weight_bytes // role.shards,
        optimizer=2 * role.trained * weight_bytes // role.shards,
        generating=_held(sizes, role.siblings) * compute if role.stages > 1 else 0,
        per_micro_batch=int(exchanged * compute) + handed_on,
        per_update=int((2 * part_of(role.replicas) * role.trained + of_ends) * weight_bytes / role.shards),
    )


def fsdp_cost(role: ShardedRole, *, frees_blocks: bool, reduces_once: bool, is_offloaded: bool) -> ShardingCost:
    """Weights are gathered block by block, and gradients reduced.

    Args:
        role: the role.
        frees_blocks: a block is freed after its forward pass, and gathered again for the backward pass.
        reduces_once: gradients are reduced once per update, and not in each micro-batch.
        is_offloaded: weights, gradients and optimizer state rest in main memory.
    """
    cost, sizes, shards, held = replicated_cost(role), role.sizes, role.shards, role.held
    cost = replace(cost, weights=held * role.weight_bytes // shards, is_offloaded=is_offloaded)
    if shards == 1:
        return cost
    block = (sizes.parameters - sizes.embedding_elements) // max(sizes.layers, 1) // role.siblings
    ends = held - block * sizes.layers
    again = held - ends if frees_blocks and role.trains else 0  # the ends stay from the forward to the backward pass
    sent = int(part_of(shards) * (held + again) * role.compute_bytes)
    # within a replica, and over replicas
    reduced = int(part_of(shards) * role.trained * role.weight_bytes + cost.per_update)
    return replace(
        cost,
        gathered=(ends + block if frees_blocks else held) * role.compute_bytes,
        whole_gradients=role.trained * role.weight_bytes if reduces_once else 0,
        generating=held * role.compute_bytes,
        per_micro_batch=cost.per_micro_batch + sent + (0 if reduces_once else reduced),
        per_update=reduced if reduces_once else 0,
    )


def sharded_stage_cost(role: ShardedRole, ep: int) -> ShardingCost:
    """Weights of a stage are gathered once for all micro-batches, gradients reduced once; see `StageShards`."""
    cost, held, weight_bytes = replicated_cost(role), role.held, role.weight_bytes
    cast = 0 if role.compute_bytes == weight_bytes else held * role.compute_bytes
    experts = role.sizes.expert_elements // role.stages if ep > 1 else 0  # of a stage, of which a process has 1 / ep
    passes = 1 + role.trains_all
    spared = (experts - experts // ep) * passes
    fewer = part_of(role.shards) * experts - part_of(role.shards // ep) * experts / ep
    sent = part_of(role.shards) * (held + role.trained) - fewer * passes
    return replace(
        cost,
        weights=held * weight_bytes // role.shards,
        gathered=(held + role.trained - spared) * weight_bytes + cast,
        per_update=cost.per_update + int(sent * weight_bytes),
    )


def with_experts_apart(
    cost: ShardingCost, role: ShardedRole, ep: int, *, frees_blocks: bool, reduces_once: bool
) -> ShardingCost:
    """The cost of FSDP, except that experts are gathered only over the processes that have the same experts."""
    whole, local = role.sizes.expert_elements, role.sizes.expert_elements // ep
    spared = (whole - local) // (max(role.sizes.expert_layers, 1) if frees_blocks else 1)
    fewer = part_of(role.shards) * whole - part_of(role.shards // ep) * local
    reduced = int(fewer * role.weight_bytes) if role.trains_all else 0
    sent = int(fewer * (1 + (frees_blocks and role.trains)) * role.compute_bytes) + (0 if reduces_once else reduced)
    whole_gradients = (whole - local) * role.weight_bytes if reduces_once and role.trains_all else 0
    return replace(
        cost,
        gathered=cost.gathered - spared * role.compute_bytes,
        whole_gradients=cost.whole_gradients - whole_gradients,
        per_micro_batch=cost.per_micro_batch - sent,
        per_update=cost.per_update - (reduced if reduces_once else 0),
    )


def _held(sizes: ModelStats, siblings: int, stages: int = 1) -> int:
    """Parameters per process with tensor parallelism and stages; transformers' plans split only a tied embedding."""
    embedding = sizes.vocabulary * sizes.hidden if siblings > 1 and not (sizes.tied and sizes.has_head) else 0
    parameters = sizes.parameters if stages == 1 else largest_stage(sizes, stages)
    return (parameters - embedding) // siblings + embedding


def part_of(count: int) -> float:
    """The part of a tensor over `count` processes that each of them sends to gather or reduce it."""
    return (count - 1) / count
