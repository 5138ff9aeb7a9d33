"""Supervised fine-tuning data: tokenised rows with a loss mask on the completion or on the assistant's turns."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.data.base import RaggedTokens, SFTOptions, cut, fit_lengths, pad_id_of, read_options, refuse_cuts
from verl.data.chat_template import (
    ChatTemplate,
    as_chat,
    conversation_tokens,
    messages_fault,
    parts_by_turn,
    render_prompts,
    shortened,
    template_in_use,
    text_fault,
    with_chats,
    with_one_end,
)
from verl.data.images import ImagesOfRows, with_images
from verl.data.readers import DataRows, RowErrors, read_rows
from verl.errors import ConfigError
from verl.protocol import DataProto

COMPLETION_KEYS = ("completion", "response")
log = logging.getLogger(__name__)
MESSAGES_KEYS = ("messages", "conversations")


@dataclass(frozen=True)
class LossMaskedTokens:
    """Tokens of a row, with their loss mask, and the text with a placeholder for each image that they begin with."""

    tokens: list[int]
    learned: list[bool]
    text: str = ""

    @classmethod
    def after(cls, prompt: list[int], completion: list[int], text: str = "") -> LossMaskedTokens:
        """A prompt without loss and a completion with loss."""
        return cls(prompt + completion, [False] * len(prompt) + [True] * len(completion), text)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def can_be_learned(self) -> bool:
        """Whether some token after the first has loss, and some token has none (there is a prompt)."""
        return any(self.learned[1:]) and not all(self.learned)

    def cut(self, limit: int, truncation: str) -> LossMaskedTokens:
        """At most `limit` tokens; see `verl.data.base.cut`."""
        return LossMaskedTokens(cut(self.tokens, limit, truncation), cut(self.learned, limit, truncation), self.text)


def from_prompts(
    rows: DataRows, prompt_key: str, completion_key: str | None, chat: ChatTemplate, bad: RowErrors
) -> dict[int, LossMaskedTokens]:
    """Tokenise prompts and completions; loss is on the completion and its EOS.

    Prompt and completion are tokenised separately, so that a prompt has the same tokens as in generation. A completion
    of chat messages is rendered with its prompt by the chat template; loss is on its assistant turns.

    Args:
        rows: the data.
        prompt_key: column of the prompt.
        completion_key: column of the completion; None for `completion`, or `response` if there is none.
        chat: the template.
        bad: receives unusable rows, which are left out.
    Returns:
        Tokens by row index.
    Raises:
        ConfigError: the tokenizer has no EOS, or no row has a column.
    """
    texts, prompts = render_prompts(rows, prompt_key, chat, bad)
    key = completion_column(completion_key, {name for row in rows.values for name in row})
    found = dict[int, LossMaskedTokens | None]()  # None: a text, which is tokenised with the others
    for index in (index for index, prompt in enumerate(prompts) if prompt):
        prompt, completion = rows.values[index][prompt_key], rows.values[index].get(key)
        completion: Any = completion if isinstance(prompt, str) and isinstance(completion, str) else as_chat(completion)
        messages = chat.messages_of(prompt) if isinstance(completion, list) else None
        if messages is not None:
            if fault := _messages_fault(completion, key, rows.location(index)):
                bad.add(fault)
            elif conversation := _conversation(chat, [*messages, *completion], rows, index, bad, len(messages)):
                found[index] = conversation
        elif fault := rows.column_fault(key, "completion_key", index) or _completion_fault(rows, key, index):
            bad.add(fault)
        else:
            found[index] = None
    plain = [index for index, conversation in found.items() if conversation is None]
    completions = completion_tokens([rows.values[index][key] for index in plain], chat.tokenizer)
    after = {
        index: LossMaskedTokens.after(prompts[index], completion, texts[index])
        for index, completion in zip(plain, completions, strict=True)
    }
    return {index: conversation or after[index] for index, conversation in found.items()}


def completion_column(completion_key: str | None, present: Collection[str]) -> str:
    """The column of completions: the configured one, else `completion` if it exists, else `response`."""
    return completion_key or next((name for name in COMPLETION_KEYS if name in present), COMPLETION_KEYS[0])


def completion_tokens(completions: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of texts that follow a prompt, each with EOS.

    Raises:
        ConfigError: the tokenizer has no EOS.
    """
    if (end := tokenizer.eos_token_id) is None:
        raise ConfigError("tokenizer has no EOS token: completions could not be terminated. Set eos_token.")
    encoded = tokenizer(list(completions), add_special_tokens=False)["input_ids"] if completions else []
    return [with_one_end(tokens, end) for tokens in encoded]


