"""Preference data: pairs of a chosen and a rejected response to a prompt, or responses with a label each.

Columns are those of TRL: `prompt`, `chosen`, `rejected`; `chosen` and `rejected` that begin with the prompt; or
`prompt`, `completion`, `label`. Each is a text or a list of chat messages.

    files ──> PreferenceDataset ── collate ──> rows: chosen of all pairs, then rejected      losses of pairs
                   │  ^                        rows: examples, then mismatched               KTO
                   └──┘ unpaired
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl.data.base import PreferenceOptions, RaggedTokens, fit_lengths, pad_id_of
from verl.data.chat_template import (
    ChatTemplate,
    messages_fault,
    shortened,
    template_in_use,
    text_fault,
    text_tokens,
    with_chats,
    with_one_end,
)
from verl.data.images import BadImage, ImagesOfRows, with_images
from verl.data.readers import DataRows, RowErrors
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.protocol.ragged import Ragged

_WORD = re.compile(r"\w\w", re.ASCII)  # words without spaces between them, as in Chinese, may be divided
MAX_MARGIN = 1e30  # beyond it float32 may overflow


def preference_rows(
    prompts: tuple[Tensor, Tensor],
    responses: tuple[Tensor, Tensor],
    ragged: Mapping[str, Ragged] | None = None,
    **columns: Tensor | None,
) -> DataProto:
    """Rows of prompts with their responses.

    Args:
        prompts: tokens and mask [R P], padded on the left.
        responses: tokens and mask [R T], padded on the right.
        ragged: images of the prompts.
        columns: further tensors [R]; None is left out.
    Returns:
        `input_ids`, `attention_mask`, `position_ids` [R S], `responses` and `response_mask` [R T], and the columns.
    """
    attention = torch.cat([prompts[1], responses[1]], dim=1).long()
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([prompts[0], responses[0]], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0) * attention,
            "responses": responses[0],
            "response_mask": responses[1],
            **{name: x for name, x in columns.items() if x is not None},
        },
        ragged=ragged,
    )


@dataclass(frozen=True)
class Preference:
    """A tokenised row of the data; `rejected` is None for a response with a label.

    Attributes:
        label: whether `chosen` is a desirable response.
        margin: by how much `chosen` is better, for the loss of a reward model.
    """

    prompt: list[int]
    chosen: list[int]
    rejected: list[int] | None = None
    label: bool = True
    margin: float | None = None


class PreferenceDataset:
    """Prompts with a chosen and a rejected response each, or with one response that is desirable or not.

    Attributes:
        is_paired: whether rows have a rejected response.
        sources: index of each row's file; None for rows from memory.
        has_chats: whether some row was rendered by the chat template.
        ref_scores: [N 2] nats, log-probs of both responses by the reference; None where they are not computed before.
    """

    ref_scores: Tensor | None = None

    def __init__(
        self,
        rows: Sequence[Preference],
        pad_id: int,
        images: ImagesOfRows,
        sources: list[int] | None = None,
        has_chats: bool = False,
    ):
        self.sources, self._pad_id, self.has_chats, self._images = sources, pad_id, has_chats, images
        self._prompts = RaggedTokens([row.prompt for row in rows])
        rejected = [row.rejected for row in rows if row.rejected is not None]
        self.is_paired = bool(rejected)
        self._responses = RaggedTokens([*(row.chosen for row in rows), *rejected])  # N, or 2N of pairs
        self._labels = torch.tensor([row.label for row in rows], dtype=torch.bool)
        margins = [row.margin for row in rows]
        self._margins = None if None in margins else torch.tensor(margins, dtype=torch.float32)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Any]] | DataRows, tokenizer: Any, options: PreferenceOptions, bad: RowErrors
    ) -> PreferenceDataset:
        """Tokenise rows.

        Raises:
            ConfigError: a column is missing, or a row cannot be used, with its file and line.
        """
        keys = (options.prompt_key, options.chosen_key, options.rejected_key, options.completion_key)
        num_rows, rows = len(rows) + len(bad), with_chats(DataRows.of(rows), *keys)
        rows = with_images(rows, options.prompt_key, options, tokenizer, bad)
        chat = ChatTemplate(tokenizer, template_in_use(tokenizer, options), options.system_prompt)
        parsed = dict(_parsed(rows, chat, options, bad))
        bad.settle(num_rows)
        tokens = _tokenized(parsed, tokenizer)
        kept = list(tokens)
        for limit in ("max_prompt_length", "max_length"):
            lengths = [len(tokens[i].prompt) + (limit == "max_length") * _longest(tokens[i]) for i in kept]
            locations = [rows.location(index) for index in kept]
            bound = getattr(options, limit)
            fitting = fit_lengths(lengths, bound, limit, options.truncation, locations.__getitem__, others="drop")
            kept = [kept[position] for position in fitting]
        has_chats, rows = any(row.is_chat for row in parsed.values()), rows.only(kept)
        images = ImagesOfRows.of(rows.images, [parsed[i].prompt for i in kept], tokenizer)
        return cls([tokens[i] for i in kept], pad_id_of(tokenizer), images, rows.sources, has_chats)

    @property
    def has_images(self) -> bool:
        return bool(self._images)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with a response."""
        prompts = self._prompts.lengths.repeat(1 + self.is_paired)
        return int((prompts + self._responses.lengths).max()) if len(self) else 0

    @property
    def digests(self) -> list[bytes]:
        """A hash of each row's tokens, to find duplicates."""
        responses = self._responses.digests()
        return [x + b"".join(responses[i :: len(self)]) for i, x in enumerate(self._prompts.digests(self._images))]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = range(len(self))[index]
        row = {"prompts": self._prompts[number]}
        if not self.is_paired:
            return {**row, "responses": self._responses[number], "label": bool(self._labels[number])}
        return {**row, "chosen": self._responses[number], "rejected": self._responses[number + len(self)]}

    def unpaired(self) -> PreferenceDataset:
        """Each pair as two consecutive labelled responses."""
        rows: list[Preference] = []
        for index in range(len(self)):
            prompt, chosen, rejected = (x.tolist() for x in self[index].values())
            rows += [Preference(prompt, chosen), Preference(prompt, rejected, label=False)]
        sources = None if self.sources is None else [source for source in self.sources for _ in range(2)]
        images, texts = ([x for x in of_row for _ in range(2)] for of_row in (self._images.images, self._images.texts))
        images = replace(self._images, images=images, texts=texts)
        return PreferenceDataset(rows, self._pad_id, images, sources, self.has_chats)

    def collate(self, indices: Sequence[int] | Tensor) -> DataProto:
        """The B rows at `indices`, as 2B rows: chosen responses, then rejected ones; or labelled responses, then
        mismatched ones, each prompt with the response of the row before it.

        Returns:
            See `preference_rows`, with `is_chosen` [2B], of mismatched rows that of the prompt's own response, and if
            the data has them, `row_margins` and `ref_scores` [2B].
        """
        rows = torch.as_tensor(indices, dtype=torch.int64)
        keys, media = self._images.fields(rows.repeat(2), self._prompts.__getitem__)
        others, labels = rows + len(self) if self.is_paired else rows.roll(1), self._labels[rows]
        return preference_rows(
            self._prompts.padded(rows.repeat(2), self._pad_id, left=True),
            self._responses.padded(torch.cat([rows, others]), self._pad_id, left=False),
            is_chosen=torch.cat([labels, labels ^ self.is_paired]),
            row_margins=None if self._margins is None else self._margins[rows].repeat(2),
            ref_scores=None if self.ref_scores is None else self.ref_scores[rows].T.reshape(-1),
            ragged=media,
            **keys,
        )


