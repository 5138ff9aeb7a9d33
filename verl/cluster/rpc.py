"""Remote calls to roles: handles whose methods return futures, the rows that each process gets, and joined replies.

`WorkerGroup` is the interface of every place where roles live (this process, sibling processes, Ray actors).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from verl.cluster.batch_partition import BatchPartition, SharedOutput
from verl.component import BuildContext
from verl.dispatch import Dispatch, dispatch_of
from verl.engines.sharding import Sharding


class ColocatedRoles(Protocol):
    """What a process builds: its roles. Travels to other processes by pickle."""

    def worker_types(self) -> Mapping[str, type]: ...

    def shardings(self) -> Mapping[str, Sharding]: ...

    def build(self, context: BuildContext) -> Any: ...


class WorkerGroup(Protocol):
    """A place where roles live.

    Attributes:
        world_size: processes that hold each role.
        shares_memory: the driver sees the roles' own tensors.
        step: the training step, for error messages; set by the driver.
    """

    world_size: int
    shares_memory: bool
    step: int | None

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]: ...

    def close(self) -> None: ...


class RoleHandle:
    """A role as the driver sees it: each of its methods, returning a future.

        log_probs = cluster_role.compute_log_probs(batch).result()

    Calls to one cluster are carried out in the order they were made.
    """

    def __init__(self, cluster: WorkerGroup, role: str, worker_type: type):
        self._cluster, self._role, self._type = cluster, role, worker_type

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        dispatch_of(self._type, method)
        return lambda *args: self._cluster.submit(self._role, method, args)


def role_handles(cluster: WorkerGroup, host: ColocatedRoles) -> dict[str, RoleHandle]:
    """A handle for each role of a host."""
    return {role: RoleHandle(cluster, role, kind) for role, kind in host.worker_types().items()}


class Deadline:
    """A moment in the future, and how far it is."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class RowAssignment:
    """Which processes work on which share of the rows of a role.

    Attributes:
        of_rank: the number of the share of each.
        speakers: of each share, the rank that answers for it; siblings that work on one share answer alike.
    """

    of_rank: tuple[int, ...]

    @property
    def speakers(self) -> list[int]:
        return [self.of_rank.index(share) for share in range(max(self.of_rank) + 1)]


def row_assignment(shardings: Mapping[str, Sharding], world_size: int) -> dict[str, RowAssignment]:
    """Of each role."""
    return {role: RowAssignment(sharding.parts(world_size)) for role, sharding in shardings.items()}


# What an exchange among processes says when one of them does not come to it, in the text of gloo, NCCL and TCPStore.
_GAVE_UP = re.compile(
    r"timed? ?out|timeout|watchdog|connection (closed|reset|refused|was aborted)|broken pipe|closed by peer|"
    r"remote process exited|unhandled system error",
    re.IGNORECASE,
)
_INNER_FRAMES = 5  # below which torch.distributed calls nothing of anybody else's
_EXCHANGE = re.compile(r"torch/distributed/|torch\.distributed\.|/gloo/|NCCL|ProcessGroup|c10d")


def gave_up_on_sibling(error: str) -> bool:
    """Whether the traceback of a worker is that of an exchange which another process did not come to, or left."""
    last = error.rpartition("Traceback (most recent call last)")[2]
    return bool(_EXCHANGE.search(last) and _GAVE_UP.search(last))


def missed_exchange(rank: int, error: str, stacks: Mapping[int, str]) -> tuple[int, str]:
    """Who is to blame that a worker gave up on an exchange: the first that does not wait in one as well.

    Args:
        rank: that gave up, with its traceback in `error`.
        stacks: where those stand that have not answered, by rank.
    Returns:
        The rank to blame, and what to say of it.
    """
    for other, stack in stacks.items():
        if not _waits_in_exchange(stack):
            where = f"and stands at:\n{stack.rstrip()}" if stack else "and does not react at all"
            missed = f"it did not come to an exchange in which rank {rank} waited for it, {where}"
            return other, f"{missed}\nRank {rank} failed for it:\n{error}"
    waiting = f" Ranks {', '.join(map(str, stacks))} wait in one too." if stacks else ""
    return rank, f"an exchange with the other processes was not completed.{waiting}\n{error}"


def _waits_in_exchange(stack: str) -> bool:
    """Whether a thread of a process is within torch.distributed, as far as its innermost frames tell.

    Args:
        stack: of one thread, innermost frame last, or of several by faulthandler, innermost frame first.
    """
    for thread in re.split(r"^(?:Current t|T)hread .*$", stack, flags=re.MULTILINE):
        frames = re.findall(r'^  File "(.+)", line \d+,? in (.+)$', thread, flags=re.MULTILINE)
        inner = frames[:_INNER_FRAMES] if "most recent call first" in stack else frames[-_INNER_FRAMES:]
        if any("torch/distributed/" in file or name == "_engine_run_backward" for file, name in inner):
            return True  # a backward pass exchanges in threads that Python does not show
    return False


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
    shares: RowAssignment
    future: Future[Any] = field(default_factory=Future)
    division: BatchPartition | None = None
    room: SharedOutput | None = None

    def __post_init__(self):
        if self.dispatch.divides and len(self.shares.speakers) > 1:
            self.division = BatchPartition(self.args[0], len(self.shares.speakers))

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
