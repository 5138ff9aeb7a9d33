"""Tokenization of observations: the model's tokens are never changed; an observation is encoded once and appended.

In a chat, the text between two turns of the model is computed from two renderings of placeholder messages, split at the
placeholders. The template's parts are encoded with special tokens, the contents without: a tool result is text, even if
it contains the text of a special token. What the template writes for an image is one of its own parts, expanded to as
many tokens as the image has.

With `history=rerender` the chat template renders the whole conversation before each turn, and each turn is a sample.
The contents of observations are replaced by placeholders for rendering, and encoded without special tokens too. Turns
that the template omits or shortens are omitted or shortened in the prompt.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl.data.chat_template import ChatTemplate
from verl.data.images import PLACEHOLDER, BadImage, CheckedImage
from verl.environments.base import EnvironmentDescription, Observation
from verl.environments.tool_calls.parse import ToolCall, ToolFormat, find_calls
from verl.environments.tool_calls.round_trip import SOURCE, TOOLS, as_message, format_of, stand_in_turn
from verl.errors import ConfigError, faults_below

log = logging.getLogger(__name__)

STAND_IN = "verlstandin{}x"
MAX_PIECES = 1024  # size of the cache, by roles and names of messages
CUT = "\n[... {} {} are left out ...]\n"
MAX_CHARACTERS = 32  # per token of the limit; a longer text is cut before tokenisation


class PlainTextEncoder:
    """Encodes text without any special or added token, so that `<|im_end|>` in it is the characters `<|im_end|>`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.reserved = {int(i) for i in tokenizer.all_special_ids} | {
            int(i) for i in tokenizer.get_added_vocab().values()
        }
        self._plain = _without_added_tokens(tokenizer)

    def __call__(self, text: str) -> list[int]:
        text = text.encode(errors="replace").decode()  # lone surrogates, which no tokenizer takes
        if self._plain is not None:
            ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        else:
            ids = list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
        unknown = self.tokenizer.unk_token_id
        if forged := [i for i in ids if i in self.reserved and i != unknown]:
            token = self.tokenizer.convert_ids_to_tokens(forged[0])
            raise ConfigError(
                f"actor.model: its tokenizer makes the special token {token!r} of plain text, so an observation could "
                "forge one. Use a tokenizer whose special tokens are added tokens."
            )
        return ids


