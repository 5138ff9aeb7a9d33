"""Asynchronous training, simulated by a heap of events: responses per second, idle shares, staleness.

trainer   batch t is complete ── admits batch t+S ── train_s ── sync_s ── waits for batch t+1
engine    each open row gets a token in token_s(rows) seconds ──> a row ends

Batches are admitted as in `verl.trainer.sampling`. With `rollout.weight_update=drain` the engine processes batches
and weight updates one after another; otherwise rows of several batches are open, and an update stops them for `load_s`.
Devices are divided between the two sides in proportion: rows over engines, and `train_s` over the devices that train.
"""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from verl.trainer.plan.memory import MemoryPlan
from verl.trainer.plan.step_time import StageTime, engine_of
from verl.trainer.plan.workload import DeviceRates, role_processes, workload

STEPS = 40  # that are measured
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


@dataclass
class _Row:
    batch: int
    tokens: float  # until its end
    start: float = 0.0


class _Simulation:
    """One run of a setting.

    Attributes:
        tokens: length of a row that was open from the beginning.
        changes: `tokens` at each weight update.
        sampled: tokens by batch and version of the weights.
        marks: time and busy seconds of trainer and engine at the beginning of the training of each batch.
    """

    def __init__(self, setting: AsyncSetting, times: AsyncTimes, lengths: Lengths):
        self.times, self.lengths, self.chance = times, lengths, random.Random(0)
        self.ahead, self.engines = setting.max_staleness or 0, setting.generate / times.per_engine
        self.train_s = times.train_s * times.devices / setting.train
        self.prompts_s = times.prompts_s * times.devices / setting.generate
        self.now = self.tokens = self.trainer_s = self.engine_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.jobs: deque[int | None] = deque()  # queue of batches to begin; None is a weight update
        self.active: list[tuple[float, int, _Row]] = []
        self.waiting: deque[_Row] = deque()
        self.open: Counter[int] = Counter()
        self.sampled: dict[int, defaultdict[int, float]] = {}
        self.changes: list[float] = []
        self.lags: defaultdict[int, float] = defaultdict(float)
        self.marks: list[tuple[float, float, float]] = []
        self.step = self.begun = self.rows = 0
        self.is_paused, self.trainer = False, "waits"

    def run(self) -> None:
        self._begin(1)
        while len(self.marks) <= self.ahead + 1 + STEPS:
            draws, token_s = self.active and not self.is_paused, self.times.token_s(len(self.active) / self.engines)
            time = self.now + (self.active[0][0] - self.tokens) * token_s if draws else float("inf")
            action = self._end_rows
            if self.events and self.events[0][0] <= time:
                time, _, action = heapq.heappop(self.events)
            span, self.now = time - self.now, time
            self.tokens += span / token_s if draws else 0.0
            self.engine_s += span * bool(self.active or self.is_paused)
            self.trainer_s += span * (self.trainer in ("trains", "syncs"))
            action()
            self._next_job()
            self._next_stage()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), action))

    def _begin(self, end: int) -> None:
        """Request the batches before `end` that were not begun."""
        self.jobs.extend(range(self.begun, end))
        self.begun = max(self.begun, end)
        self._next_job()

    def _next_job(self) -> None:
        if self.jobs and not self.is_paused and not (self.times.drains and self.open):
            job, self.is_paused = self.jobs.popleft(), True
            self._after(self.times.load_s if job is None else self.prompts_s, lambda: self._start(job))

    def _start(self, job: int | None) -> None:
        self.is_paused = False
        if job is None:
            self.changes.append(self.tokens)
            return
        lengths = self.lengths(self.chance)
        self.rows, self.open[job], self.sampled[job] = len(lengths), len(lengths), defaultdict(float)
        self._open(*(_Row(job, length) for length in lengths))

    def _open(self, *rows: _Row) -> None:
        self.waiting.extend(rows)
        while self.waiting and len(self.active) < self.times.slots * self.engines:
            row = self.waiting.popleft()
            row.start = self.tokens
            heapq.heappush(self.active, (row.start + row.tokens, next(self.order), row))

    def _end_rows(self) -> None:
        self.tokens = self.active[0][0]
        while self.active and self.active[0][0] <= self.tokens:
            end, _, row = heapq.heappop(self.active)
            start, version = row.start, bisect_right(self.changes, row.start)
            for change in [*self.changes[version:], end]:
                self.sampled[row.batch][version] += change - start
                start, version = change, version + 1
            self.open -= Counter([row.batch])
        self._open()

    def _next_stage(self) -> None:
        """Continue the trainer, if what it waits for is available."""
        if self.trainer == "waits" and self.step in self.sampled and not self.open[self.step]:
            for version, n in self.sampled[self.step].items() if len(self.marks) > self.ahead else ():
                self.lags[self.step - version] += n
            self.marks.append((self.now, self.trainer_s, self.engine_s))
            self.trainer = "trains"
            self._after(self.train_s, lambda: setattr(self, "trainer", "drains"))
            self._begin(self.step + self.ahead + 1)
        if self.trainer == "drains" and not (self.times.sync_waits and (self.open or self.jobs or self.is_paused)):
            self.trainer = "syncs"
            self._after(self.times.sync_s, self._synced)

    def _synced(self) -> None:
        self.jobs.append(None)
        self.step, self.trainer = self.step + 1, "waits"
        self._begin(self.step + 1)


def simulate(setting: AsyncSetting, times: AsyncTimes, lengths: Lengths) -> AsyncSetting:
    """The setting with its measured numbers, without the steps in which the queue fills."""
    simulation = _Simulation(setting, times, lengths)
    simulation.run()
    first, last = np.array(simulation.marks[simulation.ahead + 1]), np.array(simulation.marks[-1])
    seconds, trainer_s, engine_s = (last - first).tolist()
    return replace(
        setting,
        samples_per_s=STEPS * simulation.rows / seconds,
        trainer_idle=max(0.0, 1 - trainer_s / seconds),
        engine_idle=max(0.0, 1 - engine_s / seconds),
        staleness=sum(lag * n for lag, n in simulation.lags.items()) / sum(simulation.lags.values()),
    )


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
