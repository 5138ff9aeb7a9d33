"""Prompts with the completions to imitate, tokenised once and padded on the right when a batch is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.data.options import SFTOptions, read_options
from verl.data.rows import Rows, read_rows
from verl.data.tokens import RaggedTokens, cut, fit_lengths, pad_id_of, render_prompts
from verl.errors import ConfigError
from verl.protocol import DataProto

COMPLETION_KEYS = ("completion", "response")


class SFTDataset:
    """Sequences to imitate from parquet or JSONL files: a prompt, its completion, and the tokenizer's EOS.

    Prompt and completion are tokenised apart, so that the prompt has the very tokens that generation starts from.
    A row is one sequence without a padded prompt part, so its padding is all on the right, as that of a response is.

    Args:
        data_files: one path or several, ending in `.parquet` or `.jsonl`.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        config: keys of `SFTOptions`.
    Raises:
        ConfigError: a file is missing, empty or unreadable; a column is absent; a prompt or a completion is null or no
            text; a sequence is too long; a key of `config` is unknown; the tokenizer has no EOS.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: Mapping[str, Any] | SFTOptions | None = None,
    ):
        options = config if isinstance(config, SFTOptions) else read_options(SFTOptions, config)
        files = [data_files] if isinstance(data_files, (str, Path)) else list(data_files)
        self._prepare(read_rows(files), tokenizer, options)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]] | Rows,
        tokenizer: Any,
        config: Mapping[str, Any] | SFTOptions | None = None,
    ) -> SFTDataset:
        """The same from rows in memory, each a mapping of columns."""
        options = config if isinstance(config, SFTOptions) else read_options(SFTOptions, config)
        if not len(rows):
            raise ConfigError("rows is []: the data set is empty.")
        dataset = cls.__new__(cls)
        dataset._prepare(rows if isinstance(rows, Rows) else Rows(list(rows)), tokenizer, options)
        return dataset

    def _prepare(self, rows: Rows, tokenizer: Any, options: SFTOptions):
        self.options = options
        self._pad_id = pad_id_of(tokenizer)
        _, prompts = render_prompts(rows, options.prompt_key, tokenizer, options.chat_template)
        completions = _completion_tokens(rows, options.completion_key, tokenizer)
        lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompts, completions, strict=True)]
        kept = fit_lengths(lengths, options.max_length, "max_length", options.truncation, rows.place)
        sequences, prompt_lengths = [], []
        for index in kept:
            tokens = cut(prompts[index] + completions[index], options.max_length, options.truncation)
            start = len(prompts[index]) - (lengths[index] - len(tokens) if options.truncation == "left" else 0)
            if not 0 < start < len(tokens):
                raise ConfigError(
                    f"max_length is {options.max_length}: cutting {rows.place(index)} on the {options.truncation} "
                    "leaves no prompt or nothing to learn. Raise max_length, or set truncation to drop."
                )
            sequences.append(tokens)
            prompt_lengths.append(start)
        self._tokens = RaggedTokens(sequences)
        self._prompt_lengths = torch.tensor(prompt_lengths, dtype=torch.int64)

    @property
    def lengths(self) -> Tensor:
        """[N] int64, tokens of each sequence."""
        return self._tokens.lengths

    def __len__(self) -> int:
        return len(self._prompt_lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row, not padded: `input_ids` [S] int64 and `loss_mask` [S] bool."""
        place = range(len(self))[index]
        tokens = self._tokens[place]
        return {"input_ids": tokens, "loss_mask": torch.arange(len(tokens)) >= self._prompt_lengths[place]}

    def collate(self, indices: Sequence[int]) -> DataProto:
        """A batch of the rows at `indices`, padded on the right to the longest of them.

        Returns:
            input_ids, attention_mask and position_ids [B S] int64; loss_mask [B S] bool, True on the tokens of the
            completion and its EOS. Index `[b, s]` of the mask speaks of the token `input_ids[b, s]` itself, not of the
            one that follows it.
        """
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        input_ids, mask = self._tokens.padded(chosen, self._pad_id, left=False)
        place = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return DataProto.from_dict(
            tensors={
                "input_ids": input_ids,
                "attention_mask": mask.long(),
                "position_ids": place.masked_fill(~mask, 0),
                "loss_mask": mask & (place >= self._prompt_lengths[chosen].unsqueeze(1)),
            },
            meta_info={"pad_token_id": self._pad_id},
        )


def _completion_tokens(rows: Rows, key: str | None, tokenizer: Any) -> list[list[int]]:
    """The tokens of every completion, EOS at the end."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("tokenizer has no EOS token: a completion could not say where it ends. Set eos_token.")
    key = key or next((name for name in COMPLETION_KEYS if name in rows.values[0]), COMPLETION_KEYS[0])
    completions = rows.column(key, "completion_key")
    for index, completion in enumerate(completions):
        if not isinstance(completion, str) or not completion:
            raise ConfigError(f"{key} is {completion!r} at {rows.place(index)}: expected a text that is not empty.")
    encoded = tokenizer(completions, add_special_tokens=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]
