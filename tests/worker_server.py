"""Processes of workers, engines and scripts without the seconds of processor time that their imports take.

    ChildProcess ──Popen──> server ──clone──> worker: a child of this process, with the given environment and files

A process that has imported everything is copied for each of them. It computes nothing before, so that a copy is as a
fresh interpreter: no thread, no tensor, no seed. The copy is a child of the process that asks, as one that
`subprocess` starts is (CLONE_PARENT). Started anew are workers of other processes than this one, and those whose
environment differs in a variable that is read while modules are imported, as that of vLLM does. Scripts:
`faults.fork_server`. The processes of pytest-xdist are copies too, of a server of the one that distributes the tests;
each begins with a copy of itself, its own server.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

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
LAZY = (  # what a run imports when it comes to it
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.masking_utils",
    "torch._dynamo",
    "rich.console",
    "rich.live",
    "rich.progress",
    "rich.table",
    "rich.traceback",
    "hydra.main",
    "hydra._internal.hydra",
    "hydra.plugins.sweeper",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper",
)
# Heavy, or with threads, and not used; unit_tests lifts a limit of the interpreter
NOT_LOADED = {"wandb", "tensorboard", "vllm", "ray", "cli", "replay", "adapter", "service", "unit"}

forked: dict[int, Mapping[str, str]] = {}  # pids of the workers of this process, and their environments
own_server: WorkerServer | None = None  # of a process that pytest-xdist started


class WorkerServer:
    """The server, as the process sees it whose workers it makes."""

    def __init__(self, its_socket: socket.socket, pid: int):
        self._socket, self._pid = its_socket, pid
        self._lock = threading.Lock()

    @classmethod
    def start(cls, environment: Mapping[str, str], own_session: bool = True) -> WorkerServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(TESTS.parent), str(TESTS)]
        process = subprocess.Popen(
            [sys.executable, "-c", f"import worker_server; worker_server.serve({theirs.fileno()})"],
            env=dict(environment) | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=own_session,
        )  # fmt: skip
        process.returncode = 0  # it is waited for here
        theirs.close()
        assert ours.recv(MOST_BYTES) == b"1", "threads, of which a copy would have one"
        return cls(ours, process.pid)

    @classmethod
    def fork_here(cls) -> WorkerServer:
        """A copy of this process, which has computed nothing yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            carry_out(theirs)
        theirs.close()
        return cls(ours, pid)

    def fork(self, order: Mapping[str, Any], files: Mapping[int, int]) -> int:
        """The pid of a copy that carries an order out, with files by their numbers in it."""
        whole = {**order, "files": [*files], "cores": sorted(os.sched_getaffinity(0))}
        given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files.values()))]
        with self._lock:
            self._socket.sendmsg([json.dumps(whole).encode()], given)
            return int(self._socket.recv(MOST_BYTES))

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)


class WithCopies:
    """The module `subprocess`, whose `Popen` copies the server for a worker. The first one starts the server."""

    def __init__(self) -> None:
        self._server: WorkerServer | None = None
        self._environment, self._one_at_a_time = dict(os.environ), threading.Lock()
        modules, environment = self, self._environment

        class Popen(subprocess.Popen):
            def __init__(self, command: Any, **options: Any):
                if not is_as_a_copy(command, options, environment):
                    super().__init__(command, **options)
                    return
                output = options["stdout"]
                out = 1 if output is None else output if isinstance(output, int) else output.fileno()
                files = {1: out, 2: 2 if options["stderr"] is None else out} | {n: n for n in options["pass_fds"]}
                order = {"module": command[-1], "environment": dict(options["env"]), "directory": os.getcwd()}
                _start(self, command, modules.server(), {**order, "own_session": options["start_new_session"]}, files)
                if command[-1] == MODULES[0]:
                    forked[self.pid] = order["environment"]

        self.Popen = Popen

    def server(self) -> WorkerServer:
        with self._one_at_a_time:
            self._server = self._server or own_server or WorkerServer.start(self._environment)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def _start(
    process: subprocess.Popen, command: Any, server: WorkerServer, order: Mapping[str, Any], files: Mapping[int, int]
) -> None:
    """Let an instance of `Popen` stand for a copy."""
    process.args, process.returncode, process._child_created = command, None, True
    process._waitpid_lock = threading.Lock()
    process.stdin = process.stdout = process.stderr = None
    process.pid = server.fork(order, files)


