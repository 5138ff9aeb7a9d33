"""Roles in the driver's own process, or in sibling processes on this machine that the driver starts and ends.

    driver ──WorkerCall───> rank 0, rank 1, ...      rows divided by tokens, straight into shared memory
           <─WorkerReply───                          rows joined in their order
                     rank 0 <──gloo/nccl──> rank 1

A worker's exception, its death or its silence fails the call under way with the rank, the call and the step, and ends
all workers: their siblings may be waiting for it in a collective operation for ever.
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
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from verl.cluster.batch_partition import OutputLayout, OutputShapes, SharedOutput
from verl.cluster.launcher import BUILD_TIMEOUT_S, END_TIMEOUT_S, STACK_TIMEOUT_S, Launcher, refuse_mixed_versions
from verl.cluster.rpc import (
    ColocatedRoles,
    PendingCall,
    RowAssignment,
    gave_up_on_sibling,
    missed_exchange,
    row_assignment,
)
from verl.cluster.serialization import RowSubset
from verl.cluster.shm_channel import Message, MessagePacker, ShmBlock, ShmBlockPool, ShmChannel, lease, send_if_open
from verl.cluster.worker import READY, WorkerCall, WorkerReply, WorkerStart
from verl.component import BuildContext
from verl.dispatch import Dispatch, dispatch_of
from verl.errors import VerlError, WorkerError, WorkerHung
from verl.utils.child_process import StoppedTime
from verl.utils.progress import ProgressWatch, report


class InlineWorkerGroup:
    """Every role in this process. Calls are carried out at once; an error is raised where the result is asked for."""

    world_size = 1
    shares_memory = True

    def __init__(self, host: ColocatedRoles, context: BuildContext):
        self.step: int | None = None
        self._types = host.worker_types()
        self._host = host.build(context)

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            result = self._host.call(role, method, args)
            future.set_result([result] if dispatch_of(self._types[role], method).gathers else result)
        except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Let go of the models."""
        self._host.close()


GRACE_S = 0.3  # delay before an error is reported, so that a sibling's death that caused it is reported first


