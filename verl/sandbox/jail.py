"""Jails on this machine, made by bubblewrap and started in advance: each runs one program and ends with it.

run ── lend ──> warm jail ── program ──> its first process ── fork ──> the program
 │                │ stdout, stderr, memory and time are watched from here
 └── outcome <────┘ the first process ends, and the kernel ends what is left of the jail
"""

from __future__ import annotations

import contextlib
import json
import logging
import marshal
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from verl.component import BuildContext, component
from verl.errors import ConfigError
from verl.sandbox.base import CodeRunner, ExecutionResult, Outcome, Program, closed_error, outcome_of, run_linked
from verl.sandbox.jail_command import ELSE, JailCommand, JailSettings, seccomp_filter
from verl.utils.child_process.pool import PoolClosed, ProcessPool
from verl.utils.orphan_cleanup import CLEANUP

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0  # of one jail; 10 ms on an idle machine
END_TIMEOUT_S = 10.0  # from SIGKILL to the end of a jail
ATTEMPTS = 3  # of one program, each in a fresh jail, where a jail ends without a report: it has left nothing behind
POLL_INTERVAL_S = 0.05  # at the memory of a jail
INTERPRETER_MIB = 32  # of address space, in addition to the program's own
MAX_FILES = 128
PAGE = os.sysconf("SC_PAGE_SIZE")
MARK_VARIABLE = "VERL_JAILS"  # in the environment of bubblewrap


class JailFailed(Exception):
    """A jail could not be started, or ended without reporting its program's status."""


