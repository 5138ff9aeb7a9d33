"""Processes of workers and engines without the seconds of processor time that their imports take.

    ChildProcess ──Popen──> server ──clone──> worker: a child of this process, with the given environment and files

A process that has imported what they import is copied for each of them, as in `faults.fork_server`. The copy is a
child of the process that asks, as one that `subprocess` starts is (CLONE_PARENT). Started anew are: those of other
processes than this one, and those whose environment differs in a variable that is read while modules are imported, as
that of vLLM does.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
MODULES = ("verl.cluster.worker", "verl.rollout.engine_process.serve")
CLONE = {"x86_64": 56, "aarch64": 220}  # number of the system call
CLONE_PARENT = 0x00008000
READ_AT_IMPORT = (  # beginnings of variables that the interpreter, the loader or a module reads as it starts
    "VERL_STRICT_DATA_CHECK",
    "VERL_AUTO_CACHE_CLEAR",
    "PYTHONHASHSEED",
    "PYTHONMALLOC",
    "LD_",
    "MALLOC_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "ATEN_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "HF_",
    "TRANSFORMERS_",
    "VLLM_",
)
MOST_BYTES = 1 << 20

forked: dict[int, Mapping[str, str]] = {}  # pids of the workers of this process, and their environments


class WorkerServer:
    """The server, as the process sees it whose workers it makes."""

    def __init__(self, environment: Mapping[str, str]):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(TESTS.parent), str(TESTS)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker_server", str(theirs.fileno())],
            env=dict(environment) | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._lock = threading.Lock()
        assert self._socket.recv(MOST_BYTES) == b"1", "threads, of which a copy would have one"

    def fork(self, module: str, options: Mapping[str, Any]) -> int:
        """The pid of a copy that is `module`, with files and environment of these options of `subprocess.Popen`."""
        output = options["stdout"]
        out = 1 if output is None else output if isinstance(output, int) else output.fileno()
        err = 2 if options["stderr"] is None else out
        wanted = {1: out, 2: err} | {number: number for number in options["pass_fds"]}
        order = {
            "module": module,
            "environment": dict(options["env"]),
            "directory": os.getcwd(),
            "files": list(wanted),
            "own_session": options["start_new_session"],
            "cores": sorted(os.sched_getaffinity(0)),
        }
        files = array.array("i", wanted.values())
        with self._lock:
            self._socket.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
            pid = int(self._socket.recv(MOST_BYTES))
        if module == MODULES[0]:
            forked[pid] = order["environment"]
        return pid

    def close(self) -> None:
        self._socket.close()
        self._process.wait(timeout=60)


class WithCopies:
    """The module `subprocess`, whose `Popen` copies the server for a worker. The first one starts the server."""

    def __init__(self) -> None:
        self.server: WorkerServer | None = None
        modules, environment, one_at_a_time = self, dict(os.environ), threading.Lock()

        class Popen(subprocess.Popen):
            def __init__(self, command: Any, **options: Any):
                if not is_as_a_copy(command, options, environment):
                    super().__init__(command, **options)
                    return
                with one_at_a_time:
                    modules.server = modules.server or WorkerServer(environment)
                self.args, self.returncode, self._child_created = command, None, True
                self._waitpid_lock = threading.Lock()
                self.stdin = self.stdout = self.stderr = None
                self.pid = modules.server.fork(command[-1], options)

        self.Popen = Popen

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def is_as_a_copy(command: Any, options: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Whether a process that is started in this way is as a copy of one with this environment."""
    env = options.get("env") or {}
    differing = [name for name in {*env, *environment} if env.get(name) != environment.get(name)]
    is_ours = command[:-1] == [sys.executable, "-m"] and command[-1] in MODULES
    return is_ours and not any(name.startswith(READ_AT_IMPORT) for name in differing)


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Workers of this process are copies meanwhile, on a system that can make them."""
    if platform.system() != "Linux" or platform.machine() not in CLONE:
        yield
        return
    from verl.utils.child_process import process

    before, process.subprocess = process.subprocess, WithCopies()  # type: ignore[assignment]
    try:
        yield
    finally:
        server, process.subprocess = process.subprocess.server, before
        if server is not None:
            server.close()


# In the server's process


def serve(orders: socket.socket) -> None:
    """Make copies as asked, until the test's process hangs up."""
    from faults.fork_server import import_everything

    gc.disable()
    import_everything()
    gc.freeze()
    orders.send(str(len(os.listdir("/proc/self/task"))).encode())
    while True:
        message, files, _, _ = socket.recv_fds(orders, MOST_BYTES, 64)
        if not message:
            os._exit(0)
        ready, begun = os.pipe()
        pid = _copy()
        if pid == 0:
            orders.close()
            os.close(ready)
            _become(json.loads(message), files, begun)
        os.close(begun)
        os.read(ready, 1)  # it has a group of its own, or has ended: its group may get a signal now
        os.close(ready)
        orders.send(str(pid).encode())
        for number in files:
            os.close(number)


def _copy() -> int:
    """`os.fork`, but the copy's parent is this process's."""
    python = ctypes.pythonapi  # the interpreter's lock is held meanwhile
    python.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (python.PyOS_AfterFork_Child if pid == 0 else python.PyOS_AfterFork_Parent)()
    assert pid >= 0
    return pid


def _become(order: Mapping[str, Any], files: list[int], begun: int) -> None:
    """Be `python -m MODULE`."""
    gc.enable()
    (os.setsid if order["own_session"] else os.setpgrp)()
    os.close(begun)
    os.sched_setaffinity(0, order["cores"])
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    first_free = 1 + max(*order["files"], *files)  # so that none is overwritten before it is moved
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, first_free) for number in files]
    for number in files:
        os.close(number)
    for number, target in zip(above, order["files"], strict=True):
        os.dup2(number, target)
        os.close(number)
    from verl.utils.child_process.process import run_child

    run_child(order["module"])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
