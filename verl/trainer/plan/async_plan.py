"""Asynchronous training, simulated from event to event: responses per second, idle shares, staleness.

trainer   batch t is complete ── admits batch t+S ── train_s ── sync_s ── waits for batch t+1
engine    each open row gets a token in token_s(rows) seconds ──> a row ends

Batches are admitted as in `verl.trainer.sampling`. With `rollout.weight_update=drain` the engine processes batches
and weight updates one after another; otherwise rows of several batches are open, and an update stops them for `load_s`.
Devices are divided between the two sides in proportion: rows over engines, and `train_s` over the devices that train.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl.trainer.plan.memory import MemoryPlan
from verl.trainer.plan.step_time import StageTime, engine_of
from verl.trainer.plan.workload import DeviceRates, role_processes, workload

STEPS = 40  # that are measured
NEVER = float("inf")
STALENESS = (0, 1, 2, 4)
MOST_STALENESS = 64  # largest simulated; more makes responses older and nothing faster
Lengths = Callable[[random.Random], Sequence[float]]  # tokens of each response of a batch


@dataclass(frozen=True, kw_only=True)
class AsyncTimes:
    """Seconds of both sides on all devices.

    Attributes:
        token_s: by number of rows, seconds in which an engine generates one token of each; `slots` is its maximum.
        train_s: of a step without generation and sync.
        prompts_s: of prefill of a batch.
        sync_s, load_s: of a sync, for the trainer, and for the engine, which pauses.
        devices, per_engine: number in all, and of an engine.
        drains: whether the engine finishes begun batches before it takes new weights.
        sync_waits: whether a sync of the trainer waits for that.
    """

    token_s: Callable[[float], float]
    slots: int
    train_s: float
    prompts_s: float = 0.0
    sync_s: float = 0.0
    load_s: float = 0.0
    devices: int = 1
    per_engine: int = 1
    drains: bool = True
    sync_waits: bool = False


@dataclass(frozen=True)
class AsyncSetting:
    """One simulated setting.

    Attributes:
        max_staleness: None for `trainer.mode=sync`, where all devices generate, then train.
        generate, train: devices of each side.
        trainer_idle, engine_idle: shares of the time.
        staleness: mean over tokens, in syncs.
    """

    max_staleness: int | None
    generate: int
    train: int
    samples_per_s: float = 0.0
    trainer_idle: float = 0.0
    engine_idle: float = 0.0
    staleness: float = 0.0


def simulate(setting: AsyncSetting, times: AsyncTimes, lengths: Lengths) -> AsyncSetting:
    """The setting with its measured numbers, without the steps in which the queue fills."""
    rows, marks, lags = simulated_steps(setting, times, lengths)
    seconds, trainer_s, engine_s = (last - first for first, last in zip(marks[-1 - STEPS], marks[-1], strict=True))
    return replace(
        setting,
        samples_per_s=STEPS * rows / seconds,
        trainer_idle=max(0.0, 1 - trainer_s / seconds),
        engine_idle=max(0.0, 1 - engine_s / seconds),
        staleness=sum(lag * n for lag, n in lags.items()) / sum(lags.values()),
    )


def simulated_steps(
    setting: AsyncSetting, times: AsyncTimes, lengths: Lengths
) -> tuple[int, list[tuple[float, float, float]], dict[int, float]]:
    """Rows of a batch; the time and busy seconds of trainer and engine at the beginning of the training of each batch;
    tokens by their lag in syncs, of those sampled when the queue is full."""
    ahead, engines, chance = setting.max_staleness or 0, setting.generate / times.per_engine, random.Random(0)
    train_s = times.train_s * times.devices / setting.train
    prompts_s = times.prompts_s * times.devices / setting.generate
    now = position = trainer_s = engine_s = 0.0  # `position`: tokens of a row that was drawn from the beginning
    trainer_end = engine_end = NEVER
    jobs, job = deque[int | None]([0]), None  # batches to begin; None is a weight update
    waiting, active = deque[tuple[int, float]](), list[tuple[float, int]]()  # rows: batch and tokens; end and batch
    open_rows, drawn, lags = dict[int, int](), Counter[int](), defaultdict[int, float](float)
    marks, stage, step, begun, version, rows = [], "waits", 0, 1, 0, 0
    while len(marks) <= ahead + 1 + STEPS:
        if stage == "waits" and open_rows.get(step) == 0:
            marks.append((now, trainer_s, engine_s))
            stage, trainer_end = "trains", now + train_s
            jobs.extend(range(begun, step + ahead + 1))
            begun = max(begun, step + ahead + 1)
        is_open = bool(waiting or active)
        if stage == "trained" and not (times.sync_waits and (is_open or jobs or engine_end < NEVER)):
            stage, trainer_end = "syncs", now + times.sync_s
        if jobs and engine_end == NEVER and not (times.drains and is_open):
            job = jobs.popleft()
            engine_end = now + (times.load_s if job is None else prompts_s)
        token_s = times.token_s(len(active) / engines)
        rows_end = now + (active[0][0] - position) * token_s if active and engine_end == NEVER else NEVER
        before, now = now, min(trainer_end, engine_end, rows_end)
        trainer_s += (now - before) * (trainer_end < NEVER)
        engine_s += (now - before) * bool(active or engine_end < NEVER)
        if rows_end < NEVER:
            tokens = (now - before) / token_s
            position = active[0][0] if now == rows_end else position + tokens
            for batch, count in drawn.items() if len(marks) > ahead and tokens else ():
                lags[batch - version] += count * tokens
        if now == trainer_end:
            trainer_end = NEVER
            if stage == "trains":
                stage = "trained"
            else:
                stage, step = "waits", step + 1
                jobs.extend([None, *range(begun, step + 1)])
                begun = max(begun, step + 1)
        elif now == engine_end:
            engine_end = NEVER
            if job is None:
                version += 1
            else:
                begins = lengths(chance)
                waiting.extend((job, length) for length in begins)
                rows = open_rows[job] = len(begins)
        while active and active[0][0] <= position:
            batch = heapq.heappop(active)[1]
            open_rows[batch] -= 1
            drawn -= Counter([batch])
        while waiting and len(active) < times.slots * engines:
            batch, length = waiting.popleft()
            heapq.heappush(active, (position + length, batch))
            drawn[batch] += 1
    return rows, marks, lags


@dataclass(frozen=True)
class AsyncPlan:
    """Settings of asynchronous training, and the synchronous one first."""

    settings: tuple[AsyncSetting, ...]

    @property
    def best(self) -> AsyncSetting:
        """The fastest setting; among those within 2 percent of it the least stale."""
        fastest = max(setting.samples_per_s for setting in self.settings)
        return next(s for s in self.settings if s.samples_per_s >= 0.98 * fastest)

    def lines(self) -> Iterator[str]:
        """A table in plain text."""
        yield "asynchronous training, simulated with the seconds of the plan"
        yield "max_staleness   generate+train  samples/s  idle: trainer  engine    lag"
        for s in self.settings:
            name = "mode=sync" if s.max_staleness is None else str(s.max_staleness)
            split = "in turn" if s.max_staleness is None else f"{s.generate}+{s.train}"
            idle = f"{s.trainer_idle:>15.0%}{s.engine_idle:>8.0%}"
            mark = "*" if s is self.best else " "
            yield f"{mark}{name:<14}{split:>15}{s.samples_per_s:>11.3g}{idle}{s.staleness:>7.2f}"
        yield "* the best; lag: mean age of a token in weight syncs"

    def to_json(self) -> dict[str, Any]:
        return {"settings": [asdict(s) for s in self.settings], "best": asdict(self.best)}


def plan_async(run: Any, times: AsyncTimes, lengths: Lengths) -> AsyncPlan:
    """Simulate the synchronous run, the best split of the devices for its `max_staleness`, other bounds with that
    split, and the split of `trainer.placement`. If one engine uses all devices, as many others are assumed to generate.
    """
    drains = run.rollout.weight_update == "drain"
    times = replace(times, drains=drains, sync_waits=drains and run.rollout.runs_ahead)
    count, each, staleness = times.devices, times.per_engine, min(MOST_STALENESS, run.trainer.max_staleness)
    splits = [(k, count - k) for k in range(each, count, each)] or [(count, count)]
    tried = (simulate(AsyncSetting(staleness, *split), times, lengths) for split in splits)
    best = max(tried, key=lambda setting: setting.samples_per_s)
    bounds = sorted({*STALENESS, staleness} if not times.sync_waits else {0, min(1, staleness)})
    settings = [AsyncSetting(None, count, count), *(replace(best, max_staleness=bound) for bound in bounds)]
    own = AsyncSetting(staleness, run.devices_apart, count - run.devices_apart)
    settings += [own] if own.generate and own.generate != best.generate else []
    return AsyncPlan(tuple(simulate(setting, times, lengths) for setting in settings))


def length_draws(run: Any, mean: int | None) -> Lengths:
    """Batches of responses, of exponential lengths with this mean, or of maximum length."""
    rows, most = workload(run).rows, run.response_tokens
    if mean is None:
        return lambda chance: [most] * rows
    return lambda chance: [min(most, 1 + round(chance.expovariate(1 / mean))) for _ in range(rows)]


def planned_times(run: Any, memory: MemoryPlan, stages: Sequence[StageTime], device: DeviceRates) -> AsyncTimes:
    """Seconds from the plan of the run."""
    engine, by_name = engine_of(run, memory, device), {stage.name: stage.seconds for stage in stages}
    length, training = engine.step.prompt + run.response_tokens / 2, role_processes(run)["actor"]
    devices, sync_s = training + run.devices_apart, by_name.get("sync", memory.roles[0].weights / device.link)
    return AsyncTimes(
        token_s=lambda count: engine.token_s(count, length)[0],
        slots=min(workload(run).rows, engine.most_slots),
        prompts_s=engine.prompts_s(run.trainer.group_size) * training / devices,
        train_s=sum(x for name, x in by_name.items() if name not in ("generate", "sync")) * training / devices,
        sync_s=sync_s,
        load_s=sync_s,
        devices=devices,
        per_engine=max(1, training // engine.engines),
    )
