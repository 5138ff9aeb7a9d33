"""What a process of torchrun does for the driver: one worker on its host, started, relayed to, watched and ended.

driver ══calls══> agent ──shared memory──> `python -m verl.cluster.worker`
       ══watch══>       ──its end, its stack, whether it is stopped

The agent itself computes nothing, so it can tell of a worker that is killed, stopped or hangs, and can end it.
The driver has such an agent too, in a thread, for the worker of rank 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

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
from verl.cluster.hosts.rendezvous import DriverAddress, DriverSearch
from verl.cluster.network import interface_of
from verl.cluster.rpc import END_TIMEOUT_S, STACK_TIMEOUT_S, Deadline
from verl.cluster.serialization import Serialized, serialize
from verl.cluster.shm_channel import MessagePacker, ShmChannel
from verl.cluster.worker import WorkerStart
from verl.utils import torchrun
from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.process import ChildLog, ChildProcess
from verl.utils.child_process.stopped_watch import StoppedTime
from verl.utils.progress import Progress
from verl.utils.torchrun import TorchrunPlace


def serve_driver(place: TorchrunPlace) -> int:
    """The main program of a process of torchrun on several hosts, but of the driver: a worker for each run of it.

    Returns:
        An exit status: 0 where the driver has said that it is done.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job: the driver decides
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    torchrun.forget()
    try:
        search = DriverSearch(place)
        while (driver := search.next()) is not None:
            with contextlib.suppress(ConnectionError):  # it ended before this one came to it: there may be another
                if not HostAgent(place, driver).serve():
                    return 1
    except ConnectionError as error:
        sys.stderr.write(f"The worker of rank {place.rank} on {socket.gethostname()} ends: {error}\n")
        return 1
    return 0


class HostAgent:
    """One worker on this host, and the connections of its agent to the driver.

    Raises:
        ConnectionError: the driver is not there any more.
    """

    def __init__(self, place: TorchrunPlace, driver: DriverAddress):
        self._calls = driver.connect()
        address = self._calls.own_address
        network = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
        hello = AgentHello(place.rank, place.local_rank, "calls", socket.gethostname(), address, network)
        self._calls.send(hello)
        self._watch = driver.connect()
        self._watch.send(replace(hello, channel="watch"))
        self._telling = threading.Lock()
        self._progress = Progress(num_slots=1)
        self._post = MessagePacker()
        self._log = ChildLog(None)
        self._child: ChildProcess | None = None

    def serve(self) -> bool:
        """Have the worker work until the driver hangs up. Returns whether it has said that it does."""
        is_done = False
        try:
            start: AgentStart = self._watch.receive()
            child = self._child = self._start(start)
            worker = ShmChannel(child.channel, self._post)
            for relay in (partial(self._to_worker, worker), partial(self._to_driver, worker)):
                threading.Thread(target=relay, daemon=True).start()
            stopped = StoppedTime(start.look_every_s)
            self._tell(self._status(child, stopped))
            while not is_done:
                match self._watch.receive():
                    case StatusRequest():
                        self._tell(self._status(child, stopped))
                    case StackRequest():
                        self._tell(StackReply(self._stack(child), self._tail()))
                    case HangUp():
                        is_done = True
            child.await_exit(END_TIMEOUT_S)
        except ChannelClosed:  # the driver is gone
            pass
        finally:
            self._end()
        return is_done

    def _start(self, start: AgentStart) -> ChildProcess:
        if start.log is not None and start.log.parent.is_dir():
            self._log.close()
            self._log = ChildLog(start.log)
        child = ChildProcess(
            "verl.cluster.worker",
            self._progress,
            environment={**start.environment, "OMP_NUM_THREADS": str(start.num_threads)},
            output=self._log.file,
            is_in_own_session=True,
            is_killed_with_parent=True,
            stuck_s=None,
        )
        child.begin(WorkerStart(start.number, start.payload, start.num_threads))
        return child

    def _to_worker(self, worker: ShmChannel) -> None:
        """Relay calls, until the driver hangs up."""
        with contextlib.suppress(OSError, EOFError):  # the other thread reports one that is gone
            while True:
                call: Serialized | None = self._calls.receive()
                worker.send(self._post.pack(call))

    def _to_driver(self, worker: ShmChannel) -> None:
        """Relay replies until the worker disconnects or ends."""
        try:
            while True:
                self._calls.send(serialize(worker.receive()))
        except (OSError, EOFError):
            with contextlib.suppress(OSError):
                self._tell(WorkerEnd(self._ending()))

    def _ending(self) -> str:
        child = self._child
        assert child is not None
        child.await_exit(END_TIMEOUT_S)
        host = socket.gethostname()
        if ended := child.describe_exit():
            return f"the process on {host} ended with {ended}\n{self._tail()}"
        return f"the process on {host} does not answer{f': {state}' if (state := child.state()) else ''}"

    def _status(self, child: ChildProcess, stopped: StoppedTime) -> WorkerStatus:
        seconds = stopped.of(child.pid)
        return WorkerStatus(child.pid, self._progress.count(0), self._progress.stage(), seconds, child.state())

    def _stack(self, child: ChildProcess) -> str:
        before, deadline = self._log.size, Deadline(STACK_TIMEOUT_S - 1.0)
        child.request_stack()
        while self._log.size == before and deadline.left_s:
            time.sleep(0.1)
        return self._log.text(before)

    def _tail(self) -> str:
        return "\n".join(self._log.excerpt().lines)

    def _tell(self, message: Any) -> None:
        with self._telling:
            self._watch.send(message)

    def _end(self) -> None:
        for channel in (self._calls, self._watch):
            channel.close()
        if self._child is not None:
            self._child.kill()
        self._log.close()
        self._progress.close()
        self._post.close()
