"""The content of a Ray actor: the roles of one process, and calls to them. Does not import Ray.

Calls run one after another in one thread; `progress`, `stack` and `end` run in a second one, also during a call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.cluster.shm_channel import Serialized, deserialize, serialize
from verl.cluster.worker import versions
from verl.errors import Traceback
from verl.utils.child_process.interpreter import rare_garbage_collection
from verl.utils.progress import Progress, report, report_to

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


class RayReply(NamedTuple):
    """Reply to a call; `error` is the traceback if it failed."""

    serialized: Serialized | None
    error: str | None = None


def own_gpu(ids: Sequence[str], visible: str | None) -> int:
    """Index of the process's own GPU among those that it sees.

    Args:
        ids: names of the GPUs that Ray assigned.
        visible: CUDA_VISIBLE_DEVICES. Ray sets it to the ids, so that the index is 0; with
            RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES the process sees all GPUs of the machine.
    """
    if not ids:
        return 0
    if visible is None:
        return int(ids[0])
    names = [name.strip() for name in visible.split(",")]
    return names.index(ids[0]) if ids[0] in names else 0


class RoleWorker:
    """One process of a group of roles.

    Args:
        log: file for the output of this process, if its directory exists on this machine.
    """

    def __init__(self, log: str | None):
        self._host: Any = None
        self._thread: int | None = None
        self._progress = Progress(num_slots=1)
        report_to(self._progress)
        if log is not None and Path(log).parent.is_dir():
            with open(log, "wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)

    def versions(self) -> dict[str, str]:
        """Versions that must be equal on all machines of a run."""
        return versions()

    def start(
        self,
        payload: bytes,
        search_path: Sequence[str],
        env: Mapping[str, str],
        num_threads: int,
    ) -> RayReply:
        """Build the roles.

        Args:
            payload: the pickled (host description, build context).
        """
        import torch

        self._thread = threading.get_ident()
        report("building the roles")
        try:
            os.environ.update(env)
            sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
            torch.set_num_threads(num_threads)
            with rare_garbage_collection():
                host, context = pickle.loads(payload)
                self._host = host.build(context)
        except BaseException:  # noqa: BLE001 - reported to the driver, `exit()` of a component included
            return RayReply(None, Traceback.here())
        return RayReply(serialize(None))

    def call(self, role: str, method: str, args: Serialized, returns_result: bool = True) -> RayReply:
        """Call a method of a role.

        Args:
            returns_result: whether the result is sent back.
        """
        report(f"{role}.{method}")
        try:
            result = self._host.call(role, method, deserialize(args))
            return RayReply(serialize(result if returns_result else None))
        except BaseException:  # noqa: BLE001 - reported to the driver, `exit()` of a component included
            return RayReply(None, Traceback.here())

    def progress(self) -> tuple[int, str]:
        """Progress count, and the current stage."""
        return self._progress.count(0), self._progress.stage()

    def stack(self) -> str:
        """Stack of the current call."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "idle"

    def end(self) -> None:
        """Free the models and leave the process group."""
        host, self._host = self._host, None
        if host is not None:
            with contextlib.suppress(BaseException):  # the process is about to end
                host.close()


_reserved: list[socket.socket] = []


def free_address(host: str) -> str:
    """An address of this machine with a free port, for a rendezvous. A bound socket reserves the port for the lifetime
    of this process."""
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((host, 0))
    _reserved.append(probe)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{probe.getsockname()[1]}"


def interface_of(address: str) -> str:
    """Name of this machine's network interface with the given IPv4 address; empty if none has it."""
    return next((interface for interface, interface_address in _interfaces() if interface_address == address), "")


def _interfaces() -> Iterator[tuple[str, str]]:
    """Interfaces with an IPv4 address, and the address."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, name.encode()[:15].ljust(256, b"\0"))
                yield name, socket.inet_ntoa(reply[20:24])
