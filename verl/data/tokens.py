"""From rows to tokens: rendering prompts, cutting long ones, and keeping ragged rows in one flat tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.data.rows import Rows
from verl.errors import ConfigError

logger = logging.getLogger(__name__)


class RaggedTokens:
    """Rows of tokens of differing length, kept as one flat tensor.

    Attributes:
        lengths: [N] int64, tokens of each row.
    """

    def __init__(self, rows: Sequence[Sequence[int]]):
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._starts = torch.cumsum(self.lengths, dim=0) - self.lengths
        self._flat = torch.tensor([token for row in rows for token in row], dtype=torch.int64)

    def __getitem__(self, index: int) -> Tensor:
        return self._flat[self._starts[index] : self._starts[index] + self.lengths[index]]

    def padded(self, indices: Tensor, pad_id: int, left: bool) -> tuple[Tensor, Tensor]:
        """The rows at `indices` [B], padded to the longest on one side: tokens [B S] int64 and mask [B S] bool."""
        lengths = self.lengths[indices]
        longest = int(lengths.max()) if len(lengths) else 0
        place = torch.arange(longest).expand(len(indices), longest)
        if left:
            place = place - (longest - lengths).unsqueeze(1)
        mask = (place >= 0) & (place < lengths.unsqueeze(1))
        tokens = torch.full((len(indices), longest), pad_id, dtype=torch.int64)
        tokens[mask] = self._flat[(self._starts[indices].unsqueeze(1) + place)[mask]]
        return tokens, mask


def render_prompts(
    rows: Rows, key: str, tokenizer: Any, chat_template: str | None
) -> tuple[list[str], list[list[int]]]:
    """The text and the tokens of every prompt.

    A text is tokenised as it is, with the special tokens that the tokenizer puts before a text. Chat messages go
    through the chat template, up to where the assistant begins to speak; the template writes its own special tokens.

    Raises:
        ConfigError: the column is absent, or a prompt is null, empty or neither text nor messages; names the row.
    """
    prompts = rows.column(key, "prompt_key")
    texts, chats = [], []
    for index, prompt in enumerate(prompts):
        if (expected := _prompt_fault(prompt)) is not None:
            raise ConfigError(f"{key} is {_shortened(prompt)} at {rows.place(index)}: expected {expected}.")
        chats.append(not isinstance(prompt, str))
        texts.append(_chat_text(prompt, tokenizer, chat_template, rows.place(index)) if chats[-1] else prompt)
    tokens: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [index for index, chat in enumerate(chats) if chat is not special]
        if chosen:
            encoded = tokenizer([texts[index] for index in chosen], add_special_tokens=special)["input_ids"]
            for index, ids in zip(chosen, encoded, strict=True):
                tokens[index] = list(ids)
    for index, ids in enumerate(tokens):
        if not ids:
            raise ConfigError(f"{key} is {_shortened(prompts[index])} at {rows.place(index)}: it has no tokens.")
    return texts, tokens


def fit_lengths(
    lengths: Sequence[int], limit: int, limit_name: str, truncation: str, place: Callable[[int], str]
) -> list[int]:
    """The indices of the rows to keep, which are all of them unless `truncation` is `drop`.

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


def cut(tokens: list[int], limit: int, truncation: str) -> list[int]:
    """At most `limit` tokens: `left` cuts the start, `right` the end."""
    return tokens[-limit:] if truncation == "left" else tokens[:limit]


def pad_id_of(tokenizer: Any) -> int:
    """The id that fills padding: the tokenizer's own, else its EOS, else 0. A mask always says what is padding."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in ids if token is not None), 0)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """One object per row, lists included, which numpy would otherwise join into a matrix."""
    return np.fromiter(values, dtype=object, count=len(values))


def _prompt_fault(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "a text that is not empty"
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return "a text or a list of chat messages"
    for message in prompt:
        fits = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits:
            return "each chat message to have a text `role` and a text `content`"
    return None


def _chat_text(messages: Sequence[Mapping], tokenizer: Any, chat_template: str | None, place: str) -> str:
    if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"chat_template is null: {place} holds chat messages and the tokenizer has no template. "
            "Set one, or write the prompts as text."
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=chat_template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is code of the model's author and may raise anything
        raise ConfigError(f"chat_template refuses the messages at {place}: {error}") from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
