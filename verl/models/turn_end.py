"""The token with which a chat template ends a turn of the assistant: a policy that learns the template stops at it."""

from __future__ import annotations

import logging
from typing import Any

PROBE = "Seventeen herons."  # answer of a chat that shows how a template ends a turn
_log = logging.getLogger(__name__)


def turn_end(tokenizer: Any, **options: Any) -> str | None:
    """The special token that a chat template writes after an assistant's answer; None if it writes none.

    Args:
        options: of `apply_chat_template`: another template than the tokenizer's, and its variables.
    """
    chat = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    except Exception:  # noqa: BLE001 - templates raise what they like; the data report a template that fails
        return None
    tail = text.rpartition(PROBE)[2] if PROBE in text else ""
    special = {tokenizer.convert_ids_to_tokens(number) for number in tokenizer.added_tokens_decoder}
    written = sorted((tail.find(word), word) for word in special if word and word in tail)
    return written[0][1] if written else None


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Ids of the tokens that end a response: of the model's generation config, the tokenizer and its chat template."""
    configured = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    if getattr(tokenizer, "chat_template", None) and (end := turn_end(tokenizer)) is not None:
        ids.add(tokenizer.convert_tokens_to_ids(end))
    return ids - {None}


def save_turn_end(model: Any, tokenizer: Any) -> None:
    """Add the end of a turn to the model's generation config, which is saved, where it would not end a response.

    Base models end a text with another token than their chat template a turn: other programs would run on after it.
    """
    config = getattr(model, "generation_config", None)
    if config is None or tokenizer is None:
        return
    configured = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if more := end_ids(model, tokenizer) - {tokenizer.eos_token_id, *configured}:
        names = tokenizer.convert_ids_to_tokens(sorted(more))
        _log.info("Responses also end with %s, as a turn in the chat template.", " and ".join(names))
        config.eos_token_id = sorted(more | {i for i in configured if i is not None})
