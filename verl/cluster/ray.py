"""Roles in Ray actors, on this machine or on a cluster: the same calls, futures and errors as with sibling processes.

    driver ──share of the rows──> object store ──> actor 0, actor 1, ...     each reads its share where it lies
           <─────answers───────── object store <──                           rows joined in their order
                                                   actor 0 <──gloo/nccl──> actor 1

An error in one worker, its death, or its silence fails the call under way with the rank, the call and the step, and
ends the whole group: its siblings may be waiting for it in a collective operation for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from ray.exceptions import ObjectStoreFullError, RayError

from verl.cluster.base import HostDescription
from verl.cluster.crew import END_TIMEOUT_S
from verl.cluster.dividing import Division
from verl.cluster.parcel import Parcel, wrap
from verl.cluster.ray_crew import Group, RayCrew
from verl.cluster.ray_session import Session
from verl.description import BuildContext
from verl.dispatch import Dispatch, dispatch_of
from verl.errors import VerlError, WorkerDied, WorkerError


@dataclass
class _Pending:
    """A call under way, and the answers to come, by rank."""

    name: str
    step: int | None
    future: Future[Any]
    division: Division | None
    dispatch: Dispatch
    refs: list[Any]

    def result(self, answers: list[Any], speakers: Sequence[int]) -> Any:
        """The answers of all ranks as the one that the caller waits for; `speakers` answer for the shares of rows."""
        if self.dispatch.gathers:
            return answers
        answers = [answers[rank] for rank in speakers]
        return self.division.join(answers) if self.dispatch.joins and self.division else answers[0]


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
        self._speakers = [group.parts.index(part) for part in range(max(group.parts) + 1)]
        self._session, self._group, self._types = session, group, host.worker_types()
        self._lock = threading.Lock()
        self._failure: VerlError | None = None
        self._pending: list[_Pending] = []
        self._inbox: SimpleQueue[_Pending | None] = SimpleQueue()
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
        divides = dispatch.divides and len(self._speakers) > 1
        division = Division(args[0], len(self._speakers)) if divides else None
        name, future = f"{role}.{method}", Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            try:
                shares = self._shares(args, division)
                refs = self._crew.call(role, method, shares)
            except (RayError, OSError, ValueError) as error:
                future.set_exception(_refusal(error, name, self.step))
                return future
            pending = _Pending(name, self.step, future, division, dispatch, refs)
            self._pending.append(pending)
            self._inbox.put(pending)
        return future

    def _shares(self, args: tuple[Any, ...], division: Division | None) -> list[Parcel]:
        """What each rank is sent; ranks that share their rows are sent one object."""
        if division is None:
            return [wrap(args)] * self.world_size
        shares = [wrap((part, *args[1:])) for part in division.divide(args[0])]
        return [shares[part] for part in self._group.parts]

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
        while (pending := self._inbox.get()) is not None:
            try:
                answers = self._crew.answers(pending.name, pending.step, pending.refs, self._group.call_timeout_s)
                result = pending.result(answers, self._speakers)
            except WorkerError as failure:
                self._fail(failure)
            except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
                if self._taken(pending):
                    pending.future.set_exception(error)
            else:
                if self._taken(pending):
                    pending.future.set_result(result)

    def _taken(self, pending: _Pending) -> bool:
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

    def _withdraw(self, failure: VerlError) -> list[_Pending] | None:
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
