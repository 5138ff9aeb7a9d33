"""Roles in the driver's own process, or in sibling processes on this machine that the driver starts and ends.

    driver ──WorkerCall───> rank 0, rank 1, ...      rows divided by tokens, packed into shared memory
           <─WorkerReply───                          rows joined in order
                     rank 0 <──gloo/nccl──> rank 1

`LocalTransport` starts the processes and sends the calls; `RemoteWorkerGroup` does the rest.
"""

from __future__ import annotations

import atexit
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
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from verl.cluster.rpc import END_TIMEOUT_S, STACK_TIMEOUT_S, ColocatedRoles, Deadline, PendingCall, RemoteWorkerGroup
from verl.cluster.shm_channel import Message, pack, receive, send_if_open
from verl.cluster.worker import WorkerCall, WorkerReply, WorkerStart, refuse_mixed_versions
from verl.component import BuildContext
from verl.protocol.dispatch import dispatch_of
from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.process import ChildLog, ChildProcess
from verl.utils.progress import Progress, nameless_file


class InlineWorkerGroup:
    """All roles in this process. Calls run immediately; errors are raised when the result is read."""

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
            future.set_result([result] if dispatch_of(self._types[role], method).gathers_list else result)
        except Exception as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)
        return future

    def worker(self, role: str) -> Any:
        """The role object in this process."""
        return self._host.workers[role]

    def close(self) -> None:
        """Free the models."""
        self._host.close()


class LocalWorkerGroup(RemoteWorkerGroup):
    """All roles in each of `world_size` processes.

    Args:
        num_threads: torch threads of each process.
        devices: `cuda:N` or `cpu:N` (the N-th core that this process may use) of each; None numbers GPUs by rank.
        name: subdirectory for the logs, if there are several groups of processes.
        call_timeout_s: see `RemoteWorkerGroup`.
    """

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
        devices = devices or [device_of_rank(context.device, rank) for rank in range(world_size)]
        logs = None if context.run_dir is None else context.run_dir / "workers" / name
        transport = LocalTransport(devices, num_threads, logs)
        super().__init__(transport, host, context, world_size, call_timeout_s)


