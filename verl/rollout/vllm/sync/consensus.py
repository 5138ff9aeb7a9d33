"""Consensus of ranks around engines that may fail: all of them go on, or all of them stop.

Each rank does its part, which may fail; then all ranks exchange the outcomes, so that none waits in a collective for
one that has failed. A part may take long: an engine without progress is killed only after `rollout.call_timeout_s`,
and starting another one may take minutes. So the ranks first meet in the store of torch.distributed, where waiting has
no limit, before they use a collective operation, which has one (`sharding.timeout_s`). If a rank dies meanwhile, the
driver, which watches all of them, ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from verl.models.parallel_info import ParallelInfo

T = TypeVar("T")
LONGEST_LOOK_S = 0.05


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


def consensus(divided: ParallelInfo, part: Callable[[], T], may_repeat: Callable[[Exception], bool]) -> list[T]:
    """The outcome of each process, by rank. All processes of the model take part.

    Raises:
        ConsensusFailed: one of them failed.
    """
    import torch.distributed as dist

    found: list[Any] = [None] * divided.mesh.size
    try:
        own: Any = part()
    except Exception as error:  # noqa: BLE001 - sent to all
        own = RankFailure(divided.rank, error, may_repeat(error))
    _meet(divided)
    dist.all_gather_object(found, own)
    if failures := [value for value in found if isinstance(value, RankFailure)]:
        raise ConsensusFailed(failures)
    return found


_MEETINGS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # so far, by store


def _meet(divided: ParallelInfo) -> None:
    """Barrier over all processes of the model, without a time limit."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    number = _MEETINGS[store] = _MEETINGS.get(store, 0) + 1
    store.set(f"verl/meeting/{number}/{divided.rank}", "here")
    everyone = [f"verl/meeting/{number}/{rank}" for rank in range(divided.mesh.size)]
    look_s = 0.0005
    while not store.check(everyone):
        time.sleep(look_s)
        look_s = min(2 * look_s, LONGEST_LOOK_S)
    if number > 1:  # all have left that one, or they would not have come to this
        store.delete_key(f"verl/meeting/{number - 1}/{divided.rank}")


def among_siblings(divided: ParallelInfo, value: T) -> list[T]:
    """All-gather of objects among siblings, in their order."""
    if len(divided.siblings) == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * len(divided.siblings)
    dist.all_gather_object(found, value, group=divided.sibling_group)
    return found


def from_first(divided: ParallelInfo, value: T) -> T:
    """Broadcast of an object from the first sibling."""
    if len(divided.siblings) == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=divided.siblings[0], group=divided.sibling_group)
    return box[0]