class LocalWorkerGroup:
    """Every role in each of `world_size` processes.

    Args:
        num_threads: that torch may use in each.
        devices: of each, `cuda:N` or `cpu:N`, the N-th core that this process may use; None numbers the GPUs by rank.
        name: of a directory for the logs, where there are several groups of processes.
        call_timeout_s: without progress of any worker, after which a call under way names who is silent.
    Raises:
        WorkerError: a worker could not build its roles.
        WorkerDied: a worker ended while it was starting; WorkerHung: it did not come to an end with that.
        ConfigError: a worker is of another version than the driver.
    """

    shares_memory = False

    def __init__(
        self,
        host: ColocatedRoles,
        context: BuildContext,
        world_size: int,
        num_threads: int,
        devices: Sequence[str] | None = None,
        name: str = "",
        call_timeout_s: float = 1800.0,
    ):
        self.world_size = world_size
        self._shares = row_assignment(host.shardings(), world_size)
        self.step: int | None = None
        self._types = host.worker_types()
        self._lock = threading.Lock()
        self._pending: dict[int, PendingCall] = {}
        self._answers: dict[int, dict[int, Any]] = {}  # by call and rank
        self._raised: set[tuple[int, int]] = set()  # calls and ranks
        self._next_number = 0
        self._failure: VerlError | None = None
        self._outbox: SimpleQueue[list[Message] | None] = SimpleQueue()
        self._post, self._joined, self._expected = MessagePacker(), ShmBlockPool(shared=False), OutputShapes()
        self._channels: list[ShmChannel] = []
        self._sender = threading.Thread(target=self._send_calls, daemon=True)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._call_timeout_s, self._is_closed = call_timeout_s, threading.Event()
        self._devices = devices or [_device(context.device, rank) for rank in range(world_size)]
        logs = None if context.run_dir is None else context.run_dir / "workers" / name
        self._launcher = Launcher(world_size, num_threads, logs, call_timeout_s)
        atexit.register(self.close)
        try:
            self._launcher.start()
            self._build_roles(host, context)
        except BaseException:
            self._launcher.kill()
            self.close()
            raise

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call to every process. Its future fails with WorkerError or WorkerDied; after `close`, VerlError."""
        dispatch = dispatch_of(self._types[role], method)
        pending = PendingCall(f"{role}.{method}", self.step, dispatch, args, self._shares[role])
        with self._lock:
            if self._failure is not None:
                pending.future.set_exception(self._failure)
                return pending.future
            number, self._next_number = self._next_number, self._next_number + 1
            messages = self._messages(number, role, method, pending)
            self._pending[number], self._answers[number] = pending, {}
            self._outbox.put(messages)
        return pending.future

    def _room(self, pending: PendingCall) -> tuple[OutputLayout | None, ShmBlock | None]:
        """Memory in which the answer is put together, where it is known what it will look like."""
        layout = self._expected.layout(pending.name, pending.args[0]) if pending.joins else None
        if layout is None:
            return None, None
        block = self._post.blocks.take(layout.size, self.world_size + 1)
        release = partial(self._post.blocks.give_back, block.number)
        pending.room = SharedOutput(layout, partial(lease, block.memory, release))
        return layout, block

    def _messages(self, number: int, role: str, method: str, pending: PendingCall) -> list[Message]:
        """What each rank is sent; those that share their rows are sent one message."""
        args, division = pending.args, pending.division
        heard = pending.heard
        if division is None:
            return [self._post.pack(WorkerCall(number, role, method, args, heard), self.world_size)] * self.world_size
        layout, room = self._room(pending)
        of_rank, packed = pending.shares.of_rank, []
        for part, rows in enumerate(division.rows):
            own = None if layout is None else rows
            call = WorkerCall(number, role, method, (RowSubset(args[0], rows), *args[1:]), heard, own, layout)
            packed.append(self._post.pack(call, of_rank.count(part), room))
        return [packed[part] for part in of_rank]

    def close(self) -> None:
        """End the workers: asked first, then made to. Leaves nothing running; may be called again."""
        atexit.unregister(self.close)
        ended = VerlError("The workers of this run were ended: close() was called.")
        for pending in self._withdraw(ended):
            pending.future.set_exception(ended)
        self._is_closed.set()
        self._outbox.put(None)
        if self._watcher.is_alive():
            self._watcher.join(timeout=2 * STACK_TIMEOUT_S)
        self._launcher.end()
        if self._sender.is_alive():
            self._sender.join(timeout=END_TIMEOUT_S)
        self._post.close()

    def _build_roles(self, host: ColocatedRoles, context: BuildContext) -> None:
        ready = PendingCall("start", None, Dispatch(divides=False, joins=False, gathers=True), (), RowAssignment((0,)))
        self._pending[READY], self._answers[READY] = ready, {}
        search_path = tuple(map(os.path.abspath, sys.path))
        for rank, connection in enumerate(self._launcher.connections):
            kind, _, number = self._devices[rank].partition(":")
            core = int(number) if kind == "cpu" and number else None
            device = "cpu" if kind == "cpu" else self._devices[rank]
            own = replace(context, rank=rank, world_size=self.world_size, device=device)
            payload = pickle.dumps((host, replace(own, tokenizer=None)))
            with contextlib.suppress(OSError):  # the worker is gone: its listener says so
                connection.send_bytes(pickle.dumps(WorkerStart(search_path, payload, self._launcher.num_threads, core)))
            self._channels.append(channel := ShmChannel(connection, self._post))
            threading.Thread(target=self._listen, args=(rank, channel), daemon=True).start()
        self._sender.start()
        self._watcher.start()
        refuse_mixed_versions(ready.future.result(), "sharding")

    def _send_calls(self) -> None:
        """Send what `submit` puts out.

        A thread does it, because Ctrl-C strikes the main thread alone: it never leaves half a message on its way, nor
        one worker without the call in which its siblings wait for it.
        """
        while (messages := self._outbox.get()) is not None:
            for channel, message in zip(self._channels, messages, strict=True):
                send_if_open(channel, message)
        for channel in self._channels:
            send_if_open(channel, self._post.pack(None))

    def _listen(self, rank: int, channel: ShmChannel) -> None:
        """Take in the answers of one worker until it hangs up."""
        while True:
            try:
                answer: WorkerReply = channel.receive()
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
                with self._lock:
                    self._raised.add((answer.number, rank))
                time.sleep(GRACE_S)
                self._fail(self._failure_of(rank, pending, answer))

    def _failure_of(self, rank: int, pending: PendingCall, answer: WorkerReply) -> WorkerError:
        """The error of a worker; if it waited in vain for a sibling that is stopped or hangs, that of the sibling."""
        error = answer.error or ""
        with self._lock:
            answered = self._answers.get(answer.number, {})
            others = [
                other
                for other in range(self.world_size)
                if other != rank and other not in answered and (answer.number, other) not in self._raised
            ]
        stopped = next((other for other in others if self._launcher.is_stopped(other)), None)
        if stopped is not None:
            detail = f"the process is stopped (SIGSTOP or SIGTSTP), and rank {rank} failed for it:\n{error}"
            return WorkerHung(stopped, pending.name, pending.step, detail)
        if gave_up_on_sibling(error):
            blamed, detail = missed_exchange(rank, error, self._launcher.stacks(others))
            return WorkerHung(blamed, pending.name, pending.step, detail)
        return WorkerError(rank, pending.name, pending.step, error)

    def _take(self, answer: WorkerReply, rank: int, pending: PendingCall) -> None:
        with self._lock:
            if (answers := self._answers.get(answer.number)) is None:
                return
            answers[rank] = answer.result
            if len(answers) < self.world_size:
                return
            del self._pending[answer.number], self._answers[answer.number]
        try:
            result = pending.result(answers, self._joined.empty)
            if pending.joins and (pending.room is None or not pending.room.was_used):
                self._expected.note(pending.name, pending.args[0], result)
        except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
            pending.future.set_exception(error)
        else:
            pending.future.set_result(result)

    def _watch(self) -> None:
        """Name who is silent, where nobody makes progress with the oldest call under way."""
        oldest, look_every_s = None, min(5.0, self._call_timeout_s / 5)
        watch = ProgressWatch(self._launcher.progress, self._call_timeout_s, look_every_s=2 * look_every_s)
        stopped = StoppedTime(look_every_s)
        while not self._is_closed.wait(look_every_s):
            with self._lock:
                number = min(self._pending, default=None)
                pending = None if number is None else self._pending[number]
                waiting = [rank for rank in range(self.world_size) if rank not in self._answers.get(number, {})]
            limit_s = max(self._call_timeout_s, BUILD_TIMEOUT_S) if number == READY else self._call_timeout_s
            if number != oldest or pending is None:
                oldest = number
                watch.restart(limit_s)
            elif watch.is_overdue or self._launcher.stopped(waiting, stopped) >= self._call_timeout_s:
                self._fail(self._launcher.silence(waiting, pending.name, pending.step, limit_s))
                return
            elif not watch.idle_s:
                report()  # to whoever waits for this process

    def _on_hang_up(self, rank: int) -> None:
        with self._lock:
            if self._failure is not None:
                return
            unanswered = [number for number in self._pending if rank not in self._answers[number]]
            pending = self._pending[min(unanswered)] if unanswered else None
        name, step = ("idle", self.step) if pending is None else (pending.name, pending.step)
        self._fail(self._launcher.death(rank, name, step))

    def _fail(self, failure: WorkerError) -> None:
        """End the workers, and fail every call under way and all that come."""
        failed = self._withdraw(failure)
        self._launcher.kill()
        for pending in failed:
            pending.future.set_exception(failure)

    def _withdraw(self, failure: VerlError) -> list[PendingCall]:
        """Let no call through from here on. Returns those under way; none if something had failed before."""
        with self._lock:
            if self._failure is not None:
                return []
            self._failure = failure
            failed, self._pending, self._answers = list(self._pending.values()), {}, {}
            return failed


def _device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device.startswith("cuda") else device
