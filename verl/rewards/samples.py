"""Rewards of one response at a time, rated in worker processes that a hanging or crashing call cannot outlive."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from verl.errors import NonFiniteRewardError, RewardError
from verl.protocol import DataProto
from verl.protocol.provenance import source_of
from verl.rewards.base import Rating, Reward, texts_of
from verl.rewards.locate import load_function
from verl.rewards.pool import Outcome, Pool
from verl.rewards.results import LARGEST, reward_error
from verl.rewards.signature import check_columns, named_parameters

logger = logging.getLogger(__name__)

EXPECTED = "one finite number"


class SampleReward(Reward):
    """A reward that calls a function once for each response, `num_workers` at a time. `close` ends its processes.

    Args:
        path: of a function of `prompt`, `response` and columns of the data; see `RewardFunction`.
        kwargs: further keyword arguments of every call.
        timeout_s: for one sample.
        error_score: of a sample that fails; None raises instead.
        columns: argument of the function -> column of the data, where the two differ in name.
    Raises:
        RewardError: the function cannot be imported, or does not take `prompt` and `response`.
    """

    def __init__(
        self,
        path: str,
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        num_workers: int,
        error_score: float | None,
        columns: Mapping[str, str] | None = None,
    ):
        self.function, self.kwargs, self.error_score = load_function(path), dict(kwargs), error_score
        self._renamed = dict(columns or {})
        self._accepted = named_parameters(self.function)
        for name in ("prompt", "response", *self.kwargs):
            if self._accepted is not None and name not in self._accepted:
                found = f"it takes {', '.join(self._accepted)}"
                raise reward_error(f"a function that takes `{name}`", found, self.function)
        self._pool = Pool(path, source_of(self.function).file, self.kwargs, timeout_s, num_workers)

    @property
    def producer(self) -> Callable:
        return self.function

    def rate_batch(self, batch: DataProto) -> Rating:
        """Rate every response by itself.

        Raises:
            RewardError: a sample failed and none may, or the function needs a column that the data lacks. Of several
                samples that fail, the first is named.
        """
        prompts, responses, columns = texts_of(batch)
        for argument, column in self._renamed.items():
            if column not in columns:
                present = ", ".join(columns) or "none"
                raise RewardError(f"The data has no column {column!r}, which the reward reads. Its columns: {present}.")
            columns[argument] = columns[column]
        check_columns(self._accepted, columns, ("prompt", "response", *self.kwargs), self.function)
        names = [name for name in columns if self._accepted is None or name in self._accepted]
        samples = [
            {"prompt": prompt, "response": response, **{name: columns[name][index] for name in names}}
            for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        outcomes = self._pool.rate(samples, stop_at_failure=self.error_score is None)
        failures = {index: found for index, outcome in enumerate(outcomes) if (found := _failure(outcome)) is not None}
        if failures:
            numbers = [index for index in failures if (o := outcomes[index]) is not None and o.failure is None]
            self._report(failures, prompts, responses, numbers)
        if self.error_score is None:
            return Rating(np.array([outcome.score for outcome in outcomes if outcome is not None], dtype=np.float64))
        scores = [
            self.error_score if index in failures or outcome is None else outcome.score
            for index, outcome in enumerate(outcomes)
        ]
        failed = np.array([float(index in failures) for index in range(len(scores))])
        return Rating(np.array(scores, dtype=np.float64), {"failed": failed})

    def close(self) -> None:
        self._pool.close()

    def _report(self, failures: dict[int, str], prompts: list[str], responses: list[str], numbers: list[int]) -> None:
        """`numbers`: the samples among the failures that gave a number, which is not finite."""
        first = min(failures)
        error = reward_error(EXPECTED, failures[first], self.function, prompts, responses, first)
        if self.error_score is None:
            raise NonFiniteRewardError(str(error), numbers) if first in numbers else error
        logger.warning(
            "%d of %d samples have no reward of their own and get error_score %g. The first of them:\n%s",
            len(failures), len(responses), self.error_score, error,
        )  # fmt: skip


def pool_faults(timeout_s: float, num_workers: int, **scores: float) -> Iterator[str]:
    """What is wrong with the settings of a pool, and with scores that are to be finite."""
    if not 0 < timeout_s < 1e6:
        yield f"timeout_s is {timeout_s:g}: must be positive, and below a million seconds."
    if num_workers < 1:
        yield f"num_workers is {num_workers}: must be at least 1."
    for name, score in scores.items():
        if not math.isfinite(score):
            yield f"{name} is {score}: must be finite."


def _failure(outcome: Outcome | None) -> str | None:
    """Why a sample has no score; None where it has one, or was never handed out."""
    if outcome is None or outcome.failure is not None:
        return None if outcome is None else outcome.failure
    assert outcome.score is not None
    return None if abs(outcome.score) <= LARGEST else f"{outcome.score!r}"