class _JailProcess:
    """A jail whose first process waits for a program.

    Attributes:
        process: bubblewrap outside of the jail, which ends with it.
        control: connection to the first process of the jail.
        first: process id of the jail's first process, as seen from outside.
    """

    def __init__(self, described: JailSettings, command: JailCommand, mark: str):
        self.control, theirs = socket.socketpair()
        info, info_writer = os.pipe()
        self._info = open(info, "rb")  # noqa: SIM115 - closed by `await_ready`
        filter_fd = os.memfd_create("verl-seccomp")
        binary = os.open(command.bwrap, os.O_RDONLY)
        libraries = [os.open(path, os.O_RDONLY) for path in command.libraries]
        preloaded = {"LD_PRELOAD": " ".join(f"/proc/self/fd/{fd}" for fd in libraries)} if libraries else {}
        try:
            os.write(filter_fd, seccomp_filter())
            os.lseek(filter_fd, 0, os.SEEK_SET)
            fds = (binary, filter_fd, info_writer, theirs.fileno())
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command.arguments(described.disk_mib, *fds),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                pass_fds=(*fds, *libraries),
                env={MARK_VARIABLE: mark, **preloaded},
                cwd="/",
                bufsize=0,
                process_group=0,
            )
        finally:
            theirs.close()
            for fd in (info_writer, filter_fd, binary, *libraries):
                os.close(fd)
        self.first = self.process.pid

    @property
    def is_usable(self) -> bool:
        return self.process.poll() is None

    def await_ready(self) -> None:
        """Raises JailFailed: the jail cannot be made."""
        try:
            self.control.settimeout(START_TIMEOUT_S)
            ready = self.control.recv(1)
            with self._info:
                if ready:
                    self.first = int(json.load(self._info)["child-pid"])
        except (OSError, ValueError, KeyError) as error:
            raise JailFailed(f"a jail did not start within {START_TIMEOUT_S:g} s ({error})") from error
        if not ready:
            assert self.process.stderr is not None
            output = self.process.stderr.read(2000).decode(errors="replace").strip() or "it wrote nothing"
            raise JailFailed(f"a jail cannot be made on this machine: {output}")

    def kill(self) -> None:
        """Kill the whole jail and wait for its end."""
        self.control.close()
        if self.first != self.process.pid:
            self._kill(os.kill, self.first)
        self._kill(os.killpg, self.process.pid)  # before a jail is ready, bubblewrap's child waits for it forever
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _kill(self, kill: Callable[[int, int], None], number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(number, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_TIMEOUT_S / 2)


class JailPool(CodeRunner):
    """A running `Jail`."""

    described: JailSettings

    def __init__(self, described: JailSettings, command: JailCommand):
        super().__init__(described)
        self._slots = threading.BoundedSemaphore(described.max_concurrency)
        mark = secrets.token_hex(8)
        self._registered = CLEANUP.register(environment=[f"{MARK_VARIABLE}={mark}"])
        self._jails = ProcessPool(
            lambda: _JailProcess(described, command, mark), described.pool_size, is_used_once=True
        )

    @property
    def warm(self) -> list[_JailProcess]:
        """The jails that wait for a program."""
        return list(self._jails.loans)

    def execute(self, program: Program) -> ExecutionResult:
        (result,) = self._attempted(lambda: (self._attempt(program),))
        return result

    def execute_linked(self, first: Program, second: Program) -> tuple[ExecutionResult, ExecutionResult]:
        one, other = self._attempted(lambda: run_linked(self._attempt, first, second))
        return one, other

    def _attempted(self, attempt: Callable[[], tuple[ExecutionResult, ...]]) -> tuple[ExecutionResult, ...]:
        with self._slots:
            results = attempt()
            for _ in range(ATTEMPTS - 1):
                if any(result.outcome == "infra" for result in results):
                    results = attempt()
            return results

    def _attempt(self, program: Program) -> ExecutionResult:
        started = time.perf_counter()
        try:
            with self._jails.lend(START_TIMEOUT_S) as jail:
                return _Execution(self, jail, program).result(started)
        except PoolClosed:
            raise closed_error() from None
        except (JailFailed, OSError) as error:
            return ExecutionResult("infra", detail=str(error), seconds=time.perf_counter() - started)

    def close(self) -> None:
        self._jails.close()
        CLEANUP.withdraw(self._registered)


class _Execution:
    """The execution of one program in one jail."""

    def __init__(self, pool: JailPool, jail: _JailProcess, program: Program):
        self._described, self._jail, self._program = pool.described, jail, program
        self._timeout_s, self._memory_mib = pool.limits(program)
        self._texts = b"", b""
        self._cut: Outcome | None = None  # the limit by which it was ended
        assert jail.process.stdin is not None
        self._stdin, jail.process.stdin = jail.process.stdin, None  # `communicate` writes it in its first call alone

    def result(self, started: float) -> ExecutionResult:
        jail = self._jail
        try:
            self._hand_over()
            self._watch(time.monotonic() + self._timeout_s)
            report = self._report()
            if report is None and self._cut is None:
                raise JailFailed("a jail ended without a report of its program")
        finally:
            jail.kill()
        stdout, stderr = (text.decode("utf-8", "replace") for text in self._texts)
        outcome, code = self._cut, None
        if outcome is None and report is not None:
            status, cpu_s = os.waitstatus_to_exitcode(report[0]), report[1]
            code = 128 - status if status < 0 else status
            is_late = status in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s >= self._timeout_s
            outcome = "timeout" if is_late else outcome_of(code, stderr)
        return ExecutionResult(outcome or "infra", stdout, stderr, code, seconds=time.perf_counter() - started)

    def _hand_over(self) -> None:
        channel, control, described = self._program.channel, self._jail.control, self._described
        contents = self._program.contents()
        program = {
            "code": self._program.code,
            "files": [(name, len(content)) for name, content in contents.items()],
            "limits": {
                "RLIMIT_CORE": 0,
                "RLIMIT_MEMLOCK": 0,
                "RLIMIT_MSGQUEUE": 0,
                "RLIMIT_CPU": int(self._timeout_s) + 2,  # of one process, where its clock fails to end it
                "RLIMIT_FSIZE": described.disk_mib * 2**20,
                "RLIMIT_NOFILE": MAX_FILES,
                "RLIMIT_NPROC": described.max_processes + 1,  # the jail's first process counts
                "RLIMIT_AS": (self._memory_mib + INTERPRETER_MIB) * 2**20,
            },
            "has_channel": channel is not None,
        }
        text = marshal.dumps(program, 2)  # the form of any Python 3
        try:
            control.sendall(len(text).to_bytes(8, "little") + text)
            for content in contents.values():
                control.sendall(content)
            if channel is not None:
                socket.send_fds(control, [b"C"], [channel.fileno()])
                channel.close()
        except OSError as error:
            self._report()
            raise JailFailed(f"a jail ended before it had its program ({error})") from error

    def _watch(self, deadline: float) -> None:
        """Transfer input and output and check limits until the jail ends or must be killed."""
        threading.Thread(target=self._write_input, daemon=True).start()
        jail, most_mib = self._jail, self._memory_mib + INTERPRETER_MIB
        most, has_ended = self._described.max_output_kib * 1024, False
        while not has_ended and self._cut is None:
            pause_s = min(POLL_INTERVAL_S, max(0.0, deadline - time.monotonic()))
            try:
                self._texts = jail.process.communicate(timeout=pause_s)
                has_ended = True
            except subprocess.TimeoutExpired as poll:  # the next call continues from here
                self._texts = poll.output or self._texts[0], poll.stderr or self._texts[1]
            if max(map(len, self._texts)) > most:
                self._cut = "output"
            elif not has_ended and time.monotonic() >= deadline:
                self._cut = "timeout"
            elif not has_ended and memory_mib(jail.first) > most_mib:
                self._cut = "memory"
        self._texts = self._texts[0][:most], self._texts[1][:most]

    def _write_input(self) -> None:
        with contextlib.suppress(OSError), self._stdin as pipe:  # it need not read it
            pipe.write(self._program.stdin.encode("utf-8", "surrogatepass"))

    def _report(self) -> tuple[int, float] | None:
        """Wait status and CPU seconds of the program, reported by the first process; None without a report.

        Raises:
            ValueError: the files of the program do not fit.
        """
        if self._cut is not None:
            return None
        self._jail.control.settimeout(END_TIMEOUT_S)
        try:
            report = self._jail.control.recv(4096)
        except OSError:
            return None
        if report.startswith(b"F"):
            raise ValueError(
                f"files has {report[1:].decode('utf-8', 'replace')}. The sandbox holds disk_mib="
                f"{self._described.disk_mib} MiB."
            )
        status, _, cpu_s = report.partition(b" ")
        return (int(status), float(cpu_s)) if cpu_s else None


def memory_mib(first: int) -> float:
    """Memory of a process and its descendants; shared pages are counted once if the kernel reports them."""
    resident, pids = 0, descendants_of(first)
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
            resident += int(file.read().split()[1]) * PAGE
    if resident <= 64 * 2**20 or len(pids) < 2:
        return resident / 2**20
    proportional = 0
    for pid in pids:  # a page that several of them share counts by its part in each
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                proportional += next(int(line.split()[1]) for line in file if line.startswith(b"Pss:")) * 1024
        except PermissionError:
            return resident / 2**20
        except (OSError, StopIteration):  # it has ended meanwhile
            continue
    return proportional / 2**20


def descendants_of(first: int) -> list[int]:
    pids, ahead = [], [first]
    while ahead:
        pid = ahead.pop()
        pids.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                    ahead += map(int, file.read().split())
    return pids


@component
class Jail(JailSettings):
    """Runs each program in a new bubblewrap jail; some jails are started in advance."""

    def machine_faults(self) -> Iterator[str]:
        try:
            with contextlib.closing(replace(self, pool_size=1).build(BuildContext())) as pool:
                result = pool.run("print(6 * 7)")
        except ConfigError as error:
            yield from error.faults
            return
        if result.stdout != "42\n":
            printed = result.detail or result.stderr or result.outcome
            yield f"_target_ is Jail: a test program in a jail returned {printed!r} in place of 42. {ELSE}"

    def build(self, context: BuildContext) -> JailPool:
        """Raises ConfigError where this machine cannot make a jail."""
        return JailPool(self, JailCommand.find(self))
