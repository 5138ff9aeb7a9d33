"""The queue between generation and training, under any schedule of engine, trainer, saves and kills."""

from __future__ import annotations

import itertools
import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusal

from verl.data.sampler import DataSampler
from verl.errors import RolloutError, WorkerDied
from verl.protocol import DataProto
from verl.rewards.async_rewards import AsyncRewards
from verl.rollout.base import GenerationRequest, SyncResult
from verl.trainer.sampling import RolloutQueue, Sampling
from verl.workers.rollout_worker import weight_digests


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def drawn(prompts: DataProto, request: GenerationRequest, version: int) -> DataProto:
    """Rows whose only token is the step that keys their noise."""
    rows = prompts.repeat(request.num_samples)
    fields = {"responses": torch.full((len(rows), 1), request.step), "response_mask": torch.ones(len(rows), 1) > 0}
    fields["policy_version"] = torch.full((len(rows),), version)
    return DataProto.from_dict(dict(rows.batch) | fields)


class Answer(Future):
    """A call to an engine that works only while somebody waits, or `FakeSampler.work` says so."""

    def __init__(self, engine: FakeSampler):
        super().__init__()
        self.engine = engine

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self.engine.work()
        return super().result()


class FakeSampler:
    """A group with the role `rollout`, which does its calls one by one."""

    world_size, shares_memory = 1, False

    def __init__(self):
        self.calls: deque[tuple[Answer, str, tuple]] = deque()
        self.step: int | None = None
        self.version = -1

    def submit(self, role: str, method: str, args: tuple) -> Future[Any]:
        self.calls.append((answer := Answer(self), method, args))
        return answer

    def close(self) -> None:
        """Nothing was started."""

    def work(self) -> None:
        if self.calls:
            answer, method, args = self.calls.popleft()
            if method == "load":
                self.version = args[0]
                answer.set_result([weight_digests(args[1])])
            else:
                answer.set_result(drawn(args[0], args[1], self.version))


class FakeStepSampler(FakeSampler):
    """A process of the role `rollout` in flight: each piece of work is one call, or one step of rows of 1 to 6 tokens.

    It begins no more rows than three, in their order.
    """

    def __init__(self, rank: int, size: int):
        super().__init__()
        self.rank, self.size = rank, size
        self.rows: list[tuple[int, int, list[int]]] = []  # step of the batch, length, and versions of the tokens so far
        self.batches: dict[int, tuple[DataProto, GenerationRequest]] = {}

    def work(self) -> None:
        if not self.calls or (self.calls[0][1] == "finish_batch" and not self._is_finished(self.calls[0][2][0])):
            open_rows = [row for row in self.rows if len(row[2]) < row[1]]
            for _, _, versions in open_rows[:3]:
                versions.append(self.version)
            assert open_rows or not self.calls, "nobody would ever answer"
            return
        answer, method, args = self.calls.popleft()
        answer.set_result(getattr(self, f"_{method}")(*args))

    def _is_finished(self, step: int) -> bool:
        return all(len(versions) == length for number, length, versions in self.rows if number == step)

    def _load(self, version: int, weights: dict[str, torch.Tensor]) -> dict[str, str]:
        self.version = version
        return weight_digests(weights)

    def _begin_batch(self, prompts: DataProto, request: GenerationRequest) -> None:
        assert request.step not in self.batches
        prompts = prompts[list(range(self.rank, len(prompts), self.size))]
        self.batches[request.step] = prompts, request
        for index in range(len(prompts) * request.num_samples):
            self.rows.append((request.step, 1 + (7 * request.step + 5 * index + self.rank) % 6, []))

    def _finish_batch(self, step: int) -> tuple[DataProto, float, tuple[int, list[str]]]:
        prompts, request = self.batches.pop(step)
        versions = [row[2] for row in self.rows if row[0] == step]
        self.rows = [row for row in self.rows if row[0] != step]
        width = max(map(len, versions))
        mask = torch.tensor([[place < len(row) for place in range(width)] for row in versions])
        fields = {
            "responses": torch.full(mask.shape, step),
            "response_mask": mask,
            "token_versions": torch.tensor([row + [0] * (width - len(row)) for row in versions]),
            "policy_version": torch.tensor([row[0] for row in versions]),
        }
        return DataProto.from_dict(dict(prompts.repeat(request.num_samples).batch) | fields), 0.0, (0, [])

    def _save_rows(self, step: int) -> dict[str, Any]:
        rows = [(number, length, list(versions)) for number, length, versions in self.rows]
        state = {"schedule": torch.tensor([step]), "steps": torch.tensor(sorted(self.batches), dtype=torch.int64)}
        return state | {"fake": (rows, dict(self.batches))}  # as the real one, opaque to the pipeline

    def _restore_rows(self, states: list[Any], version: int, weights: dict[str, torch.Tensor]) -> dict[str, str]:
        rows, batches = states[self.rank]["fake"] if states else ([], {})
        self.rows, self.batches = [(number, length, list(drawn)) for number, length, drawn in rows], dict(batches)
        return self._load(version, weights)


