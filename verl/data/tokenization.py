"""Tokenised rows: truncation of long ones, and ragged rows in one flat tensor."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import ConfigError

logger = logging.getLogger(__name__)


class RaggedTokens:
    """Rows of different lengths, stored in one flat tensor.

    Attributes:
        lengths: tokens of each row, [N] int64.
    """

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.int64):
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._starts = torch.cumsum(self.lengths, dim=0) - self.lengths
        self._flat = torch.tensor([token for row in rows for token in row], dtype=dtype)

    def __getitem__(self, index: int) -> Tensor:
        return self._flat[self._starts[index] : self._starts[index] + self.lengths[index]]

    def digests(self) -> list[bytes]:
        """A hash of each row: equal for equal tokens."""
        return [hashlib.blake2b(self[index].numpy().tobytes(), digest_size=12).digest() for index in range(len(self))]

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, indices: Tensor, pad_id: int | bool, left: bool) -> tuple[Tensor, Tensor]:
        """The rows at `indices` [B], padded to the longest on one side: tokens [B S] and mask [B S] bool."""
        lengths = self.lengths[indices]
        longest = int(lengths.max()) if len(lengths) else 0
        column = torch.arange(longest).expand(len(indices), longest)
        if left:
            column = column - (longest - lengths).unsqueeze(1)
        mask = (column >= 0) & (column < lengths.unsqueeze(1))
        tokens = torch.full((len(indices), longest), pad_id, dtype=self._flat.dtype)
        tokens[mask] = self._flat[(self._starts[indices].unsqueeze(1) + column)[mask]]
        return tokens, mask


def fit_lengths(
    lengths: Sequence[int], limit: int, limit_name: str, truncation: str, place: Callable[[int], str]
) -> list[int]:
    """Check row lengths against a limit.

    Args:
        lengths: tokens of each row.
        limit: the most tokens.
        limit_name: the setting, for messages.
        truncation: `error`, `left`, `right` or `drop`.
        place: file and number of a row, for messages.
    Returns:
        Indices of the rows to keep: all, unless `truncation` is `drop`.

    Raises:
        ConfigError: `truncation` is `error` and a row is longer than `limit`, or no row would be left.
    """
    over = [index for index, length in enumerate(lengths) if length > limit]
    if not over:
        return list(range(len(lengths)))
    longest = max(over, key=lambda index: lengths[index])
    seen = (
        f"{limit_name} is {limit}: {len(over)} of {len(lengths)} rows have more tokens; the longest, "
        f"{place(longest)}, has {lengths[longest]}."
    )
    if truncation == "error":
        raise ConfigError(f"{seen} Raise {limit_name}, or set truncation to left, right or drop.")
    logger.warning("%s truncation=%s", seen, truncation)
    if truncation != "drop":
        return list(range(len(lengths)))
    if len(over) == len(lengths):
        raise ConfigError(f"{seen} truncation=drop leaves no rows. Raise {limit_name}.")
    dropped = set(over)
    return [index for index in range(len(lengths)) if index not in dropped]


def cut(tokens: list[Any], limit: int, truncation: str) -> list[Any]:
    """Truncate to `limit` tokens: `left` cuts the start, `right` the end."""
    return tokens[-limit:] if truncation == "left" else tokens[:limit]


def pad_id_of(tokenizer: Any) -> int:
    """The token id for padding: the tokenizer's pad token, else its EOS, else 0. Masks mark padding in any case."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in ids if token is not None), 0)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """An object array [N]; lists stay single objects instead of becoming a matrix."""
    return np.fromiter(values, dtype=object, count=len(values))
