"""Sizes of the process mesh, one per kind of parallelism, and the layers of each pipeline stage. Arithmetic only; no
process group.

rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t

pp            pipeline stages
dp_replicate  replicas of a stage, each on different rows
dp_shard      FSDP shards of weights, gradients and optimizer state, each on different rows
cp            context parallelism: processes with different tokens of the same rows; FSDP shards over dp_shard x cp
tp            tensor parallelism: processes that split each layer, on the same tokens
ep            expert parallelism: neighbours among the dp_shard x cp processes that split the experts of a layer; the
              dp_shard x cp / ep processes with the same experts shard them by FSDP
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

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