class FakeStepSamplers:
    """The group of several of these, of which one or another works."""

    shares_memory = False

    def __init__(self, size: int):
        self.world_size, self.step = size, None
        self.engines = [FakeStepSampler(rank, size) for rank in range(size)]
        self.chance = random.Random(size)

    def submit(self, role: str, method: str, args: tuple) -> Any:
        answers = [engine.submit(role, method, args) for engine in self.engines]
        return SimpleNamespace(
            result=lambda: [answer.result() for answer in answers],
            done=lambda: all(answer.done() for answer in answers),
        )

    def work(self) -> None:
        self.chance.choice(self.engines).work()


@dataclass
class FakeActor:
    """The actor, with an engine that generates one batch in the background."""

    version: int = 0
    begun: int | None = None

    def current_version(self) -> Future[int]:
        return done(self.version)

    def rollout_weights(self) -> Future[Any]:
        return done((self.version, {"w": torch.tensor([self.version])}))

    def sync(self) -> Future[SyncResult]:
        assert self.begun is None
        return done(SyncResult("synced"))

    def generate(self, prompts: DataProto, request: GenerationRequest) -> Future[DataProto]:
        assert self.begun is None
        return done(drawn(prompts, request, self.version))

    def begin_generate(self, prompts: DataProto, request: GenerationRequest) -> Future[None]:
        assert self.begun is None
        self.begun = self.version
        return done(None)

    def finish_generate(self, prompts: DataProto, request: GenerationRequest) -> Future[DataProto]:
        version, self.begun = self.begun, None
        assert version is not None
        return done(drawn(prompts, request, version))


class _OfBareRows(Sampling):
    """Its rows have ids and no tokens."""

    def _prepared(self, prompts: DataProto) -> DataProto:
        return prompts


