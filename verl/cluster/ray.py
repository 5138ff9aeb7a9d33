"""Roles in Ray actors, on this machine or on a cluster: the same calls, futures and errors as with sibling processes.

    driver ──batch──> object store ──> actor 0, actor 1, ...     each takes its rows from where the batch lies
           <─────answers───────── object store <──                           rows joined in their order
                                                   actor 0 <──gloo/nccl──> actor 1

Where actors are on other machines than the driver, each is sent its share, so that no row goes to two machines.
An error in one worker, its death, or its silence fails the call under way with the rank, the call and the step, and
ends the whole group: its siblings may be waiting for it in a collective operation for ever.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from ray.exceptions import ObjectStoreFullError, RayError

from verl.cluster.base import HostDescription
from verl.cluster.crew import END_TIMEOUT_S
from verl.cluster.memory import Blocks
from verl.cluster.parcel import Parcel, wrap
from verl.cluster.pending import PendingCall, shares_of
from verl.cluster.ray_crew import Group, RayCrew
from verl.cluster.ray_session import Session
from verl.component import BuildContext
from verl.dispatch import dispatch_of
from verl.errors import VerlError, WorkerDied, WorkerError


class RayActors:
    """Every role of a host in each of the actors of a group.

    Args:
        session: closed with the group.
    Raises:
        WorkerError: a worker could not build its roles.
        WorkerDied: a worker ended while it was starting.
        ConfigError: the machines have different versions of what must be the same.
    """

    shares_memory = False

    def __init__(self, session: Session, group: Group, host: HostDescription, context: BuildContext):
        self.world_size, self.step = group.size, None
        self._shares = shares_of(host.shardings(), group.size)
        self._session, self._group, self._types = session, group, host.worker_types()
        self._lock = threading.Lock()
        self._failure: VerlError | None = None
        self._pending: list[PendingCall] = []
        self._inbox: SimpleQueue[tuple[PendingCall, list[Any]] | None] = SimpleQueue()
        self._joined = Blocks(shared=False)
        self._crew: RayCrew | None = None
        self._collector = threading.Thread(target=self._collect, daemon=True)
        logs = None if context.run_dir is None else context.run_dir.absolute() / "workers"
        try:
            self._crew = RayCrew(session, group, logs)
            self._crew.start(host, context)
        except BaseException:
            self._kill()
            self.close()
            raise
        self._collector.start()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own machine."""
        return [] if self._crew is None else self._crew.pids

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call to every actor. Its future fails with a WorkerError; after `close`, with a VerlError."""
        dispatch = dispatch_of(self._types[role], method)
        pending = PendingCall(f"{role}.{method}", self.step, dispatch, args, self._shares[role])
        with self._lock:
            if self._failure is not None:
                pending.future.set_exception(self._failure)
                return pending.future
            try:
                refs = self._crew.call(role, method, *self._sent(pending), pending.heard)
            except (RayError, OSError, ValueError) as error:
                pending.future.set_exception(_refusal(error, pending.name, self.step))
                return pending.future
            self._pending.append(pending)
            self._inbox.put((pending, refs))
        return pending.future

    def _sent(self, pending: PendingCall) -> tuple[list[Parcel], list[Any]]:
        """What each rank is sent, one object to all who are sent the same; and which of its rows are for that rank."""
        args, division = pending.args, pending.division
        if division is None:
            return [wrap(args)] * self.world_size, [None] * self.world_size
        if self._crew.shares_store:  # all may read all of it: they take their rows themselves, side by side
            return [wrap(args)] * self.world_size, [division.rows[part] for part in pending.shares.of_rank]
        shares = [wrap((part, *args[1:])) for part in division.divide(args[0])]
        return [shares[part] for part in pending.shares.of_rank], [None] * self.world_size

    def close(self) -> None:
        """End the actors, asked first unless they are at work. Leaves nothing running; may be called again."""
        ended = VerlError("The workers of this run were ended: close() was called.")
        is_idle, withdrawn = not self._pending, self._withdraw(ended)
        for pending in withdrawn or []:
            pending.future.set_exception(ended)
        if is_idle and withdrawn is not None and self._crew is not None:
            self._crew.end()
        self._kill()
        self._inbox.put(None)
        if self._collector.is_alive():
            self._collector.join(timeout=END_TIMEOUT_S)
        self._session.close()

    def _collect(self) -> None:
        """Take in the answers, call by call."""
        while (received := self._inbox.get()) is not None:
            pending, refs = received
            try:
                answers = self._crew.answers(pending.name, pending.step, refs, self._group.call_timeout_s)
                result = pending.result(dict(enumerate(answers)), self._joined.empty)
            except WorkerError as failure:
                self._fail(failure)
            except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
                if self._taken(pending):
                    pending.future.set_exception(error)
            else:
                if self._taken(pending):
                    pending.future.set_result(result)

    def _taken(self, pending: PendingCall) -> bool:
        """Whether the call was still under way; it is not any more."""
        with self._lock:
            is_open = pending in self._pending
            if is_open:
                self._pending.remove(pending)
            return is_open

    def _fail(self, failure: WorkerError) -> None:
        """End the actors, and fail every call under way and all that come."""
        failed = self._withdraw(failure)
        self._kill()
        for pending in failed or []:
            pending.future.set_exception(failure)

    def _withdraw(self, failure: VerlError) -> list[PendingCall] | None:
        """Let no call through from here on. Returns those under way; None if something had failed before."""
        with self._lock:
            if self._failure is not None:
                return None
            self._failure = failure
            failed, self._pending = self._pending, []
            return failed

    def _kill(self) -> None:
        if self._crew is not None:
            self._crew.kill()


def _refusal(error: Exception, name: str, step: int | None) -> VerlError:
    """Why Ray does not take a call."""
    if isinstance(error, ObjectStoreFullError):
        return VerlError(
            f"{name}: Ray's object store has no room for the batch. Set trainer.placement.object_store_mib higher "
            "(of a cluster that was there before: `ray start --object-store-memory`), or a smaller batch."
        )
    return WorkerDied(0, name, step, f"Ray does not take the call ({type(error).__name__}: {error})")