def copies_for_xdist() -> None:
    """Processes that pytest-xdist starts from now on are copies of one that has imported everything."""
    from execnet.gateway_base import MainThreadOnlyExecModel

    server = WorkerServer.start(os.environ, own_session=False)  # Ctrl-C reaches them as it reaches this process

    class Popen(subprocess.Popen):
        def __init__(self, command: Any, stdin: int, stdout: int):
            (its_stdin, ours_in), (ours_out, its_stdout) = os.pipe(), os.pipe()
            order = {"code": command[-1], "environment": dict(os.environ), "directory": os.getcwd()}
            _start(self, command, server, {**order, "own_session": None}, {0: its_stdin, 1: its_stdout, 2: 2})
            os.close(its_stdin)
            os.close(its_stdout)
            self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    MainThreadOnlyExecModel.subprocess = SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def is_possible() -> bool:
    return platform.system() == "Linux" and platform.machine() in CLONE


def is_as_a_copy(command: Any, options: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Whether a process that is started in this way is as a copy of one with this environment."""
    env = options.get("env") or {}
    differing = [name for name in {*env, *environment} if env.get(name) != environment.get(name)]
    is_ours = command[:-1] == [sys.executable, "-m"] and command[-1] in MODULES
    return is_ours and not any(name.startswith(READ_AT_IMPORT) for name in differing)


@contextlib.contextmanager
def in_use() -> Iterator[WithCopies | None]:
    """Workers of this process are copies meanwhile, on a system that can make them."""
    if not is_possible():
        yield None
        return
    from verl.utils.child_process import process

    before, copies = process.subprocess, WithCopies()
    process.subprocess = copies  # type: ignore[assignment]
    try:
        yield copies
    finally:
        process.subprocess = before
        copies.close()


# In the server's process


def serve(number: int) -> NoReturn:
    """Import everything, and make copies as asked through a socket."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_everything()
    gc.freeze()  # what was imported is not garbage of a copy, and need not be copied for it
    orders = socket.socket(fileno=number)
    orders.send(str(len(os.listdir("/proc/self/task"))).encode())
    carry_out(orders)


def carry_out(orders: socket.socket) -> NoReturn:
    """Make copies as asked, until the test's process hangs up."""
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


def import_everything() -> None:
    """Import what trainers and workers import, and nothing that starts a thread."""
    import verl

    names = [module.name for module in pkgutil.walk_packages(verl.__path__, "verl.")]
    for name in [*(name for name in names if not NOT_LOADED & set(name.replace("_", ".").split("."))), *LAZY]:
        with contextlib.suppress(ImportError):  # of what is not installed; a copy that needs it says so itself
            importlib.import_module(name)
    from verl.compose.compose import compose_root

    compose_root("ppo", ["actor.lora={rank:1}", "trainer.seed=1", "data=files"])  # the parser learns its grammar


def end(status: int) -> NoReturn:
    """End as the interpreter does, but for freeing everything that was imported.

    That takes 1.4 s of processor time: more than most of what is run here.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _copy() -> int:
    """`os.fork`, but the copy's parent is this process's."""
    python = ctypes.pythonapi  # the interpreter's lock is held meanwhile
    python.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (python.PyOS_AfterFork_Child if pid == 0 else python.PyOS_AfterFork_Parent)()
    assert pid >= 0
    return pid


def _become(order: Mapping[str, Any], files: list[int], begun: int) -> None:
    """Be `python -m MODULE`, `python -c CODE`, or a script."""
    global own_server
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["own_session"] is not None:
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
    if "code" in order:
        if pid := os.fork():  # by the C library, which else has the number of another thread for `pthread_kill`
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        own_server, sys.argv = WorkerServer.fork_here(), ["-c"]
        exec(order["code"], {"__name__": "__main__"})
        end(0)
    if "script" in order:
        from faults.fork_server import run_script

        run_script(order)
    from verl.utils.child_process.process import run_child

    run_child(order["module"])
