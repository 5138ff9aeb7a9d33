"""A weighted sum of several rewards, each logged by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from verl.component import BuildContext, Description, component
from verl.errors import faults_below
from verl.protocol import DataProto
from verl.rewards.base import TAKEN, Reward, RewardDescription, RewardResult, in_time, token_scores_of


@component
class WeightedSum(RewardDescription):
    """score = sum over parts of weight * score of the part; a part without a reward for a response counts 0, and a
    response without a reward of any part whose weight is not 0 has none.

    The score of each part, before its weight, is the metric `reward/NAME` and a column of the sample tables.

    Args:
        parts: rewards by name.
        weights: weight of every part, by the same names; a part with weight 0 is only logged.
    """

    parts: dict[str, Description]
    weights: dict[str, float]

    def faults(self) -> Iterator[str]:
        if not self.parts:
            yield "parts is {}: expected at least one reward, keyed by a name."
        for name in self.parts:
            if name in TAKEN or not name.replace("-", "_").isidentifier():
                yield f"parts.{name}: expected a name of letters, digits, - and _, other than {', '.join(TAKEN)}."
            if name not in self.weights:
                yield f"weights has no {name}: expected the weight of parts.{name}."
        for name in self.weights:
            if name not in self.parts:
                yield f"weights.{name}: there is no such part. The parts: {', '.join(self.parts)}."

    def columns_read(self) -> Iterator[tuple[str, str]]:
        for name, part in self.parts.items():
            if isinstance(part, RewardDescription):
                yield from ((f"parts.{name}.{named_by}", column) for named_by, column in part.columns_read())

    def build(self, context: BuildContext) -> Reward:
        with ExitStack() as built:
            parts = {}
            for name, described in self.parts.items():
                with faults_below(f"parts.{name}"):
                    parts[name] = in_time(described.build(context))
                built.callback(parts[name].close)
            built.pop_all()
        return SumOfRewards(parts, self.weights)


class SumOfRewards(Reward):
    """The reward that `WeightedSum` builds; `close` closes every part."""

    def __init__(self, parts: Mapping[str, Reward], weights: Mapping[str, float]):
        self.parts, self.weights = dict(parts), dict(weights)
        self.scores_ahead = all(part.scores_ahead for part in parts.values())
        self.scores_groups = all(part.scores_groups for part in parts.values())

    def score_batch(self, batch: DataProto) -> RewardResult:
        """The weighted sum; `parts` has the scores of each part, and its own parts as `NAME_...`."""
        return self.apply(self.prepare(batch), batch)

    def prepare(self, batch: DataProto) -> RewardResult:
        inner = {name: reward.prepare(batch) for name, reward in self.parts.items()}
        counts = {f"{name}_{of_part}": x for name, result in inner.items() for of_part, x in result.counts.items()}
        return RewardResult(np.zeros(len(batch)), counts=counts, inner=inner)

    def apply(self, result: RewardResult, batch: DataProto) -> RewardResult:
        results = {name: reward.apply(result.inner[name], batch) for name, reward in self.parts.items()}
        total, parts, columns = np.zeros(len(batch)), {}, {}
        for name, result in results.items():
            total = total + self.weights[name] * result.summands
            parts[name] = result.scores
            parts |= {f"{name}_{inner}": values for inner, values in result.parts.items()}
            columns |= {f"{name}_{inner}": values for inner, values in result.columns.items()}
        counted = [result for name, result in results.items() if self.weights[name]] or list(results.values())
        is_scored = np.any([~np.isnan(result.scores) for result in counted], axis=0)
        is_none = all(result.nan_is_none or not np.isnan(result.scores).any() for result in results.values())
        tokens = self._token_scores(results, batch)
        return RewardResult(np.where(is_scored, total, np.nan), parts, columns, tokens, nan_is_none=is_none)

    def _token_scores(self, results: Mapping[str, RewardResult], batch: DataProto) -> torch.Tensor | None:
        """Weighted sum of token scores [B T]; None if no part scores single tokens."""
        if all(result.token_scores is None for result in results.values()):
            return None
        mask = batch.batch["response_mask"]
        total = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        for name, result in results.items():
            total += self.weights[name] * token_scores_of(result, mask)
        return total

    def check_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        messages = []
        for part, reward in self.parts.items():
            with faults_below(f"parts.{part}"):
                messages += reward.check_rows(name, rows)
        return messages

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with ExitStack() as frozen:
            for reward in self.parts.values():
                frozen.enter_context(reward.frozen())
            yield

    def reset_stats(self) -> None:
        for reward in self.parts.values():
            reward.reset_stats()

    def state_dict(self) -> dict[str, Any]:
        states = {name: reward.state_dict() for name, reward in self.parts.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, reward in self.parts.items():
            reward.load_state_dict(state.get(name, {}))

    def close(self) -> None:
        with ExitStack() as ending:
            for reward in self.parts.values():
                ending.callback(reward.close)
