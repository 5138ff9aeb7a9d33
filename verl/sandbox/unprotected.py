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

from verl.component import BuildContext, component
from verl.sandbox.base import (
    MAIN,
    CodeRunner,
    ExecutionResult,
    Program,
    Sandbox,
    closed_error,
    encoded,
    outcome_of,
    run_linked,
)

logger = logging.getLogger(__name__)

SPACE_MIB = 64  # of address space, in addition to the program's own
LIMITED = """
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


@component
class Unprotected(Sandbox):
    """Programs as processes of this user: THE MODEL'S CODE CAN READ, CHANGE AND SEND WHATEVER THIS USER CAN."""

    def build(self, context: BuildContext) -> UnprotectedRunner:
        logger.warning(
            "sandbox=none: CODE THAT THE MODEL WRITES RUNS ON THIS MACHINE WITH ALL RIGHTS OF YOUR USER. IT CAN READ "
            "AND DELETE YOUR FILES, USE YOUR KEYS AND YOUR NETWORK, AND END OTHER PROCESSES, THIS TRAINING TOO. "
            "Set sandbox=jail."
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
        (timeout_s, memory_mib), most = self.limits(program), self.described.max_output_kib * 1024
        started, channel, status = time.perf_counter(), program.channel, None
        with (
            tempfile.TemporaryDirectory(prefix="verl-program-", ignore_cleanup_errors=True) as directory,
            tempfile.TemporaryFile() as source,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            for name, content in {MAIN: encoded(program.code), **program.contents()}.items():
                path = Path(directory, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            fds = () if channel is None else (channel.fileno(),)
            limits = [(memory_mib + SPACE_MIB) * 2**20, most + 1, *(fds or (-1,))]
            command = [sys.executable, "-I", "-X", "utf8", "-c", LIMITED, *map(str, limits)]
            source.write(encoded(program.stdin))
            source.seek(0)
            child = subprocess.Popen(
                command, cwd=directory, stdin=source, stdout=out, stderr=err, start_new_session=True, pass_fds=fds
            )
            if channel is not None:
                channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout_s)
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)  # processes that it left running in its session
            child.wait()
            texts = [os.pread(file.fileno(), most + 1, 0) for file in (out, err)]
        seconds, (stdout, stderr) = time.perf_counter() - started, (x[:most].decode("utf-8", "replace") for x in texts)
        if status is None:
            return ExecutionResult("timeout", stdout, stderr, seconds=seconds)
        if max(map(len, texts)) > most:
            return ExecutionResult("output", stdout, stderr, seconds=seconds)
        code = 128 - status if status < 0 else status
        return ExecutionResult(outcome_of(code, stderr), stdout, stderr, code, seconds=seconds)
