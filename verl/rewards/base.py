"""From texts to scores: what a reward is, and how its scores reach the tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from verl.component import Description, component
from verl.errors import RewardError
from verl.ops.masking import last_true
from verl.protocol import DataProto
from verl.protocol.provenance import source_of
from verl.rewards.deadline import BATCH_TIMEOUT_S, CallFailed, call_within
from verl.rewards.validation import checked_scores, reward_error

TEXT_COLUMNS = ("prompt_text", "response_text")


@dataclass(frozen=True)
class RewardResult:
    """Scores and what they are made of.

    Attributes:
        scores: [B] float64.
        token_scores: [B T] float32, where the reward itself says which token is worth what; a row's sum is its score.
        parts: by name, [B] floats each: a metric `reward/NAME` (their mean) and a column of the sample tables.
        columns: by name, [B] of anything else, such as texts: a column `reward_NAME` of the sample tables.
    """

    scores: np.ndarray
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    token_scores: torch.Tensor | None = None


@component
class RewardDescription(Description):
    """Base of what `reward` may be: builds a `Reward`, or is one.

    Attributes:
        is_model: it can live as a role `rm` of its own.
    """

    is_model: ClassVar[bool] = False

    def columns_read(self) -> Iterator[tuple[str, str]]:
        """Yield each column of the data that it cannot do without, after what names it: `answer_key is 'answer'`."""
        yield from ()


class Reward:
    """Base of every reward: a subclass rates texts, this class checks its answer and places it on the tokens.

    One that needs more than texts, such as lengths in tokens, overrides `rate_batch` in place of `rate`.

    Attributes:
        call_timeout_s: seconds for one batch, after which the call is interrupted where it stands; None for no
            deadline. A class that says nothing gets 60 when a run builds it.
    """

    call_timeout_s: float | None = None

    def rate(self, prompts: list[str], responses: list[str], **columns: list) -> Any:
        """Rate B responses.

        Args:
            prompts, responses: texts, B each.
            columns: every other column of the data, B items each.
        Returns:
            B finite numbers, as a sequence, an array or a tensor.
        """
        raise NotImplementedError

    @property
    def producer(self) -> Callable:
        """The function that errors name as their source."""
        return self.rate

    def rate_batch(self, batch: DataProto) -> RewardResult:
        """Rate every response of a batch, as `score` does, but place nothing on the tokens."""
        prompts, responses, columns = texts_of(batch)
        if not len(batch):
            return RewardResult(np.zeros(0))
        return RewardResult(checked_scores(self.rate(prompts, responses, **columns), prompts, responses, self.producer))

    def rated(self, batch: DataProto) -> RewardResult:
        """What `rate_batch` gives, in time.

        Raises:
            RewardError: as there; or it did not return within `call_timeout_s`.
        """
        if self.call_timeout_s is None:
            return self.rate_batch(batch)
        try:
            return call_within(self.call_timeout_s, lambda: self.rate_batch(batch), source_of(self.producer).file)
        except CallFailed as late:
            raise reward_error("a score for each response", str(late), self.producer) from late

    def frozen(self) -> AbstractContextManager[None]:
        """The context in which what the reward learns of scores, such as their mean, stays as it is: evaluation."""
        return contextlib.nullcontext()

    def take(self) -> dict[str, float]:
        """What was counted since the last call, evaluations left out, by NAME: metrics `reward/NAME`."""
        return {}

    def reset_stats(self) -> None:
        """Forget what was learned of scores."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned of scores, as plain numbers and dicts; empty for most rewards."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""

    def close(self) -> None:
        """End what was started to rate; the trainer calls it at the end of a run, and it may be called again."""

    def score(self, batch: DataProto) -> DataProto:
        """Score every response of a batch.

        Args:
            batch: response_mask [B T]; `prompt_text`, `response_text` and the columns of the data.
        Returns:
            token_level_scores [B T] float32: those that the reward gives itself; else the score on the last True of
            response_mask, 0 elsewhere, so a row whose mask is empty has none; and in `non_tensor_batch` `score`, B
            floats as they were rated, and a column `reward/NAME` for each part of the rating and `reward_NAME` for each
            of its columns.
        Raises:
            RewardError: the rating raised, or is not B finite numbers; names the sample and the function.
        """
        rating = self.rated(batch)
        placed = token_scores_of(rating, batch.batch["response_mask"])
        parts = {f"reward/{name}": values.astype(object) for name, values in rating.parts.items()}
        columns = {f"reward_{name}": values for name, values in rating.columns.items()}
        return DataProto.from_dict(
            tensors={"token_level_scores": placed},
            non_tensors={"score": rating.scores.astype(object), **parts, **columns},
            producer=self.producer,
        )


def in_time(reward: Reward, timeout_s: float | None = None) -> Reward:
    """A reward of the user with a deadline: the one that is given, that of its class, or 60 seconds for a batch.

    Rewards of the package have deadlines of their own.
    """
    own = [kind for kind in type(reward).__mro__ if not kind.__module__.startswith("verl.")]
    is_said = "call_timeout_s" in getattr(reward, "__dict__", ()) or any("call_timeout_s" in vars(x) for x in own)
    if type(reward) in own and isinstance(reward, Reward) and (timeout_s is not None or not is_said):
        object.__setattr__(reward, "call_timeout_s", BATCH_TIMEOUT_S if timeout_s is None else timeout_s)
    return reward


def token_scores_of(rating: RewardResult, mask: torch.Tensor) -> torch.Tensor:
    """What each token is worth [B T] float32: as the reward says, else all of a score on its last token.

    Args:
        mask: response_mask [B T].
    """
    if rating.token_scores is not None:
        return rating.token_scores.to(device=mask.device, dtype=torch.float32)
    last = last_true(mask)
    rows = torch.nonzero(last >= 0).squeeze(1)
    placed = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    placed[rows, last[rows]] = torch.tensor(rating.scores, dtype=torch.float32, device=mask.device)[rows]
    return placed


def missing_columns(reward: Description, columns: Collection[str], where: str) -> Iterator[str]:
    """Yield a sentence for each column that a reward reads and the data lack, opening with the reward's key.

    Args:
        columns: of the data, beside the prompt.
        where: which rows lack it, in words.
    """
    if not isinstance(reward, RewardDescription):
        return
    for named_by, column in reward.columns_read():
        if column not in columns and column not in ("prompt_messages", *TEXT_COLUMNS):
            present = ", ".join(sorted(set(columns) - set(TEXT_COLUMNS))) or "none beside the prompt"
            yield f"{named_by}: the {where} have no column {column!r}. Their columns: {present}."


def texts_of(batch: DataProto) -> tuple[list[str], list[str], dict[str, list]]:
    """Prompts, responses and the columns of the data, B items each."""
    arrays = batch.non_tensor_batch
    if missing := [name for name in TEXT_COLUMNS if name not in arrays]:
        raise RewardError(
            f"The batch has no {' and no '.join(missing)}: a reward reads texts. It has {_names(arrays)}."
        )
    columns = {name: list(values) for name, values in arrays.items() if name not in TEXT_COLUMNS}
    return list(arrays["prompt_text"]), list(arrays["response_text"]), columns


def _names(columns: Iterable[str]) -> str:
    return ", ".join(columns) or "no columns"
