"""What the driver and the agent of a worker say to each other, over two connections.

calls   driver ──Serialized WorkerCall──> agent ──shared memory──> worker, and its replies the same way back
watch   driver ──AgentStart, StatusRequest, StackRequest, HangUp──> agent
               <──WorkerStatus, StackReply, WorkerEnd──
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class AgentHello:
    """First message of an agent on each of its connections.

    Attributes:
        rank, local_rank: of its worker.
        channel: which connection it is.
        host: the name of its machine.
        address, network: of its machine towards the driver, and the interface that has it, or that the user has
            chosen; empty where it is not known.
    """

    rank: int
    local_rank: int
    channel: Literal["calls", "watch"]
    host: str
    address: str
    network: str


@dataclass(frozen=True)
class AgentStart:
    """Have the worker started.

    Attributes:
        number: of the call that it answers when its roles are built.
        payload: pickled (host description, build context).
        num_threads: that torch may use.
        environment: variables of the worker.
        log: a file for what it prints, if the directory above its own is there on the agent's host.
        look_every_s: interval of status requests.
    """

    number: int
    payload: bytes
    num_threads: int
    environment: Mapping[str, str]
    log: Path | None
    look_every_s: float


@dataclass(frozen=True)
class StatusRequest:
    """Ask the agent how its worker is. The next one follows its answer: a driver that is stopped is sent nothing."""


@dataclass(frozen=True)
class StackRequest:
    """Request the stacks of the worker."""


@dataclass(frozen=True)
class HangUp:
    """The driver is done with the worker, which was asked to end."""


@dataclass(frozen=True)
class WorkerStatus:
    """How a worker is.

    Attributes:
        count, stage: of its progress.
        stopped_s: for how long it has been stopped by a signal.
        state: what the system says of it, as a clause.
    """

    pid: int
    count: int
    stage: str
    stopped_s: float
    state: str


@dataclass(frozen=True)
class StackReply:
    """Stacks of the worker's threads, empty if it does not react; and the end of its log."""

    stack: str
    tail: str


@dataclass(frozen=True)
class WorkerEnd:
    """The worker has ended, or does not answer; `words` say how."""

    words: str
