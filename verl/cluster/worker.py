"""The main program of a worker process: `python -m verl.cluster.worker`, started by `cluster/launcher.py` alone.

It says that it is there, builds its roles, and carries out one call after another until the driver hangs up.
Started this way, and not by multiprocessing's spawn, it never imports the driver's main script.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from verl.utils.child_process import end_with_parent
from verl.utils.progress import Progress, report, report_to


@dataclass(frozen=True)
class WorkerStart:
    """First message to a worker.

    Attributes:
        sys_path: the driver's, so that user code that can be imported there can be imported here.
        payload: pickled (host description, build context); opened after `sys_path` is in place.
        num_threads: that torch may use.
        core: keep to this one of the cores that the process may use; None for any.
    """

    sys_path: tuple[str, ...]
    payload: bytes
    num_threads: int
    core: int | None = None


@dataclass(frozen=True)
class WorkerCall:
    """A method of a role, to be carried out.

    Attributes:
        heard: the ranks that are to answer with the result; others say that they have done it.
        rows, layout: of the whole batch, those that are sent here; how the rows of the answer are to lie in the memory
            that comes with the call. None where they are sent back.
    """

    number: int
    role: str
    method: str
    args: tuple[Any, ...]
    heard: Sequence[int]
    rows: Any = None
    layout: Any = None


@dataclass(frozen=True)
class WorkerReply:
    """What became of a call; `error` is the traceback if it failed."""

    number: int
    result: Any = None
    error: str | None = None


READY = -1  # the number of the answer to Start


def serve(connection: Connection) -> None:
    """Build the roles and answer calls until the driver hangs up."""
    host = None
    try:
        start: WorkerStart = connection.recv()
        try:
            host = _build(start)
        except BaseException:  # noqa: BLE001 - the driver's to handle, `exit()` of a component included
            from verl.cluster.shm_channel import MessagePacker, ShmChannel

            ShmChannel(connection, post := MessagePacker()).send(
                post.pack(WorkerReply(READY, error=traceback.format_exc()))
            )
            return
        from verl.cluster.launcher import versions
        from verl.cluster.shm_channel import (  # imports torch, so the search path was to be in place before
            MessagePacker,
            ShmChannel,
        )

        channel = ShmChannel(connection, post := MessagePacker())
        channel.send(post.pack(WorkerReply(READY, versions())))
        report("idle")
        while (call := channel.receive()) is not None:
            report(f"{call.role}.{call.method}")
            answer = _packed(post, _carry_out(host, call, channel.room))
            call = channel.room = None  # what it lies on is used again, unless the role has kept something
            channel.send(answer)
            report("idle")
    except (EOFError, ConnectionError):  # the driver is gone
        pass
    finally:
        if host is not None:
            host.close()


def _packed(post: Any, answer: WorkerReply) -> Any:
    try:
        return post.pack(answer)
    except Exception:  # noqa: BLE001 - the driver's to handle
        return post.pack(WorkerReply(answer.number, error=traceback.format_exc()))


def _build(start: WorkerStart) -> Any:
    sys.path[:] = [*start.sys_path, *(path for path in sys.path if path not in start.sys_path)]
    if start.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[start.core]})
    import torch

    torch.set_num_threads(start.num_threads)
    report("building the roles")
    host, context = pickle.loads(start.payload)
    return host.build(context)


def _carry_out(host: Any, call: WorkerCall, room: Any) -> WorkerReply:
    try:
        result = host.call(call.role, call.method, call.args)
        if int(os.environ["RANK"]) not in call.heard:
            return WorkerReply(call.number)
        if room is not None:
            from verl.cluster.batch_partition import write_output

            result = write_output(result, call.rows, call.layout, room)
        return WorkerReply(call.number, result)
    except BaseException:  # noqa: BLE001 - the driver's to handle, `exit()` of a component included
        return WorkerReply(call.number, error=traceback.format_exc())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach all processes of a job: the driver ends its workers
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2)  # the driver asks where a silent worker stands; the log has the answer
    end_with_parent(int(os.environ["VERL_WORKER_PARENT"]))
    rank = int(os.environ["RANK"])
    report_to(Progress.open(int(os.environ.pop("VERL_WORKER_PROGRESS"))), rank)
    with Connection(int(os.environ.pop("VERL_WORKER_CONNECTION"))) as connection:
        report("importing")
        connection.send(rank)
        serve(connection)


if __name__ == "__main__":
    from verl.cluster.worker import main as imported_main  # so that messages are of the importable module's classes

    imported_main()
