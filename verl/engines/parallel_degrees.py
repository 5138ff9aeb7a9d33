"""Sizes of the mesh of processes, one number for each kind of parallelism; arithmetic alone.

rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t

pp            stages of layers
dp_replicate  copies of a stage, each with rows of its own
dp_shard      parts of weights, gradients and optimizer state (FSDP), each with rows of its own
cp            processes that share the tokens of the same rows; weights are divided over dp_shard x cp
tp            processes that share each layer, on the same tokens
ep            of the dp_shard x cp processes, those that share the experts of a layer; they are next to each other, and
              the experts of each are divided over the dp_shard x cp / ep that have the same ones (FSDP)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

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
        """Parts that FSDP divides the weights of a stage into."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Parts that FSDP divides the experts of a process into."""
        return self.shards // self.ep

    @property
    def row_shares(self) -> int:
        """Shares that the rows of a batch are divided into."""
        return self.dp_replicate * self.dp_shard

    @property
    def siblings(self) -> int:
        """Processes of a stage that work on the same rows; they are next to each other."""
        return self.cp * self.tp

    def row_share(self, rank: int) -> int:
        """The number of the share of rows that a process works on; all stages work on all shares."""
        within = rank % (self.world_size // self.pp) if self.pp > 1 else rank
        return within // self.siblings

    def context_ranks(self, rank: int) -> tuple[int, ...]:
        """The processes that share the tokens of this one's rows, in order."""
        first = rank - rank // self.tp % self.cp * self.tp
        return tuple(first + place * self.tp for place in range(self.cp))

    def overrides(self, prefix: str = "") -> str:
        """As arguments of the command line, those above 1."""
        wanted = [f"{prefix}{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != 1]
        return " ".join(wanted) or f"{prefix}dp_shard=1"


def layouts(world_size: int) -> Iterator[ParallelDegrees]:
    """Every way of arranging so many processes, without expert parallelism."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for sizes in itertools.product(divisors, repeat=len(OF_WORLD) - 1):
        product = math.prod(sizes)
        if world_size % product == 0:
            pp, replicate, cp, tp = sizes
            yield ParallelDegrees(pp=pp, dp_replicate=replicate, dp_shard=world_size // product, cp=cp, tp=tp)


def nearest_ep(shards: int, experts: int, wanted: int) -> int:
    """The number of processes that may share so many experts, of so many, which is least far from what is wanted."""
    fitting = [n for n in range(1, shards + 1) if shards % n == 0 and experts % n == 0]
    return min(fitting, key=lambda n: (abs(math.log2(n / wanted)), n))


def nearest_layout(
    world_size: int, wanted: dict[str, int], fits: Callable[[ParallelDegrees], bool] = lambda degrees: True
) -> ParallelDegrees | None:
    """The layout of so many processes whose sizes are least far, in factors, from those that are wanted.

    Args:
        wanted: size by name; those that are not named may be anything.
        fits: what else a layout has to fulfil.
    """

    def distance(degrees: ParallelDegrees) -> tuple[float, ...]:
        apart = [abs(math.log2(getattr(degrees, name) / size)) for name, size in wanted.items()]
        return (sum(apart), degrees.dp_replicate, degrees.pp, degrees.tp, degrees.cp)

    return min((degrees for degrees in layouts(world_size) if fits(degrees)), key=distance, default=None)
