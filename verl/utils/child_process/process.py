"""A child process: starting it, messages, watching and ending it; and the child's main program.

    parent: ChildProcess(MODULE) ──setting, messages, files──> child: run_child(MODULE) ─> serve(channel, ...)
                                 <──messages, Progress──

A child is started by `subprocess` as `python -m MODULE`, not by multiprocessing, so that it does not import the
parent's main script. It has its own process group, so that only the parent handles Ctrl-C. It ends soon after its
parent, also if that is killed; a suspended child is continued by the kernel then.

An exit report has the status or signal of a process as text, and the relevant lines of its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl.utils.child_process.channel import STUCK_S, Channel, ChannelClosed, JSONMessages, OnPoll
from verl.utils.child_process.interpreter import exit_without_freeing, rare_garbage_collection
from verl.utils.orphan_cleanup import CLEANUP, kill_group, kill_marked, resume_without_parent
from verl.utils.progress import STARTER_VARIABLE, Progress, is_stopped, report_to_starter, state_of
from verl.utils.redact import redact_output

TAIL_LINES = 20
TRACEBACK_LINES = 60  # limit for the traceback of the cause; longer ones lose their middle
READ_BYTES = 1 << 20  # read from the end of a log

# Lines that libraries print in normal operation: logging below ERROR (that of engines, then that of logging's own
# examples), glog and c10 below ERROR, warnings of Python
LEVEL = "DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL"
DATE, TIME = r"\d\d-\d\d", r"\d\d:\d\d:\d\d"
LOGGED = re.compile(
    rf"^(?:\([^)]*\) )?(?P<level>{LEVEL}) {DATE} {TIME} \[[^]]*\] ?(?P<text>.*)$"
    rf"|^\d{{4}}-{DATE} {TIME}[,.\d]* .{{0,60}}?\b(?P<level2>{LEVEL})\b.{{0,3}}(?P<text2>.*)$"
)
GLOG = re.compile(r"^\[?[WI]\d{4} \d\d:\d\d:\d\d")
WARNED = re.compile(r"^\S.*:\d+: \w*Warning: ")
QUIET = ("DEBUG", "INFO", "WARNING")
TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored in"
CHAIN = ("The above exception was the direct cause", "During handling of the above exception")
ABORTS = ("Fatal Python error: ", "terminate called ", "  what(): ")
_log = logging.getLogger(__name__)

PARENT_VARIABLE, CHANNEL_VARIABLE, MARK_VARIABLE = "VERL_PARENT", "VERL_CHANNEL", "VERL_COMMAND"
PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
KILL_TIMEOUT_S = 10.0  # a killed process ends at once, unless it is blocked in a disk or a device
POLL_S = 0.5
EXIT_POLL_S = 0.02


@dataclass(frozen=True)
class LogExcerpt:
    """Lines of a log about the end of a process.

    Attributes:
        lines: the relevant lines, in order.
        cause: the exception or abort that ended the process, in one line; None if the log has none.
    """

    lines: tuple[str, ...] = ()
    cause: str | None = None


def describe_exit(code: int, memory_kills_before: int | None = None) -> str:
    """`exit status 3`, `signal SIGSEGV`, `signal SIGKILL (...)`.

    Args:
        code: `subprocess.Popen.returncode`.
        memory_kills_before: `memory_kills()` before the process was started; None if unknown.
    """
    if code >= 0:
        return f"exit status {code}"
    name = next((known.name for known in signal.Signals if known == -code), str(-code))
    if -code != signal.SIGKILL:
        return f"signal {name}"
    now = memory_kills()
    if now is None or memory_kills_before is None:
        return f"signal {name} (out of memory, unless somebody sent it)"
    if now > memory_kills_before:
        return f"signal {name}: out of memory (the kernel has killed a process for lack of memory)"
    return f"signal {name}, sent by another process (the kernel has killed none for lack of memory)"


def memory_kills() -> int | None:
    """Counter of processes that the kernel has killed for lack of memory, here or in this container; None if
    unknown.
    """
    counts = []
    for file in _counters():
        try:
            match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            counts.append(int(match[1]))
    return sum(counts) if counts else None


def excerpt(log: str | Path | int, start: int = 0) -> LogExcerpt:
    """Lines of a log that may explain the end of a process, without normal output of libraries.

    Args:
        log: path, or descriptor of the open file.
        start: size of the log before the process was started.
    """
    try:
        text = _read(log, start)
    except OSError as error:
        return LogExcerpt((f"(its log cannot be read: {error})",))
    lines = list(_relevant(text.splitlines()))
    begin, cause = _cause(lines)
    if cause is None:
        return LogExcerpt(tuple(lines[-TAIL_LINES:]))
    excerpt_lines = lines[begin:]
    if len(excerpt_lines) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        excerpt_lines = [
            *excerpt_lines[:half],
            f"  ... ({len(excerpt_lines) - 2 * half} lines)",
            *excerpt_lines[-half:],
        ]
    return LogExcerpt(tuple(excerpt_lines), cause)


def log_size(log: str | Path | int) -> int:
    """Size of a log in bytes; 0 if it does not exist."""
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _read(log: str | Path | int, start: int) -> str:
    size = log_size(log)
    begin = max(start, size - READ_BYTES)
    if isinstance(log, int):
        return os.pread(log, max(0, size - begin), begin).decode(errors="replace")
    with open(log, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def _relevant(lines: Sequence[str]) -> Iterator[str]:
    """Yield the relevant lines; logged errors without the prefix of the logger."""
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if WARNED.match(line):
            number += number < len(lines) and lines[number].startswith("  ")  # the line of code
        elif line.startswith(IGNORED):
            number = _after_traceback(lines, number)
        elif (logged := LOGGED.match(line)) is not None:
            if (logged["level"] or logged["level2"]) not in QUIET:
                yield logged["text"] if logged["level"] else logged["text2"]
        elif line.strip() and not GLOG.match(line):
            yield line


def _after_traceback(lines: Sequence[str], number: int) -> int:
    """The number of the first line after a traceback that begins at this line, if one does."""
    if number >= len(lines) or lines[number] != TRACEBACK:
        return number
    number += 1
    while number < len(lines) and lines[number].startswith(" "):
        number += 1
    return number + 1


def _cause(lines: Sequence[str]) -> tuple[int, str | None]:
    """Line number at which the report of the fatal error begins, and the error in one line."""
    for last in range(len(lines) - 1, -1, -1):
        if lines[last].startswith(ABORTS):
            begin = last
            while begin > 0 and lines[begin - 1].startswith(ABORTS):
                begin -= 1
            return begin, " ".join(line.strip() for line in lines[begin : last + 1])
        if lines[last].startswith(TRACEBACK):
            end = _after_traceback(lines, last) - 1
            if end >= len(lines):
                continue
            begin = last
            for before in range(last - 1, -1, -1):  # chained exceptions before it
                if lines[before].startswith(TRACEBACK):
                    if not any(line.startswith(CHAIN) for line in lines[before:begin]):
                        break
                    begin = before
            return begin, lines[end]
    return len(lines), None


def _counters() -> Iterable[Path]:
    """Files with counters of OOM kills: of the control groups of this process, and of the machine."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        if controllers == "":
            yield Path(f"/sys/fs/cgroup{path}/memory.events")
        if controllers == "memory":
            yield Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    yield Path("/proc/vmstat")


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
        is_marked: whether all processes that it has started, in any session, end with it: they are found by a mark in
            their environment.
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
        is_marked: bool = False,
        stuck_s: float | None = STUCK_S,
    ):
        ours, theirs = socket.socketpair()
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")])),
            PARENT_VARIABLE: str(os.getpid()),
            CHANNEL_VARIABLE: str(theirs.fileno()),
            STARTER_VARIABLE: f"{progress.fd}:{slot}",
        }
        if is_marked:
            variables[MARK_VARIABLE] = self._new_mark()
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
            self._registered = CLEANUP.register(process_groups=[self.pid], environment=self._marks)
        self.channel = Channel(ours, self.is_alive, stuck_s)

    _marks: Sequence[str] = ()

    def _new_mark(self) -> str:
        """The value of a mark in the environment of this process and of all that it starts."""
        self._marks = [f"{MARK_VARIABLE}={(mark := secrets.token_hex(8))}"]
        return mark

    def begin(self, setting: Any, on_poll: OnPoll | None = None) -> None:
        """Send the first message, with the argument `setting` of the module's `serve`.

        Raises:
            ChannelClosed: the process has ended.
        """
        # pickled apart, since it is unpickled after the paths of imports are set
        self.channel.send((tuple(map(os.path.abspath, sys.path)), pickle.dumps(setting)), on_poll=on_poll)

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
            time.sleep(EXIT_POLL_S)
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
        """Kill its process group, including suspended processes, and what is marked; calling it again does nothing.

        Waits for the end, unless the process is blocked in the kernel.
        """
        self.channel.close()
        if self._process.returncode is not None:
            return
        for mark in self._marks:
            kill_marked(mark)
        kill_group(self.pid)
        reap(self._process)
        CLEANUP.withdraw(self._registered)


