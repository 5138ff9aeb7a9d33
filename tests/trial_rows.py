"""Rows with a prompt and a response that is given, not drawn, for tests that run a model over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.models.structure import call_model
from verl.protocol import DataProto


@dataclass(frozen=True)
class TrialRow:
    """A prompt [P] and a response [T] to it."""

    prompt: Tensor
    response: Tensor

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, self.response])


def as_batch(rows: Sequence[TrialRow]) -> DataProto:
    """Rows as training has them: prompts padded on the left, responses on the right."""
    width = max(len(row.prompt) for row in rows)
    longest = max(len(row.response) for row in rows)
    ids = torch.zeros(len(rows), width + longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        cut = slice(width - len(row.prompt), width + len(row.response))
        ids[index, cut], attention[index, cut] = row.tokens, 1
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0),
            "responses": ids[:, width:],
            "response_mask": attention[:, width:].bool(),
        }
    )


@torch.no_grad()
def states_of(model: Any, **inputs: Any) -> Tensor:
    """Logits [b s V], or the last states [b s D] of a model without a language-model head."""
    output = call_model(model, use_cache=False, **inputs)
    return output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
