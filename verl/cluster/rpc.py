"""Remote calls to roles: handles whose methods return futures, the rows that each process gets, and joined replies.

    RoleHandle ──> RemoteWorkerGroup.submit ──PendingCall──> Transport.send ──> rank 0, rank 1, ...
    future     <── on_reply, on_error, on_end <─────────────  its threads  <──

`WorkerGroup` is the interface to roles in this process, in sibling processes or in Ray actors. `RemoteWorkerGroup`
implements it for other processes on top of a transport: futures and deadlines. If a worker raises, dies or hangs, the
pending calls fail with rank, call and step, and all workers are ended, because its siblings could wait forever in a
collective operation.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.component import BuildContext
from verl.engines.sharding import Sharding
from verl.errors import ConfigError, Traceback, VerlError, WorkerDied, WorkerError, WorkerHung
from verl.ops.batching import BatchPartition
from verl.protocol.dispatch import Dispatch, dispatch_of
from verl.utils.progress import Progress, ProgressWatch, report

START = "start"  # the call that builds the roles, in errors
BUILD_TIMEOUT_S = 600.0  # timeout without progress while roles are built, unless that of calls is longer
END_TIMEOUT_S = 5.0
STACK_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 5.0
GRACE_S = 0.5  # delay before an error is reported, so that a sibling's death that caused it is reported first
COLLECTIVE = "torch/distributed/", "_engine_run_backward"  # in the stack of a worker that waits for its siblings


class ColocatedRoles(Protocol):
    """Description of the roles that a process builds. Picklable."""

    def worker_types(self) -> Mapping[str, type]: ...

    def shardings(self) -> Mapping[str, Sharding]: ...

    def build(self, context: BuildContext) -> Any: ...


class WorkerGroup(Protocol):
    """Processes that hold roles.

    Attributes:
        world_size: number of processes of each role.
        shares_memory: the driver has access to the roles' tensors.
        step: the training step, for error messages; set by the driver.
    """

    world_size: int
    shares_memory: bool

    @property
    def step(self) -> int | None: ...

    @step.setter
    def step(self, step: int | None) -> None: ...

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]: ...

    def close(self) -> None: ...


class RoleHandle:
    """The driver's handle to a role: calling a method returns a future.

        log_probs = cluster_role.compute_log_probs(batch).result()

    Calls to one group run in the order in which they were made.
    """

    def __init__(self, cluster: WorkerGroup, role: str, worker_type: type):
        self._cluster, self._role, self._type = cluster, role, worker_type

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        dispatch_of(self._type, method)
        return lambda *args: self._cluster.submit(self._role, method, args)


def role_handles(cluster: WorkerGroup, host: ColocatedRoles) -> dict[str, RoleHandle]:
    return {role: RoleHandle(cluster, role, kind) for role, kind in host.worker_types().items()}


class Deadline:
    """A point in time, and the seconds left until it."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class RowAssignment:
    """Division of the rows of a role among its processes.

    Attributes:
        of_rank: index of the row share of each rank.
        reporting_ranks: for each share, the rank whose reply is used; ranks with the same share reply the same.
    """

    of_rank: tuple[int, ...]

    @property
    def reporting_ranks(self) -> list[int]:
        return [self.of_rank.index(share) for share in range(max(self.of_rank) + 1)]


def row_assignment(shardings: Mapping[str, Sharding], world_size: int) -> dict[str, RowAssignment]:
    """The row assignment of each role."""
    return {role: RowAssignment(sharding.row_share_by_rank(world_size)) for role, sharding in shardings.items()}


# Messages of gloo, NCCL and TCPStore when a process is missing from a collective operation.
_GAVE_UP = re.compile(
    r"timed? ?out|timeout|watchdog|connection (closed|reset|refused|was aborted)|broken pipe|closed by peer|"
    r"remote process exited|unhandled system error",
    re.IGNORECASE,
)
_EXCHANGE = re.compile(r"torch/distributed/|torch\.distributed\.|/gloo/|NCCL|ProcessGroup|c10d")


def is_sibling_failure(error: str) -> bool:
    """Whether a worker failed in a collective operation that another process missed or left."""
    last = error.rpartition("Traceback (most recent call last)")[2]
    return bool(_EXCHANGE.search(last) and _GAVE_UP.search(last))


