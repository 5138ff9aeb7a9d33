"""Interface of sandboxes: run a Python program outside of this process and return its outcome."""

from __future__ import annotations

import concurrent.futures
import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from verl.component import BuildContext, Description, component
from verl.errors import SandboxError

MAIN = "main.py"  # name of a program in its directory
MAX_NAME_BYTES = 255
CHANNEL_FD = 3

# ok:       the program ended with exit status 0
# error:    it ended with another status, or by a signal that it raised itself
# timeout:  it was ended after timeout_s
# memory:   it needed more than memory_mib
# output:   it wrote more than max_output_kib, and was ended
# infra:    the sandbox failed, and not the program: nothing is known about it
Outcome = Literal["ok", "error", "timeout", "memory", "output", "infra"]


@dataclass(frozen=True)
class Program:
    """A Python program and its input.

    Attributes:
        code: run as `__main__` in an empty directory.
        files: created in that directory, by relative name.
        stdin: content of its standard input.
        timeout_s, memory_mib: its own limits; None: those of the sandbox, which are also upper bounds.
        channel: a socket that it has as file descriptor 3. `execute` closes it here; set by `execute_linked`.
    """

    code: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    stdin: str = ""
    timeout_s: float | None = None
    memory_mib: int | None = None
    channel: socket.socket | None = None

    def __post_init__(self) -> None:
        taken = {MAIN, *self.files}
        for name in self.files:
            parts = name.split("/")
            if not name or "\0" in name or name.startswith("/") or any(part in ("", ".", "..") for part in parts):
                raise ValueError(f"files has {name!r}: expected a relative name such as data/cases.txt.")
            if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
                raise ValueError(f"files has {name[:20] + '...'!r}: a name has at most {MAX_NAME_BYTES} bytes.")
            above = ["/".join(parts[:count]) for count in range(1, len(parts))]
            if name == MAIN or taken.intersection(above):
                other = "the program itself" if MAIN in (name, *above) else repr(min(taken.intersection(above)))
                raise ValueError(f"files has {name!r}, which collides with {other}. Choose another name.")
        for name, limit in (("timeout_s", self.timeout_s), ("memory_mib", self.memory_mib)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ValueError(f"{name} is {limit!r}: must be above 0.")

    def contents(self) -> dict[str, bytes]:
        """The files as bytes; lone surrogates, which a model can write, give invalid UTF-8."""
        return {name: encoded(x) if isinstance(x, str) else x for name, x in self.files.items()}


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class ExecutionResult:
    """Outcome of a program.

    Attributes:
        stdout, stderr: its output, decoded as UTF-8; invalid bytes are replaced.
        exit_status: as in a shell, 128 + N after signal N; None if the program was killed or its status is unknown.
        detail: for the outcome `infra`, what failed.
        seconds: run time, from when the program was passed to the sandbox.
    """

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    exit_status: int | None = None
    detail: str = ""
    seconds: float = 0.0


@component
class Sandbox(Description):
    """Base class of the options of `sandbox`.

    Args:
        timeout_s: for one program, at most.
        memory_mib: memory limit of a program with its child processes.
        max_output_kib: of its standard output, and as much of its standard error.
        max_concurrency: the most concurrent programs.
    """

    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] = 10.0
    memory_mib: Annotated[int, Field(ge=64, lt=2**30)] = 256
    max_output_kib: Annotated[int, Field(ge=1, lt=2**20)] = 256
    max_concurrency: PositiveInt = 4

    def build(self, context: BuildContext) -> CodeRunner:
        raise NotImplementedError


class CodeRunner:
    """A running `Sandbox`. Call `close` when done; `close` is idempotent."""

    def __init__(self, described: Sandbox):
        self.described = described

    def run(
        self,
        code: str,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
        memory_mib: int | None = None,
    ) -> ExecutionResult:
        """Run a program and wait for its end. May be called from several threads.

        Raises:
            ValueError: a name in `files` leads out of the program's directory or collides with another, the files do
                not fit into the sandbox, or a limit is not positive.
            SandboxError: the sandbox was closed.
        """
        return self.execute(Program(code, files or {}, stdin, timeout_s, memory_mib))

    def run_all(self, programs: Sequence[Program]) -> list[ExecutionResult]:
        """Run programs concurrently, `max_concurrency` at a time; returns the results in order."""
        if len(programs) < 2:
            return [self.execute(program) for program in programs]
        threads = min(len(programs), self.described.max_concurrency)
        with concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="verl sandbox") as pool:
            return list(pool.map(self.execute, programs))

    def execute(self, program: Program) -> ExecutionResult:
        """Run one program."""
        raise NotImplementedError

    def execute_linked(self, first: Program, second: Program) -> tuple[ExecutionResult, ExecutionResult]:
        """Run two programs concurrently, as one of `max_concurrency`. Each has one end of a stream socket as file
        descriptor 3; it reads its end when the other program has ended.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Kill running programs and reject further ones."""

    def limits(self, program: Program) -> tuple[float, int]:
        """Time and memory limits of a program: its own, at most those of the sandbox."""
        described = self.described
        return (
            min(program.timeout_s or described.timeout_s, described.timeout_s),
            min(program.memory_mib or described.memory_mib, described.memory_mib),
        )


def run_linked(
    run: Callable[[Program], ExecutionResult], first: Program, second: Program
) -> tuple[ExecutionResult, ExecutionResult]:
    """Run two programs with the ends of a socket as their channels.

    Args:
        run: runs one program; closes its channel in this process when the program has it.
    """

    def run_with(program: Program, end: socket.socket) -> ExecutionResult:
        with end:
            return run(replace(program, channel=end))

    ends = socket.socketpair()
    with ends[0], ends[1], concurrent.futures.ThreadPoolExecutor(1, "verl sandbox") as pool:
        later = pool.submit(run_with, second, ends[1])
        return run_with(first, ends[0]), later.result()


_OUT_OF_MEMORY = re.compile(r"(?:[\w.]*\.)?_?\w*MemoryError\b")


def outcome_of(exit_status: int, stderr: str) -> Outcome:
    """Outcome of a program that ended by itself; its traceback shows whether it ran out of memory."""
    if exit_status == 0:
        return "ok"
    return "memory" if _OUT_OF_MEMORY.match(stderr.rstrip().rpartition("\n")[2]) else "error"


def closed_error() -> SandboxError:
    return SandboxError("The sandbox was closed: it runs no more programs.")
