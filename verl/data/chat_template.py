"""Chat templates: the prompt column as text and tokens, conversations as tokens, and which tokens the assistant
wrote.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from verl.data.readers import DataRows, RowErrors
from verl.errors import ConfigError

FinalAssistant = Literal["error", "drop", "answer"]
Messages = Sequence[Mapping[str, Any]]
PINNED_DAY = "verl_day"  # attribute of a tokenizer


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become text.

    Attributes:
        template: a Jinja template in place of the tokenizer's own, or None.
        system_prompt: the system message of chats that have none; with it a text prompt is the message of a user.
        tools: JSON schemas for rows that name none of their own; of no effect where the template reads none.
    """

    tokenizer: Any
    template: str | None = None
    system_prompt: str | None = None
    tools: tuple[Any, ...] = ()

    @property
    def reads_tools(self) -> bool:
        """Whether the template writes schemas of tools into a prompt."""
        return "tools" in (self.source or "")

    @property
    def is_dated(self) -> bool:
        """Whether the template writes the date of the day."""
        return "strftime_now" in (self.source or "")

    @property
    def source(self) -> str | None:
        """The template in use."""
        return self.template or getattr(self.tokenizer, "chat_template", None)

    def with_system(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The messages, opened by the system prompt unless they open with a system message of their own."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def tools_of(self, tools: Any, place: str) -> list[Any] | None:
        """A column `tools` as a template takes it: JSON schemas, or JSON text of them; None where there are none.

        Raises:
            ConfigError: they are no list of mappings, or the template does not read any.
        """
        if tools is None or tools == "" or (not isinstance(tools, str) and len(tools) == 0):
            return None
        try:
            found = json.loads(tools) if isinstance(tools, str) else list(tools)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tools is {shortened(tools)} at {place}: no JSON ({error}).") from error
        if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
            raise ConfigError(f"tools is {shortened(tools)} at {place}: expected a list of JSON schemas.")
        if not self.reads_tools:
            raise ConfigError(
                f"tools is given at {place}, and the chat template reads none: the policy would not see them. Choose a "
                "chat_template that does, or rename the column."
            )
        return [_without_nulls(tool) for tool in found] or None

    def messages_of(self, prompt: str | Messages) -> list[Mapping[str, Any]] | None:
        """The chat that a prompt is; None for a text, unless a system prompt makes it one."""
        if not isinstance(prompt, str):
            return self.with_system(prompt)
        return None if self.system_prompt is None else self.with_system([{"role": "user", "content": prompt}])

    def render(self, messages: Messages, place: str, *, reply_follows: bool, tools: Any = None) -> str:
        """The text of a chat.

        Args:
            place: of the row, in words.
            reply_follows: end with the generation prompt, where the assistant begins to speak.
            tools: what stands in the row's column `tools`, for the template.
        Raises:
            ConfigError: there is no template, or it refuses the messages or knows no tools; names row, roles and the
                template's error.
        """
        if self.source is None:
            raise ConfigError(
                f"chat_template is null: {place} needs one for its chat messages and the tokenizer has none. "
                "Set one, or write the prompts as text."
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=reply_follows,
                tools=self.tools_of(tools, place),
                **pinned_date(self.tokenizer),
            )
        except ConfigError:
            raise
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(f"chat_template refuses the roles {roles} at {place}: {error}.") from error


def today() -> str:
    return datetime.date.today().isoformat()


def pin_date(tokenizer: Any, day: str) -> None:
    """Have chat templates of this tokenizer write a fixed day, as 2026-11-23, in place of the present one."""
    setattr(tokenizer, PINNED_DAY, day)


def pinned_date(tokenizer: Any) -> dict[str, Any]:
    """What `apply_chat_template` takes for that."""
    if (day := getattr(tokenizer, PINNED_DAY, None)) is None:
        return {}
    return {"strftime_now": datetime.datetime.fromisoformat(day).strftime}


def render_prompts(rows: DataRows, key: str, chat: ChatTemplate, bad: RowErrors) -> tuple[list[str], list[list[int]]]:
    """The text and the tokens of every prompt; both are empty for rows that `bad` received.

    A text is tokenised as it is, with the special tokens that the tokenizer puts before a text. Chat messages go
    through the chat template, up to where the assistant begins to speak; the template writes its own special tokens.

    Raises:
        ConfigError: no row has the column, or messages meet no template at all.
    """
    texts, is_chat = [""] * len(rows), [False] * len(rows)
    for index in range(len(rows)):
        fault = rows.column_fault(key, "prompt_key", index) or _prompt_fault(rows, key, index)
        if fault is None:
            prompt = rows.values[index][key]
            messages = chat.messages_of(prompt)
            is_chat[index] = messages is not None
            tools = rows.values[index].get("tools") or (chat.tools if chat.reads_tools else None)
            texts[index], fault = (
                (prompt, None) if messages is None else _rendered(messages, chat, rows.place(index), tools)
            )
        if fault is not None:
            bad.add(fault)
    tokens = _tokens(texts, is_chat, chat.tokenizer)
    for index, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
        if text and not ids:
            bad.add(f"{key} is {shortened(rows.values[index][key])} at {rows.place(index)}: it has no tokens.")
    return texts, tokens


def messages_fault(messages: Any) -> str | None:
    """What was expected, where a value is no list of chat messages; None where it is one."""
    if not isinstance(messages, (list, tuple)) or not messages:
        return "a list of chat messages"
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return "each chat message to have a text `role` and a text `content`"
        if text_fault(message["content"]) is not None:
            return "each chat message to be valid Unicode"
    return None


def text_fault(text: str) -> str | None:
    """What was expected, where a text cannot be tokenised: JSON can hold halves of surrogate pairs."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "valid Unicode"
    return None


def shortened(value: Any) -> str:
    """A value for a message, in at most 80 characters."""
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _prompt_fault(rows: DataRows, key: str, index: int) -> str | None:
    prompt = rows.values[index][key]
    if isinstance(prompt, str):
        expected = text_fault(prompt) if prompt else "a text that is not empty"
    elif isinstance(prompt, (list, tuple)) and prompt:
        expected = messages_fault(prompt)
    else:
        expected = "a text or a list of chat messages"
    return expected and f"{key} is {shortened(prompt)} at {rows.place(index)}: expected {expected}."


def _without_nulls(value: Any) -> Any:
    """Without the keys that parquet gives every row of a column, null where a row had none."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value


def without_final_assistant(rows: DataRows, key: str, how: FinalAssistant) -> DataRows:
    """Rows whose chats end before the assistant's last words, where these are not to stand in the prompt.

    Args:
        how: see `PromptOptions`; under `error` the rows stay, and are refused when they are rendered.
    Raises:
        ConfigError: the words are to be the column `answer`, and there is one.
    """
    if how == "error":
        return rows
    values = []
    for index, row in enumerate(rows.values):
        prompt, last = row.get(key), None
        while _ends_with_assistant(prompt) and len(prompt) > 1:
            last = prompt[-1] if last is None else last
            prompt = list(prompt[:-1])
        if last is not None and how == "answer" and "answer" in row:
            raise ConfigError(
                f"final_assistant is 'answer', and {rows.place(index)} has a column answer of its own. Set drop, or "
                "rename the column."
            )
        answer = {"answer": last["content"]} if last is not None and how == "answer" else {}
        values.append(row if last is None else {**row, key: prompt, **answer})
    return replace(rows, values=values)


def _ends_with_assistant(prompt: Any) -> bool:
    return (
        isinstance(prompt, (list, tuple))
        and bool(prompt)
        and isinstance(prompt[-1], Mapping)
        and prompt[-1].get("role") == "assistant"
    )


def _rendered(messages: Messages, chat: ChatTemplate, place: str, tools: Any) -> tuple[str, str | None]:
    """The text of a chat, or why the row has none."""
    if _ends_with_assistant(messages):
        return "", (
            f"the chat at {place} ends with the assistant, whose words would stand in the prompt and may be the "
            "answer. Set final_assistant to drop, or to answer to have them as the column answer"
        )
    try:
        return chat.render(messages, place, reply_follows=True, tools=tools), None
    except ConfigError as error:
        if chat.source is None:  # no row could be rendered
            raise
        return "", str(error)


def _tokens(texts: list[str], is_chat: list[bool], tokenizer: Any) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [index for index, text in enumerate(texts) if text and is_chat[index] is not special]
        if chosen:
            encoded = tokenizer([texts[index] for index in chosen], add_special_tokens=special)["input_ids"]
            for index, ids in zip(chosen, encoded, strict=True):
                tokens[index] = list(ids)
    return tokens


GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def conversation_tokens(
    chat: ChatTemplate, messages: Messages, place: str, tools: Any = None
) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and by token whether it is learned.

    A template that marks the assistant's part itself (`{% generation %}`) is asked. Of any other template the
    conversation is rendered up to each turn of the assistant with the generation prompt, and up to its end: what the
    turn added is learned, up to its end token, without the whitespace that templates put after it. That holds only if
    a conversation goes on as it began, so each rendering must begin the next.

    Args:
        place: of the row, in words.
        tools: what stands in the row's column `tools`.
    Raises:
        ConfigError: the template refuses the messages, or rewrites earlier turns when later ones follow, or no turn is
            the assistant's; names the row.
    """
    messages = chat.with_system(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{place} has no message of the role assistant: there is nothing to learn.")
    if GENERATION_BLOCK.search(chat.source or ""):
        return _as_template_says(chat, messages, place, tools)
    text = chat.render(messages, place, reply_follows=False, tools=tools)
    spans = [
        _span(chat, messages, turn, text, place, tools)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        any(start <= first < end and last > first for start, end in spans) for first, last in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), learned


def _span(chat: ChatTemplate, messages: Messages, turn: int, text: str, place: str, tools: Any) -> tuple[int, int]:
    """Where in the text of the conversation a turn of the assistant lies, its end token included."""
    before = chat.render(messages[:turn], place, reply_follows=True, tools=tools)
    after = chat.render(messages[: turn + 1], place, reply_follows=False, tools=tools)
    if not after.startswith(before) or not text.startswith(after):
        raise ConfigError(
            f"chat_template renders message {turn} at {place} differently at the end of a conversation and within "
            "it, so the assistant's tokens cannot be determined. Mark it in the template with "
            "{% generation %} and {% endgeneration %}, or give prompt and completion columns."
        )
    said = after.rstrip()
    ends = [token for token in chat.tokenizer.all_special_tokens if token.strip()]
    return len(before), max(len(before), len(said if said.endswith(tuple(ends)) else after))


def _as_template_says(chat: ChatTemplate, messages: Messages, place: str, tools: Any) -> tuple[list[int], list[bool]]:
    known = chat.tools_of(tools, place)
    try:
        encoded: Any = chat.tokenizer.apply_chat_template(
            list(messages),
            chat_template=chat.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tools=known,
            **pinned_date(chat.tokenizer),
        )
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ConfigError(f"chat_template refuses the roles {roles} at {place}: {error}.") from error
    learned = [bool(mark) for mark in encoded["assistant_masks"]]
    if not any(learned):
        raise ConfigError(f"chat_template marks nothing at {place} as the assistant's: there is nothing to learn.")
    return list(encoded["input_ids"]), learned