def _without_added_tokens(tokenizer: Any) -> Any:
    """A copy of the fast tokenizer without added tokens; None if there is no fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from tokenizers import Tokenizer

    plain = json.loads(backend.to_str())
    plain["added_tokens"], plain["post_processor"], plain["truncation"], plain["padding"] = [], None, None, None
    model = plain.get("model", {})
    added = set(tokenizer.get_added_vocab()) | set(tokenizer.all_special_tokens)
    if model.get("type") in ("WordLevel", "WordPiece") and isinstance(model.get("vocab"), dict):
        unknown = model.get("unk_token")
        model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in added or token == unknown}
    return Tokenizer.from_str(json.dumps(plain))


@dataclass(frozen=True)
class TextBetween:
    """Text of a chat template between two turns of the model.

    Attributes:
        end: end of the model's turn if no message follows.
        pieces: before the first content, between contents, and after the last one.
        is_json: for each content, whether the template writes it as a JSON string.
    """

    end: str
    pieces: list[str]
    is_json: list[bool]


def text_between(chat: ChatTemplate, style: ToolFormat, messages: Sequence[Mapping[str, Any]]) -> TextBetween:
    """Text that a chat template writes around messages that follow a turn of the model.

    Tool results are rendered after a turn with one call for each; with a single call if the template allows no more;
    without calls in the format `plain`, and if the template renders no calls.

    Args:
        messages: with `role`, and `name` for those of the role `tool`.
    Raises:
        ConfigError: the template refuses the roles, or changes contents.
    """
    tools = itertools.takewhile(lambda message: message["role"] == "tool", messages)
    names = [] if style == "plain" else [_stand_in_name(message) for message in tools]
    failures = []
    for count in sorted({len(names), min(1, len(names)), 0}, reverse=True):
        try:
            return _text_between(chat, style, messages, names[:count])
        except ConfigError as error:
            failures.append(error)
    raise failures[0]


def _stand_in_name(message: Mapping[str, Any]) -> str:
    name = str(message.get("name") or "")
    return name if re.fullmatch(r"[^\W\d][\w.\-/]*", name) else "unknown"


def _text_between(
    chat: ChatTemplate, style: ToolFormat, messages: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> TextBetween:
    question, reply = STAND_IN.format("asked"), STAND_IN.format("said")
    turn: dict[str, Any] = {"role": "assistant", "content": "" if names else reply}
    if names:
        turn["tool_calls"] = [as_message(ToolCall(name, {}), number) for number, name in enumerate(names)]
    begin = [{"role": "user", "content": question}, turn]
    stand_ins = [STAND_IN.format(number) for number in range(len(contents("text", messages)))]

    def rendered(after: str) -> str:
        following = iter(stand_ins)
        answers = [
            {"role": message["role"], "content": _stand_ins(message, following, after)}
            | ({"name": _stand_in_name(message)} if message["role"] == "tool" else {})
            | ({"tool_call_id": f"call{min(number, len(names) - 1):05}"} if message["role"] == "tool" and names else {})
            for number, message in enumerate(messages)
        ]
        return chat.render([*begin, *answers], SOURCE, reply_follows=True)

    text, short = rendered(""), chat.render(begin, SOURCE, reply_follows=False)
    turn_end, short_end = (_end_of_turn(x, style, names, reply, stand_ins) for x in (text, short))
    if turn_end is None or any(text.count(content) != 1 for content in stand_ins):
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ConfigError(
            f"chat_template does not render the roles {roles} after the assistant's turn as they are. Set another "
            "data.chat_template."
        )
    remaining, pieces = text[turn_end:], []
    for content in stand_ins:
        before, _, remaining = remaining.partition(content)
        pieces.append(before)
    is_json = [False] * len(stand_ins)
    if any(f'"{content}"' in text for content in stand_ins):
        lines = rendered("\n")
        is_json = [f'"{content}\\n"' in lines for content in stand_ins]
    return TextBetween("" if short_end is None else short[short_end:], [*pieces, remaining], is_json)


def _stand_ins(message: Mapping[str, Any], texts: Iterator[str], after: str) -> Any:
    """The content of a message with the next ones of `texts` in place of its own, and bare placeholders of images."""
    if not isinstance(message.get("content"), list):
        return next(texts) + after
    parts = parts_of(message)
    return [{**x, "text": next(texts) + after} if x["type"] == "text" else PLACEHOLDER for x in parts]


def _end_of_turn(text: str, style: ToolFormat, names: Sequence[str], reply: str, contents: Sequence[str]) -> int | None:
    """End of the model's turn in a rendering; None if the turn is not found."""
    if not names:
        position = text.find(reply)
        return position + len(reply) if position >= 0 else None
    start = text.rfind(STAND_IN.format("asked")) + len(STAND_IN.format("asked"))
    stop = min((position for content in contents if (position := text.find(content)) >= 0), default=len(text))
    calls = find_calls(text[start:stop], style, {name: {} for name in names})
    complete = [item for item in calls if isinstance(item.call, ToolCall)]
    return start + complete[-1].end if len(complete) == len(names) else None


