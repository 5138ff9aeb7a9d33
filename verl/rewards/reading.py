"""What a reward model reads of a batch: the one place where rows become token ids of its tokenizer.

tokens   the ids of the policy, as they are
chat     the messages of the prompt and the response as the assistant's, through the chat template
text     prompt and response as one text
pair     prompt and response as the two texts of a pair, with what the tokenizer puts between them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verl.errors import ConfigError
from verl.models.interfaces import reads_alike
from verl.protocol import DataProto
from verl.rewards.base import texts_of
from verl.rewards.results import reward_error

Form = Literal["auto", "tokens", "chat", "text", "pair"]


@dataclass(frozen=True)
class Reading:
    """B texts as token ids.

    Attributes:
        ids: by row.
        types: by row, which text of a pair each token belongs to, for tokenizers that tell; else None.
        was_cut: [B] bool, whether the start of the row was cut off.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    was_cut: np.ndarray


def chosen_form(form: Form, tokenizer: Any, actors: Any) -> Form:
    """What `auto` means for two tokenizers; any other form is checked against them.

    Args:
        actors: the tokenizer of the policy, or None where it is not known.
    Raises:
        ConfigError: the form needs a tokenizer that is the policy's, or a chat template, and there is none.
    """
    is_same = actors is not None and reads_alike(tokenizer, actors)
    template = getattr(tokenizer, "chat_template", None)
    if form == "tokens" and not is_same:
        raise ConfigError("reads is tokens: the tokenizer of the reward model is not the actor's. Set reads=auto.")
    if form == "chat" and template is None:
        raise ConfigError("reads is chat: the tokenizer of the reward model has no chat template. Set reads=text.")
    if form != "auto":
        return form
    if is_same and template == getattr(actors, "chat_template", None):
        return "tokens"
    return "text" if template is None else "chat"


class Reader:
    """Reads batches for one reward model.

    Args:
        tokenizer: the reward model's.
        form: any but `auto`.
        max_length: tokens that the model can read, or None.
        truncation: of longer rows: `error`, or `left` to cut off their start.
    """

    def __init__(self, tokenizer: Any, form: Form, max_length: int | None, truncation: Literal["error", "left"]):
        assert form != "auto"
        self.tokenizer, self.form, self.max_length, self.truncation = tokenizer, form, max_length, truncation

    def __call__(self, batch: DataProto, producer: Callable) -> Reading:
        """Read every row of a batch.

        Raises:
            RewardError: a row is too long, has no tokens, or is refused by the chat template; names it.
        """
        prompts, responses, columns = texts_of(batch)
        messages = columns.get("prompt_messages") or [None] * len(prompts)
        if self.form == "tokens":
            ids, types = _tokens_of(batch), None
        elif self.form == "chat":
            texts = [self._rendered(row, prompts, responses, messages[row], producer) for row in range(len(prompts))]
            ids, types = self._encoded(texts, add_special_tokens=False)
        else:
            asked = [_plain(prompt, chat) for prompt, chat in zip(prompts, messages, strict=True)]
            ids, types = self._read_texts(asked, responses)
        lengths = np.array([len(row) for row in ids])
        for row in np.flatnonzero(lengths == 0):
            raise reward_error("at least one token to read", "none", producer, prompts, responses, int(row))
        was_cut = lengths > (np.inf if self.max_length is None else self.max_length)
        if self.truncation == "error" and was_cut.any():
            row = int(lengths.argmax())
            expected = f"at most {self.max_length} tokens, the max_length of the reward model (or set truncation=left)"
            raise reward_error(expected, f"{lengths[row]} tokens", producer, prompts, responses, row)
        if was_cut.any():
            self._cut(ids, types, was_cut)
        return Reading(ids, types, was_cut)

    def _read_texts(self, prompts: list[str], responses: list[str]) -> tuple[list[list[int]], list[list[int]] | None]:
        if self.form == "pair":
            return self._encoded(prompts, responses)
        return self._encoded([prompt + response for prompt, response in zip(prompts, responses, strict=True)])

    def _encoded(self, *texts: list[str], **options: Any) -> tuple[list[list[int]], list[list[int]] | None]:
        encoded = self.tokenizer(*texts, **options)
        return [list(row) for row in encoded["input_ids"]], encoded.get("token_type_ids")

    def _cut(self, ids: list[list[int]], types: list[list[int]] | None, was_cut: np.ndarray) -> None:
        """Cut the start off, but not the tokens that the tokenizer puts before every text, such as [CLS]."""
        assert self.max_length is not None
        for row in np.flatnonzero(was_cut):
            opening = self._opening(ids[row])
            kept = [*range(opening), *range(len(ids[row]) - self.max_length + opening, len(ids[row]))]
            ids[row] = [ids[row][place] for place in kept]
            if types is not None:
                types[row] = [types[row][place] for place in kept]

    def _opening(self, ids: list[int]) -> int:
        return int(ids[0] in (self.tokenizer.cls_token_id, self.tokenizer.bos_token_id))

    def _rendered(self, row: int, prompts: list, responses: list, messages: Any, producer: Callable) -> str:
        turns = [*(messages or [{"role": "user", "content": prompts[row]}])]
        turns.append({"role": "assistant", "content": responses[row]})
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # a template raises whatever it likes
            roles = ", ".join(str(turn["role"]) for turn in turns)
            expected = f"a chat template that takes the roles {roles} (or set reads=text)"
            raise reward_error(expected, f"{error}", producer, prompts, responses, row) from error


def _tokens_of(batch: DataProto) -> list[list[int]]:
    mask = batch.batch["attention_mask"].bool()
    return [row[kept].tolist() for row, kept in zip(batch.batch["input_ids"].cpu(), mask.cpu(), strict=True)]


def _plain(prompt: str, messages: Any) -> str:
    """A prompt without the marks of the policy's chat template, which another tokenizer does not know."""
    return prompt if not messages else "".join(f"{message['content']}\n" for message in messages)