def expected_completion(completion: Any) -> str | None:
    """Description of what a value must be to be a completion; None if it is one."""
    if isinstance(completion, list):
        return "a text; data=sft_files takes chat messages too, after a prompt of chat messages"
    return text_fault(completion) if isinstance(completion, str) and completion else "a text that is not empty"


def from_conversations(rows: DataRows, key: str, chat: ChatTemplate, bad: RowErrors) -> dict[int, LossMaskedTokens]:
    """Tokenise conversations; loss is on the assistant turns with their end tokens.

    Args:
        rows: the data.
        key: column of the messages.
        chat: the template.
        bad: receives unusable rows, which are left out.
    Returns:
        Tokens by row index.
    Raises:
        ConfigError: no row has the column, there is no chat template, or the tokenizer has no character offsets.
    """
    if chat.source is None:
        raise ConfigError("chat_template is null: conversations need one and the tokenizer has none. Set one.")
    conversations = {}
    for index in range(len(rows)):
        messages, place = rows.values[index].get(key), rows.location(index)
        if fault := rows.column_fault(key, "messages_key", index) or _messages_fault(messages, key, place):
            bad.add(fault)
        elif (conversation := _conversation(chat, messages, rows, index, bad)) is not None:
            conversations[index] = conversation
    return conversations


def each_turn_alone(rows: DataRows, key: str, chat: ChatTemplate) -> DataRows:
    """The rows, those with several in whose place `parts_by_turn` puts several conversations."""
    found, chats = list[int](), list[Any]()
    for index, row in enumerate(rows.values):
        messages: Any = row.get(key)
        is_usable = messages_fault(messages) is None and not rows.images[index]
        parts = parts_by_turn(chat, messages, rows.location(index), row.get("tools")) if is_usable else [messages]
        found += [index] * len(parts)
        chats += parts
    if len(found) == len(rows):
        return rows
    log.info(
        "The chat template writes earlier turns otherwise than the last one: such conversations are learned turn by "
        "turn, %d rows in place of %d.", len(found), len(rows),
    )  # fmt: skip
    more = rows.only(found)
    return replace(more, values=[{**row, key: part} for row, part in zip(more.values, chats, strict=True)])


def _conversation(
    chat: ChatTemplate, messages: Any, rows: DataRows, index: int, bad: RowErrors, learned_from: int = 0
) -> LossMaskedTokens | None:
    """The tokens of a row's conversation; None, and an entry in `bad`, if it has none to learn."""
    tools, images = rows.values[index].get("tools"), rows.images[index]
    try:
        made = LossMaskedTokens(*conversation_tokens(chat, messages, rows.location(index), tools, images, learned_from))
    except ConfigError as error:
        bad.add(str(error))
        return None
    if not made.can_be_learned:
        bad.add(f"chat_template writes no token to learn at {rows.location(index)}, or none before it")
        return None
    return made


def _messages_fault(messages: Any, key: str, location: str) -> str | None:
    expected = messages_fault(messages)
    return expected and f"{key} is {shortened(messages)} at {location}: expected {expected}."


def _completion_fault(rows: DataRows, key: str, index: int) -> str | None:
    completion = rows.values[index][key]
    expected = expected_completion(completion)
    return expected and f"{key} is {shortened(completion)} at {rows.location(index)}: expected {expected}."


