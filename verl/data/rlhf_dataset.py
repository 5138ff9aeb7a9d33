"""Prompts for reinforcement learning, tokenised once and padded on the left when a batch is made."""

from __future__ import annotations

import datetime
import decimal
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.data.base import (
    PromptOptions,
    RaggedTokens,
    cut,
    fit_lengths,
    object_array,
    pad_id_of,
    read_options,
    refuse_cuts,
)
from verl.data.chat_template import ChatTemplate, render_prompts, template_in_use, with_chats, without_final_assistant
from verl.data.images import ImagesOfRows, with_images
from verl.data.readers import DataRows, RowErrors, read_rows
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.protocol.fields import FIELDS
from verl.protocol.serialization import JSON_VALUES, NotJson, json_value

log = logging.getLogger(__name__)
RESERVED_COLUMNS = frozenset({"prompt_text", "prompt_messages", "response_text", "score"})


class RLHFDataset:
    """Prompts from parquet or JSONL files, with all other columns of their rows.

    `prompt_ids`, the identity of a row, is its index over all files. It does not change when other rows are dropped, so
    a prompt keeps its sampling noise.

    Args:
        data_files: one path or several, ending in `.parquet` or `.jsonl`.
        tokenizer: a Hugging Face tokenizer.
        config: keys of `PromptOptions`.
    Attributes:
        sources: index of each row's file; None for rows from memory.
        has_chats: whether some prompt was rendered by the chat template.
    Raises:
        ConfigError: a file is missing, empty or unreadable; the prompt column is missing; a prompt is null, not a text
            or too long; a column has the name of a batch field; a key of `config` is unknown.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: Mapping[str, Any] | PromptOptions | None = None,
    ):
        options = config if isinstance(config, PromptOptions) else read_options(PromptOptions, config)
        files = [data_files] if isinstance(data_files, (str, Path)) else list(data_files)
        bad = RowErrors(options.on_bad_row)
        self._prepare(read_rows(files, bad), tokenizer, options, bad)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]] | DataRows,
        tokenizer: Any,
        config: Mapping[str, Any] | PromptOptions | None = None,
        bad: RowErrors | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> RLHFDataset:
        """Make a data set from rows in memory.

        Args:
            rows: mappings of columns.
            tokenizer: a Hugging Face tokenizer.
            config: keys of `PromptOptions`.
            bad: unusable rows found while reading.
            tools: JSON schemas that the chat template writes into the prompts of rows without a column `tools`.
        """
        options = config if isinstance(config, PromptOptions) else read_options(PromptOptions, config)
        bad = RowErrors(options.on_bad_row) if bad is None else bad
        rows = DataRows.of(rows)
        if not len(rows) and not len(bad):
            raise ConfigError("rows is []: the data set is empty.")
        dataset = cls.__new__(cls)
        dataset._prepare(rows, tokenizer, options, bad, tuple(tools))
        return dataset

    def _prepare(
        self, rows: DataRows, tokenizer: Any, options: PromptOptions, bad: RowErrors, tools: tuple[Any, ...] = ()
    ):
        self.options = options
        self._pad_id = pad_id_of(tokenizer)
        num_rows = len(rows) + len(bad)
        rows = with_chats(rows, options.prompt_key)
        rows = with_images(rows, options.prompt_key, options, tokenizer, bad)
        rows = without_final_assistant(rows, options.prompt_key, options.final_assistant)
        columns = _columns_beside(rows, options.prompt_key)
        chat = ChatTemplate(tokenizer, template_in_use(tokenizer, options), options.system_prompt, tools)
        texts, tokens = render_prompts(rows, options.prompt_key, chat, bad)
        if tools and not chat.reads_tools and chat.source is not None:
            log.warning(
                "The chat template does not use tools, so the prompts do not list those of the environment. Describe "
                "them "
                "in the data or in data.system_prompt."
            )
        bad.settle(num_rows)
        usable = [index for index, ids in enumerate(tokens) if ids]
        limit, lengths = options.max_prompt_length, [len(tokens[index]) for index in usable]
        fitting = fit_lengths(
            lengths, limit, "max_prompt_length", options.truncation, lambda position: rows.location(usable[position])
        )
        remaining = [usable[position] for position in fitting]
        refuse_cuts(rows, {i: len(tokens[i]) for i in remaining}, limit, "max_prompt_length", options.truncation)
        for index in remaining:
            if len(tokens[index]) > limit:
                tokens[index] = cut(tokens[index], limit, options.truncation)
                texts[index] = tokenizer.decode(tokens[index])
        rows = rows.only(remaining)
        self.sources = rows.sources
        self._images = ImagesOfRows.of(rows.images, [texts[index] for index in remaining], tokenizer)
        self.tokens = RaggedTokens([tokens[index] for index in remaining])
        self._prompt_ids = torch.tensor([rows.number(index) for index in range(len(rows))], dtype=torch.int64)
        self._columns = {name: column for name in columns if (column := _column(rows, name)) is not None}
        self._columns["prompt_text"] = object_array([texts[index] for index in remaining])
        messages = [chat.messages_of(row[options.prompt_key]) for row in rows.values]
        self.has_chats = any(chat_messages is not None for chat_messages in messages)
        if self.has_chats:
            self._columns["prompt_messages"] = object_array(messages)

    @property
    def columns(self) -> list[str]:
        """The columns of a batch besides the prompt tokens, including `prompt_text`."""
        return list(self._columns)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.tokens.lengths.max()) if len(self) else 0

    @property
    def digests(self) -> list[bytes]:
        """A hash of each row's tokens, to find duplicates."""
        return self.tokens.digests(self._images)

    @property
    def has_images(self) -> bool:
        return bool(self._images)

    def pictures(self, row: int) -> list[str]:
        """The images of a row, small, as data URLs."""
        return self._images.thumbnails(row)

    def __len__(self) -> int:
        return len(self._prompt_ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row without padding: `prompts` [P] int64, `prompt_ids` (an int), `prompt_text` and the other columns."""
        number = range(len(self))[index]
        row = {"prompts": self.tokens[number], "prompt_ids": int(self._prompt_ids[number])}
        return row | {name: values[number] for name, values in self._columns.items()}

    def collate(self, indices: Sequence[int] | Tensor) -> DataProto:
        """A batch of the rows at `indices`, padded on the left to the longest of them.

        Returns:
            prompts [B P] int64, prompt_mask [B P] bool, prompt_ids [B] int64, and in `non_tensor_batch` the text of
            each prompt as `prompt_text`, its chat messages as `prompt_messages` where any row has some, and the row's
            other columns. Of a data set with images also media_keys [B], and the ragged fields `media.*`.
        """
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        prompts, mask = self.tokens.padded(chosen, self._pad_id, left=True)
        keys, media = self._images.fields(chosen, self.tokens.__getitem__)
        return DataProto.from_dict(
            tensors={"prompts": prompts, "prompt_mask": mask, "prompt_ids": self._prompt_ids[chosen], **keys},
            non_tensors={name: values[chosen.numpy()] for name, values in self._columns.items()},
            meta_info={"pad_token_id": self._pad_id},
            ragged=media,
        )


def _column(rows: DataRows, name: str) -> np.ndarray | None:
    """A column as an object array of JSON values; None, with a warning, if it has others.

    Dates and times become ISO 8601 strings, decimals numbers.
    """
    values = []
    for index, row in enumerate(rows.values):
        try:
            values.append(json_value(_without_dates(row.get(name))))
        except NotJson as error:
            log.warning(
                "The column %r is left out, so that no reward and no environment can read it: it is %s at %s%s, and a "
                "batch carries %s. Convert the column if it is needed.",
                name, error.kind, rows.location(index), error.path, JSON_VALUES,
            )  # fmt: skip
            return None
    return object_array(values)


def _without_dates(value: Any) -> Any:
    if isinstance(value, (datetime.date, datetime.time)):  # datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, list):
        return [_without_dates(item) for item in value]
    return {key: _without_dates(item) for key, item in value.items()} if isinstance(value, dict) else value


def _columns_beside(rows: DataRows, prompt_key: str) -> list[str]:
    """All columns but the prompt, in order of first occurrence."""
    columns = [name for name in dict.fromkeys(key for row in rows.values for key in row) if name != prompt_key]
    faults = [
        f"column {name!r} has the name of a batch field that verl sets. Rename it in the data."
        for name in columns
        if name in FIELDS or name in RESERVED_COLUMNS
    ]
    if faults:
        raise ConfigError(faults)
    return columns
