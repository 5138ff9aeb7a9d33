"""Prompts with the completions to imitate, tokenised once and padded on the right when a batch is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.data.bad_rows import BadRows
from verl.data.learnable import from_conversations, from_prompts
from verl.data.options import SFTOptions, read_options
from verl.data.prompts import Chat
from verl.data.rows import Rows, read_rows
from verl.data.tokens import RaggedTokens, fit_lengths, pad_id_of
from verl.errors import ConfigError
from verl.protocol import DataProto


class SFTDataset:
    """Sequences to imitate from parquet or JSONL files: prompts with completions, or conversations.

    A completion is learned with the EOS that ends it; of a conversation, the assistant's turns with their end tokens.
    A row is one sequence without a padded prompt part, so its padding is all on the right, as that of a response is.

    Args:
        data_files: one path or several, ending in `.parquet` or `.jsonl`.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        config: keys of `SFTOptions`.
    Attributes:
        sources: the index of each row's file, in order; None where the rows came from memory.
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
        bad = BadRows(options.on_bad_row)
        self._prepare(read_rows(files, bad), tokenizer, options, bad)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]] | Rows,
        tokenizer: Any,
        config: Mapping[str, Any] | SFTOptions | None = None,
        bad: BadRows | None = None,
    ) -> SFTDataset:
        """The same from rows in memory, each a mapping of columns; `bad` knows of those left out when reading."""
        options = config if isinstance(config, SFTOptions) else read_options(SFTOptions, config)
        bad = BadRows(options.on_bad_row) if bad is None else bad
        if not len(rows) and not len(bad):
            raise ConfigError("rows is []: the data set is empty.")
        dataset = cls.__new__(cls)
        dataset._prepare(rows if isinstance(rows, Rows) else Rows(list(rows)), tokenizer, options, bad)
        return dataset

    def _prepare(self, rows: Rows, tokenizer: Any, options: SFTOptions, bad: BadRows):
        self.options = options
        self._pad_id = pad_id_of(tokenizer)
        num_rows = len(rows) + len(bad)
        chat = Chat(tokenizer, options.chat_template, options.system_prompt)
        if options.messages_key is None:
            texts = from_prompts(rows, options.prompt_key, options.completion_key, chat, bad)
        else:
            texts = from_conversations(rows, options.messages_key, chat, bad)
        bad.settle(num_rows)
        usable = list(texts)
        kept = fit_lengths(
            [len(texts[index]) for index in usable],
            options.max_length,
            "max_length",
            options.truncation,
            lambda place: rows.place(usable[place]),
        )
        cuts = []
        for index in (usable[place] for place in kept):
            cuts.append(texts[index].cut(options.max_length, options.truncation))
            if not cuts[-1].can_be_learned:
                raise ConfigError(
                    f"max_length is {options.max_length}: cutting {rows.place(index)} on the {options.truncation} "
                    "leaves no prompt or nothing to learn. Raise max_length, or set truncation to drop."
                )
        self.sources = rows.only([usable[place] for place in kept]).sources
        self._tokens = RaggedTokens([text.tokens for text in cuts])
        self._learned = RaggedTokens([[False, *text.learned[1:]] for text in cuts], dtype=torch.bool)

    @property
    def lengths(self) -> Tensor:
        """[N] int64, tokens of each sequence."""
        return self._tokens.lengths

    def __len__(self) -> int:
        return len(self._tokens.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row, not padded: `input_ids` [S] int64 and `loss_mask` [S] bool."""
        place = range(len(self))[index]
        return {"input_ids": self._tokens[place], "loss_mask": self._learned[place]}

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
                "loss_mask": self._learned.padded(chosen, False, left=False)[0],
            },
            meta_info={"pad_token_id": self._pad_id},
        )
