"""A call under way: which rows go where, and how the answers of all processes become the one that is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verl.cluster.dividing import Division
from verl.dispatch import Dispatch
from verl.engines.sharding import Sharding


@dataclass(frozen=True)
class Shares:
    """Which processes work on which share of the rows of a role.

    Attributes:
        of_rank: the number of the share of each.
        speakers: of each share, the rank that answers for it; siblings that work on one share answer alike.
    """

    of_rank: tuple[int, ...]

    @property
    def speakers(self) -> list[int]:
        return [self.of_rank.index(share) for share in range(max(self.of_rank) + 1)]


def shares_of(shardings: Mapping[str, Sharding], world_size: int) -> dict[str, Shares]:
    """Of each role."""
    return {role: Shares(sharding.parts(world_size)) for role, sharding in shardings.items()}


@dataclass(eq=False)
class PendingCall:
    """A call to a role, until all of its processes have answered.

    Args:
        name: role and method.
        step: of the training, for messages.
        dispatch: how the call travels.
        args: of the method.
        shares: into which rows are divided; a single one is sent whole.
    Attributes:
        future: what the caller waits for.
        division: which rows go where; None where all processes receive the same.
    """

    name: str
    step: int | None
    dispatch: Dispatch
    args: tuple[Any, ...]
    shares: Shares
    future: Future[Any] = field(default_factory=Future)
    division: Division | None = None

    def __post_init__(self):
        if self.dispatch.divides and len(self.shares.speakers) > 1:
            self.division = Division(self.args[0], len(self.shares.speakers))

    def result(self, answers: Mapping[int, Any], empty: Callable[..., Tensor]) -> Any:
        """One answer from those of all ranks; `empty` gives memory for fields that are joined, by shape and dtype."""
        if self.dispatch.gathers:
            return [answers[rank] for rank in sorted(answers)]
        spoken = [answers[rank] for rank in self.shares.speakers]
        return self.division.join(spoken, empty) if self.dispatch.joins and self.division is not None else spoken[0]