@dataclass
class Schedule:
    """A run of the real admission and queue over fake engines.

    Attributes:
        skipped: steps that end without an update.
        trained: by step, prompts and the version that drew them.
    """

    staleness: int
    prompts_per_step: int
    num_steps: int
    has_rollout_worker: bool
    skipped: frozenset[int]
    in_flight: bool = False
    num_engines: int = 1
    trained: list[tuple[list[int], int, int]] = field(default_factory=list)

    def __post_init__(self):
        self.start()

    def start(self, saved: Any = None) -> None:
        """Begin, or go on from what `save` gave, with new engines."""
        self.actor = FakeActor()
        samplers = FakeStepSamplers(self.num_engines) if self.in_flight else FakeSampler()
        self.group: Any = samplers if self.has_rollout_worker else None
        self.sampler = DataSampler(7, self.prompts_per_step, seed=3)
        self.pipeline: Any = RolloutQueue(self.actor, self.staleness, self.group, in_flight=self.in_flight)
        settings, rollout = SimpleNamespace(group_size=2), SimpleNamespace(can_offload=False)
        run = SimpleNamespace(trainer=settings, algorithm=None, environment=None, rollout=rollout)
        trainer: Any = SimpleNamespace(description=run, tokenizer=None, guards=None, stages=None)
        trainer.train_data, trainer.sampler = SimpleNamespace(collate=self._collate), self.sampler
        trainer.num_steps, trainer.async_rewards = self.num_steps, AsyncRewards()
        trainer.data_responses = SimpleNamespace(sampled=lambda prompts, step: prompts)
        self.sampling = _OfBareRows(trainer, self.pipeline)
        self.trained = []
        if saved is not None:
            self.trained, self.actor.version = list(saved[0]), saved[1]
            self.sampler.load_state_dict(saved[2])
            self.pipeline.load_state_dict(saved[3])

    def save(self) -> Any:
        return list(self.trained), self.actor.version, self.sampler.state_dict(), self.pipeline.state_dict()

    def step(self, chance: random.Random) -> dict[str, float]:
        """One step, with the engine at work between any two lines."""
        step, batch = len(self.trained) + 1, self._collate(self.sampler.next_batch())
        self._engine_works(chance)
        rows = self.pipeline.take(batch, GenerationRequest(step, 2))
        self.sampling.begin_ahead(step)
        assert len(self.pipeline) == min(self.staleness, self.num_steps - step)
        begun = step + len(self.pipeline)
        assert begun - (step - 1) <= self.staleness + 1
        self._engine_works(chance)
        versions = rows["token_versions"] if "token_versions" in rows else rows["policy_version"]
        assert rows["prompt_ids"].tolist() == [i for i in batch["prompt_ids"].tolist() for _ in range(2)]
        assert set(rows["responses"][rows["response_mask"].bool()].tolist()) == {step}
        drawn_by = set(versions[rows["response_mask"]].tolist() if self.in_flight else versions.flatten().tolist())
        version = min(drawn_by)
        assert self.actor.version - version <= self.staleness
        assert self.in_flight or drawn_by == {version}
        self.trained.append((batch["prompt_ids"].tolist(), version, self.actor.version))
        if not self.in_flight and (
            self.staleness or self.has_rollout_worker
        ):  # an update a step, so that versions count syncs
            assert self.pipeline._metrics[f"async/lag_{self.actor.version - version}_share"] == 1
        if step in self.skipped:
            return {}
        self.actor.version += 1
        if self.pipeline.holds_weights:
            self.pipeline.collect()
        metrics = self.pipeline.sync().metrics
        self._engine_works(chance)
        return metrics

    def run(self, chance: random.Random) -> None:
        while len(self.trained) < self.num_steps:
            self.step(chance)

    def _collate(self, rows: torch.Tensor) -> DataProto:
        return DataProto.from_dict({"prompt_ids": rows, "group_ids": torch.arange(len(rows))})

    def _engine_works(self, chance: random.Random) -> None:
        if self.group is not None:
            for _ in range(chance.randrange(4)):
                self.group.work()


def run_with_kills(schedule: Schedule, chance: random.Random) -> tuple[int, list[dict[str, float]]]:
    """To the end, with saves and up to two kills; their number, and the metrics of all steps made."""
    saved, kills, killed, metrics = None, chance.randrange(3), 0, []
    while len(schedule.trained) < schedule.num_steps:
        metrics.append(schedule.step(chance))
        if chance.random() < 0.4:
            saved = schedule.save()
        if kills and chance.random() < 0.3:
            kills, killed = kills - 1, killed + 1
            schedule.start(saved)
    return killed, metrics


def some_steps(chance: random.Random, num_steps: int) -> frozenset[int]:
    return frozenset(step for step in range(1, num_steps + 1) if chance.random() < 0.1)


