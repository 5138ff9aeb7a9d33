"""No sandbox: a program runs as a process of this user, with limits of time, memory and output and nothing else."""

from __future__ import annotations

import logging
import threading
import time

from verl.component import BuildContext, component
from verl.sandbox.base import CodeRunner, ExecutionResult, Program, Sandbox, closed_error, run_linked
from verl.sandbox.limited_run import run_limited

logger = logging.getLogger(__name__)


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
        started = time.perf_counter()
        outcome = run_limited(**self.limited_arguments(program), channel=program.channel)
        return self.limited_result(*outcome, time.perf_counter() - started)
