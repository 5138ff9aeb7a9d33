"""Responses of the data set instead of sampled ones, for a fraction of the prompts of each step.

prompts of a step ──> sampled ── score, advantages ──> experience ──> joined ── update
                  └─> rows: prompt and response of the data ── the teacher ─────────┘

The choice of prompts depends on the seed and the step only, so a resumed run, one that generates ahead, and one in
other processes choose the same. Their rows were not sampled by a policy: `policy_version` is -1, advantages are 0, and
rewards, curriculum and replay buffer leave them out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.distillation import Distillation
from verl.data.chat_template import shortened
from verl.data.sft_dataset import completion_column, completion_tokens, expected_completion
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.protocol.fields import FIELDS
from verl.rollout.rows import assemble, right_padded
from verl.utils.seeding import derive_seed

SETTING = "algorithm.distill.completion_key"


class DataResponses:
    """The responses of the data that a run trains on; without `data_fraction` it has none.

    Args:
        run: its description.
        train_data: the training rows.
    Raises:
        ConfigError: the column is missing, or a response is not a text.
    """

    def __init__(self, run: Any, train_data: Any, tokenizer: Any):
        distill: Distillation | None = run.algorithm.distill
        self._fraction = 0.0 if distill is None else distill.data_fraction
        self._seed, self._max_tokens, self._tokenizer = run.trainer.seed, run.response_tokens, tokenizer
        if distill is None or not self._fraction:
            return
        columns = getattr(train_data, "columns", ())
        if faults := list(missing_completions(distill, columns, "training rows")):
            raise ConfigError(faults)
        self._column = completion_column(distill.completion_key, columns)
        for index in range(len(train_data)):
            if (expected := expected_completion(completion := train_data[index][self._column])) is not None:
                raise ConfigError(
                    f"{SETTING}: {self._column} is {shortened(completion)} at row {index} of the training rows: "
                    f"expected {expected}."
                )

    def sampled(self, prompts: DataProto, step: int) -> DataProto:
        """The prompts of a step that the policy responds to: at least one, from which metrics are computed."""
        if not self._fraction:
            return prompts
        return prompts[self._order(prompts, step)[min(self._count(prompts), len(prompts) - 1) :].sort().values]

    def rows(self, prompts: DataProto, step: int) -> DataProto | None:
        """Prompts of a step with their responses in the data, one row each, as in `assemble`; None for none.

        A response is truncated, without EOS, to the maximum length of a generated one.
        """
        if not (count := self._count(prompts)):
            return None
        prompts = prompts[self._order(prompts, step)[:count].sort().values]
        prompts = prompts.union(DataProto.from_dict({"group_ids": torch.arange(count)}))
        completions = completion_tokens(prompts[self._column].tolist(), self._tokenizer)
        lines = [tokens[: self._max_tokens] for tokens in completions]
        pad_id = prompts.meta_info["pad_token_id"]
        mask = right_padded([[True] * len(line) for line in lines], False, torch.bool)
        tokens, log_probs = right_padded(lines, pad_id, torch.int64), torch.zeros(mask.shape)
        return assemble(prompts, 1, tokens, mask, log_probs, pad_id).union(prompts.select([], []))  # with their images

    def joined(self, experience: DataProto, rows: DataProto) -> DataProto:
        """The experience without columns, followed by the rows; only the rows if all responses are from the data.

        Args:
            rows: those of `rows`, with the scores of the teacher.
        """
        known = {**rows.batch, "group_ids": rows["group_ids"] + 1 + int(experience["group_ids"].max())}
        known["policy_version"] = torch.full((len(rows),), -1)
        shape = rows["responses"].shape
        tensors = {name: known.get(name, _filled(name, x, shape)).to(x) for name, x in experience.batch.items()}
        of_data = DataProto.from_dict(tensors, meta_info=experience.meta_info, ragged=rows.ragged)
        return of_data if self._fraction == 1 else DataProto.concat([experience.select(None, []), of_data])

    def _count(self, prompts: DataProto) -> int:
        return round(self._fraction * len(prompts))

    def _order(self, prompts: DataProto, step: int) -> Tensor:
        """Indices of prompts, those with a response of the data first."""
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "responses of the data", step))
        return torch.randperm(len(prompts), generator=generator)


def missing_completions(distill: Distillation, columns: Collection[str], where: str) -> Iterator[str]:
    """Yield a sentence, with its config path, if the data lack the column of responses."""
    if (column := completion_column(distill.completion_key, columns)) not in columns:
        present = ", ".join(sorted({*columns} - {"prompt_text", "prompt_messages"})) or "none but the prompt"
        yield f"{SETTING} is {distill.completion_key}: the {where} have no column {column!r}. Their columns: {present}."


def _filled(name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Default values [B ...] of a field: zeros, or its padding; `shape` is [B T]."""
    field = FIELDS.get(name)
    of_tokens = field is not None and field.dims[1:2] == ("T",)
    fill = 0 if field is None or isinstance(field.pad, str) else field.pad
    return like.new_full((shape[0], *(shape[1:] if of_tokens else like.shape[1:2]), *like.shape[2:]), fill)