@pytest.mark.parametrize("schedules", [150, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("in_flight", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_schedule_with_saves_and_kills_trains_on_each_ticket_once_in_order_and_within_the_bound(
    in_flight, schedules
):
    killed = mixed = 0
    for seed in range(schedules):
        chance = random.Random(seed)
        staleness, prompts, steps = chance.randint(in_flight, 4), chance.randint(1, 3), chance.randint(1, 6)
        skipped, has_worker = some_steps(chance, steps), in_flight or chance.random() < 0.7
        engines = chance.randint(1, prompts) if in_flight else 1
        schedule = Schedule(staleness, prompts, steps, has_worker, skipped, in_flight=in_flight, num_engines=engines)
        kills, metrics = run_with_kills(schedule, chance)
        killed += kills
        mixed += sum(0 < x < 1 for line in metrics for name, x in line.items() if name.startswith("async/lag"))
        order = DataSampler(7, prompts, seed=3)
        synced = [sum(step not in skipped for step in range(1, s)) for s in range(1, steps + 1)]
        assert len(schedule.trained) == steps
        for index, (prompt_ids, version, trained_at) in enumerate(schedule.trained):
            assert prompt_ids == order.next_batch().tolist(), seed
            assert trained_at == synced[index], seed
            oldest = synced[max(0, index - staleness)]
            assert oldest <= version <= trained_at if in_flight else version == oldest, seed
    assert killed > schedules / 3
    assert not in_flight or mixed > schedules


@pytest.mark.parametrize("has_rollout_worker", [True, False])
def test_the_lag_of_each_token_is_counted_in_syncs(has_rollout_worker):
    schedule, chance = Schedule(2, 1, 6, has_rollout_worker, frozenset()), random.Random(0)
    lags = []
    for _ in range(6):
        metrics = schedule.step(chance)
        lags.append([metrics[f"async/lag_{lag}_share"] for lag in range(3)])
        assert metrics["async/oldest_group_s"] >= 0
        assert metrics["async/wait_s"] >= 0
        assert ("sync/bytes" in metrics) == has_rollout_worker
    assert lags == [[1, 0, 0], [0, 1, 0], *[[0, 0, 1]] * 4]


def test_a_synchronous_run_has_no_such_metrics():
    schedule, chance = Schedule(0, 1, 2, has_rollout_worker=False, skipped=frozenset()), random.Random(0)
    assert [schedule.step(chance) for _ in range(2)] == [{}, {}]


class Paced(random.Random):
    """Chance for `Schedule`: calls that the engine does at each look, in turn."""

    def __init__(self, *calls: int):
        super().__init__(0)
        self.calls = itertools.cycle(calls)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return next(self.calls)


def test_a_sync_does_not_wait_for_an_engine_that_has_begun_nothing_yet():
    schedule, never = Schedule(3, 2, 9, True, frozenset()), Paced(0)
    schedule.step(never)
    assert [method for _, method, _ in schedule.group.calls] == ["generate"] * 3 + ["load"]


@pytest.mark.parametrize("has_rollout_worker", [True, False])
def test_a_resume_at_a_late_version_begins_no_more_than_the_bound_admits(has_rollout_worker):
    schedule = Schedule(2 if has_rollout_worker else 1, 2, 99, has_rollout_worker, frozenset())
    schedule.start(([([], 0, 0)] * 50, 50, DataSampler(7, 2, seed=3).state_dict(), {}))  # of a synchronous run
    for _ in range(4):
        schedule.step(Paced(0))  # asserts what was begun, and the age of what is trained on
    assert [version for _, version, _ in schedule.trained[50:]][:3] == [50] * (schedule.staleness + 1) + [51] * (
        2 - schedule.staleness
    )


@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 0), (6, 1), (1, 3), (0, 2)])
def test_a_resume_with_another_staleness_trains_on_each_ticket_once_in_order(before, after):
    schedule = Schedule(before, 2, 19, True, frozenset())
    for _ in range(before + 3):
        schedule.step(Paced(1))
    saved = schedule.save()
    schedule.staleness = after
    schedule.start(saved)
    while len(schedule.trained) < schedule.num_steps:
        batch, step = schedule._collate(schedule.sampler.next_batch()), len(schedule.trained) + 1
        rows = schedule.pipeline.take(batch, GenerationRequest(step, 2))
        schedule.sampling.begin_ahead(step)
        assert len(schedule.pipeline) <= max(after, 2 * before + 3 - step)
        version = int(rows["policy_version"][0])
        assert schedule.pipeline._metrics[f"async/lag_{schedule.actor.version - version}_share"] == 1
        schedule.trained.append((batch["prompt_ids"].tolist(), version, schedule.actor.version))
        schedule.actor.version += 1
        schedule.pipeline.sync()
    order = DataSampler(7, 2, seed=3)
    assert [prompts for prompts, _, _ in schedule.trained] == [order.next_batch().tolist() for _ in range(19)]
    assert [at - version for _, version, at in schedule.trained][-2:] == [after, after]


