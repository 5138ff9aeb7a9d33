"""Tokenization of observations: the model's tokens are never changed; an observation is encoded once and appended.

In a chat, the text between two turns of the model is computed from two renderings of placeholder messages, split at the
placeholders. The template's parts are encoded with special tokens, the contents without: a tool result is text, even if
it contains the text of a special token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.chat_template import ChatTemplate
from verl.environments.base import Observation
from verl.errors import ConfigError

log = logging.getLogger(__name__)

STAND_IN = "verlstandin{}x"
CUT = "\n[... {} {} are left out ...]\n"
MAX_CHARACTERS = 32  # for each token that may remain: the rest of a longer text is not even tokenised


class PlainTextEncoder:
    """Encodes text without any special or added token, so that `<|im_end|>` in it is the characters `<|im_end|>`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.reserved = {int(i) for i in tokenizer.all_special_ids} | {
            int(i) for i in tokenizer.get_added_vocab().values()
        }
        self._plain = _without_added_tokens(tokenizer)

    def __call__(self, text: str) -> list[int]:
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


class ObservationEncoder:
    """Encodes the tokens between two turns of the model.

    Args:
        tokenizer: of the actor.
        chat: the template of the prompts.
        stop_ids: tokens that end a turn.
        max_tokens: limit for the content of one message.
    Attributes:
        num_cut: number of contents that were too long, since the last `take`.
    """

    def __init__(self, tokenizer: Any, chat: ChatTemplate, stop_ids: Sequence[int], max_tokens: int):
        self.tokenizer, self.chat, self.max_tokens = tokenizer, chat, max_tokens
        self.stop_ids = frozenset(stop_ids)
        self.plain = PlainTextEncoder(tokenizer)
        self.num_cut = 0
        self._pieces: dict[tuple[str, ...], list[list[int]]] = {}
        self._reported = False

    def encode(self, observation: Observation, *, is_chat: bool, last: int | None) -> list[int]:
        """Token ids from the end of a turn to the start of the next one.

        Args:
            is_chat: the prompt is a chat, so the contents are wrapped by the chat template.
            last: the last token of the model; None before its first turn, where, in a chat, the observation follows an
                empty turn of the model.
        """
        messages = as_messages(observation)
        if not is_chat:
            return [i for message in messages for i in self.content(message["content"])]
        if not messages:
            messages = [{"role": "user", "content": ""}]
        between = self._between(tuple(message["role"] for message in messages))
        ids = list(between[0])
        if last is not None and last in ids[: len(self._end) or 1] and last in self.stop_ids:
            ids = ids[ids.index(last) + 1 :]
        for message, piece in zip(messages, between[1:], strict=True):
            ids += self.content(message["content"])
            ids += piece
        return ids

    def content(self, text: str) -> list[int]:
        """Of the content of one message, without special tokens, and without its middle if it is too long."""
        most = MAX_CHARACTERS * self.max_tokens
        if len(text) > most:
            first, last = self.plain(text[: most // 2]), self.plain(text[-(most // 2) :])
            note = self.plain(CUT.format(len(text) - 2 * (most // 2), "characters and more"))
        else:
            first = last = self.plain(text)
            if len(first) <= self.max_tokens:
                return first
            note = self.plain(CUT.format(len(first) - self.max_tokens, "tokens"))
        self.num_cut += 1
        room = max(0, self.max_tokens - len(note))
        head = (room + 1) // 2
        return first[:head] + note + (last[-(room - head) :] if room > head else [])

    def _between(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Tokens of the template before the first content, between contents, and after the last one."""
        if roles not in self._pieces:
            reply = STAND_IN.format("said")
            begin = [{"role": "user", "content": STAND_IN.format("asked")}, {"role": "assistant", "content": reply}]
            contents = [STAND_IN.format(i) for i in range(len(roles))]
            answers = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            short = self.chat.render(begin, "a stand-in conversation", reply_follows=False)
            text = self.chat.render([*begin, *answers], "a stand-in conversation", reply_follows=True)
            place = text.find(reply)
            if place < 0 or any(text.count(content) != 1 for content in contents):
                raise ConfigError(
                    f"chat_template does not render the roles {', '.join(roles)} after the assistant's turn as they "
                    "are. Set another data.chat_template."
                )
            rest, pieces = text[place + len(reply) :], []
            for content in contents:
                before, _, rest = rest.partition(content)
                pieces.append(before)
            pieces.append(rest)
            self._end = self.encoded(short[short.find(reply) + len(reply) :]) if reply in short else []
            self._pieces[roles] = [self.encoded(piece) for piece in pieces]
        return self._pieces[roles]

    def encoded(self, text: str) -> list[int]:
        """Of words of the template, special tokens included."""
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
            log.info("The chat template cannot render a whole episode: %s", error)
            self._reported = True
            return
        same = next((i for i, (a, b) in enumerate(zip(ids, rendered, strict=False)) if a != b), None)
        if same is None:
            return
        self._reported = True
        mine, other = (self.tokenizer.decode(x[max(0, same - 8) : same + 24]) for x in (ids, rendered))
        log.warning(
            "Episodes keep the tokens that were drawn; the chat template would render this conversation differently "
            "from token %d on: %r in place of %r. This is logged once.",
            same,
            other,
            mine,
        )


def as_messages(observation: Observation) -> list[Mapping[str, Any]]:
    """An observation as chat messages; a text becomes a user message."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return list(observation)