@dataclass(frozen=True)
class _Texts:
    """A row as texts; a prompt that is no chat gets the special tokens that the tokenizer puts before a text."""

    prompt: str
    responses: list[str]
    is_chat: bool
    label: bool = True
    margin: float | None = None
    expanded: str = ""  # the prompt with as many placeholders as its images have tokens


def _parsed(
    rows: DataRows, chat: ChatTemplate, options: PreferenceOptions, bad: RowErrors
) -> Iterator[tuple[int, _Texts]]:
    """The usable rows as texts, by index; the others go to `bad`."""
    names = {name for row in rows.values for name in row}
    is_paired = options.completion_key not in names or options.chosen_key in names
    keys = (options.chosen_key, options.rejected_key) if is_paired else (options.completion_key,)
    needed = {key: f"{name}_key" for name, key in zip(("chosen", "rejected") if is_paired else ("completion",), keys)}
    needed |= {} if is_paired else {options.prompt_key: "prompt_key", options.label_key: "label_key"}
    has_margins = any(row.get(options.margin_key) is not None for row in rows.values)
    for index, row in enumerate(rows.values):
        faults = [rows.column_fault(key, setting, index) for key, setting in needed.items()]
        if fault := next((x for x in faults if x is not None), None):
            bad.add(fault)
            continue
        try:
            texts = _texts(row, keys, chat, options, rows.location(index), has_margins)
            texts = replace(texts, expanded=chat.images.expanded(texts.prompt, rows.images[index]))
        except (ConfigError, BadImage) as error:
            bad.add(str(error) if isinstance(error, ConfigError) else f"images at {rows.location(index)}: {error}")
            continue
        yield index, texts


