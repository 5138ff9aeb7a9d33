"""Calls of environments, run in a separate thread: each has an id, a deadline and a typed outcome.

The episode loop generates tokens in its own thread; calls run in an event loop in another thread, and results arrive
through a queue. The result of a call that returns after its deadline is dropped. Calls are handed over together, when
the loop next takes results. An environment that `answers_at_once` is called in the episode loop's thread.
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
    CallRecord,
    Environment,
    EnvironmentDescription,
    EnvironmentFactory,
    InfraError,
    Outcome,
    StepResult,
)
from verl.errors import RolloutError
from verl.http_client.client import EventLoopThread

log = logging.getLogger(__name__)

STUCK_S = 30.0  # that code of an environment may hold the event loop beyond the deadline of its call


@dataclass(frozen=True)
class CallResult:
    """Outcome of a call of an environment.

    Attributes:
        episode: its number in this call of the engine.
        attempt: attempt of the episode; results of earlier attempts are dropped.
        value: an observation (`reset`) or a `StepResult` (`step`); None if the outcome is not ok.
        play: which call of the engine that was.
    """

    episode: int
    attempt: int
    record: CallRecord
    value: Any = None
    play: int = 0


async def called(method: Callable[..., Any], *args: Any) -> Any:
    """Call a function or coroutine function and return its result."""
    found = method(*args)
    return await found if inspect.isawaitable(found) else found


def _at_once(found: Any) -> Any:
    """The value, or the result of the coroutine, which must not suspend.

    Raises:
        InfraError: it suspends.
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
        InfraError: it has another form.
    """
    if isinstance(found, StepResult):
        made = found
    elif isinstance(found, tuple) and len(found) == 5:
        made = StepResult(*found)
    else:
        raise InfraError(
            f"step gave {type(found).__name__}: expected a StepResult or (observation, reward, terminated, truncated, "
            "info)"
        )
    if isinstance(made.reward, bool) or not isinstance(made.reward, (int, float)) or made.reward != made.reward:
        raise InfraError(f"step gave the reward {made.reward!r}: expected a finite number")
    if fault := observation_fault(made.observation):
        raise InfraError(f"step gave {fault}")
    if made.observation is None and not (made.terminated or made.truncated):
        raise InfraError("step gave no observation, and the episode goes on")
    return made


def as_observation(found: Any) -> Any:
    """The return value of `reset`.

    Raises:
        InfraError: it has another form.
    """
    if fault := observation_fault(found):
        raise InfraError(f"reset gave {fault}")
    return found


def observation_fault(observation: Any) -> str | None:
    """Why an observation is invalid; None if it is valid."""
    if observation is None or isinstance(observation, str):
        return None
    if isinstance(observation, (list, tuple)) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in observation
    ):
        return None
    return f"an observation of type {type(observation).__name__}: expected a text, chat messages or None"


class _Call:
    """An environment call that has not begun."""

    __slots__ = (
        "arguments",
        "attempt",
        "begin",
        "call_id",
        "environment",
        "episode",
        "name",
        "play",
        "timeout_s",
    )

    def __init__(
        self,
        play: int,
        episode: int,
        attempt: int,
        call_id: str,
        name: Literal["reset", "step"],
        environment: Any,
        arguments: tuple[Any, ...],
        timeout_s: float,
    ):
        self.play, self.episode, self.attempt, self.call_id, self.name = play, episode, attempt, call_id, name
        self.environment, self.arguments, self.timeout_s = environment, arguments, timeout_s
        self.begin = 0.0

    @property
    def method(self) -> Callable[..., Any]:
        return self.environment.step if self.name == "step" else self.environment.reset

    def answered(self, found: Any) -> CallResult:
        """The result where the method returned this.

        Raises:
            InfraError: it is not an answer.
        """
        return self.result("ok", as_step_result(found) if self.name == "step" else as_observation(found))

    def failed(self, failure: BaseException) -> CallResult:
        """The result where the method raised."""
        return self.result("infra", None, f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}")

    def result(self, outcome: Outcome, value: Any = None, error: str = "") -> CallResult:
        record = CallRecord(self.call_id, self.name, outcome, time.monotonic() - self.begin, error)
        return CallResult(self.episode, self.attempt, record, value, self.play)


class CallRunner:
    """Runs the environments of one process."""

    def __init__(self, factory: EnvironmentFactory, options: EnvironmentDescription):
        self.factory, self.options = factory, options
        self.results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self._loop = EventLoopThread("environments")
        self._slots: asyncio.Semaphore | None = None
        self._play = self._pending = 0
        self._waiting: list[Coroutine[Any, Any, None]] = []  # not handed over yet
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only
        start = self._loop.begin(self._start())
        self._loop.wait(start, options.reset_timeout_s + STUCK_S)

    @property
    def num_pending(self) -> int:
        """Number of calls whose results were not taken yet."""
        return self._pending

    def begin_play(self) -> None:
        """Begin other episodes under the same numbers: results of calls that were made before are dropped."""
        self._play += 1
        self._pending = 0

    async def _start(self) -> None:
        self._slots = asyncio.Semaphore(self.options.max_concurrent)
        await self.factory.start()

    def reset(self, episode: int, attempt: int, call_id: str, environment: Any, row: Any, seed: int) -> None:
        """Begin an episode."""
        arguments, limit_s = (row, seed), self.options.reset_timeout_s
        self._begin(_Call(self._play, episode, attempt, call_id, "reset", environment, arguments, limit_s))

    def step(self, episode: int, attempt: int, call_id: str, environment: Any, action: Any) -> None:
        """Take a turn."""
        arguments, limit_s = (action,), self._step_limit(environment)
        self._begin(_Call(self._play, episode, attempt, call_id, "step", environment, arguments, limit_s))

    def _step_limit(self, environment: Any) -> float:
        # The calls of a turn have deadlines of their own, and run side by side.
        return self.options.step_timeout_s * (1.0 if not getattr(environment, "times_calls", False) else 1.5) + 0.05

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
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self.results.get(timeout=timeout_s) if timeout_s else self.results.get_nowait())
            while True:
                found.append(self.results.get_nowait())
        found = [result for result in found if result.play == self._play]
        self._pending -= len(found)
        return found

    def _begin(self, call: _Call) -> None:
        self._pending += 1
        if getattr(call.environment, "answers_at_once", False):
            call.begin = time.monotonic()
            try:
                self.results.put(call.answered(_at_once(call.method(*call.arguments))))
            except Exception as failure:  # noqa: BLE001 - code of the environment
                self.results.put(call.failed(failure))
            return
        self._waiting.append(self._made(call))

    def hand_over(self) -> None:
        """Start the waiting calls in the event loop, together, since each start wakes its thread; `take` does so
        too.
        """
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._loop.begin(self._run_all(waiting))

    async def _run_all(self, coroutines: list[Coroutine[Any, Any, None]]) -> None:
        for coroutine in coroutines:
            task = asyncio.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _made(self, call: _Call) -> None:
        assert self._slots is not None
        async with self._slots:
            call.begin = time.monotonic()
            try:
                async with asyncio.timeout(call.timeout_s):
                    found = await called(call.method, *call.arguments)
                result = call.answered(found)
            except TimeoutError:
                result = call.result("timeout", error=f"no answer within {call.timeout_s:g} s")
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self.factory.abandon(call.environment), call.timeout_s)
            except asyncio.CancelledError:
                raise
            except BaseException as failure:  # noqa: BLE001 - code of the user
                result = call.failed(failure)
        self.results.put(result)

    def close(self) -> None:
        """End all environments."""
        self.hand_over()
        with contextlib.suppress(Exception):
            self._loop.wait(self._loop.begin(self.factory.stop()), self.options.reset_timeout_s)
        self._loop.close()

    def stuck_error(self) -> RolloutError:
        """The error for results that are still missing after every deadline."""
        return RolloutError(
            f"environment: {self._pending} calls have not come back within their deadlines "
            f"(environment.step_timeout_s {self.options.step_timeout_s:g}): code of the environment blocks the "
            "event loop. Make its methods coroutines that await, or run it in separate processes "
            "(environment.processes)."
        )
