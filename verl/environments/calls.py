"""Calls of environments, run in a separate thread: each has an id, a deadline and a typed outcome.

The episode loop generates tokens in its own thread; calls run in an event loop in another thread, and results arrive
through a queue. The result of a call that returns after its deadline is dropped.
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
from typing import Any

from verl.environments.base import CallRecord, EnvironmentDescription, EnvironmentFactory, InfraError, StepResult
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
    """

    episode: int
    attempt: int
    record: CallRecord
    value: Any = None


async def called(method: Callable[..., Any], *args: Any) -> Any:
    """Call a function or coroutine function and return its result."""
    found = method(*args)
    return await found if inspect.isawaitable(found) else found


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


class CallRunner:
    """Runs the environments of one process."""

    def __init__(self, factory: EnvironmentFactory, options: EnvironmentDescription):
        self.factory, self.options = factory, options
        self.results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self._loop = EventLoopThread("environments")
        self._slots: asyncio.Semaphore | None = None
        self._pending = 0
        start = self._loop.begin(self._start())
        self._loop.wait(start, options.reset_timeout_s + STUCK_S)

    @property
    def num_pending(self) -> int:
        """Number of calls whose results were not taken yet."""
        return self._pending

    async def _start(self) -> None:
        self._slots = asyncio.Semaphore(self.options.max_concurrent)
        await self.factory.start()

    def reset(self, episode: int, attempt: int, call_id: str, environment: Any, row: Any, seed: int) -> None:
        """Begin an episode."""

        async def run() -> Any:
            observation = await called(environment.reset, row, seed)
            if fault := observation_fault(observation):
                raise InfraError(f"reset gave {fault}")
            return observation

        self._begin(episode, attempt, call_id, "reset", run, environment, self.options.reset_timeout_s)

    def step(self, episode: int, attempt: int, call_id: str, environment: Any, action: Any) -> None:
        """Take a turn."""

        async def run() -> Any:
            return as_step_result(await called(environment.step, action))

        self._begin(episode, attempt, call_id, "step", run, environment, self._step_limit(environment))

    def _step_limit(self, environment: Any) -> float:
        # The calls of a turn have deadlines of their own, and run side by side.
        return self.options.step_timeout_s * (1.0 if not getattr(environment, "times_calls", False) else 1.5) + 0.05

    def end(self, environment: Any) -> None:
        """Close an environment without waiting for it."""

        async def run() -> None:
            with contextlib.suppress(Exception):
                if (close := getattr(environment, "close", None)) is not None:
                    await asyncio.wait_for(called(close), self.options.step_timeout_s)

        self._loop.begin(run())

    def take(self, timeout_s: float) -> list[CallResult]:
        """The available results; optionally waits for the first.

        Raises:
            RolloutError: an environment blocks the event loop, so deadlines cannot be enforced.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self.results.get(timeout=timeout_s) if timeout_s else self.results.get_nowait())
            while True:
                found.append(self.results.get_nowait())
        self._pending -= len(found)
        return found

    def _begin(
        self,
        episode: int,
        attempt: int,
        call_id: str,
        name: str,
        run: Callable[[], Coroutine[Any, Any, Any]],
        environment: Any,
        timeout_s: float,
    ) -> None:
        async def guarded() -> None:
            assert self._slots is not None
            async with self._slots:
                begin = time.monotonic()
                value, outcome, error = None, "ok", ""
                try:
                    value = await asyncio.wait_for(run(), timeout_s)
                except TimeoutError:
                    outcome, error = "timeout", f"no answer within {timeout_s:g} s"
                    with contextlib.suppress(Exception):
                        await asyncio.wait_for(self.factory.abandon(environment), timeout_s)
                except asyncio.CancelledError:
                    raise
                except BaseException as failure:  # noqa: BLE001 - code of the user
                    outcome, error = "infra", f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
                record = CallRecord(call_id, name, outcome, time.monotonic() - begin, error)  # type: ignore[arg-type]
            self.results.put(CallResult(episode, attempt, record, value))

        self._pending += 1
        self._loop.begin(guarded())

    def close(self) -> None:
        """End all environments."""
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
