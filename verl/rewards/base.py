"""From texts to scores: what a reward is, and how its scores reach the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from verl.errors import RewardError
from verl.ops.masking import last_true
from verl.protocol import DataProto
from verl.rewards.results import checked_scores

TEXT_COLUMNS = ("prompt_text", "response_text")


class Reward:
    """Base of every reward: a subclass rates texts, this class checks its answer and places it on the tokens."""

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

    def score(self, batch: DataProto) -> DataProto:
        """Score every response of a batch.

        Args:
            batch: response_mask [B T]; `prompt_text`, `response_text` and the columns of the data.
        Returns:
            token_level_scores [B T] float32: the score on the last True of response_mask, 0 elsewhere, so a row whose
            mask is empty has none; and `score` in `non_tensor_batch`, B floats as they were rated.
        Raises:
            RewardError: the rating raised, or is not B finite numbers; names the sample and the function.
        """
        prompts, responses, columns = _texts_of(batch)
        scores = np.zeros(0)
        if len(batch):
            scores = checked_scores(self.rate(prompts, responses, **columns), prompts, responses, self.producer)
        mask = batch.batch["response_mask"]
        last = last_true(mask)
        rows = torch.nonzero(last >= 0).squeeze(1)
        placed = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        placed[rows, last[rows]] = torch.tensor(scores, dtype=torch.float32, device=mask.device)[rows]
        return DataProto.from_dict(
            tensors={"token_level_scores": placed},
            non_tensors={"score": scores.astype(object)},
            producer=self.producer,
        )


def _texts_of(batch: DataProto) -> tuple[list[str], list[str], dict[str, list]]:
    arrays = batch.non_tensor_batch
    if missing := [name for name in TEXT_COLUMNS if name not in arrays]:
        raise RewardError(
            f"The batch has no {' and no '.join(missing)}: a reward reads texts. It has {_names(arrays)}."
        )
    columns = {name: list(values) for name, values in arrays.items() if name not in TEXT_COLUMNS}
    return list(arrays["prompt_text"]), list(arrays["response_text"]), columns


def _names(columns: Iterable[str]) -> str:
    return ", ".join(columns) or "no columns"