class LocalTransport:
    """Sibling processes on this machine, numbered by rank, and the channel to each.

    Args:
        devices: device of each process.
        num_threads: torch threads of each process.
        logs: directory for their output; None for a temporary one.
    """

    poll_takes_s = 0.0

    def __init__(self, devices: Sequence[str], num_threads: int, logs: Path | None):
        self._devices, self._num_threads, size = devices, num_threads, len(devices)
        self.progress = Progress(num_slots=size)
        self._logs = [ChildLog(None if logs is None else logs / f"rank_{rank}.log") for rank in range(size)]
        self._children: list[ChildProcess] = []
        self._outbox: SimpleQueue[list[Message] | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_calls, daemon=True)
        self._group: RemoteWorkerGroup | None = None

    @property
    def pids(self) -> Sequence[int]:
        return [child.pid for child in self._children]

    def start(self, group: RemoteWorkerGroup, host: ColocatedRoles, context: BuildContext) -> None:
        atexit.register(group.close)
        self._group, size = group, len(self._devices)
        starts = [
            partial(self._start_of, rank=rank, payload=pickle.dumps((host, self._context(context, rank))))
            for rank in range(size)
        ]
        with os.fdopen(nameless_file(), "w+b") as rendezvous:
            for rank in range(size):
                self._children.append(self._spawn(rank, rendezvous))

        def begin(number: int, _: PendingCall) -> None:
            for rank, start in enumerate(starts):
                threading.Thread(target=self._listen, args=(group, rank, start(number=number)), daemon=True).start()

        self._sender.start()
        refuse_mixed_versions(group.begin_start(begin).result(), "sharding")

    def send(self, number: int, pending: PendingCall) -> None:
        role, _, method = pending.name.partition(".")
        self._outbox.put(
            pending.by_rank(lambda args: pack(WorkerCall(number, role, method, args, pending.result_ranks)))
        )

    def poll_progress(self, ranks: Sequence[int]) -> None:
        """Nothing to do: workers write their progress to shared memory."""

    def unresponsive(self, ranks: Sequence[int]) -> Sequence[int]:
        return [rank for rank in ranks if self._children[rank].is_stopped()]

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        log_sizes = {rank: self._logs[rank].size for rank in ranks}
        for rank in ranks:
            self._children[rank].request_stack()
        deadline, silent = Deadline(STACK_TIMEOUT_S), list(ranks)
        while silent and deadline.left_s:
            time.sleep(0.1)
            silent = [rank for rank in silent if self._logs[rank].size == log_sizes[rank]]
        return {rank: self._logs[rank].text(log_sizes[rank]) for rank in ranks}

    def state(self, rank: int) -> str:
        return self._children[rank].state()

    def tail(self, rank: int) -> str:
        return "\n".join(self._logs[rank].excerpt().lines)

    def kill(self) -> None:
        for child in self._children:
            child.request_end()
        for child in self._children:
            child.kill()

    def close(self, is_idle: bool) -> None:
        self._outbox.put(None)
        deadline = Deadline(END_TIMEOUT_S)
        for child in self._children:
            child.await_exit(deadline.left_s)
            child.kill()
        if self._sender.is_alive():
            self._sender.join(timeout=END_TIMEOUT_S)
        for log in self._logs:
            log.close()
        self.progress.close()

    def _spawn(self, rank: int, rendezvous: BinaryIO) -> ChildProcess:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._devices)),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": str(self._num_threads),
            "VERL_RENDEZVOUS": f"file:///dev/fd/{rendezvous.fileno()}",
        }
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = "lo"  # all processes are on this machine: no need to resolve its name
        return ChildProcess(
            "verl.cluster.worker",
            self.progress,
            slot=rank,
            environment=variables,
            output=self._logs[rank].file,
            files=[rendezvous.fileno()],
            is_in_own_session=True,
            is_killed_with_parent=True,
            stuck_s=None,  # calls are queued at a worker that is still busy
        )

    def _context(self, context: BuildContext, rank: int) -> BuildContext:
        device = "cpu" if self._devices[rank].startswith("cpu") else self._devices[rank]
        return replace(context, rank=rank, world_size=len(self._devices), device=device, tokenizer=None)

    def _start_of(self, *, number: int, rank: int, payload: bytes) -> WorkerStart:
        kind, _, core = self._devices[rank].partition(":")
        return WorkerStart(number, payload, self._num_threads, int(core) if kind == "cpu" and core else None)

    def _send_calls(self) -> None:
        """Send the queued messages.

        Runs in a thread because Ctrl-C interrupts only the main thread: no message is partially sent, and no worker
        misses a call in which its siblings wait for it.
        """
        while (messages := self._outbox.get()) is not None:
            for child, message in zip(self._children, messages, strict=True):
                send_if_open(child.channel, message)
        for child in self._children:
            send_if_open(child.channel, pack(None))

    def _ending(self, rank: int) -> str:
        child = self._children[rank]
        child.await_exit(END_TIMEOUT_S)
        if ended := child.describe_exit():
            return f"the process ended with {ended}\n{self.tail(rank)}"
        return f"the process does not answer{f': {state}' if (state := child.state()) else ''}"

    def _listen(self, group: RemoteWorkerGroup, rank: int, start: WorkerStart) -> None:
        """Start a worker, and receive its replies until it disconnects."""
        child = self._children[rank]
        try:
            child.begin(start)
            while True:
                answer: WorkerReply = receive(child.channel)
                if answer.error is None:
                    group.on_reply(answer.number, rank, answer.result)
                else:
                    group.on_error(answer.number, rank, answer.error)
        except (ChannelClosed, EOFError):
            group.on_end(rank, partial(self._ending, rank))
        except Exception:  # noqa: BLE001 - an unreadable reply; raised in the caller
            group.fail_reply(rank, traceback.format_exc())


def device_of_rank(device: str, rank: int) -> str:
    """The device of a rank: each rank has its own GPU."""
    return f"cuda:{rank}" if device.startswith("cuda") else device
