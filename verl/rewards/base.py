"""Base class of rewards, which score texts, and placement of a score on tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """Scores of a batch, and their components.

    Attributes:
        scores: [B] float64.
        token_scores: [B T] float32, for a reward that scores single tokens; each row sums to its score. None for
            others.
        parts: components by name, [B] floats each: logged as metric `reward/NAME` (mean) and as a column of sample
            tables.
        columns: other values by name, [B] each, such as texts: a column `reward_NAME` of the sample tables.
    """

    scores: np.ndarray
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    token_scores: torch.Tensor | None = None


@component
class RewardDescription(Description):
    """Base class of `reward=` components. A subclass builds a `Reward`, or is one.

    Attributes:
        is_model: whether it can run as the role `rm`, on its own devices.
    """

    is_model: ClassVar[bool] = False

    def columns_read(self) -> Iterator[tuple[str, str]]:
        """Yield (setting, column) for each column of the data that it requires, e.g. (`answer_key is 'answer'`,
        `answer`).
        """
        yield from ()


class Reward:
    """Base class of rewards. A subclass scores texts in `rate`; this class checks the scores and places them on tokens.

    A subclass that needs more than texts, such as lengths in tokens, overrides `rate_batch` instead.

    Attributes:
        call_timeout_s: seconds for one batch, after which the call is interrupted; None for no deadline. A user's
            class that does not set it gets 60 in a run.
        rates_ahead: whether it may rate a batch in a thread, while the trainer works: it computes elsewhere, or little,
            and draws from no generator of this process.
    """

    call_timeout_s: float | None = None
    rates_ahead: bool = False

    def rate(self, prompts: list[str], responses: list[str], **columns: list) -> Any:
        """Score B responses.

        Args:
            prompts, responses: B texts each.
            columns: all other columns of the data, B items each.
        Returns:
            B finite numbers, as a sequence, an array or a tensor.
        """
        raise NotImplementedError

    @property
    def producer(self) -> Callable:
        """The function that error messages name as the source of the scores."""
        return self.rate_batch if type(self).rate is Reward.rate else self.rate

    def rate_batch(self, batch: DataProto) -> RewardResult:
        """Score every response of a batch, without placing scores on tokens."""
        prompts, responses, columns = texts_of(batch)
        if not len(batch):
            return RewardResult(np.zeros(0))
        return RewardResult(checked_scores(self.rate(prompts, responses, **columns), prompts, responses, self.producer))

    def rated(self, batch: DataProto) -> RewardResult:
        """Call `rate_batch` with the deadline `call_timeout_s`.

        Raises:
            RewardError: raised by `rate_batch`, or the deadline has passed.
        """
        if self.call_timeout_s is None:
            return self.rate_batch(batch)
        try:
            return call_within(self.call_timeout_s, lambda: self.rate_batch(batch), source_of(self.producer).file)
        except CallFailed as late:
            raise reward_error("a score for each response", str(late), self.producer) from late

    def prepare(self, batch: DataProto) -> Callable[[], RewardResult]:
        """Rate a batch before its turn. The function that is returned applies running statistics of scores, in its
        turn, and gives what `rated` would give then.
        """
        rating = self.rated(batch)
        return lambda: rating

    def check_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Check the rows that a run will score, before weights load.

        Args:
            name: of the rows, such as `training rows`.
            rows: mappings of columns.
        Returns:
            Sentences to show at the start of the run.
        Raises:
            ConfigError: rows that cannot be scored.
        """
        return []

    def frozen(self) -> AbstractContextManager[None]:
        """Inside this context running statistics of scores, such as their mean, are not updated; used for
        evaluation.
        """
        return contextlib.nullcontext()

    def take(self) -> dict[str, float]:
        """Return and reset the counters since the last call, without evaluations, by NAME of the metric
        `reward/NAME`.
        """
        return {}

    def reset_stats(self) -> None:
        """Reset running statistics of scores."""

    def state_dict(self) -> dict[str, Any]:
        """Running statistics of scores, as plain numbers and dicts; empty for most rewards."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def close(self) -> None:
        """Stop processes and connections. The trainer calls it at the end of a run; calling it again does nothing."""

    def score(self, batch: DataProto, rating: RewardResult | None = None) -> DataProto:
        """Score every response of a batch.

        Args:
            batch: response_mask [B T]; `prompt_text`, `response_text` and the columns of the data.
            rating: of the batch; None calls `rated`.
        Returns:
            token_level_scores [B T] float32: per-token scores of the reward, or the score on the last True of
            response_mask and 0 elsewhere (all 0 for a row with an empty mask). In `non_tensor_batch`: `score`, B
            floats; `reward/NAME` for each part of the result and `reward_NAME` for each of its columns.
        Raises:
            RewardError: the reward raised, or did not return B finite numbers; names the sample and the function.
        """
        rating = self.rated(batch) if rating is None else rating
        placed = token_scores_of(rating, batch.batch["response_mask"])
        parts = {f"reward/{name}": values.astype(object) for name, values in rating.parts.items()}
        columns = {f"reward_{name}": values for name, values in rating.columns.items()}
        return DataProto.from_dict(
            tensors={"token_level_scores": placed},
            non_tensors={"score": rating.scores.astype(object), **parts, **columns},
            producer=self.producer,
        )


def in_time(reward: Reward, timeout_s: float | None = None) -> Reward:
    """Set the deadline of a user-defined reward: `timeout_s`, else that of its class, else 60 seconds per batch.

    Rewards of this package keep their own deadlines.
    """
    classes = [kind for kind in type(reward).__mro__ if not kind.__module__.startswith("verl.")]
    is_said = "call_timeout_s" in getattr(reward, "__dict__", ()) or any("call_timeout_s" in vars(x) for x in classes)
    if type(reward) in classes and isinstance(reward, Reward) and (timeout_s is not None or not is_said):
        object.__setattr__(reward, "call_timeout_s", BATCH_TIMEOUT_S if timeout_s is None else timeout_s)
    return reward


def token_scores_of(rating: RewardResult, mask: torch.Tensor) -> torch.Tensor:
    """Per-token scores [B T] float32: those of the result, or each score on the last token of its response.

    Args:
        rating: scores of the batch.
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
    """Yield a sentence for each column that a reward requires and the data lack, beginning with the reward's setting.

    Args:
        reward: the component.
        columns: columns of the data, without the prompt.
        where: the rows, for the sentence, such as `rows of data.files`.
    """
    if not isinstance(reward, RewardDescription):
        return
    for named_by, column in reward.columns_read():
        if column not in columns and column not in ("prompt_messages", *TEXT_COLUMNS):
            present = ", ".join(sorted(set(columns) - set(TEXT_COLUMNS))) or "none but the prompt"
            yield f"{named_by}: the {where} have no column {column!r}. Their columns: {present}."


def texts_of(batch: DataProto) -> tuple[list[str], list[str], dict[str, list]]:
    """Prompts, responses and all other columns of a batch, B items each.

    Raises:
        RewardError: the batch has no texts.
    """
    arrays = batch.non_tensor_batch
    if missing := [name for name in TEXT_COLUMNS if name not in arrays]:
        columns = ", ".join(arrays) or "no columns"
        raise RewardError(f"The batch has no {' and no '.join(missing)}: a reward reads texts. It has {columns}.")
    columns = {name: list(values) for name, values in arrays.items() if name not in TEXT_COLUMNS}
    return list(arrays["prompt_text"]), list(arrays["response_text"]), columns
