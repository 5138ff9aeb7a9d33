"""Roles on several hosts that torchrun has started: the same calls, futures and errors as with sibling processes.

    driver ──calls──> agent of rank 0 ──> worker     on the driver's host, in a thread of the driver
           ──calls──> agent of rank 1 ──> worker     a process of torchrun, on this host or another
                                          worker <──gloo/nccl──> worker

Each worker is sent its own rows alone. `HostsTransport` carries the calls; all else is `RemoteWorkerGroup`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from verl.cluster.hosts.agent import HostAgent
from verl.cluster.hosts.messages import (
    AgentHello,
    AgentStart,
    HangUp,
    StackReply,
    StackRequest,
    StatusRequest,
    WorkerEnd,
    WorkerStatus,
)
from verl.cluster.hosts.rendezvous import HANDSHAKE_TIMEOUT_S, DriverListener, is_host_lost
from verl.cluster.network import free_address, interface_of
from verl.cluster.rpc import (
    END_TIMEOUT_S,
    STACK_TIMEOUT_S,
    ColocatedRoles,
    Deadline,
    PendingCall,
    RemoteWorkerGroup,
    refuse_mixed_versions,
)
from verl.cluster.serialization import Serialized, deserialize, serialize
from verl.cluster.worker import WorkerCall, WorkerReply
from verl.component import BuildContext
from verl.errors import VerlError
from verl.utils.child_process.channel import Channel, ChannelClosed
from verl.utils.child_process.stopped_watch import StoppedTime
from verl.utils.progress import Progress, report
from verl.utils.torchrun import TorchrunPlace

ARRIVAL_TIMEOUT_S = 300.0  # of all agents; what torchrun has started, imports this package first
STATUS_EVERY_S = 1.0
SHARED_VARIABLES = ("VERL_STRICT_DATA_CHECK", "CUBLAS_WORKSPACE_CONFIG")


class HostsWorkerGroup(RemoteWorkerGroup):
    """Every role of a host in each of the processes that torchrun has started on several hosts.

    Args:
        place: of this process, the driver, among them.
        num_threads: that torch may use in each.
        call_timeout_s: see `RemoteWorkerGroup`.
    """

    def __init__(
        self,
        place: TorchrunPlace,
        host: ColocatedRoles,
        context: BuildContext,
        num_threads: int,
        call_timeout_s: float = 1800.0,
    ):
        logs = None if context.run_dir is None else context.run_dir.absolute() / "workers"
        transport = HostsTransport(place, num_threads, logs, min(STATUS_EVERY_S, call_timeout_s / 10))
        super().__init__(transport, host, context, place.world_size, call_timeout_s)


class _Peer:
    """The driver's side of one agent."""

    def __init__(self, calls: Channel, watch: Channel, hello: AgentHello):
        self.calls, self.watch, self.hello = calls, watch, hello
        self.outbox: SimpleQueue[Serialized | None] = SimpleQueue()
        self.status: WorkerStatus | None = None
        self.asked_at: float | None = None  # time of the pending status request
        self.stack: StackReply | None = None
        self.tail = ""
        self.telling = threading.Lock()

    def ask_status(self) -> None:
        with self.telling:
            if self.asked_at is None:
                self.asked_at = time.monotonic()
                self.watch.send(StatusRequest())

    def tell(self, message: Any) -> None:
        with self.telling, contextlib.suppress(OSError):  # its receiver will notice the loss
            self.watch.send(message)

    def close(self) -> None:
        for channel in (self.calls, self.watch):
            channel.close()