class CommandProcess(ChildProcess):
    """A command for any interpreter, with a connection for JSON messages as its standard input.

    It ends with all processes that it has started, in any session, even if this process is killed: they are found by a
    mark in their environment.

    Args:
        command: program and arguments.
        output: for its standard output and standard error.
        max_bytes: of a message from it.
    """

    def __init__(self, command: Sequence[str], output: int, max_bytes: int):
        ours, theirs = socket.socketpair()
        mark, self._memory_kills = self._new_mark(), memory_kills()
        self._registered = CLEANUP.register(environment=self._marks)
        try:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {MARK_VARIABLE: mark},
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is handled by the parent
            )
        except BaseException:
            CLEANUP.withdraw(self._registered)
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.channel = Channel(ours, self.is_alive, codec=JSONMessages, max_bytes=max_bytes)


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


def run_child(module: str, *, outlives_parent: bool = False) -> None:
    """The main program of a child: runs `serve(channel, setting, progress)` of a module until the parent closes the
    connection. It does not return: the process ends with status 0, or by an exception.

    The module is imported by its own name, so that classes of messages can be pickled.

    Args:
        module: name of the module.
        outlives_parent: let `serve` finish its current work if the parent has ended; else this process is killed then
            with its group, also during a computation.
    """
    global _parent
    _parent = int(os.environ.pop(PARENT_VARIABLE))
    redact_output(may_fail=True)
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
        threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    progress = report_to_starter()
    assert progress is not None
    channel = Channel(socket.socket(fileno=int(os.environ.pop(CHANNEL_VARIABLE))), is_parent_alive)
    with rare_garbage_collection():
        serve = importlib.import_module(module).serve
    with contextlib.suppress(ChannelClosed):
        sys_path, setting = channel.receive()
        sys.path[:] = [*sys_path, *(path for path in sys.path if path not in sys_path)]
        serve(channel, pickle.loads(setting), progress)
    exit_without_freeing()


def _end_with_parent() -> None:
    while is_parent_alive():
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)
