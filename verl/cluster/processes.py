"""Roles in sibling processes on this machine, which the driver starts and ends.

    driver ──Call──> rank 0, rank 1, ...      rows divided by tokens
           <─Answer─                          rows joined in their order
                     rank 0 <──gloo/nccl──> rank 1

A worker's exception, and a worker's death, fail the call that was under way with the rank, the call and the step, and
end all workers: their siblings may be waiting for them in a collective operation for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from verl.cluster.base import HostDescription
from verl.cluster.crew import END_TIMEOUT_S, Crew
from verl.cluster.dividing import Division
from verl.cluster.worker import READY, Answer, Call, Start
from verl.description import BuildContext
from verl.dispatch import Dispatch, dispatch_of
from verl.errors import VerlError, WorkerError

GRACE_S = 0.3  # an error waits so long to be told: a sibling's death, where that is the cause, is told first


@dataclass
class _Pending:
    """A call under way: answers come in by rank."""

    name: str
    step: int | None
    future: Future[Any]
    division: Division | None
    dispatch: Dispatch | None
    answers: dict[int, Any]

    def result(self, speakers: Sequence[int]) -> Any:
        """The answers of all ranks as the one that the caller waits for; `speakers` answer for the shares of rows."""
        if self.dispatch is not None and self.dispatch.gathers:
            return [self.answers[rank] for rank in sorted(self.answers)]
        answers = [self.answers[rank] for rank in speakers]
        joins = self.dispatch is not None and self.dispatch.joins and self.division is not None
        return self.division.join(answers) if joins else answers[0]


class Processes:
    """Every role in each of `world_size` processes.

    Args:
        parts: of each process, which share of the rows it works on: 0, 1, ... in the order of the ranks. Processes that
            work on one share together give the same answer, and that of the first one counts. By default each has its
            own.
        num_threads: that torch may use in each.
        devices: of each, `cuda:N` or `cpu:N`, the N-th core that this process may use; None numbers the GPUs by rank.
        name: of a directory for the logs, where there are several groups of processes.
    Raises:
        WorkerError: a worker could not build its roles.
        WorkerDied: a worker ended while it was starting.
    """

    shares_memory = False

    def __init__(
        self,
        host: HostDescription,
        context: BuildContext,
        world_size: int,
        num_threads: int,
        parts: Sequence[int] | None = None,
        devices: Sequence[str] | None = None,
        name: str = "",
    ):
        self.world_size = world_size
        self._parts = tuple(range(world_size)) if parts is None else tuple(parts)
        self._speakers = [self._parts.index(part) for part in range(max(self._parts) + 1)]
        self.step: int | None = None
        self._types = host.worker_types()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._next_number = 0
        self._failure: VerlError | None = None
        self._outbox: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_calls, daemon=True)
        self._devices = devices or [_device(context.device, rank) for rank in range(world_size)]
        logs = None if context.run_dir is None else context.run_dir / "workers" / name
        self._crew = Crew(world_size, num_threads, logs)
        atexit.register(self.close)
        try:
            self._crew.start()
            self._build_roles(host, context)
        except BaseException:
            self._crew.kill()
            self.close()
            raise

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call to every process. Its future fails with WorkerError or WorkerDied; after `close`, VerlError."""
        dispatch = dispatch_of(self._types[role], method)
        division = Division(args[0], len(self._speakers)) if dispatch.divides else None
        shares = [(part, *args[1:]) for part in division.divide(args[0])] if division else [args] * len(self._speakers)
        pending = _Pending(f"{role}.{method}", self.step, Future(), division, dispatch, {})
        with self._lock:
            if self._failure is not None:
                pending.future.set_exception(self._failure)
                return pending.future
            number, self._next_number = self._next_number, self._next_number + 1
            messages = [pickle.dumps(Call(number, role, method, share)) for share in shares]
            self._pending[number] = pending
            self._outbox.put([messages[part] for part in self._parts])
        return pending.future

    def close(self) -> None:
        """End the workers: asked first, then made to. Leaves nothing running; may be called again."""
        atexit.unregister(self.close)
        ended = VerlError("The workers of this run were ended: close() was called.")
        for pending in self._withdraw(ended):
            pending.future.set_exception(ended)
        self._outbox.put(None)
        self._crew.end()
        if self._sender.is_alive():
            self._sender.join(timeout=END_TIMEOUT_S)

    def _build_roles(self, host: HostDescription, context: BuildContext) -> None:
        ready = _Pending("start", None, Future(), None, None, {})
        self._pending[READY] = ready
        search_path = tuple(map(os.path.abspath, sys.path))
        for rank, connection in enumerate(self._crew.connections):
            kind, _, number = self._devices[rank].partition(":")
            core = int(number) if kind == "cpu" and number else None
            device = "cpu" if kind == "cpu" else self._devices[rank]
            own = replace(context, rank=rank, world_size=self.world_size, device=device)
            payload = pickle.dumps((host, replace(own, tokenizer=None)))
            _quietly_send(connection, pickle.dumps(Start(search_path, payload, self._crew.num_threads, core)))
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()
        self._sender.start()
        ready.future.result()  # however long the weights take: a worker's end would be noticed

    def _send_calls(self) -> None:
        """Send what `submit` puts out.

        A thread does it, because Ctrl-C strikes the main thread alone: it never leaves half a message on its way, nor
        one worker without the call in which its siblings wait for it.
        """
        while (messages := self._outbox.get()) is not None:
            for connection, message in zip(self._crew.connections, messages, strict=True):
                _quietly_send(connection, message)
        for connection in self._crew.connections:
            _quietly_send(connection, pickle.dumps(None))

    def _listen(self, rank: int, connection: Connection) -> None:
        """Take in the answers of one worker until it hangs up."""
        while True:
            try:
                answer: Answer = connection.recv()
            except (EOFError, OSError):
                return self._on_hang_up(rank)
            except Exception:  # noqa: BLE001 - an answer that cannot be read; whoever waits for it is told
                return self._fail(WorkerError(rank, "an answer", self.step, traceback.format_exc()))
            with self._lock:
                pending = self._pending.get(answer.number)
            if pending is None:
                continue
            if answer.error is None:
                self._take(answer, rank, pending)
            else:
                time.sleep(GRACE_S)
                self._fail(WorkerError(rank, pending.name, pending.step, answer.error))

    def _take(self, answer: Answer, rank: int, pending: _Pending) -> None:
        with self._lock:
            pending.answers[rank] = answer.result
            if len(pending.answers) < self.world_size or self._pending.pop(answer.number, None) is None:
                return
        try:
            result = pending.result(self._speakers)
        except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
            pending.future.set_exception(error)
        else:
            pending.future.set_result(result)

    def _on_hang_up(self, rank: int) -> None:
        with self._lock:
            if self._failure is not None:
                return
            unanswered = [number for number, pending in self._pending.items() if rank not in pending.answers]
            pending = self._pending[min(unanswered)] if unanswered else None
        name, step = ("idle", self.step) if pending is None else (pending.name, pending.step)
        self._fail(self._crew.death(rank, name, step))

    def _fail(self, failure: WorkerError) -> None:
        """End the workers, and fail every call under way and all that come."""
        failed = self._withdraw(failure)
        self._crew.kill()
        for pending in failed:
            pending.future.set_exception(failure)

    def _withdraw(self, failure: VerlError) -> list[_Pending]:
        """Let no call through from here on. Returns those under way; none if something had failed before."""
        with self._lock:
            if self._failure is not None:
                return []
            self._failure = failure
            failed, self._pending = list(self._pending.values()), {}
            return failed


def _device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device.startswith("cuda") else device


def _quietly_send(connection: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the worker is gone: its listener says so
        connection.send_bytes(message)