class ObservationEncoder:
    """Encodes the tokens between two turns of the model.

    Args:
        tokenizer: of the actor.
        chat: the template of the prompts.
        stop_ids: tokens that end a turn.
        max_tokens: limit for the content of one message.
        style: format of the model's tool calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat: ChatTemplate,
        stop_ids: Sequence[int],
        max_tokens: int,
        style: ToolFormat = "plain",
    ):
        self.tokenizer, self.chat, self.max_tokens = tokenizer, chat, max_tokens
        self.style: ToolFormat = style
        self.stop_ids = frozenset(stop_ids)
        self.plain = PlainTextEncoder(tokenizer)
        self._pieces: dict[tuple[Any, ...], tuple[list[list[int]], int, list[bool]]] = {}
        self._reported = False

    def encode(self, observation: Observation, *, is_chat: bool, last: int | None) -> list[int]:
        """Token ids from the end of a turn to the start of the next one.

        Args:
            is_chat: the prompt is a chat, so the contents are wrapped by the chat template.
            last: the last token of the model; None before its first turn, when the observation of a chat follows an
                empty turn of the model.
        Raises:
            ConfigError: the chat template refuses the messages.
            BadImage: an image cannot be read, or the prompt is a text.
        """
        messages = as_messages(observation)
        images = [self.chat.images.read(url) for url in contents("image", messages)]
        if not is_chat and images:
            raise BadImage("the prompt is a text")
        if not is_chat:
            return [i for text in contents("text", messages) for i in self.content(text)]
        if not messages:
            messages = [{"role": "user", "content": ""}]
        (ids, *pieces), num_end, is_json = self._between(messages, images)
        if last is not None and last in ids[: num_end or 1] and last in self.stop_ids:
            ids = ids[ids.index(last) + 1 :]
        for text, is_escaped, piece in zip(contents("text", messages), is_json, pieces, strict=True):
            ids = ids + self.content(json.dumps(text, ensure_ascii=False)[1:-1] if is_escaped else text) + piece
        return ids

    def content(self, text: str) -> list[int]:
        """Tokens of the content of one message, without special tokens, and without its middle if it is too long."""
        most = MAX_CHARACTERS * self.max_tokens
        if len(text) > most:
            first, last = self.plain(text[: most // 2]), self.plain(text[-(most // 2) :])
            note = self.plain(CUT.format(len(text) - 2 * (most // 2), "characters and more"))
        else:
            first = last = self.plain(text)
            if len(first) <= self.max_tokens:
                return first
            note = self.plain(CUT.format(len(first) - self.max_tokens, "tokens"))
        room = max(0, self.max_tokens - len(note))
        head = (room + 1) // 2
        return first[:head] + note + (last[-(room - head) :] if room > head else [])

    def _between(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[CheckedImage]
    ) -> tuple[list[list[int]], int, list[bool]]:
        """Token ids of the pieces of `text_between`, number of those of its `end`, and its `is_json`; cached."""
        key = (
            *((str(x["role"]), str(x.get("name") or ""), *(part["type"] for part in parts_of(x))) for x in messages),
            *(image.size for image in images),
        )
        if key not in self._pieces:
            if len(self._pieces) >= MAX_PIECES:
                self._pieces.clear()
            text = text_between(self.chat, self.style, messages)
            pieces = self.chat.images.expanded("\0".join(text.pieces), images).split("\0")
            self._pieces[key] = [*map(self.encoded, pieces)], len(self.encoded(text.end)), text.is_json
        return self._pieces[key]

    def encoded(self, text: str) -> list[int]:
        """Tokens of the template's text, including special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids) if text else []

    def warn_of_difference(
        self, prompt: Sequence[Mapping[str, Any]], turns: Sequence[tuple[str, Any]], ids: list[int]
    ) -> None:
        """Log once if the tokens of an episode differ from the rendering of the whole conversation."""
        if self._reported:
            return
        messages = [*prompt]
        for text, observation in turns:
            messages.append({"role": "assistant", "content": text})
            messages += as_messages(observation)
        try:
            rendered = self.encoded(self.chat.render(messages, "an episode", reply_follows=False))
        except ConfigError as error:
            self._reported = True
            log.info("The chat template cannot render a whole episode: %s", error)
            return
        first = next((i for i, (a, b) in enumerate(zip(ids, rendered, strict=False)) if a != b), None)
        if first is not None:
            self._reported = True
            own, other = (self.tokenizer.decode(x[max(0, first - 8) : first + 24]) for x in (ids, rendered))
            log.warning(
                "Episodes keep the sampled tokens; the chat template would render this conversation differently from "
                "token %d on: %r in place of %r. This is logged once.", first, other, own,
            )  # fmt: skip


def as_messages(observation: Observation) -> list[Mapping[str, Any]]:
    """An observation as chat messages; a text becomes a user message."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return list(observation)


def parts_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The parts of a message's content: texts, and images as data URLs; see `hosts.host_main.as_content`."""
    content = message.get("content", "")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def contents(kind: Literal["text", "image"], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts, or the images as data URLs, of all messages in order."""
    return [part[kind] for message in messages for part in parts_of(message) if part["type"] == kind]


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
            rendered = chat.render(messages, SOURCE, reply_follows=True)
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
        """Text of a turn of the model, without its last token if the template adds that token to a turn."""
        if self._ends is None:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            rendered = self.chat.render(messages, "a stand-in conversation", reply_follows=False)
            self._ends = self.encoder.stop_ids & set(self.encoder.encoded(rendered)[-2:])
        written = turn[:-1] if turn[-1] in self._ends else turn
        return self.chat.tokenizer.decode(written, skip_special_tokens=False)

    def refuse_other_prompt(self, row: Mapping[str, Any]) -> None:
        """Check that the template renders the messages of a row to the text of its prompt.

        Raises:
            ConfigError: the prompt is not a chat, or was truncated, or rendered differently.
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
                f"environment.history is rerender: the chat template renders {where} differently than the data did, so "
                f"the prompt of later turns would differ: {text[:200]!r} in place of {row['prompt_text'][:200]!r}."
            )

    def tokens(self, row: Mapping[str, Any], turns: Sequence[tuple[str | None, Observation]]) -> list[int]:
        """Token ids of the conversation so far, up to the model's next turn.

        Args:
            turns: text of each turn of the model, None for the observation before its first one; and the observation
                after it.
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