def _texts(
    row: Mapping[str, Any],
    keys: Sequence[str],
    chat: ChatTemplate,
    options: PreferenceOptions,
    location: str,
    has_margins: bool,
) -> _Texts:
    """The texts of a row.

    Raises:
        ConfigError: a value cannot be used; names it with its place.
    """

    def refuse(key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{key} is {shortened(value)} at {location}: expected {expected}.")

    for key in keys:
        is_text = isinstance(row[key], str)
        expected = (None if row[key] else "a text that is not empty") if is_text else messages_fault(row[key])
        if expected := expected or (text_fault(row[key]) if is_text else None):
            raise refuse(key, row[key], expected if is_text else f"a text, or {expected}")
    responses = [row[key] for key in keys]
    if len(responses) == 2 and responses[0] == responses[1]:
        raise refuse(keys[1], responses[1], f"another response than {keys[0]}, since equal ones prefer nothing")
    prompt = row.get(options.prompt_key)
    start: Any = prompt if messages_fault(prompt) is None else ()
    if len(responses) == 2 and (prompt is None or _is_in_both(prompt, *responses)):
        prompt, *responses = common_start(*responses)
    elif start and all(response[: len(start)] == start for response in responses):
        responses = [response[len(start) :] for response in responses]
    if not all(responses):
        key = keys[responses.index(responses[0][:0])]
        raise refuse(key, row[key], "a response behind the start that both share")
    is_text = isinstance(prompt, str)
    if not prompt or (not is_text and messages_fault(prompt)):
        raise refuse(options.prompt_key, prompt, f"a prompt that is not empty, or {keys[0]} that begins with it")
    if is_text and (expected := text_fault(prompt)):
        raise refuse(options.prompt_key, prompt, expected)
    label, margin = True if len(keys) == 2 else row[options.label_key], row.get(options.margin_key)
    if not isinstance(label, (bool, int)) or label not in (0, 1):
        raise refuse(options.label_key, label, "true or false")
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool) and abs(margin) < MAX_MARGIN
    if has_margins and not is_number:
        raise refuse(options.margin_key, margin, "a finite number, which every row has or none")
    messages = chat.messages_of(prompt)
    if messages is None:
        if any(not isinstance(x, str) for x in responses):
            raise refuse(keys[0], responses[0], "a text, as the prompt is")
        return _Texts(prompt, responses, False, bool(label), margin)
    before = chat.render(messages, location, reply_follows=True, tools=row.get("tools"))
    ends = tuple(token for token in chat.tokenizer.all_special_tokens if token.strip())
    texts = []
    for key, response in zip(keys, responses, strict=True):
        turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else list(response)
        chat.refuse_lost_calls([*messages, *turns], location)
        whole = chat.render([*messages, *turns], location, reply_follows=False, tools=row.get("tools"))
        if not whole.startswith(before) or not turns:
            raise refuse(key, response, "messages that follow the prompt, which the chat template renders after it")
        text = whole[len(before) :]
        texts.append(text.rstrip() if text.rstrip().endswith(ends) else text)
    return _Texts(before, texts, True, bool(label), margin)


def _is_in_both(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Whether a text repeats a message that two conversations begin with, as in UltraFeedback."""
    is_text = isinstance(prompt, str) and not isinstance(chosen, str) and not isinstance(rejected, str)
    return is_text and any(x["content"] == prompt for x in common_start(chosen, rejected)[0])


def common_start(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The prompt that two texts or two lists of messages begin with, and what follows it in each.

    No word of a text is divided, and the space between words belongs to what follows.
    """
    pairs = zip(chosen, rejected, strict=False)
    count = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        while any(_WORD.match(text, count - 1) for text in (chosen, rejected) if count):
            count -= 1
        count -= chosen[:count].endswith(" ")
    return chosen[:count], chosen[count:], rejected[count:]


def _tokenized(parsed: Mapping[int, _Texts], tokenizer: Any) -> dict[int, Preference]:
    """Tokens of each row; a response that is no chat ends with the EOS of the tokenizer."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("tokenizer has no EOS token: responses could not be terminated. Set eos_token.")

    def plain(texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []

    rows = list(parsed.values())
    of_texts = iter(text_tokens([x.expanded for x in rows if not x.is_chat] or ["a"], tokenizer))
    of_chats = iter(plain([x.expanded for x in rows if x.is_chat]))
    responses = iter(plain([text for x in rows for text in x.responses]))
    made = {}
    for index, row in parsed.items():
        prompt = next(of_chats if row.is_chat else of_texts)
        answers = [next(responses) for _ in row.responses]
        tokens = answers if row.is_chat else [with_one_end(ids, tokenizer.eos_token_id) for ids in answers]
        made[index] = Preference(prompt, tokens[0], tokens[1] if tokens[1:] else None, row.label, row.margin)
    return made


def _longest(row: Preference) -> int:
    return max(len(row.chosen), len(row.rejected or []))
