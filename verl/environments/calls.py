"""Calls of environments, run in a separate thread: each has an id, a deadline and a typed outcome.

The episode loop generates tokens in its own thread; calls run in an event loop in another thread, and results arrive
through a queue. The result of a call that returns after its deadline is dropped. Calls are submitted together when the
loop next takes results. An environment that `answers_at_once` is called in the episode loop's thread.

Everything that an environment returns or raises becomes a `CallResult`: values are validated here, and in the process
of the environment (`hosts.host_main`), where file and line are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from verl.environments.base import (
    MAX_ERROR,
    CallRecord,
    DeadlinePassed,
    Environment,
    EnvironmentDescription,
    EnvironmentFactory,
    Fault,
    InfraError,
    Outcome,
    StepResult,
    within,
)
from verl.environments.hosts.host_main import BadAnswer, as_observation, as_step, failure
from verl.errors import RolloutError
from verl.http_client.client import EventLoopThread

log = logging.getLogger(__name__)

STUCK_S = 30.0  # how long environment code may block the event loop beyond the deadline of its call
MAX_TRACES = 100  # maximum number of different tracebacks in the run's log


@dataclass(frozen=True)
class CallResult:
    """Outcome of a call to an environment.

    Attributes:
        episode: its number in this call of the engine.
        attempt: attempt of the episode; results of earlier attempts are dropped.
        value: an observation (`reset`) or a `StepResult` (`step`); None if the outcome is not ok.
        play: number of the call of the engine.
    """

    episode: int
    attempt: int
    record: CallRecord
    value: Any = None
    play: int = 0


async def called(method: Callable[..., Any], *args: Any) -> Any:
    """Call a function or coroutine function and return its result."""
    result = method(*args)
    return await result if inspect.isawaitable(result) else result


def _at_once(found: Any) -> Any:
    """The value itself, or the result of a coroutine, which must not suspend.

    Raises:
        InfraError: the coroutine suspends.
    """
    if not inspect.iscoroutine(found):
        return found
    try:
        found.send(None)
    except StopIteration as end:
        return end.value
    found.close()
    raise InfraError("a method waits for something, and its environment says that it answers at once")


def as_step_result(found: Any) -> StepResult:
    """The return value of `step` as a `StepResult`.

    Raises:
        BadAnswer: it has another form, or a part has another type.
    """
    calls = found.calls if isinstance(found, StepResult) else ()
    if not isinstance(calls, tuple) or not all(isinstance(call, CallRecord) for call in calls):
        raise BadAnswer(f"step gave calls of type {type(calls).__name__}: expected a tuple of CallRecord")
    return StepResult(**as_step(found), calls=calls)


@dataclass(slots=True)
class _Call:
    """An environment call that has not started; see `CallResult`."""

    play: int
    episode: int
    attempt: int
    call_id: str
    name: Literal["reset", "step"]
    environment: Any
    arguments: tuple[Any, ...]
    timeout_s: float
    begin: float = 0.0

    @property
    def method(self) -> Callable[..., Any]:
        return self.environment.step if self.name == "step" else self.environment.reset

    def answered(self, found: Any) -> CallResult:
        """The result for a value that the method returned.

        Raises:
            BadAnswer: the value is invalid.
        """
        return self.result("ok", as_step_result(found) if self.name == "step" else as_observation(found, "reset"))

    def failed(self, error: BaseException) -> CallResult:
        """The result for an exception that the method raised; each traceback is logged once."""
        fault: Fault = "own"
        if isinstance(error, InfraError):
            text, trace, fault = f"InfraError: {error}", error.trace, error.fault
        else:
            report = failure(error, self.method)
            text, trace = report["error"], report["trace"]
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_ERROR]
        if trace and trace not in _logged and len(_logged) < MAX_TRACES:
            _logged.add(trace)
            log.warning("environment: %s\n%s", text, trace.rstrip(), extra={"console": False})
        return self.result("infra", None, text, fault)

    def result(self, outcome: Outcome, value: Any = None, error: str = "", fault: Fault = "own") -> CallResult:
        record = CallRecord(self.call_id, self.name, outcome, time.monotonic() - self.begin, error, fault)
        return CallResult(self.episode, self.attempt, record, value, self.play)


_logged: set[str] = set()


class CallRunner:
    """Runs the environments of one process.

    Attributes:
        on_result: called in another thread when a result is available.
        num_pending: number of calls whose results were not taken yet.
    """

    def __init__(self, factory: EnvironmentFactory, options: EnvironmentDescription):
        self.factory, self.options = factory, options
        self.on_result: Callable[[], object] = lambda: None
        self.results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self._loop = EventLoopThread("environments")
        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._play = self.num_pending = 0
        self._waiting: list[Coroutine[Any, Any, None]] = []  # not submitted yet
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
        try:
            self._loop.wait(self._loop.begin(factory.start()), options.reset_timeout_s + STUCK_S)
        except (InfraError, TimeoutError) as error:
            self.close()
            raise RolloutError(f"environment: it did not start: {error or type(error).__name__}") from error

    def begin_play(self) -> None:
        """Start new episodes with the same numbers: results of earlier calls are dropped."""
        self._play += 1
        self.num_pending = 0

    def reset(self, episode: int, attempt: int, call_id: str, environment: Any, row: Any, seed: int) -> None:
        """Begin an episode."""
        arguments, limit_s = (row, seed), self.options.reset_timeout_s
        self._begin(_Call(self._play, episode, attempt, call_id, "reset", environment, arguments, limit_s))

    def step(self, episode: int, attempt: int, call_id: str, environment: Any, action: Any) -> None:
        """Take a turn."""
        arguments, limit_s = (action,), self.options.step_timeout_s
        self._begin(_Call(self._play, episode, attempt, call_id, "step", environment, arguments, limit_s))

    def end(self, environment: Any) -> None:
        """Close an environment without waiting for it."""
        close = getattr(environment, "close", None)
        if close is None or getattr(close, "__func__", None) is Environment.close:
            return

        async def run() -> None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(called(close), self.options.step_timeout_s)

        self._waiting.append(run())

    def take(self, timeout_s: float) -> list[CallResult]:
        """The available results; optionally waits for the first.

        Raises:
            RolloutError: an environment blocks the event loop, so deadlines cannot be enforced.
        """
        self.hand_over()
        results = []
        with contextlib.suppress(queue.Empty):
            results.append(self.results.get(timeout=timeout_s) if timeout_s else self.results.get_nowait())
            while True:
                results.append(self.results.get_nowait())
        results = [result for result in results if result.play == self._play]
        self.num_pending -= len(results)
        return results

    def _begin(self, call: _Call) -> None:
        self.num_pending += 1
        if getattr(call.environment, "answers_at_once", False):
            call.begin = time.monotonic()
            try:
                self.results.put(call.answered(_at_once(call.method(*call.arguments))))
            except Exception as error:  # noqa: BLE001 - code of the environment
                self.results.put(call.failed(error))
            return
        self._waiting.append(self._made(call))

    def hand_over(self) -> None:
        """Start the waiting calls in the event loop, all at once because each submission wakes its thread; `take` also
        does this."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._loop.begin(self._run_all(waiting))

    async def _run_all(self, coroutines: list[Coroutine[Any, Any, None]]) -> None:
        for coroutine in coroutines:
            task = asyncio.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _made(self, call: _Call) -> None:
        call.begin = time.monotonic()
        try:
            if call.name == "reset" and hasattr(call.environment, "acquire_process"):
                await call.environment.acquire_process()  # may wait for other episodes, whose calls need slots
            async with self._slots:
                call.begin = time.monotonic()
                waiting = called(call.method, *call.arguments)
                if not getattr(call.environment, "keeps_deadlines", False):
                    waiting = within(call.timeout_s, waiting)
                result = call.answered(await waiting)
        except DeadlinePassed as error:
            result = call.result("timeout", error=str(error))
        except BaseException as error:  # user code may raise anything
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # cancelled by `close`, not by the environment
                raise
            result = call.failed(error)
        self.results.put(result)
        self.on_result()

    def close(self) -> None:
        """End all environments."""
        self.hand_over()
        with contextlib.suppress(Exception):
            self._loop.wait(self._loop.begin(self.factory.stop()), self.options.reset_timeout_s)
        self._loop.close()

    def stuck_after_s(self, num_episodes: int) -> float:
        """Seconds within which one of this many episodes must have a result."""
        options = self.options
        longest_s = max(options.step_timeout_s, options.reset_timeout_s)
        return STUCK_S + 2 * longest_s * (1 + num_episodes / options.max_concurrent)

    def stuck_error(self) -> RolloutError:
        """The error for results that are missing after all deadlines."""
        return RolloutError(
            f"environment: {self.num_pending} calls have not come back within their deadlines "
            f"(environment.step_timeout_s {self.options.step_timeout_s:g}): code of the environment blocks the "
            "event loop. Make its methods coroutines that await, or run it in separate processes "
            "(environment.processes)."
        )
