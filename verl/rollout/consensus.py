"""Consensus of ranks around engines that may fail: all of them go on, or all of them stop.

Each rank does its part, which may fail; then all ranks exchange the outcomes, so that none waits in a collective for
one that has failed. A part may take long: an engine without progress is killed only after `rollout.call_timeout_s`,
and starting another one may take minutes. So the ranks first meet in the store of torch.distributed, where waiting has
no limit, before they use a collective operation, which has one (`sharding.timeout_s`). If a rank dies meanwhile, the
driver, which watches all of them, ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.models.parallel_info import ParallelInfo, meet

T = TypeVar("T")


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank's part.

    Attributes:
        rank: of the process.
        error: what was raised there.
        may_repeat: whether it may be tried once more.
    """

    rank: int
    error: Exception
    may_repeat: bool


class ConsensusFailed(Exception):
    """A part failed somewhere; raised by all processes."""

    def __init__(self, failures: list[RankFailure]):
        self.failures = failures
        super().__init__("; ".join(f"rank {failure.rank}: {failure.error}" for failure in failures))

    @property
    def may_repeat(self) -> bool:
        """Whether all failures may be retried."""
        return all(failure.may_repeat for failure in self.failures)

    @property
    def error(self) -> Exception:
        """The error to report: one that cannot be retried, if there is one."""
        return min(self.failures, key=lambda failure: failure.may_repeat).error


def consensus(parallel_info: ParallelInfo, part: Callable[[], T], may_repeat: Callable[[Exception], bool]) -> list[T]:
    """The outcome of each process, by rank. All processes of the model take part.

    Raises:
        ConsensusFailed: one of them failed.
    """
    try:
        outcome: Any = part()
    except Exception as error:  # noqa: BLE001 - sent to all
        outcome = RankFailure(parallel_info.rank, error, may_repeat(error))
    outcomes: list[Any] = [outcome]
    if parallel_info.mesh.size > 1:
        import torch.distributed as dist

        meet(parallel_info)
        outcomes = [None] * parallel_info.mesh.size
        dist.all_gather_object(outcomes, outcome)
    if failures := [value for value in outcomes if isinstance(value, RankFailure)]:
        raise ConsensusFailed(failures)
    return outcomes


def among_siblings(parallel_info: ParallelInfo, value: T) -> list[T]:
    """All-gather of objects among siblings, in their order."""
    if len(parallel_info.siblings) == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * len(parallel_info.siblings)
    dist.all_gather_object(found, value, group=parallel_info.sibling_group)
    return found


def from_first(parallel_info: ParallelInfo, value: T) -> T:
    """Broadcast of an object from the first sibling."""
    if len(parallel_info.siblings) == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=parallel_info.siblings[0], group=parallel_info.sibling_group)
    return box[0]
