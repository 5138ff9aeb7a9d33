"""Rows that stand for a batch in a comparison with a plain forward pass of each, and how far two results are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.protocol import DataProto

GROUP = 3  # rows that share a prompt
# Mean difference over the tokens of a row, in nats or in the units of a value: rounding stays below, and another
# window, position or text beside a row is far above
BOUNDS = {torch.float64: 1e-4, torch.float32: 5e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
WINDOW = 32  # consecutive tokens; a fault that begins far in a row is lost in the mean over all of it


def bound_of(weights: torch.dtype, autocast: str | None) -> float:
    """The largest `row_gaps` that rounding explains, for the narrower of the two types that a model computes in."""
    narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(autocast), weights)
    return max(BOUNDS.get(weights, 0.15), BOUNDS.get(narrow, 0.15))


def row_gaps(found: Tensor, wanted: Tensor, mask: Tensor, least_tokens: int = 1) -> Tensor:
    """[B] float64: the mean difference of each row, or half of that of any `WINDOW` consecutive tokens if it is larger.

    Args:
        found, wanted: [B T]; rows in which the wanted numbers are not finite have no gap.
        mask: [B T] bool.
        least_tokens: a shorter row counts as one of so many tokens, where a single token may differ through rounding.
    """
    gap = torch.where(mask, (found - wanted).abs().double(), 0.0).nan_to_num(nan=1e6, posinf=1e6)
    mean = gap.sum(dim=1) / mask.sum(dim=1).clamp_min(least_tokens)
    if gap.shape[1] > WINDOW:
        mean = mean.maximum(gap.unfold(1, WINDOW, WINDOW // 2).mean(dim=2).amax(dim=1) / 2)
        mean = mean.maximum(gap[:, -WINDOW:].mean(dim=1) / 2)
    return mean.masked_fill(~torch.isfinite(wanted.masked_fill(~mask, 0.0)).all(dim=1), 0.0)


def row_lengths(batch: DataProto) -> Tensor:
    """[B] tokens of each row, prompt and response; 0 for a row without a response."""
    has_response = batch["response_mask"].any(dim=1)
    return batch["attention_mask"].sum(dim=1).masked_fill(~has_response.to(batch["attention_mask"].device), 0)


def longest_row(batch: DataProto) -> int:
    """Tokens of the longest row that has a response; 0 without one."""
    return int(row_lengths(batch).max()) if len(batch) else 0


def chosen_rows(batch: DataProto) -> list[int]:
    """The longest row, the shortest, the longest of those with the shortest prompt, and up to `GROUP` that share the
    prompt of the longest; none of none."""
    if not len(batch):
        return []
    lengths, attention = row_lengths(batch), batch["attention_mask"]
    if not int(lengths.max()):
        return [0]
    longest, width = int(lengths.argmax()), attention.shape[1] - batch["response_mask"].shape[1]
    present = lengths.masked_fill(lengths == 0, int(lengths.max()) + 1)
    padding = width - attention[:, :width].sum(dim=1)
    most_padded = int(lengths.masked_fill(padding < padding[lengths > 0].max(), -1).argmax())
    prompts = torch.cat([batch["input_ids"][:, :width], attention[:, :width]], dim=1)
    group = (prompts == prompts[longest]).all(dim=1).nonzero()[:, 0].tolist()
    return sorted({longest, int(present.argmin()), most_padded, *group[:GROUP]})
