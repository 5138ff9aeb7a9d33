"""Guards: hooks around the stages of a training step, outside of the algorithm.

A stage is a method decorated with `@stage`; its name is one of `STAGES`. A guard is a generator function with the
arguments of a stage: it runs up to its `yield` before the stage, and continues with the result or the error of the
stage. A yielded value other than None replaces the first argument. A trainer registers its guards when it is built, the
first one innermost:

stage             guards
step              before: the number of the step; after: the log-prob gap where updates measured it
reward_rows       after: rewards that are not finite
run_roles         before: log-probs of the rollout engine against a plain forward pass
score             after: log-probs and values that are not finite
advantages        after: advantages that are not finite
observe           after: the log-prob gap of the step where it is known before the updates
optimizer_step    before: an injected fault, the log-prob gap that an update may have; after: a step that the engine
                  skipped because a number was not finite, or the gap too large

The checks and their reports are in `verl.monitoring.nonfinite`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from verl.monitoring.nonfinite import NonFiniteGuard
from verl.protocol import DataProto

STAGES = ("step", "reward_rows", "run_roles", "score", "advantages", "observe", "optimizer_step")

Guard = Callable[..., Generator[Any, Any, None]]
T = TypeVar("T")
P = ParamSpec("P")
Result = TypeVar("Result")


def stage(method: Callable[Concatenate[T, P], Result]) -> Callable[Concatenate[T, P], Result]:
    """Mark a method of a trainer, or of a component of it, as the stage of its name, to be wrapped by its `guards`."""
    name = method.__name__
    assert name in STAGES, name

    @functools.wraps(method)
    def guarded(self: T, *args: P.args, **kwargs: P.kwargs) -> Result:
        call: Callable[..., Any] = functools.partial(method, self)
        for guard in self.guards.of_stage[name]:  # type: ignore[attr-defined]
            call = functools.partial(_surrounded, guard, call)
        return call(*args, **kwargs)

    return guarded


def _surrounded(guard: Guard, call: Callable[..., Any], *args: Any) -> Any:
    generator = guard(*args)
    replaced = next(generator)
    try:
        result = call(*(args if replaced is None else (replaced, *args[1:])))
    except BaseException as error:
        generator.throw(error)
        raise
    with suppress(StopIteration):
        generator.send(result)
    return result


class Guards:
    """The guards of every trainer: of the step and of each optimizer step.

    Args:
        monitor: checks and reports.
    Attributes:
        of_stage: guards by stage.
    """

    def __init__(self, trainer: Any, monitor: NonFiniteGuard):
        self.trainer, self.monitor = trainer, monitor
        self.trained_on: DataProto | None = None  # context of the metrics of this step
        self.of_stage: dict[str, list[Guard]] = {name: [] for name in STAGES}
        self.of_stage["step"].append(self.whole_step)
        self.of_stage["optimizer_step"] += [self.skipped_update, self.injected_fault]

    def whole_step(self, batch: DataProto, step: int) -> Generator[None, dict[str, float], None]:
        self.trainer.cluster.step = self.monitor.step = step
        self.trained_on = batch
        metrics = yield
        if metrics["perf/samples"] and "entropies" not in self.trained_on:  # otherwise `observe` has seen it
            self.monitor.watch_gap(metrics, self.trained_on)
        self.trained_on = None

    def injected_fault(self, rows: DataProto, *args: Any) -> Generator[DataProto, Any, None]:
        yield self.monitor.with_injected_fault(rows)

    def skipped_update(
        self, rows: DataProto, name: str, role: Any, described: Callable[[], DataProto]
    ) -> Generator[None, dict[str, float], None]:
        self.monitor.check_update(name, (yield), described)


class PPOGuards(Guards):
    """The guards of a policy-gradient trainer."""

    def __init__(self, trainer: Any, monitor: NonFiniteGuard):
        super().__init__(trainer, monitor)
        for name in ("reward_rows", "run_roles", "score", "advantages", "observe", "optimizer_step"):
            self.of_stage[name].append(getattr(self, name))

    def reward_rows(self, rows: DataProto) -> Generator[None, DataProto, None]:
        self.monitor.inspect((yield), "reward")

    def run_roles(self, rows: DataProto) -> Generator[None, Any, None]:
        self.monitor.compare(rows, self.trainer.plain_log_probs)
        yield

    def score(self, rows: DataProto) -> Generator[None, DataProto, None]:
        self.monitor.inspect((yield), "score")

    def advantages(self, scored: DataProto) -> Generator[None, tuple[DataProto, Any], None]:
        experience, _ = yield
        self.monitor.inspect(experience, "credit")
        self.trained_on = experience

    def observe(self, experience: DataProto, step: int) -> Generator[None, dict[str, float], None]:
        self.monitor.watch_gap((yield), experience)

    def optimizer_step(
        self, rows: DataProto, name: str, role: Any, described: Callable[[], DataProto]
    ) -> Generator[DataProto | None, dict[str, float], None]:
        limited = copy.copy(rows)
        limited.meta_info = {**rows.meta_info, "stopping_gap_nats": self.monitor.stopping_gap}
        metrics = yield limited if name == "actor" else None
        self.monitor.refuse_gap(metrics, described)