class SFTDataset:
    """Sequences for supervised fine-tuning from parquet or JSONL files: prompts with completions, or conversations.

    Loss is on the completion with its EOS, or on the assistant turns with their end tokens. Rows are padded on the
    right.

    Args:
        data_files: one path or several, ending in `.parquet` or `.jsonl`.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        config: keys of `SFTOptions`.
    Attributes:
        sources: index of each row's file; None for rows from memory.
        has_chats: whether some row was rendered by the chat template.
    Raises:
        ConfigError: a file is missing, empty or unreadable; a column is missing; a prompt or a completion is null or
            not a text; a sequence is too long; a key of `config` is unknown; the tokenizer has no EOS.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: Mapping[str, Any] | SFTOptions | None = None,
    ):
        options = config if isinstance(config, SFTOptions) else read_options(SFTOptions, config)
        files = [data_files] if isinstance(data_files, (str, Path)) else list(data_files)
        bad = RowErrors(options.on_bad_row)
        self._prepare(read_rows(files, bad), tokenizer, options, bad)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]] | DataRows,
        tokenizer: Any,
        config: Mapping[str, Any] | SFTOptions | None = None,
        bad: RowErrors | None = None,
    ) -> SFTDataset:
        """Make a data set from rows in memory, each a mapping of columns; `bad` has the unusable rows found before."""
        options = config if isinstance(config, SFTOptions) else read_options(SFTOptions, config)
        bad = RowErrors(options.on_bad_row) if bad is None else bad
        rows = DataRows.of(rows)
        if not len(rows) and not len(bad):
            raise ConfigError("rows is []: the data set is empty.")
        dataset = cls.__new__(cls)
        dataset._prepare(rows, tokenizer, options, bad)
        return dataset

    def _prepare(self, rows: DataRows, tokenizer: Any, options: SFTOptions, bad: RowErrors):
        self.options = options
        self._pad_id = pad_id_of(tokenizer)
        num_rows = len(rows) + len(bad)
        chat = ChatTemplate(tokenizer, template_in_use(tokenizer, options), options.system_prompt)
        present = {name for row in rows.values for name in row}
        messages_key = options.messages_key
        if messages_key is None and options.prompt_key not in present:
            messages_key = next((key for key in MESSAGES_KEYS if key in present), None)
        key = messages_key or options.prompt_key
        rows = with_images(with_chats(rows, key), key, options, tokenizer, bad)
        if messages_key is not None and chat.source is not None:
            num_rows, rows = num_rows - len(rows), each_turn_alone(rows, key, chat)
            num_rows += len(rows)
        if messages_key is None:
            texts = from_prompts(rows, options.prompt_key, options.completion_key, chat, bad)
        else:
            texts = from_conversations(rows, messages_key, chat, bad)
        bad.settle(num_rows)
        prompts = [] if messages_key else [rows.values[index][options.prompt_key] for index in texts]
        self.has_chats = not prompts or any(chat.messages_of(prompt) is not None for prompt in prompts)
        usable = list(texts)
        fitting = fit_lengths(
            [len(texts[index]) for index in usable],
            options.max_length,
            "max_length",
            options.truncation,
            lambda position: rows.location(usable[position]),
        )
        cuts, kept = [], [usable[position] for position in fitting]
        refuse_cuts(rows, {i: len(texts[i]) for i in kept}, options.max_length, "max_length", options.truncation)
        for index in kept:
            cuts.append(texts[index].cut(options.max_length, options.truncation))
            if not cuts[-1].can_be_learned:
                raise ConfigError(
                    f"max_length is {options.max_length}: truncating {rows.location(index)} on the {options.truncation}"
                    " leaves no prompt or nothing to learn. Raise max_length, or set truncation to drop."
                )
        rows = rows.only(kept)
        self.sources = rows.sources
        self._images = ImagesOfRows.of(rows.images, [text.text for text in cuts], tokenizer)
        self._tokens = RaggedTokens([text.tokens for text in cuts])
        self._learned = RaggedTokens([[False, *text.learned[1:]] for text in cuts], dtype=torch.bool)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [N] int64."""
        return self._tokens.lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max()) if len(self) else 0

    @property
    def digests(self) -> list[bytes]:
        """A hash of each row's tokens, to find duplicates."""
        return self._tokens.digests(self._images)

    @property
    def has_images(self) -> bool:
        return bool(self._images)

    def __len__(self) -> int:
        return len(self._tokens.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A row without padding: `input_ids` [S] int64 and `loss_mask` [S] bool."""
        number = range(len(self))[index]
        return {"input_ids": self._tokens[number], "loss_mask": self._learned[number]}

    def collate(self, indices: Sequence[int] | Tensor) -> DataProto:
        """A batch of the rows at `indices`, padded on the right to the longest of them.

        Returns:
            input_ids, attention_mask and position_ids [B S] int64; loss_mask [B S] bool, True on the tokens of the
            completion and its EOS. `loss_mask[b, s]` refers to the token `input_ids[b, s]`, not to the next one.
            Of a data set with images also media_keys [B], and the ragged fields `media.*`.
        """
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        input_ids, mask = self._tokens.padded(chosen, self._pad_id, left=False)
        column = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        keys, media = self._images.fields(chosen, self._tokens.__getitem__)
        return DataProto.from_dict(
            tensors={
                **keys,
                "input_ids": input_ids,
                "attention_mask": mask.long(),
                "position_ids": column.masked_fill(~mask, 0),
                "loss_mask": self._learned.padded(chosen, False, left=False)[0],
            },
            meta_info={"pad_token_id": self._pad_id},
            ragged=media,
        )
