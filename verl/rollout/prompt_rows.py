"""Rows of tensors as lists, and back: prompts [b P], padded on the left, and what follows [b T], on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.protocol import DataProto


def prompt_tokens(prompts: DataProto) -> list[list[int]]:
    """Token ids of each prompt, without padding."""
    return [row[mask].tolist() for row, mask in zip(prompts["prompts"], prompts["prompt_mask"], strict=True)]


def longest_prompt(parts: Sequence[DataProto]) -> int:
    """Tokens of the longest prompt."""
    return max((int(part["prompt_mask"].sum(dim=1).max()) for part in parts if len(part)), default=0)


def left_padded(lines: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids [b P] and their mask, padded on the left."""
    width = max(map(len, lines), default=0)
    tokens = torch.full((len(lines), width), pad_id, dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, line in enumerate(lines):
        tokens[row, width - len(line) :] = torch.tensor(line)
        mask[row, width - len(line) :] = True
    return tokens, mask


def right_padded(lines: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
    """Lines of numbers as [b T], T the longest, filled up on the right."""
    padded = torch.full((len(lines), max(map(len, lines), default=0)), fill, dtype=dtype)
    for row, line in enumerate(lines):
        padded[row, : len(line)] = torch.tensor(line, dtype=dtype)
    return padded
