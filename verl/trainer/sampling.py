"""Responses to the prompts of a step, and their rewards: the queue between generation and training, dynamic sampling.

The queue is `max_staleness` S batches long; 0 generates and trains alternately.

step t     take(t) ── begin(t+S) ── score, update ── sync
engine     ... ── t+1 ── weights ── t+2 ── weights ── ... ── t+S

Each group of responses has a ticket, its index in the order of the data: batch t has the tickets tP to (t+1)P. Batch t
begins only after batch t-S was taken, so the number of begun but untrained groups stays below (S+1)P, and batches are
taken in order. With `rollout.weight_update=drain` the engine processes requests in order: batch t+S is sampled with the
weights after step t-1, independent of the speed of either side, so a run can be repeated and resumed bit by bit. With
`in_flight` the engine takes weights between two tokens, recorded by the schedule of its steps
(`verl/workers/schedule.py`).
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.dynamic_sampling import (
    DynamicSampling,
    concat_groups,
    kept_groups,
    no_group_error,
    selection_metrics,
)
from verl.cluster.rpc import RoleHandle, WorkerGroup
from verl.environments.episode import response_texts, without_dropped
from verl.errors import RolloutError, VerlError, WorkerError
from verl.model_paths.images import with_media
from verl.ops.sampling import TRAINING
from verl.protocol import DataProto
from verl.protocol.ragged import flattened, pop_ragged
from verl.protocol.serialization import json_text
from verl.rewards.async_rewards import AsyncRewards
from verl.rollout.base import GenerationRequest, SyncResult
from verl.trainer.guards import stage
from verl.workers.rollout_worker import RolloutWorker, weight_digests
from verl.workers.schedule import ScheduleFile, schedule_path

log = logging.getLogger(__name__)

PROMPT_FIELDS = ["prompts", "prompt_mask", "prompt_ids", "group_ids"]
SYNC_VERSIONS = "sync_versions"  # key in a checkpoint: versions of the latest syncs
JSON = "_json"  # suffix of keys in a checkpoint: bytes of a column of JSON values
STEP = "step"  # key in a checkpoint, in flight: step whose batch was taken last


class Sampling:
    """Responses of the policy, with their rewards.

    Args:
        trainer: provides data, rewards, guards and timers.
        queue: between generation and training.
    """

    def __init__(self, trainer: Any, queue: RolloutQueue):
        run = trainer.description
        self.settings, self.algorithm, self.tokenizer = run.trainer, run.algorithm, trainer.tokenizer
        self.data, self.order, self.num_steps = trainer.train_data, trainer.sampler, trainer.num_steps
        self.queue, self.data_responses = queue, trainer.data_responses
        self.rewards, self.guards, self.stages = trainer.async_rewards, trainer.guards, trainer.stages
        self._plays_episodes = run.environment is not None
        self._offloads = not queue.depth and run.rollout.can_offload
        self._step = 0

    def sample(self, batch: DataProto, step: int) -> tuple[DataProto, dict[str, float]]:
        """Responses to the prompts of a step, after dynamic sampling; begins generation of the next batches."""
        self._step, metrics = step, dict[str, float]()
        rollout = self.generate(self.data_responses.sampled(batch, step), self.request(step))
        self.begin_ahead(step)
        if self.algorithm.selection is not None:
            rollout, metrics = self.select(rollout, self.algorithm.selection)
        if self._offloads:  # nothing is generated before the next sync
            self.queue.actor.offload().result()
        return rollout, metrics

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Sample responses y ~ pi(. | x), or episodes: prompts with all tokens after them, [B S], and their texts."""
        with self.stages.stage("gen") as note:
            rows = self._respond(prompts, request)
            if self.algorithm.needs_greedy_baseline:
                greedy = self._respond(prompts, replace(request, num_samples=1, greedy=True))
                scores = torch.tensor(self.rewards.scored(greedy, 0)["score"].astype(float))
                baseline = {"greedy_scores": scores.repeat_interleave(request.num_samples)}
                rows = rows.union(DataProto.from_dict(baseline))
            tokens = int(rows["response_mask"].sum())
            note.say(f"{len(rows)} responses to {len(prompts)} prompts, {tokens} tokens")
        return rows

    def select(self, rollout: DataProto, selection: DynamicSampling) -> tuple[DataProto, dict[str, float]]:
        """Keep groups with mixed rewards, and sample further prompts to replace the others."""
        sampled, groups = [self.add_rewards(rollout)], []
        for round_ in range(1, selection.max_rounds + 1):
            groups = kept_groups(sampled, selection)
            if len(groups) >= self.settings.prompts_per_step or round_ == selection.max_rounds:
                break
            seen = torch.cat([rows["prompt_ids"] for rows in sampled])
            further = self.data.collate(self.order.next_batch())
            further = further[~torch.isin(further["prompt_ids"], seen)]
            if not len(further):  # an epoch ended within the step: all remaining prompts were sampled already
                break
            sampled.append(self.add_rewards(self.generate(further, self.request(self._step))))
        if not groups and selection.on_none == "error" and any(map(len, sampled)):
            raise no_group_error(sampled)
        chosen = concat_groups(groups[: self.settings.prompts_per_step]) if groups else sampled[0][:0]
        return chosen, selection_metrics(sampled, groups)

    def begin_ahead(self, step: int) -> None:
        """Begin generation of the next batches that the queue admits, to be scored as they finish."""
        for ahead in range(len(self.queue), min(self.queue.depth, self.num_steps - step)):
            request = self.request(step + 1 + ahead)
            prompts = self.data.collate(self.order.peek(ahead))
            prompts = _grouped(self.data_responses.sampled(prompts, request.step))
            self.rewards.expect(request.step, prompts, partial(self._described, prompts=prompts))
            self.queue.begin(self._prepared(prompts), request)

    def add_rewards(self, rollout: DataProto) -> DataProto:
        """Add rewards to responses and drop those without one; unchanged if rewards are present."""
        if "token_level_scores" in rollout:  # present after dynamic sampling
            return rollout
        with self.stages.stage("reward") as note:
            rollout = self.reward_rows(rollout)
            scores = rollout["score"].astype(float)
            self.order.record(rollout["prompt_ids"], torch.tensor(scores) >= self.settings.success_score)
            note.say(f"mean {float(np.mean(scores)):.4f}" if len(scores) else "no response has one")
        return rollout

    @stage
    def reward_rows(self, rollout: DataProto) -> DataProto:
        """The rows with a reward, and a greedy baseline if used; rows with None are left out."""
        rollout = self.rewards.scored(rollout, self._step)
        has_none = torch.tensor(np.isnan(rollout["score"].astype(float)))
        has_none &= rollout["token_level_scores"].isfinite().all(dim=1)  # else the reward is not finite
        if "greedy_scores" in rollout:
            has_none |= rollout["greedy_scores"].isnan()
        if has_none.any():
            self.rewards.count("unscored", float(has_none.sum()))
        if has_none.all():
            self.stages.tracker.message(f"Step {self._step}: none of {len(rollout)} responses has a reward (None).")
        return rollout[~has_none] if has_none.any() else rollout

    def evaluate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Responses with rewards, for an evaluation."""
        return self.rewards.scored(self._respond(prompts, request))

    def request(self, step: int) -> GenerationRequest:
        return GenerationRequest(step, self.settings.group_size)

    def close(self) -> None:
        """Stop computing rewards ahead, and write the remaining lines of the schedule."""
        self.rewards.close()
        self.queue.close()

    def _respond(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Responses or episodes, the data columns, and the response texts."""
        prompts = _grouped(prompts)
        prepared, is_training = self._prepared(prompts), request.stream == TRAINING and not request.greedy
        if is_training:
            self.rewards.expect(request.step, prompts, partial(self._described, prompts=prompts))
        rows = (self.queue.take if is_training else self.queue.generate)(prepared, request)
        return self._described(rows, prompts)

    def _described(self, rows: DataProto, prompts: DataProto) -> DataProto:
        """Responses with the data columns of their prompts, and their texts."""
        texts: Any = response_texts(rows, self.tokenizer)
        ragged = [] if rows.ragged else None  # episodes may have seen more images than their prompts have
        columns = prompts.select([], list(prompts.non_tensor_batch), ragged_keys=ragged)[rows["group_ids"]]
        return without_dropped(rows.union(columns, DataProto.from_dict(non_tensors={"response_text": texts})))

    def _prepared(self, prompts: DataProto) -> DataProto:
        """The prompts with the fields that the engine reads."""
        columns = list(prompts.non_tensor_batch) if self._plays_episodes else []
        return prompts.select(with_media(PROMPT_FIELDS, prompts), columns)


