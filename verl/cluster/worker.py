"""The main program of a worker process: `python -m verl.cluster.worker`, started by `local_worker_group.py` alone.

Builds its roles and serves calls until the driver closes the connection. Unlike multiprocessing's spawn, this does not
import the driver's main script.
"""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError, Traceback
from verl.utils.child_process.channel import Channel
from verl.utils.child_process.interpreter import rare_garbage_collection
from verl.utils.child_process.process import run_child
from verl.utils.progress import Progress, report


@dataclass(frozen=True)
class WorkerStart:
    """Start message of a worker.

    Attributes:
        number: call number of its reply.
        payload: pickled (host description, build context).
        num_threads: torch threads.
        core: index of the CPU core to run on, among those that the process may use; None for any.
    """

    number: int
    payload: bytes
    num_threads: int
    core: int | None = None


@dataclass(frozen=True)
class WorkerCall:
    """A call to a method of a role.

    Attributes:
        result_ranks: ranks that reply with the result; others only acknowledge.
    """

    number: int
    role: str
    method: str
    args: tuple[Any, ...]
    result_ranks: Sequence[int]


@dataclass(frozen=True)
class WorkerReply:
    """Reply to a call; `error` is the traceback if it failed."""

    number: int
    result: Any = None
    error: str | None = None


def serve(channel: Channel, start: WorkerStart, _: Progress) -> None:
    """Build the roles and serve calls until the driver closes the connection."""
    report("importing")
    with rare_garbage_collection():
        from verl.cluster.shm_channel import pack, receive, send  # imports torch

    host = None
    try:
        try:
            with rare_garbage_collection():
                host, local_versions = _build(start), versions()
        except BaseException:  # noqa: BLE001 - the driver's to handle, `exit()` of a component included
            send(channel, pack(WorkerReply(start.number, error=Traceback.here())))
            return
        send(channel, pack(WorkerReply(start.number, local_versions)))
        report("idle")
        while (call := receive(channel)) is not None:
            report(f"{call.role}.{call.method}")
            answer = _carry_out(host, call)
            call = None  # frees its memory, unless the role has kept a reference
            try:
                message = pack(answer)
            except Exception:  # noqa: BLE001 - the driver's to handle
                message = pack(WorkerReply(answer.number, error=Traceback.here()))
            send(channel, message)
            report("idle")
    finally:
        if host is not None:
            host.close()


def _build(start: WorkerStart) -> Any:
    if start.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[start.core]})
    import torch

    torch.set_num_threads(start.num_threads)
    report("building the roles")
    host, context = pickle.loads(start.payload)
    return host.build(context)


def _carry_out(host: Any, call: WorkerCall) -> WorkerReply:
    try:
        result = host.call(call.role, call.method, call.args)
        if int(os.environ["RANK"]) not in call.result_ranks:
            return WorkerReply(call.number)
        return WorkerReply(call.number, result)
    except BaseException:  # noqa: BLE001 - the driver's to handle, `exit()` of a component included
        return WorkerReply(call.number, error=Traceback.here())


def versions() -> dict[str, str]:
    """Versions of Python, torch and verl in this process."""
    import torch

    import verl

    return {"python": platform.python_version(), "torch": str(torch.__version__), "verl": verl.__version__}


def refuse_mixed_versions(workers: Sequence[Mapping[str, str]], where: str) -> None:
    """Compare the versions of workers, by rank, with those of this process, the driver.

    Args:
        where: configuration path of the placement.
    Raises:
        ConfigError: a worker has other versions.
    """
    here = versions()
    for rank, worker_versions in enumerate(workers):
        for name, version in worker_versions.items():
            if version != here[name]:
                raise ConfigError(
                    f"{where}: rank {rank} has {name} {version}, the driver has {here[name]}. Install the same set "
                    "everywhere, and start the run anew if it was replaced meanwhile."
                )


if __name__ == "__main__":
    run_child("verl.cluster.worker")
