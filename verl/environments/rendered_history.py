"""`history=rerender`: before each turn the chat template renders the whole conversation, and each turn is a sample.

Contents of observations are encoded without special tokens here too: the conversation is rendered with stand-ins in
their places, and cut there. A template that leaves out earlier turns, or parts of them, is followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.chat_template import ChatTemplate
from verl.environments.base import EnvironmentDescription, Observation
from verl.environments.observation_tokens import STAND_IN, ObservationEncoder, as_messages, text_between
from verl.environments.tool_calls.round_trip import PLACE, TOOLS, format_of, stand_in_turn
from verl.errors import ConfigError, faults_below


def check_template(options: EnvironmentDescription, chat: ChatTemplate, has_chats: bool) -> None:
    """Check that calls of the model and results of tools pass the chat template unchanged.

    Args:
        has_chats: prompts are chats, so that the template renders the results of tools.
    Raises:
        ConfigError: the format of calls is not that of the template, or the template refuses results of tools.
    """
    with faults_below("environment"):
        style = format_of(chat, options.tool_format)
    if not has_chats:
        return
    name = next(iter(TOOLS))
    with faults_below("data"):
        for count in (1, 2):  # calls of a turn
            text_between(chat, style, [{"role": "tool", "name": name}] * count)
    if options.history != "rerender":
        return
    turn, result = stand_in_turn(chat, style), STAND_IN.format("result")
    messages = [
        {"role": "user", "content": STAND_IN.format("asked")},
        {"role": "assistant", "content": turn},
        {"role": "tool", "name": name, "content": result},
    ]
    with faults_below("environment"):
        try:
            rendered = chat.render(messages, PLACE, reply_follows=True)
        except ConfigError as error:
            raise ConfigError(f"history is rerender: {error} Set environment.history=append.") from error
        if turn not in rendered or result not in rendered:
            raise ConfigError(
                f"history is rerender, and the chat template does not render a turn {turn!r} and the result of its "
                "call as they are. Set environment.history=append, or another data.chat_template."
            )


class ConversationRenderer:
    """Renders the conversations of episodes.

    Args:
        tools: JSON schemas, for rows without a column `tools`.
    """

    def __init__(self, chat: ChatTemplate, encoder: ObservationEncoder, tools: Sequence[Mapping[str, Any]]):
        self.chat, self.encoder, self.tools = chat, encoder, tuple(tools)
        self._ends: frozenset[int] | None = None

    def text_of(self, turn: Sequence[int]) -> str:
        """Text that the model wrote in a turn, without a token with which the template ends it."""
        if self._ends is None:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            rendered = self.chat.render(messages, "a stand-in conversation", reply_follows=False)
            self._ends = self.encoder.stop_ids & set(self.encoder.encoded(rendered)[-2:])
        written = turn[:-1] if turn[-1] in self._ends else turn
        return self.chat.tokenizer.decode(written, skip_special_tokens=False)

    def refuse_other_prompt(self, row: Mapping[str, Any]) -> None:
        """Check that the conversation of a row is rendered as its prompt was.

        Raises:
            ConfigError: the prompt is not a chat, or was cut, or rendered otherwise.
        """
        messages, where = row.get("prompt_messages"), f"prompt {row.get('prompt_id')}"
        if messages is None:
            raise ConfigError(
                f"environment.history is rerender: {where} is a text, and only chats are rendered. Set "
                "data.system_prompt, or environment.history=append."
            )
        text = self.chat.render(messages, where, reply_follows=True, tools=self._tools_of(row))
        if text != row["prompt_text"]:
            raise ConfigError(
                f"environment.history is rerender: the chat template renders {where} otherwise than the data did, so "
                f"that later turns would begin otherwise: {text[:200]!r} in place of {row['prompt_text'][:200]!r}."
            )

    def tokens(self, row: Mapping[str, Any], turns: Sequence[tuple[str | None, Observation]]) -> list[int]:
        """Token ids of the conversation so far, up to where the model writes again.

        Args:
            turns: what the model wrote, and what it was answered; None before its first turn, and for no answer.
        """
        messages: list[Mapping[str, Any]] = list(row["prompt_messages"])
        contents: list[str] = []
        prefix = "verlstandin"
        while any(prefix in str(message) for message in messages) or any(prefix in (text or "") for text, _ in turns):
            prefix += "x"
        for text, observation in turns:
            if text is not None:
                messages.append({"role": "assistant", "content": text})
            for message in as_messages(observation):
                messages.append({**message, "content": f"{prefix}{len(contents)}end"})
                contents.append(message["content"])
        where = f"the conversation of prompt {row.get('prompt_id')}"
        rendered = self.chat.render(messages, where, reply_follows=True, tools=self._tools_of(row))
        pieces = re.split(f"{prefix}([0-9]+)end", rendered)
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            ids += self.encoder.content(contents[int(piece)]) if number % 2 else self.encoder.encoded(piece)
        return ids

    def _tools_of(self, row: Mapping[str, Any]) -> Any:
        return row.get("tools") or (self.tools if self.chat.reads_tools else None)
