"""No sandbox: a program runs as a process of this user, with limits of time, memory and output and nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

from verl.component import BuildContext, component
from verl.sandbox.base import (
    MAIN,
    CodeRunner,
    ExecutionResult,
    Program,
    Sandbox,
    closed_error,
    outcome_of,
    run_linked,
)

logger = logging.getLogger(__name__)

_LIMITED = """
import os, resource, sys
if int(sys.argv[3]) >= 0:
    os.dup2(int(sys.argv[3]), 3)
    os.closerange(4, int(sys.argv[3]) + 1)
def limit(name, value):
    resource.setrlimit(name, (value, value))
limit(resource.RLIMIT_AS, int(sys.argv[1]))
limit(resource.RLIMIT_FSIZE, int(sys.argv[2]))
limit(resource.RLIMIT_CORE, 0)
sys.argv, sys.path[:0] = ["main.py"], ["."]
exec(compile(open("main.py", encoding="utf-8").read(), "main.py", "exec"))
"""
SPACE_MIB = 64  # of address space, beside the program's own


@component
class Unprotected(Sandbox):
    """Programs as processes of this user: THE MODEL'S CODE CAN READ, CHANGE AND SEND WHATEVER THIS USER CAN."""

    protects: ClassVar[bool] = False

    def build(self, context: BuildContext) -> UnprotectedRunner:
        logger.warning(
            "sandbox=none: CODE THAT THE MODEL WRITES RUNS ON THIS MACHINE WITH ALL RIGHTS OF YOUR USER. IT CAN READ "
            "AND DELETE YOUR FILES, USE YOUR KEYS AND YOUR NETWORK, AND END OTHER PROCESSES, THIS TRAINING TOO. "
            "Set sandbox=jail or sandbox=remote."
        )
        return UnprotectedRunner(self)


class UnprotectedRunner(CodeRunner):
    """A running `Unprotected`."""

    def __init__(self, described: Unprotected):
        super().__init__(described)
        self._slots, self._is_closed = threading.BoundedSemaphore(described.max_concurrency), False

    def close(self) -> None:
        self._is_closed = True

    def execute(self, program: Program) -> ExecutionResult:
        with self._slots:
            return self._run(program)

    def execute_linked(self, first: Program, second: Program) -> tuple[ExecutionResult, ExecutionResult]:
        with self._slots:
            return run_linked(self._run, first, second)

    def _run(self, program: Program) -> ExecutionResult:
        if self._is_closed:
            raise closed_error()
        with tempfile.TemporaryDirectory(prefix="verl-program-") as directory:
            return self._run_in(program, Path(directory))

    def _run_in(self, program: Program, directory: Path) -> ExecutionResult:
        started, (timeout_s, memory_mib) = time.perf_counter(), self.limits(program)
        most = self.described.max_output_kib * 1024
        code = program.code.encode("utf-8", "surrogatepass")
        for name, content in {MAIN: code, **program.contents()}.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        channel = () if program.channel is None else (program.channel.fileno(),)
        limits = [str((memory_mib + SPACE_MIB) * 2**20), str(most + 1), *map(str, channel or (-1,))]
        command = [sys.executable, "-I", "-X", "utf8", "-c", _LIMITED, *limits]
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(program.stdin.encode("utf-8", "surrogatepass"))
            given.seek(0)
            child = subprocess.Popen(
                command,
                cwd=directory,
                stdin=given,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=channel,
            )
            if program.channel is not None:
                program.channel.close()
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # what it has left running in its session
            child.wait()
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read(most + 1))
        stdout, stderr = (text[:most].decode("utf-8", "replace") for text in texts)
        seconds = time.perf_counter() - started
        if status is None:
            return ExecutionResult("timeout", stdout, stderr, seconds=seconds)
        if max(map(len, texts)) > most:
            return ExecutionResult("output", stdout, stderr, seconds=seconds)
        code = 128 - status if status < 0 else status
        return ExecutionResult(outcome_of(code, stderr), stdout, stderr, code, seconds=seconds)
