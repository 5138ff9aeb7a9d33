"""From rows to tokens of which some are learned: a completion, or the assistant's turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from verl.data.bad_rows import BadRows
from verl.data.conversation import conversation_tokens
from verl.data.prompts import Chat, messages_fault, render_prompts, shortened, text_fault
from verl.data.rows import Rows
from verl.data.tokens import cut
from verl.errors import ConfigError

COMPLETION_KEYS = ("completion", "response")


@dataclass(frozen=True)
class Learnable:
    """The tokens of one row, and by token whether it is learned."""

    tokens: list[int]
    learned: list[bool]

    @classmethod
    def after(cls, prompt: list[int], completion: list[int]) -> Learnable:
        """A prompt and the completion that is learned."""
        return cls(prompt + completion, [False] * len(prompt) + [True] * len(completion))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def can_be_learned(self) -> bool:
        """Whether a token is learned that follows another, and not all are: something is there to answer."""
        return any(self.learned[1:]) and not all(self.learned)

    def cut(self, limit: int, truncation: str) -> Learnable:
        """At most `limit` tokens; see `verl.data.tokens.cut`."""
        return Learnable(cut(self.tokens, limit, truncation), cut(self.learned, limit, truncation))


def from_prompts(
    rows: Rows, prompt_key: str, completion_key: str | None, chat: Chat, bad: BadRows
) -> dict[int, Learnable]:
    """By row, in order, a prompt and the completion that is learned, with its EOS.

    Both are tokenised apart, so that the prompt has the very tokens that generation starts from.

    Args:
        completion_key: the column; None takes `completion` or else `response`.
        bad: is told of rows that cannot be used, which are left out.
    Raises:
        ConfigError: the tokenizer has no EOS, or no row has a column.
    """
    tokenizer = chat.tokenizer
    if tokenizer.eos_token_id is None:
        raise ConfigError("tokenizer has no EOS token: a completion could not say where it ends. Set eos_token.")
    _, prompts = render_prompts(rows, prompt_key, chat, bad)
    present = {name for row in rows.values for name in row}
    key = completion_key or next((name for name in COMPLETION_KEYS if name in present), COMPLETION_KEYS[0])
    usable = []
    for index in (index for index, prompt in enumerate(prompts) if prompt):
        if (fault := rows.column_fault(key, "completion_key", index) or _completion_fault(rows, key, index)) is None:
            usable.append(index)
        else:
            bad.add(fault)
    if not usable:
        return {}
    completions = tokenizer([rows.values[index][key] for index in usable], add_special_tokens=False)["input_ids"]
    return {
        index: Learnable.after(prompts[index], [*completion, tokenizer.eos_token_id])
        for index, completion in zip(usable, completions, strict=True)
    }


def from_conversations(rows: Rows, key: str, chat: Chat, bad: BadRows) -> dict[int, Learnable]:
    """By row, in order, a conversation of which the assistant's turns are learned, each with its end token.

    Args:
        bad: is told of rows that cannot be used, which are left out.
    Raises:
        ConfigError: no row has the column, there is no template, or the tokenizer cannot tell where its tokens lie.
    """
    if chat.source is None:
        raise ConfigError("chat_template is null: conversations need one and the tokenizer has none. Set one.")
    if not getattr(chat.tokenizer, "is_fast", False):
        raise ConfigError("messages_key needs a fast tokenizer: this one cannot tell where its tokens lie in the text.")
    found = {}
    for index in range(len(rows)):
        fault = rows.column_fault(key, "messages_key", index)
        if fault is None and (expected := messages_fault(messages := rows.values[index][key])) is not None:
            fault = f"{key} is {shortened(messages)} at {rows.place(index)}: expected {expected}."
        if fault is not None:
            bad.add(fault)
            continue
        try:
            tokens, learned = conversation_tokens(chat, rows.values[index][key], rows.place(index))
            found[index] = Learnable(tokens, learned)
        except ConfigError as error:
            bad.add(str(error))
    return found


def _completion_fault(rows: Rows, key: str, index: int) -> str | None:
    completion = rows.values[index][key]
    is_text = isinstance(completion, str) and completion
    expected = text_fault(completion) if is_text else "a text that is not empty"
    return expected and f"{key} is {shortened(completion)} at {rows.place(index)}: expected {expected}."
