"""Rewards of groups that finish before their batch is trained on, computed in a thread while the trainer works.

engine    groups of step t are finished ── note ──> a thread: Reward.prepare ──> results by step and group
trainer   step t ── scored ──> these results, and those of the remaining groups, in the order of the rows
                        └──> Reward.apply: statistics of scores, as if the batch were scored at once

A result is used only for the responses from which it was computed (`_digests`), so that a late result, or one from a
checkpoint, is never used for others. Groups whose scoring fails in the thread are scored again with their step, where
an error ends the run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch

from verl.checkpoint.core.hashing import digest_of
from verl.protocol import DataProto
from verl.protocol.serialization import NotJson, json_value
from verl.rewards.base import Reward, RewardResult

log = logging.getLogger(__name__)

POLL_S = 0.05  # interval between polls for finished groups
Scores = tuple[dict[int, str], RewardResult]  # results of some groups, by digest, in the order of the rows
FinishedGroups = list[tuple[bool, dict[int, DataProto]]]  # by engine: is an awaited batch finished; rows by step


class AsyncRewards:
    """Ratings by training step, and the thread that computes them.

    Attributes:
        is_fed: whether `note` is called; otherwise no groups are expected.
        lock: held while the reward is used.
        poll: returns finished groups other than the given ones, by step; None if `note` is called without polling.
    """

    is_fed = False
    poll: Callable[[dict[int, list[int]]], Future[FinishedGroups]] | None = None

    def __init__(self):
        self.lock = threading.RLock()
        self._reward, self._stats = Reward(), cast(Any, None)
        self._changed = threading.Condition()  # guards the next four, which are by step; acquired after `lock`
        self._expected: dict[int, tuple[DataProto, Callable[[DataProto], DataProto]]] = {}
        self._noted: dict[int, set[int]] = {}  # groups that are scored or queued
        self._unscored: dict[int, list[DataProto]] = {}
        self._results: dict[int, list[Scores]] = {}
        self._counts: dict[str, list[float]] = {}
        self._thread: threading.Thread | None = None
        self._is_due = self._is_closed = False

    def use(self, reward: Reward, stats: Any) -> None:
        """Use this reward from now on; `stats` are its `RewardStats`."""
        with self.lock, self._changed:
            self._reward, self._stats, self._results = reward, stats, {}

    def expect(self, step: int, prompts: DataProto, describe: Callable[[DataProto], DataProto]) -> None:
        """Score the groups of these prompts [P] when noted; `describe` adds texts and columns for the reward."""
        with self._changed:
            if not (self.is_fed and self._reward.scores_ahead) or step in self._expected:
                return
            self._expected[step] = prompts, describe
            self._noted[step] = {group for digests, _ in self._results.get(step, []) for group in digests}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="async rewards", daemon=True)
                self._thread.start()

    @property
    def known(self) -> dict[int, list[int]]:
        """Groups that were already noted, by expected step."""
        with self._changed:
            return {step: sorted(groups) for step, groups in self._noted.items()}

    def note(self, groups: Mapping[int, DataProto]) -> None:
        """Queue rows of finished groups, by step; unexpected steps are ignored. Returns immediately."""
        with self._changed:
            for step, rows in groups.items():
                of_rows, noted = rows["group_ids"].tolist(), self._noted.get(step)
                if noted is not None and (new := [row for row, group in enumerate(of_rows) if group not in noted]):
                    self._unscored.setdefault(step, []).append(rows[new])
                    noted.update(of_rows)
            self._changed.notify()

    def result_of(self, step: int, rollout: DataProto) -> RewardResult:
        """The result of `Reward.prepare` for the batch of a step, some groups of which may be scored already; counts it
        and drops the step. Step 0 is for rows that were never expected."""
        self._is_due = True  # the thread starts nothing else first
        with self.lock:
            self._is_due = False
            with self._changed:
                results = self._results.get(step, [])
                for by_step in (self._expected, self._noted, self._unscored, self._results):
                    for number in [number for number in by_step if number <= step]:
                        del by_step[number]
            result = self._completed(rollout, results) if results else self._reward.prepare(rollout)
            for name, numbers in result.counts.items():
                self._counts.setdefault(name, []).extend(numbers)
            return result

    def scored(self, rollout: DataProto, step: int | None = None) -> DataProto:
        """Responses with their rewards; `step`: see `result_of`, None in an evaluation."""
        with self.lock:
            result = self._reward.prepare(rollout) if step is None else self.result_of(step, rollout)
            return rollout.union(self._reward.score_tokens(rollout, self._reward.apply(result, rollout)))

    def count(self, name: str, number: float) -> None:
        """Add to a counter of the step."""
        self._counts.setdefault(name, []).append(number)

    def take_counts(self) -> dict[str, float]:
        """Metrics of the counters since the last call; see `RewardResult.counts`."""
        counts, self._counts, metrics = self._counts, {}, dict[str, float]()
        for name, numbers in counts.items():
            if not name.endswith("_s"):
                metrics[f"reward/{name}"] = float(sum(numbers))
            elif numbers:
                middle, late = np.percentile(numbers, [50, 95])
                metrics |= {f"reward/{name[:-2]}_p50_s": float(middle), f"reward/{name[:-2]}_p95_s": float(late)}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The results so far and the identity of their reward; empty if there are none. Without results that have
        columns of other than JSON values."""
        with self._changed:
            results = [(step, *result) for step, of_step in self._results.items() for result in of_step]
        states = []
        for step, digests, result in results:
            with suppress(NotJson):
                states.append({"step": step, "digests": list(digests.items()), "result": json_value(_state(result))})
        return {"reward_of": self._stats.identity, "ratings": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the results of `state`; those of another reward are ignored."""
        with self._changed:
            for by_step in (self._expected, self._noted, self._unscored, self._results):
                by_step.clear()
            for saved in state["ratings"] if state and state["reward_of"] == self._stats.identity else []:
                result = dict(saved["digests"]), _result(saved["result"])
                self._results.setdefault(saved["step"], []).append(result)

    def close(self) -> None:
        """Stop the thread after its current call. Idempotent."""
        self._is_closed = True

    def _completed(self, rollout: DataProto, ready: Sequence[Scores]) -> RewardResult:
        """Results of the rows of a batch, in order; missing ones are computed now."""
        digests, groups = _digests(rollout), np.array(rollout["group_ids"].tolist())
        chosen = [scores for scores in ready if scores[0].items() <= digests.items()]
        rows = [row for known, _ in chosen for group in known for row in np.flatnonzero(groups == group)]
        remaining = np.setdiff1d(np.arange(len(rollout)), rows).tolist()
        results = [result for _, result in chosen]
        if results and (self._reward.scores_groups or not remaining):
            try:
                results += [self._reward.prepare(rollout[remaining])] if remaining else []
                return _joined(results, np.argsort(rows + remaining), rollout["responses"].shape[1])
            except Exception as error:  # noqa: BLE001 - an error that names rows is to name those of the batch
                log.warning("The batch is scored as a whole, because a part of it failed (%s).", type(error).__name__)
        return self._reward.prepare(rollout)

    # In the thread

    def _run(self) -> None:
        pending: Future[FinishedGroups] | None = None
        while not self._is_closed:
            if self._score():
                continue
            if self.poll is not None and (known := self.known) and (pending is None or pending.done()):
                with suppress(Exception):  # the trainer's own calls raise it
                    pending = self.poll(known)
                    pending.add_done_callback(self._take)
            with self._changed:
                self._changed.wait(POLL_S)

    def _take(self, pending: Future[FinishedGroups]) -> None:
        with suppress(Exception):
            for _, groups in pending.result():
                self.note(groups)

    def _score(self) -> bool:
        """Score all waiting groups of the first step that has some, by one call, or its whole batch if the reward does
        not score groups. Returns whether there were any."""
        if self._is_due or not self._unscored:
            return False
        with self.lock:
            with self._changed:
                is_whole = {step: len(self._noted[step]) == len(self._expected[step][0]) for step in self._unscored}
                step = min((x for x in is_whole if is_whole[x] or self._reward.scores_groups), default=0)
                if not step:
                    return False
                parts, expected = self._unscored.pop(step), self._expected[step]
            try:
                prompts, describe = expected
                rows = DataProto.concat(parts)
                rows = rows[rows["group_ids"].argsort(stable=True)]
                if prompts["prompt_ids"][rows["group_ids"]].equal(rows["prompt_ids"]):  # otherwise the size differs
                    rows = describe(rows)
                    result = _digests(rows), self._reward.prepare(rows)
                    with self._changed:
                        if self._expected.get(step) is expected:  # otherwise a checkpoint was loaded
                            self._results.setdefault(step, []).append(result)
            except BaseException as error:  # noqa: BLE001 - `result_of` raises it, if it comes again
                log.info("Groups of step %d will be scored with their step: %s", step, error)
        return True


def _digests(rows: DataProto) -> dict[int, str]:
    """Digests of the prompt and the responses of each group, in the order of the rows."""
    texts: dict[int, list[Any]] = {}
    for row, group in enumerate(rows["group_ids"].tolist()):
        tokens = rows["responses"][row][rows["response_mask"][row]].tolist()
        texts.setdefault(group, [int(rows["prompt_ids"][row])]).append(tokens)
    return {group: digest_of(repr(text).encode()) for group, text in texts.items()}


def _joined(results: Sequence[RewardResult], order: np.ndarray, width: int) -> RewardResult:
    """Concatenate results, with their rows in this order; token scores get `width` columns."""

    def joined(field: str, empty: Any) -> dict[str, np.ndarray]:
        tables = [(vars(x)[field], np.full(len(x.scores), empty)) for x in results]  # functions may vary these
        names = dict.fromkeys(name for table, _ in tables for name in table)
        return {name: np.concatenate([table.get(name, none) for table, none in tables])[order] for name in names}

    first, counts, tokens = results[0], dict[str, list[float]](), None
    for name, numbers in (item for result in results for item in result.counts.items()):
        counts[name] = [*counts.get(name, []), *numbers]
    if first.token_scores is not None:
        wide = [
            torch.nn.functional.pad(x, (0, width - x.shape[1])) for r in results if (x := r.token_scores) is not None
        ]
        tokens = torch.cat(wide)[torch.from_numpy(order)]
    inner = {name: _joined([result.inner[name] for result in results], order, width) for name in first.inner}
    scores = np.concatenate([result.scores for result in results])[order]
    parts, columns = joined("parts", np.nan), joined("columns", None)
    return RewardResult(scores, parts, columns, tokens, counts, inner, first.nan_is_none)


def _state(result: RewardResult) -> dict[str, Any]:
    tokens = None if result.token_scores is None else result.token_scores.tolist()
    return vars(result) | {"token_scores": tokens, "inner": {name: _state(x) for name, x in result.inner.items()}}


def _result(state: Mapping[str, Any]) -> RewardResult:
    tokens, parts = state["token_scores"], {name: np.array(values) for name, values in state["parts"].items()}
    columns = {name: np.fromiter(values, object) for name, values in state["columns"].items()}
    tokens = None if tokens is None else torch.tensor(tokens, dtype=torch.float32)
    inner = {name: _result(x) for name, x in state["inner"].items()}
    is_none = state.get("nan_is_none", False)  # absent in earlier checkpoints
    return RewardResult(np.array(state["scores"]), parts, columns, tokens, state["counts"], inner, is_none)
