"""How long responses to a prompt are likely to be, so that processes that draw them side by side end together.

rows of a step ── note ──> mean length by prompt ── beside ──> prompts with `expected_tokens` ──> balanced shares

The best guess for a prompt is what was drawn for it last; for one that was not seen yet, the mean of all others. Which
process draws a response changes nothing about it, but a run that goes on divides prompts as the first one would have:
so what is known is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl.protocol import DataProto

MOST = 1 << 16  # prompts that are remembered, those seen last


class ExpectedLengths:
    """Mean lengths of responses, in tokens, by the id of their prompt."""

    def __init__(self):
        self._means: dict[int, float] = {}

    def note(self, rows: DataProto) -> None:
        """Remember how long responses have become: `prompt_ids` [B], `response_mask` [B T]."""
        ids, index = rows["prompt_ids"].unique(return_inverse=True)
        lengths = rows["response_mask"].sum(dim=1).double()
        means = torch.zeros(len(ids), dtype=torch.float64).scatter_reduce(0, index, lengths, "mean", include_self=False)
        for prompt, mean in zip(ids.tolist(), means.tolist(), strict=True):
            self._means.pop(prompt, None)
            self._means[prompt] = mean
        for prompt in list(self._means)[: max(0, len(self._means) - MOST)]:
            del self._means[prompt]

    def beside(self, prompts: DataProto, num_samples: int) -> DataProto:
        """The prompts [B] with `expected_tokens` [B], of all responses to each."""
        others = sum(self._means.values()) / max(1, len(self._means))
        means = [self._means.get(prompt, others) for prompt in prompts["prompt_ids"].tolist()]
        expected = (torch.tensor(means, dtype=torch.float64) * num_samples).round().long()
        return prompts.union(DataProto.from_dict({"expected_tokens": expected}))

    def state_dict(self) -> dict[str, list[Any]]:
        """What is known, the prompt that was seen last at the end."""
        return {"prompts": list(self._means), "means": list(self._means.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._means = dict(zip(state["prompts"], state["means"], strict=True))