class HostsTransport:
    """Agents of workers on several hosts, by rank; see `Transport`.

    Args:
        logs: directory for what workers print, on hosts that have it.
        look_every_s: interval of status requests to each.
    """

    def __init__(self, place: TorchrunPlace, num_threads: int, logs: Path | None, look_every_s: float):
        self._place, self._num_threads, self._logs, self._look_every_s = place, num_threads, logs, look_every_s
        self.progress, self.look_takes_s = Progress(num_slots=place.world_size), 2 * look_every_s
        self._peers: dict[int, _Peer] = {}
        self._threads: list[threading.Thread] = []
        self._own: threading.Thread | None = None

    @property
    def pids(self) -> Sequence[int]:
        found = [self._peers[rank].status for rank in sorted(self._peers)]
        return [status.pid for status in found if status is not None]

    def start(self, group: RemoteWorkerGroup, host: ColocatedRoles, context: BuildContext) -> None:
        atexit.register(group.close)
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        self._gather()
        found = group.begin_start(lambda number, _: self._begin(group, number, host, context))
        refuse_mixed_versions(found.result(), "torchrun")

    def _gather(self) -> None:
        """Have the agents of all ranks come."""
        size, listener = self._place.world_size, DriverListener(self._place)
        self._own = threading.Thread(target=self._serve_own, args=(listener,), name="agent of rank 0", daemon=True)
        self._own.start()
        arrived: dict[int, dict[str, tuple[Channel, AgentHello]]] = {}
        try:
            for channel in listener.connections(ARRIVAL_TIMEOUT_S):
                report("waiting for the workers of all hosts")
                if channel is None:
                    continue
                with contextlib.suppress(ChannelClosed, TimeoutError):
                    hello: AgentHello = channel.receive(timeout_s=HANDSHAKE_TIMEOUT_S)
                    both = arrived.setdefault(hello.rank, {})
                    both[hello.channel] = (channel, hello)
                    if len(both) == 2:
                        self._peers[hello.rank] = _Peer(both["calls"][0], both["watch"][0], hello)
                if len(self._peers) == size:
                    return
        finally:
            listener.close()
        missing = [rank for rank in range(size) if rank not in self._peers]
        raise VerlError(
            f"torchrun has started {size} processes, of which rank {', '.join(map(str, missing))} did not come to the "
            f"driver within {ARRIVAL_TIMEOUT_S:g} s. Hosts must reach each other at all ports, and every host must be "
            f"started with the same command; the driver listens at {', '.join(listener.address.addresses)}."
        )

    def _serve_own(self, listener: DriverListener) -> None:
        with contextlib.suppress(ConnectionError):
            HostAgent(self._place, listener.address).serve()

    def _begin(self, group: RemoteWorkerGroup, number: int, host: ColocatedRoles, context: BuildContext) -> None:
        """Have every worker build its roles."""
        size, shared = self._place.world_size, {n: os.environ[n] for n in SHARED_VARIABLES if n in os.environ}
        others = [peer.watch.own_address for rank, peer in self._peers.items() if rank]
        address = others[0] if others else self._peers[0].hello.address  # by which others reach this host
        meeting = free_address(address)
        for rank, peer in sorted(self._peers.items()):
            hello = peer.hello
            device = f"cuda:{hello.local_rank}" if context.device.startswith("cuda") else context.device
            own = replace(context, rank=rank, world_size=size, device=device, tokenizer=None)
            places = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(hello.local_rank)}
            environment = {**shared, **places, "VERL_RENDEZVOUS": meeting}
            chosen = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
            if network := hello.network if rank else chosen:  # a machine's name may lead to its loopback alone
                environment["GLOO_SOCKET_IFNAME"] = network
            log = None if self._logs is None else self._logs / f"rank_{rank}.log"
            payload = pickle.dumps((host, own))
            peer.tell(AgentStart(number, payload, self._num_threads, environment, log, self._look_every_s))
            for work in (self._send_calls, self._take_replies, self._watch):
                thread = threading.Thread(target=work, args=(group, rank, peer), daemon=True)
                self._threads.append(thread)
                thread.start()

    def send(self, number: int, pending: PendingCall) -> None:
        (role, _, method), args, division = pending.name.partition("."), pending.args, pending.division
        shares = [args] if division is None else [(rows, *args[1:]) for rows in division.split_rows(args[0])]
        packed = [_copied(serialize(WorkerCall(number, role, method, share, pending.heard))) for share in shares]
        of_rank = pending.shares.of_rank
        for rank, peer in self._peers.items():
            peer.outbox.put(packed[0 if division is None else of_rank[rank]])

    def look(self, ranks: Sequence[int]) -> None:
        """Agents tell of their workers' progress all the time."""

    def stopped_s(self, ranks: Sequence[int], time_of: StoppedTime) -> float:
        found = [self._peers[rank].status for rank in ranks if rank in self._peers]
        return max((status.stopped_s for status in found if status is not None), default=0.0)

    def inert(self, ranks: Sequence[int]) -> Sequence[int]:
        self._refresh(ranks)
        return [rank for rank in ranks if self._is_silent(rank) or "stopped" in self.state(rank)]

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        self._refresh(ranks)
        for rank in ranks:
            self._peers[rank].stack = None
            self._peers[rank].tell(StackRequest())
        deadline = Deadline(STACK_TIMEOUT_S)
        while deadline.left_s and any(self._peers[rank].stack is None for rank in ranks):
            time.sleep(0.05)
        replies = {rank: self._peers[rank].stack for rank in ranks}
        return {rank: "" if reply is None else reply.stack for rank, reply in replies.items()}

    def state(self, rank: int) -> str:
        peer = self._peers.get(rank)
        if peer is None:
            return ""
        if self._is_silent(rank):
            return f"the process of torchrun for it on {peer.hello.host} does not answer"
        return "" if peer.status is None else peer.status.state

    def tail(self, rank: int) -> str:
        return self._peers[rank].tail if rank in self._peers else ""

    def kill(self) -> None:
        for peer in self._peers.values():
            peer.close()  # its agent ends the worker then, stopped ones too

    def close(self, is_idle: bool) -> None:
        for peer in self._peers.values():
            peer.outbox.put(None)
            if is_idle:
                peer.tell(HangUp())
        if not is_idle:
            self.kill()
        deadline = Deadline(2 * END_TIMEOUT_S)
        for thread in [*self._threads, *([self._own] if self._own else [])]:
            thread.join(timeout=deadline.left_s)
        self.kill()
        self.progress.close()

    def _send_calls(self, group: RemoteWorkerGroup, rank: int, peer: _Peer) -> None:
        with contextlib.suppress(OSError):  # `_watch` tells how it ended
            while (call := peer.outbox.get()) is not None:
                peer.calls.send(call)
            peer.calls.send(serialize(None))

    def _take_replies(self, group: RemoteWorkerGroup, rank: int, peer: _Peer) -> None:
        try:
            while True:
                answer: WorkerReply = deserialize(peer.calls.receive())
                if answer.error is None:
                    group.on_reply(answer.number, rank, answer.result)
                else:
                    group.on_error(answer.number, rank, answer.error)
        except (ChannelClosed, EOFError):
            return  # likewise
        except Exception:  # noqa: BLE001 - an answer that cannot be read; whoever waits for it gets the error
            group.fail_call(-1, rank, traceback.format_exc())

    def _watch(self, group: RemoteWorkerGroup, rank: int, peer: _Peer) -> None:
        """Ask the agent how its worker is, until it hangs up."""
        try:
            while True:
                try:
                    message = peer.watch.receive(timeout_s=self._look_every_s)
                except TimeoutError:
                    peer.ask_status()
                    continue
                match message:
                    case WorkerStatus():
                        if peer.status is None or message.count != peer.status.count:
                            self.progress.advance(message.stage, slot=rank)
                        peer.status, peer.asked_at = message, None
                    case StackReply():
                        peer.stack, peer.tail = message, message.tail
                    case WorkerEnd():
                        group.on_end(rank, partial(str, message.words))
        except (ChannelClosed, OSError, ValueError) as error:
            host = peer.hello.host
            how = "does not answer any more: it is down, or the network to it" if is_host_lost(error) else ""
            gone = "ended: it was killed, by torchrun or otherwise, or it has crashed"
            words = f"its host {host} {how}" if how else f"the process of torchrun for it on {host} {gone}"
            group.on_end(rank, partial(str, words))

    def _refresh(self, ranks: Sequence[int]) -> None:
        """Ask how workers are, and wait for the answers for a while."""
        before: Mapping[int, WorkerStatus | None] = {rank: self._peers[rank].status for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._peers[rank].ask_status()
        deadline = Deadline(STACK_TIMEOUT_S)
        while deadline.left_s and any(self._peers[rank].status is before[rank] for rank in ranks):
            time.sleep(0.05)

    def _is_silent(self, rank: int) -> bool:
        """Whether the agent of a worker does not react."""
        asked_at = self._peers[rank].asked_at
        return asked_at is not None and time.monotonic() - asked_at >= min(STACK_TIMEOUT_S, 4.0)


def _copied(serialized: Serialized) -> Serialized:
    """Copy the message, since its source may change before it is sent."""
    return Serialized(serialized.head, [buffer.copy() for buffer in serialized.buffers])
