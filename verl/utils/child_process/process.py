"""A child process: starting it, messages, watching and ending it; and the child's main program.

    parent: ChildProcess(MODULE) ──ChildStart, messages, files──> child: run_child(MODULE) ─> serve(channel, ...)
                                 <──messages, Progress──

A child is started by `subprocess` as `python -m MODULE`, not by multiprocessing, so that it does not import the
parent's main script. It has its own process group, so that only the parent handles Ctrl-C. It ends soon after its
parent, also if that is killed; a suspended child is continued by the kernel then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl.utils.child_process.channel import STUCK_S, Channel, ChannelClosed, Look
from verl.utils.child_process.exit_report import LogExcerpt, describe_exit, excerpt, log_size, memory_kills
from verl.utils.child_process.interpreter import exit_without_freeing, rare_garbage_collection
from verl.utils.orphan_cleanup import CLEANUP, kill_group, resume_without_parent
from verl.utils.progress import STARTER_VARIABLE, Progress, is_stopped, report_to_starter, state_of
from verl.utils.redact import redact_output

_log = logging.getLogger(__name__)

PARENT_VARIABLE, CHANNEL_VARIABLE = "VERL_PARENT", "VERL_CHANNEL"
PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
KILL_TIMEOUT_S = 10.0  # a killed process ends at once, unless it is blocked in a disk or a device
LOOK_EVERY_S = 0.5
EXIT_LOOK_S = 0.02


@dataclass(frozen=True)
class ChildStart:
    """First message to a child.

    Attributes:
        sys_path: of the parent, for imports.
        setting: pickled, and unpickled after `sys_path` is set.
    """

    sys_path: tuple[str, ...]
    setting: bytes


class ChildLog:
    """The output of a child in a file, which may be unnamed and temporary.

    Attributes:
        path: None for an unnamed file.
        start: offset of the output of this process or call.
    """

    def __init__(self, path: Path | None):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        file = tempfile.TemporaryFile() if path is None else path.open("a+b")  # noqa: SIM115 - closed by `close`
        self.file: BinaryIO = file  # type: ignore[assignment]
        self.start = self.size

    @property
    def size(self) -> int:
        return log_size(self.file.fileno())

    def excerpt(self) -> LogExcerpt:
        """Lines that may explain the end of the process; empty if another thread has closed the log."""
        if self.file.closed:
            return LogExcerpt()
        try:
            return excerpt(self.file.fileno(), self.start)
        except (ValueError, OSError):
            return LogExcerpt()

    def text(self, start: int) -> str:
        """The text from an offset on."""
        return os.pread(self.file.fileno(), max(0, self.size - start), start).decode(errors="replace")

    def close(self) -> None:
        self.file.close()


class ChildProcess:
    """A process of `python -m MODULE`, whose main program is `run_child(MODULE)`.

    Args:
        module: name of the module.
        progress: shared memory for its progress.
        slot: its slot there.
        environment: further environment variables.
        without: environment variables to remove.
        output: file or descriptor for its output; None for that of this process.
        files: open files that it inherits under their numbers.
        is_in_own_session: whether it has its own session. In the session of its parent a low priority has an effect,
            since Linux divides processors among sessions first.
        is_killed_with_parent: whether the clean-up process kills it if this process is killed.
        stuck_s: see `Channel`.
    Attributes:
        pid: of the process and of its group.
        channel: connection to it.
    """

    def __init__(
        self,
        module: str,
        progress: Progress,
        *,
        slot: int = 0,
        environment: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
        output: BinaryIO | int | None = None,
        files: Sequence[int] = (),
        is_in_own_session: bool = False,
        is_killed_with_parent: bool = False,
        stuck_s: float | None = STUCK_S,
    ):
        ours, theirs = socket.socketpair()
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")])),
            PARENT_VARIABLE: str(os.getpid()),
            CHANNEL_VARIABLE: str(theirs.fileno()),
            STARTER_VARIABLE: f"{progress.fd}:{slot}",
        }
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        self._memory_kills, self._registered = memory_kills(), -1
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", module],
                env=inherited | dict(environment or {}) | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=(theirs.fileno(), progress.fd, *files),
                start_new_session=is_in_own_session,
                process_group=None if is_in_own_session else 0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        if is_killed_with_parent:
            self._registered = CLEANUP.register(process_groups=[self.pid])
        self.channel = Channel(ours, self.is_alive, stuck_s)

    def begin(self, setting: Any, look: Look | None = None) -> None:
        """Send the first message, with the argument `setting` of the module's `serve`.

        Raises:
            ChannelClosed: the process has ended.
        """
        self.channel.send(ChildStart(tuple(map(os.path.abspath, sys.path)), pickle.dumps(setting)), look=look)

    def exit_code(self) -> int | None:
        """`subprocess.Popen.returncode`; None while the process runs or is suspended.

        It is not reaped before `kill` has ended its group, so that its process id is not reused.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code has reaped all children
            return self._process.poll()
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def is_alive(self) -> bool:
        """Whether the process runs or is suspended."""
        return self.exit_code() is None

    def await_exit(self, timeout_s: float) -> int | None:
        """Wait at most `timeout_s` until the process has ended; see `exit_code`."""
        deadline = time.monotonic() + timeout_s
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(EXIT_LOOK_S)
        return code

    def describe_exit(self) -> str | None:
        """Description of how it ended; None if it has not."""
        code = self.exit_code()
        return None if code is None else describe_exit(code, self._memory_kills)

    def state(self) -> str:
        """State of the process by the operating system, as a clause; empty if unknown."""
        return state_of(self.pid)

    def is_stopped(self) -> bool:
        """Whether it is suspended by a signal or a debugger."""
        return is_stopped(self.pid)

    def request_stack(self) -> None:
        """Make it print the stacks of its threads, if it still handles signals."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGUSR2)

    def request_end(self) -> None:
        """Send SIGKILL to its process group; `kill` waits for the end."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, timeout_s: float) -> None:
        """Close the connection, so that it exits, and kill it after `timeout_s`; calling it again does nothing."""
        self.channel.close()
        self.await_exit(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill its process group, including suspended processes; calling it again does nothing.

        Waits for the end, unless the process is blocked in the kernel.
        """
        self.channel.close()
        if self._process.returncode is not None:
            return
        kill_group(self.pid)
        reap(self._process)
        CLEANUP.withdraw(self._registered)


def reap(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a killed process; None if it has not ended."""
    try:
        return process.wait(timeout=KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _log.error("process %d was killed but has not ended: it is blocked in a disk or a device", process.pid)
        return None


def is_parent_alive() -> bool:
    """Whether the parent is alive, in a child that runs `run_child`."""
    return os.getppid() == _parent


_parent = -1


def run_child(module: str, *, on_parent_end: Callable[[], object] | None = None, outlives_parent: bool = False) -> None:
    """The main program of a child: runs `serve(channel, setting, progress)` of a module until the parent closes the
    connection. It does not return: the process ends with status 0, or by an exception.

    The module is imported by its own name, so that classes of messages can be pickled.

    Args:
        module: name of the module.
        on_parent_end: called when the parent has ended, also during a computation, to end this process; by default
            `os._exit(1)`.
        outlives_parent: let `serve` finish its current work if the parent has ended.
    """
    global _parent
    _parent = int(os.environ.pop(PARENT_VARIABLE))
    redact_output()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # sent to all processes of a job; only the parent handles them
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN not inherited
        signal.siginterrupt(number, False)
    faulthandler.enable()  # a crash in native code tells where each thread was
    faulthandler.register(signal.SIGUSR2)
    resume_without_parent()
    if not outlives_parent:
        threading.Thread(target=_end_with, args=(on_parent_end,), name="end with parent", daemon=True).start()
    progress = report_to_starter()
    assert progress is not None
    channel = Channel(socket.socket(fileno=int(os.environ.pop(CHANNEL_VARIABLE))), is_parent_alive)
    with rare_garbage_collection():
        serve = importlib.import_module(module).serve
    with contextlib.suppress(ChannelClosed):
        start: ChildStart = channel.receive()
        sys.path[:] = [*start.sys_path, *(path for path in sys.path if path not in start.sys_path)]
        serve(channel, pickle.loads(start.setting), progress)
    exit_without_freeing()


def _end_with(end: Callable[[], object] | None) -> None:
    while is_parent_alive():
        time.sleep(LOOK_EVERY_S)
    if end is not None:
        end()
    os._exit(1)