@dataclass(eq=False)
class PendingCall:
    """A call to a role, until all of its processes have answered.

    Args:
        name: `role.method`.
        step: training step, for messages.
        dispatch: how arguments are divided and results joined.
        args: arguments of the method.
        shares: division of the rows; a single share is sent whole.
    Attributes:
        future: receives the result.
        division: rows of each share; None if all processes receive the same.
        answers: replies so far, by rank.
        raised: ranks that have failed.
        limit_s: timeout without progress, in seconds; None for the group's.
    """

    name: str
    step: int | None
    dispatch: Dispatch
    args: tuple[Any, ...]
    shares: RowAssignment
    future: Future[Any] = field(default_factory=Future)
    division: BatchPartition | None = None
    answers: dict[int, Any] = field(default_factory=dict)
    raised: set[int] = field(default_factory=set)
    limit_s: float | None = None

    def __post_init__(self):
        if self.dispatch.splits_rows and len(self.shares.reporting_ranks) > 1:
            self.division = BatchPartition(self.args[0], len(self.shares.reporting_ranks))

    @property
    def unanswered(self) -> list[int]:
        """The ranks without a reply."""
        return [rank for rank in range(len(self.shares.of_rank)) if rank not in self.answers]

    @property
    def concatenates(self) -> bool:
        """Whether replies are rows, to be joined in the order of the rows sent."""
        return self.dispatch.concatenates and self.division is not None

    @property
    def result_ranks(self) -> list[int]:
        """The ranks whose replies are used."""
        if self.dispatch.gathers_list:
            return list(range(len(self.shares.of_rank)))
        return self.shares.reporting_ranks if self.concatenates else self.shares.reporting_ranks[:1]

    def by_rank(self, pack: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
        """The packed arguments for each rank; ranks with the same rows share them."""
        if self.division is None:
            return [pack(self.args)] * len(self.shares.of_rank)
        packed = [pack((rows, *self.args[1:])) for rows in self.division.split_rows(self.args[0])]
        return [packed[share] for share in self.shares.of_rank]

    def result(self) -> Any:
        """Join the replies of all ranks."""
        answers = self.answers
        if self.dispatch.gathers_list:
            return [answers[rank] for rank in sorted(answers)]
        replies = [answers[rank] for rank in self.result_ranks]
        if self.division is None or not self.concatenates:
            return replies[0]
        return self.division.join(replies)


class Transport(Protocol):
    """Sends calls to the processes of a group, and reports the state of the processes.

    Calls `on_reply`, `on_error` and `on_end` of the group from its own threads.

    Attributes:
        pids: process ids by rank, each on its own machine.
        progress: a counter per rank, which advances while the rank works.
        poll_takes_s: maximum duration of `poll_progress`.
    """

    progress: Progress
    poll_takes_s: float

    @property
    def pids(self) -> Sequence[int]: ...

    def start(self, group: RemoteWorkerGroup, host: ColocatedRoles, context: BuildContext) -> None:
        """Start the processes and build the roles in each."""
        ...

    def send(self, number: int, pending: PendingCall) -> None:
        """Begin a call in every process. Raises VerlError if a process refuses it."""
        ...

    def poll_progress(self, ranks: Sequence[int]) -> None:
        """Update the progress of ranks that do not report it themselves."""
        ...

    def unresponsive(self, ranks: Sequence[int]) -> Sequence[int]:
        """The given ranks whose processes are not running, such as stopped ones."""
        ...

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Thread stacks of processes, by rank; empty for a process that does not respond."""
        ...

    def state(self, rank: int) -> str:
        """State of a process according to the operating system, as a clause; empty if unknown."""
        ...

    def tail(self, rank: int) -> str:
        """The last lines of a process's log, which may explain how it ended."""
        ...

    def kill(self) -> None:
        """Kill every process, stopped ones too. Idempotent."""
        ...

    def close(self, is_idle: bool) -> None:
        """End the remaining processes, by a request if they are idle. Idempotent."""
        ...


class RemoteWorkerGroup:
    """All roles of a host in each of several other processes.

    Args:
        call_timeout_s: seconds without progress of any worker after which the call fails with the rank that does not
            answer.
    Raises:
        WorkerError: a worker could not build its roles.
        WorkerDied: a worker ended while it was starting; WorkerHung: it did not finish starting.
        ConfigError: a worker has other versions (verl, torch, Python) than the driver.
    """

    shares_memory = False

    def __init__(
        self, transport: Transport, host: ColocatedRoles, context: BuildContext, world_size: int, call_timeout_s: float
    ):
        self.world_size = world_size
        self.step: int | None = None
        self._shares, self._types = row_assignment(host.shardings(), world_size), host.worker_types()
        self._transport, self._call_timeout_s = transport, call_timeout_s
        self._lock = threading.Lock()
        self._pending: dict[int, PendingCall] = {}
        self._next_number = 0
        self._failure: VerlError | None = None
        self._is_ending = False  # a process has ended, which is about to be reported as the failure
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        try:
            self._watcher.start()
            transport.start(self, host, context)
        except BaseException:
            transport.kill()
            self.close()
            raise

    @property
    def pids(self) -> Sequence[int]:
        """Process ids by rank, each on its own machine."""
        return self._transport.pids

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call to every process. Its future fails with WorkerError or WorkerDied; after `close`, VerlError."""
        dispatch = dispatch_of(self._types[role], method)
        pending = PendingCall(f"{role}.{method}", self.step, dispatch, args, self._shares[role])
        return self._begin(pending, self._transport.send)

    def begin_start(self, send: Callable[[int, PendingCall], object], limit_s: float | None = None) -> Future[list]:
        """Begin a start-up call of the transport; the result of its future is the list of replies, by rank.

        Args:
            limit_s: timeout without progress, in seconds; None for that of building roles.
        """
        dispatch = Dispatch(splits_rows=False, concatenates=False, gathers_list=True)
        pending = PendingCall(START, None, dispatch, (), RowAssignment((0,) * self.world_size))
        pending.limit_s = max(self._call_timeout_s, BUILD_TIMEOUT_S) if limit_s is None else limit_s
        return self._begin(pending, send)

    def close(self) -> None:
        """End the workers, by a request and then by force. Idempotent."""
        atexit.unregister(self.close)
        ended = VerlError("The workers of this run were ended: close() was called.")
        is_idle, withdrawn = not self._pending, self._withdraw(ended)
        for pending in withdrawn or []:
            pending.future.set_exception(ended)
        self._is_closed.set()
        if self._watcher.is_alive():
            self._watcher.join(timeout=2 * STACK_TIMEOUT_S)
        self._transport.close(is_idle and withdrawn is not None)

    def on_reply(self, number: int, rank: int, result: Any) -> None:
        """Handle the reply of a process to a call."""
        with self._lock:
            if (pending := self._pending.get(number)) is None:
                return
            pending.answers[rank] = result
            if len(pending.answers) < self.world_size:
                return
            del self._pending[number]
        try:
            joined = pending.result()
        except Exception as error:  # noqa: BLE001 - raised by the future
            pending.future.set_exception(error)
        else:
            pending.future.set_result(joined)

    def on_error(self, number: int, rank: int, error: str) -> None:
        """Handle the failure of a call in a process; `error` is its traceback."""
        with self._lock:
            if (pending := self._pending.get(number)) is None:
                return
            pending.raised.add(rank)
        threading.Thread(target=self._blame, args=(pending, rank, error), daemon=True).start()

    def on_end(self, rank: int, words: Callable[[], str]) -> None:
        """Handle the end of a process, described by `words`. An earlier error of the process is reported instead."""
        with self._lock:
            if self._failure is not None or any(rank in pending.raised for pending in self._pending.values()):
                return
            self._is_ending = True
            unanswered = [number for number, pending in self._pending.items() if rank not in pending.answers]
            pending = self._pending[min(unanswered)] if unanswered else None
        name, step = ("idle", self.step) if pending is None else (pending.name, pending.step)
        held = "" if name not in ("idle", START) else f"it held the role {', '.join(self._types)}; "
        self._fail(WorkerDied(rank, name, step, held + words()))

    def fail_reply(self, rank: int, error: str) -> None:
        """Handle an unreadable reply: the call fails without waiting for the other workers."""
        self._fail(WorkerError(rank, "an answer", self.step, error))

    def _begin(self, pending: PendingCall, send: Callable[[int, PendingCall], object]) -> Future[Any]:
        with self._lock:
            if self._failure is not None:
                pending.future.set_exception(self._failure)
                return pending.future
            number, self._next_number = self._next_number, self._next_number + 1
            self._pending[number] = pending
            try:
                send(number, pending)
            except BaseException as error:
                del self._pending[number]
                if not isinstance(error, VerlError):
                    raise
                pending.future.set_exception(error)
        return pending.future

    def _blame(self, pending: PendingCall, rank: int, error: str) -> None:
        time.sleep(GRACE_S)
        if self._failure is None and not self._is_ending:
            failure = self._failure_of(pending, rank, error)
            if not self._is_ending:  # it may have ended in the meantime
                self._fail(failure)

    def _failure_of(self, pending: PendingCall, rank: int, error: str) -> VerlError:
        """The error to report: that of the worker, or that of the stopped or hanging sibling for which it waited;
        ConfigError for faults of the configuration that were found while building roles."""
        if isinstance(error, Traceback) and error.faults and pending.name == START:
            return ConfigError(error.faults)
        with self._lock:
            others = [other for other in pending.unanswered if other not in pending.raised]
        if unresponsive := self._transport.unresponsive(others):
            state = self._transport.state(unresponsive[0]) or "it does not react at all"
            words = f"the process does nothing: {state}. Rank {rank} failed for it:\n{error}"
            return WorkerHung(unresponsive[0], pending.name, pending.step, words)
        if is_sibling_failure(error):
            stacks = self._transport.stacks(others)
            where = [f"rank {other} is at:\n{stack or 'it does not react at all'}" for other, stack in stacks.items()]
            absent = (other for other, stack in stacks.items() if not any(place in stack for place in COLLECTIVE))
            detail = "\n".join([f"rank {rank} failed in a collective operation:\n{error}", *where])
            return WorkerHung(next(absent, rank), pending.name, pending.step, detail)
        return WorkerError(rank, pending.name, pending.step, error)

    def _watch(self) -> None:
        """Fail the oldest pending call if none of its workers makes progress."""
        transport, oldest = self._transport, None
        poll_interval_s = min(POLL_INTERVAL_S, self._call_timeout_s / 5)
        gap_s = 2 * poll_interval_s + transport.poll_takes_s
        watch = ProgressWatch(transport.progress, self._call_timeout_s, poll_interval_s=gap_s)
        while not self._is_closed.wait(poll_interval_s):
            with self._lock:
                number = min(self._pending, default=None)
                pending = None if number is None else self._pending[number]
                waiting = [] if pending is None else pending.unanswered
            if number != oldest or pending is None:
                oldest = number
                watch.restart(self._call_timeout_s if pending is None else pending.limit_s or self._call_timeout_s)
                continue
            if watch.idle_s >= watch.timeout_s / 2:  # progress is requested only when needed
                transport.poll_progress(waiting)
            if watch.is_overdue:
                self._fail(self._silence(waiting, pending, watch.timeout_s))
                return
            if not watch.idle_s:
                report()  # progress of this process

    def _silence(self, ranks: Sequence[int], pending: PendingCall, limit_s: float) -> WorkerHung:
        """The error for ranks without a reply; it names a process that does not respond at all, if there is one."""
        stacks, waited = self._transport.stacks(ranks), f"no answer within {limit_s:g} s, and "
        states = {rank: self._transport.state(rank) for rank in ranks if not stacks[rank]}
        if states:
            rank = next((rank for rank, state in states.items() if "stopped" in state), min(states))
            state, last_stage = states[rank], self._transport.progress.stage(rank)
            words = f"the process does not react at all{f': {state}' if state else ''}"
            stage = f"; its last progress was at: {last_stage}" if last_stage else ""
            tail = self._transport.tail(rank)
            return WorkerHung(rank, pending.name, pending.step, "\n".join([f"{waited}{words}{stage}", tail]).rstrip())
        where = [f"rank {rank} is at:\n{stacks[rank]}" for rank in ranks]
        detail = "\n".join([f"{waited}no progress meanwhile", *where])
        return WorkerHung(ranks[0], pending.name, pending.step, detail)

    def _fail(self, failure: VerlError) -> None:
        """End the workers, and fail all pending and future calls."""
        failed = self._withdraw(failure)
        self._transport.kill()
        for pending in failed or []:
            pending.future.set_exception(failure)

    def _withdraw(self, failure: VerlError) -> list[PendingCall] | None:
        """Reject further calls. Returns the pending calls; None if a failure was reported before."""
        with self._lock:
            if self._failure is not None:
                return None
            self._failure = failure
            failed, self._pending = list(self._pending.values()), {}
            return failed
