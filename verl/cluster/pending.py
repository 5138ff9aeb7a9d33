"""A call under way: which rows go where, and how the answers of all processes become the one that is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verl.cluster.dividing import Division
from verl.cluster.rooms import Room
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
        room: where the answer is put together by those who give it; None where the driver does so.
    """

    name: str
    step: int | None
    dispatch: Dispatch
    args: tuple[Any, ...]
    shares: Shares
    future: Future[Any] = field(default_factory=Future)
    division: Division | None = None
    room: Room | None = None

    def __post_init__(self):
        if self.dispatch.divides and len(self.shares.speakers) > 1:
            self.division = Division(self.args[0], len(self.shares.speakers))

    @property
    def joins(self) -> bool:
        """The answers are rows, to be put together in the order of those that were sent."""
        return self.dispatch.joins and self.division is not None

    @property
    def heard(self) -> list[int]:
        """The ranks whose answers matter."""
        if self.dispatch.gathers:
            return list(range(len(self.shares.of_rank)))
        return self.shares.speakers if self.joins else self.shares.speakers[:1]

    def result(self, answers: Mapping[int, Any], empty: Callable[..., Tensor]) -> Any:
        """One answer from those of all ranks; `empty` gives memory for fields that are joined, by shape and dtype."""
        if self.dispatch.gathers:
            return [answers[rank] for rank in sorted(answers)]
        heard = [answers[rank] for rank in self.heard]
        if self.division is None or not self.joins:
            return heard[0]
        return self.division.join(heard, empty) if self.room is None else self.room.join(heard, self.division, empty)