def _grouped(prompts: DataProto) -> DataProto:
    return prompts.union(DataProto.from_dict({"group_ids": torch.arange(len(prompts))}))


@contextmanager
def rollout_worker_errors(size: int = 1) -> Iterator[None]:
    """Add advice to errors of a process of the role `rollout`, which has `size` processes."""
    try:
        yield
    except WorkerError as error:
        detail = (
            f"{error.detail.rstrip()}\nThis process generates the responses under trainer.mode=async; its log is in "
            "workers/ of the run directory. Continue with resume=DIRECTORY: a checkpoint holds the responses that "
            "were begun before it. If memory ran out, lower rollout.max_rows or trainer.max_staleness."
        )
        process = "the rollout worker" if size == 1 else f"rollout worker {error.rank}"
        raise type(error)(error.rank, error.call, error.step, detail, process) from error


@dataclass
class _BegunBatch:
    """A batch in the queue; `is_loaded`: its rows come from a checkpoint."""

    finish: Callable[[], DataProto]
    is_loaded: bool = False
    begun_s: float = field(default_factory=time.monotonic)

    @cached_property
    def rows(self) -> DataProto:
        """The responses; waits for them."""
        return self.finish()


class RolloutQueue:
    """The batches between generation and training.

    The actor's engine, if it `runs_ahead`, generates one batch during training; a sync waits for that
    batch. A rollout worker (the role `rollout`) has a copy of the model and a queue of batches and weights, so a sync
    does not wait. In flight it has a loop over steps of the engine, which loads weights between two tokens.

    Checkpoints contain responses that were begun, because the weights that generated them no longer exist. In flight
    open responses are saved with their tokens; otherwise a save waits for them.

    Args:
        actor: handle of the role that trains.
        depth: batches that are begun ahead; more than 1 with rollout workers only.
        workers: the rollout workers, each with an engine; None for the actor's engine.
        in_flight: each has a `verl.workers.step_loop.StepLoop`.
        actor_generates: the actor has an engine too, for evaluations.
        run_dir: for the schedules of engines on machines that do not see it.
        rewards: receives finished groups of rollout workers.
    """

    def __init__(
        self,
        actor: Any,
        depth: int,
        workers: WorkerGroup | None = None,
        *,
        in_flight: bool = False,
        actor_generates: bool = True,
        run_dir: Path | None = None,
        rewards: AsyncRewards | None = None,
    ):
        self._rewards = AsyncRewards() if rewards is None else rewards
        self._num_engines = 1 if workers is None else workers.world_size
        paths = [] if run_dir is None else [schedule_path(run_dir, engine) for engine in range(self._num_engines)]
        self._schedule_files = [ScheduleFile(path) for path in paths]
        self._writes_schedule = False
        self.actor, self.depth, self._group, self.in_flight = actor, depth, workers, in_flight
        self._workers: Any = None if workers is None else RoleHandle(workers, "rollout", RolloutWorker)
        self._actor_generates = actor_generates
        self._queue: deque[_BegunBatch] = deque()
        self._versions: list[int] = []  # versions of the latest syncs, the current one last
        self._num_versions = depth + 2  # that are kept
        self._sent: int | None = None  # latest version sent to the rollout workers
        self._loads: deque[tuple[int, dict[str, str], Future[list[dict[str, str]]]]] = deque()  # unverified weights
        self._step = 0  # step whose batch was taken last
        self._last_call: Future[Any] | None = None
        self._idle_since = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._rewards.is_fed = workers is not None and depth > 0
        if in_flight:
            self._rewards.poll = self._workers.finished_groups

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def holds_weights(self) -> bool:
        """Whether `collect` must be called before weights change."""
        return bool(self.depth) and self._workers is None

    def current_version(self) -> int:
        return self.actor.current_version().result()

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Start generating for the next batch; returns immediately."""
        version = self.current_version()
        if self._group is not None:
            self._group.step = request.step
        if self.in_flight:
            self._update_engine(version)
            begun = self._workers.begin_batch(prompts, request)
            self._queue.append(_BegunBatch(partial(self._finish, request.step, begun)))
            return
        if self._workers is None:
            self.collect()
            self._note_version(version)
            self.actor.begin_generate(prompts, request).result()
            self._queue.append(_BegunBatch(lambda: self.actor.finish_generate(prompts, request).result()))
            return
        self._update_engine(version)
        sampled = self._call(self._workers.generate, prompts, request)
        sampled.add_done_callback(partial(self._note_sampled, request.step))
        self._queue.append(_BegunBatch(partial(self._answer, sampled)))

    def collect(self) -> None:
        """Wait for all begun responses. Idempotent."""
        for batch in self._queue:
            self._wait(batch)

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Generate responses with the current weights, outside of the queue."""
        if not self._actor_generates:
            self._update_engine(self.current_version())
            return self._answer(self._workers.generate(prompts, request))
        if self.holds_weights:
            self.collect()
        return self.actor.generate(prompts, request).result()

    def take(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Responses to these prompts: the oldest batch of the queue, or new ones if it is empty."""
        expected = prompts.batch["prompt_ids"].repeat_interleave(request.num_samples)
        if self._queue and not expected.equal(self._wait(self._queue[0])["prompt_ids"]):
            assert self._queue[0].is_loaded, "the responses generated ahead belong to another batch"
            log.warning(
                "The responses generated ahead in the checkpoint are for another batch size; they are generated again."
            )
            self.load_state_dict({})
        self._step = request.step
        if not self._queue and self._workers is None:
            rows = self.generate(prompts, request)
            return self._measured(rows, time.monotonic()) if self.depth else rows
        if not self._queue:
            self.begin(prompts, request)
        batch = self._queue.popleft()
        rows = self._wait(batch)
        versions = rows["token_versions" if "token_versions" in rows else "policy_version"]
        self._verify(int(versions.max()) if versions.numel() else -1)
        return self._measured(rows, batch.begun_s, is_bounded=not batch.is_loaded)

    def close(self) -> None:
        """Write the remaining lines of the schedule."""
        if self._writes_schedule:
            with suppress(VerlError):  # that process may be the reason for the end of the run
                self._write_schedules(self._workers.take_schedule().result())

    def sync(self) -> SyncResult:
        """Send the current weights to the engine; returns metrics since the last sync."""
        if self.holds_weights:
            self.collect()
        synced: SyncResult = self.actor.sync().result()
        if self._workers is not None:
            synced = self._send_weights()
        elif self.depth:
            self._note_version(self.current_version())
        metrics, self._metrics = synced.metrics | self._metrics, {}
        return SyncResult(synced.note, metrics, synced.is_current)

    def state_dict(self) -> dict[str, Tensor]:
        """Responses that were not trained on yet, later batches under `INDEX.NAME`; in flight the states of
        `StepLoop.save`, of further engines under `RANK/NAME`."""
        if self.in_flight:
            self._update_engine(self.current_version())
            states = self._answer(self._workers.save_rows(self._step))
            state = {f"{rank}/{name}" if rank else name: x for rank, of in enumerate(states) for name, x in of.items()}
            return state | {SYNC_VERSIONS: torch.tensor(self._versions), STEP: torch.tensor([self._step])}
        state = {}
        for index, batch in enumerate(self._queue):
            rows, prefix = self._wait(batch), f"{index}." if index else ""
            columns = {name: bytearray(json_text(name, list(x)).encode()) for name, x in rows.non_tensor_batch.items()}
            texts = {f"{name}{JSON}": torch.frombuffer(text, dtype=torch.uint8) for name, text in columns.items()}
            state |= {f"{prefix}{name}": x for name, x in {**rows.batch, **flattened(rows.ragged), **texts}.items()}
        return state | {SYNC_VERSIONS: torch.tensor(self._versions)} if state else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the responses by those of a checkpoint. They are used if the next batch has their prompts, that is,
        if the batch size did not change."""
        if state and self.in_flight != ("schedule" in state):
            log.warning("The responses generated ahead in the checkpoint are for another rollout.weight_update.")
            self.load_state_dict({})
            return
        if self.in_flight:
            self._restore(state)
            return
        self.collect()
        self._queue.clear()
        for part in _numbered(state, "."):
            texts = {name.removesuffix(JSON): part.pop(name).numpy() for name in list(part) if name.endswith(JSON)}
            columns, ragged = {name: json.loads(text.tobytes()) for name, text in texts.items()}, pop_ragged(part)
            rows = DataProto.from_dict(part, columns, ragged=ragged)
            self._queue.append(_BegunBatch(lambda rows=rows: rows, is_loaded=True))
        self._load_versions(state.get(SYNC_VERSIONS, state["policy_version"].unique()).tolist() if state else [])

    def _restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the rollout workers from a checkpoint, in flight."""
        states = _numbered(state, "/")
        if states and len(states) != self._num_engines:
            log.warning(
                "The responses generated ahead in the checkpoint are of %d engines; they are generated again by %d.",
                len(states),
                self._num_engines,
            )
            state, states = {}, []
        self._sent = self.current_version()
        version, weights = self.actor.rollout_weights().result()
        loaded = self._workers.restore_rows(states, version, weights)
        self._answer(loaded)
        self._loads.append((version, weight_digests(weights), loaded))
        steps = state["steps"].tolist() if state else []
        self._queue = deque(_BegunBatch(lambda step=step: self._finish(step), is_loaded=True) for step in steps)
        self._load_versions(state[SYNC_VERSIONS].tolist() if state else [])
        self._step = int(state[STEP]) if state else 0

    def _answer(self, call: Future[Any]) -> Any:
        with rollout_worker_errors(self._num_engines):
            return call.result()

    def _update_engine(self, version: int) -> None:
        """Send the weights if this version was not sent yet: at the start, and after an aborted step."""
        if self._sent != version:
            self._send_weights()

    def _note_sampled(self, step: int, sampled: Future[DataProto]) -> None:
        if not sampled.cancelled() and sampled.exception() is None:
            self._rewards.note({step: sampled.result()})

    def _finish(self, step: int, begun: Future[None] | None = None) -> DataProto:
        if begun is not None:
            self._answer(begun)
        is_finished = False
        while not is_finished and (known := self._rewards.known):
            finished = self._answer(self._workers.finished_groups(known, step))
            for _, groups in finished:
                self._rewards.note(groups)
            is_finished = all(is_whole for is_whole, _ in finished)
        parts, idle_s, unwritten = zip(*self._answer(self._workers.finish_batch(step)), strict=True)
        self._write_schedules(unwritten)
        self._add("async/rollout_idle_s", sum(idle_s) / len(idle_s))
        if len(parts) == 1:
            return parts[0]
        rows = DataProto.concat(parts)
        return rows[rows["group_ids"].argsort(stable=True)]

    def _write_schedules(self, unwritten: Sequence[tuple[int, list[str]]]) -> None:
        for file, (first, lines) in zip(self._schedule_files, unwritten, strict=False):
            if lines:
                self._writes_schedule = True
                file.write(first, lines)

    def _send_weights(self) -> SyncResult:
        """Queue a copy of the current weights for the rollout workers, after the begun batches."""
        version, weights = self.actor.rollout_weights().result()
        load = self._workers.load if self.in_flight else partial(self._call, self._workers.load)
        self._loads.append((version, weight_digests(weights), load(version, weights)))
        self._note_version(version)
        self._sent = version
        num_bytes = sum(x.nbytes for x in weights.values())
        note = f"{len(weights)} tensors, {num_bytes / 2**20:.1f} MiB, to the rollout workers"
        return SyncResult(note, {"sync/bytes": float(num_bytes)})

    def _verify(self, sampled_by: int) -> None:
        """Compare digests of the weights that rollout workers have loaded with those sent: waits for all versions up to
        the newest that sampled a token of this batch, and checks later versions that are loaded already.

        Raises:
            RolloutError: a tensor differs.
        """
        version = -1
        while self._loads and (version < sampled_by >= self._loads[0][0] or self._loads[0][2].done()):
            version, sent, load = self._loads.popleft()
            for rank, held in enumerate(self._answer(load)):
                if wrong := [name for name, digest in sent.items() if held.get(name) != digest]:
                    raise RolloutError(
                        f"rollout worker {rank} does not hold the trainer's weights of version {version}: "
                        f"{len(wrong)} of {len(sent)} tensors differ, {', '.join(wrong[:8])}"
                        f"{', ...' if wrong[8:] else ''}. What it drew with them was not trained on. Resume from the "
                        "last checkpoint."
                    )

    def _call(self, method: Callable[..., Future[Any]], *args: Any) -> Future[Any]:
        """Call the rollout workers, and count their idle time."""
        if self._last_call is None or self._last_call.done():
            self._add("async/rollout_idle_s", time.monotonic() - self._idle_since)
        self._last_call = method(*args)
        self._last_call.add_done_callback(lambda _: setattr(self, "_idle_since", time.monotonic()))
        return self._last_call

    def _wait(self, batch: _BegunBatch) -> DataProto:
        began = time.monotonic()
        rows = batch.rows
        self._add("async/wait_s", time.monotonic() - began)
        return rows

    def _measured(self, rows: DataProto, begun_s: float, *, is_bounded: bool = True) -> DataProto:
        """Rows with `token_versions`; records metrics of their age."""
        if "token_versions" not in rows:
            versions = rows["policy_version"][:, None].expand(rows["responses"].shape)
            rows = rows.union(DataProto.from_dict({"token_versions": versions.clone()}))
        self._note_version(self.current_version())
        sampled = rows["token_versions"][rows["response_mask"]]
        lags = (torch.tensor(self._versions, dtype=torch.int64) > sampled[:, None]).sum(dim=1)
        counts = torch.bincount(lags, minlength=self.depth + 1).tolist()
        assert not is_bounded or not any(counts[self.depth + 1 :]), f"lags {counts} exceed {self.depth}"
        self._metrics |= {f"async/lag_{lag}_share": n / max(1, len(lags)) for lag, n in enumerate(counts)}
        self._metrics["async/oldest_group_s"] = time.monotonic() - begun_s
        if self._workers is not None:
            self._add("async/rollout_idle_s", 0.0)
        return rows

    def _note_version(self, version: int) -> None:
        earlier = [known for known in self._versions if known < version]  # other rows: a checkpoint was loaded
        self._versions = [*earlier, version][-self._num_versions :]

    def _load_versions(self, versions: list[int]) -> None:
        """Restore the versions of a checkpoint, whose run may have had a larger `max_staleness`."""
        self._versions, self._num_versions = versions, max(self.depth + 2, len(versions))

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds


def _numbered(state: Mapping[str, Tensor], separator: str) -> list[dict[str, Tensor]]:
    """States by number, which prefixes the names of their tensors; number 0 has no prefix."""
    parts: dict[int, dict[str, Tensor]] = {}
    for name, x in state.items():
        if name not in (SYNC_VERSIONS, STEP):
            number, _, own_name = name.rpartition(separator)
            parts.setdefault(int(number or 0), {})[own_name] = x
    return [parts[number] for number in sorted(parts)]