def test_batches_of_a_checkpoint_are_not_begun_again_and_none_is_begun_beyond_the_last_step():
    schedule = Schedule(2, 2, 6, True, frozenset())
    for _ in range(3):
        schedule.step(Paced(0))
    saved = schedule.save()
    assert schedule.save()[3].keys() == saved[3].keys()  # a save takes nothing out
    schedule.start(saved)
    begun = []
    submit = schedule.group.submit
    schedule.group.submit = lambda role, method, args: begun.append((method, args[1])) or submit(role, method, args)
    schedule.run(Paced(0))
    assert [request.step for method, request in begun if method == "generate"] == [6]  # 4 and 5 were begun before


def test_a_sampler_that_fails_is_named_and_what_it_had_drawn_before_is_trained_on():
    schedule = Schedule(2, 2, 9, True, frozenset())
    schedule.step(Paced(99))
    schedule.group.submit = lambda *_: done_with(WorkerDied(0, "idle", 1, "the process ended with signal SIGKILL"))
    with refusal("idle", 0, value="SIGKILL", kind=WorkerDied):
        schedule.run(Paced(0))
    assert len(schedule.trained) == 2


def done_with(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def test_a_wrong_weight_in_the_sampler_stops_the_run_before_its_rows_are_trained_on(monkeypatch):
    schedule, chance = Schedule(1, 1, 6, True, frozenset()), random.Random(0)
    schedule.step(chance)
    monkeypatch.setattr(schedule.group, "work", lambda work=schedule.group.work: planted(schedule.group, work))
    with refusal("version 1", "1 of 1 tensors", "w", kind=RolloutError):
        schedule.run(chance)
    assert {version for _, version, _ in schedule.trained} == {0}


def test_digests_that_come_behind_the_rows_of_their_weights_are_awaited(monkeypatch):
    """Transports promise no order of answers: those of a process may overtake each other."""
    schedule, late, wait = Schedule(1, 1, 6, True, frozenset()), set(), Answer.result
    monkeypatch.setattr(Answer, "done", lambda self: Future.done(self) and self not in late)
    monkeypatch.setattr(Answer, "result", lambda self: late.discard(self) or wait(self))
    work = schedule.group.work

    def planted_and_late():
        if schedule.group.calls and schedule.group.calls[0][1] == "load":
            late.add(schedule.group.calls[0][0])
        planted(schedule.group, work)

    monkeypatch.setattr(schedule.group, "work", planted_and_late)
    with refusal("version 1", "1 of 1 tensors", kind=RolloutError):
        schedule.run(Paced(99))
    assert {version for _, version, _ in schedule.trained} == {0}


@pytest.mark.parametrize("in_flight", [False, True])
def test_tokens_that_are_older_than_the_bound_are_not_trained_on(in_flight, monkeypatch):
    schedule, chance = Schedule(2, 1, 9, True, frozenset(), in_flight), Paced(99)
    monkeypatch.setattr(
        RolloutQueue,
        "_send_weights",
        lambda self, send=RolloutQueue._send_weights: send(self) if self._sent is None else SyncResult("lost"),
    )
    with pytest.raises(AssertionError, match="lags .* exceed 2"):
        schedule.run(chance)
    assert len(schedule.trained) == 3


def planted(group: FakeSampler, work: Any) -> None:
    """The engine works, and loads a wrong tensor as version 1."""
    if group.calls and group.calls[0][1] == "load" and group.calls[0][2][0] == 1:
        answer, method, _ = group.calls[0]
        group.calls[0] = answer, method, (1, {"w": torch.tensor([7])})
    work()
