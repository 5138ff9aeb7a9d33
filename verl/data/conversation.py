"""The tokens of a conversation, and which of them the assistant wrote."""

from __future__ import annotations

import re
from typing import Any

from verl.data.prompts import Chat, Messages
from verl.errors import ConfigError

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def conversation_tokens(chat: Chat, messages: Messages, place: str) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and by token whether it is learned.

    A template that marks the assistant's part itself (`{% generation %}`) is asked. Of any other template the
    conversation is rendered up to each turn of the assistant with the generation prompt, and up to its end: what the
    turn added is learned, up to its end token, without the whitespace that templates put after it. That holds only if
    a conversation goes on as it began, so each rendering must begin the next.

    Args:
        place: of the row, in words.
    Raises:
        ConfigError: the template refuses the messages, or rewrites earlier turns when later ones follow, or no turn is
            the assistant's; names the row.
    """
    messages = chat.with_system(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{place} has no message of the role assistant: nothing is there to learn.")
    if GENERATION_BLOCK.search(chat.source or ""):
        return _as_template_says(chat, messages, place)
    text = chat.render(messages, place, reply_follows=False)
    spans = [
        _span(chat, messages, turn, text, place)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        any(start <= first < end and last > first for start, end in spans) for first, last in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), learned


def _span(chat: Chat, messages: Messages, turn: int, text: str, place: str) -> tuple[int, int]:
    """Where in the text of the conversation a turn of the assistant lies, its end token included."""
    before = chat.render(messages[:turn], place, reply_follows=True)
    after = chat.render(messages[: turn + 1], place, reply_follows=False)
    if not after.startswith(before) or not text.startswith(after):
        raise ConfigError(
            f"chat_template renders message {turn} at {place} otherwise when it is cut off there than within the whole "
            "conversation, so what the assistant wrote cannot be told. Mark it in the template with "
            "{% generation %} and {% endgeneration %}, or give prompt and completion columns."
        )
    said = after.rstrip()
    ends = [token for token in chat.tokenizer.all_special_tokens if token.strip()]
    return len(before), max(len(before), len(said if said.endswith(tuple(ends)) else after))


def _as_template_says(chat: Chat, messages: Messages, place: str) -> tuple[list[int], list[bool]]:
    try:
        encoded: Any = chat.tokenizer.apply_chat_template(
            list(messages),
            chat_template=chat.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ConfigError(f"chat_template refuses the roles {roles} at {place}: {error}.") from error
    learned = [bool(mark) for mark in encoded["assistant_masks"]]
    if not any(learned):
        raise ConfigError(f"chat_template marks nothing at {place} as the assistant's: nothing is there to learn.")
    return list(encoded["input_ids"]), learned
