"""Conversations: the tokens that a request continues, the requests that make one row of training, and sessions.

A request whose messages start with those of an earlier request and its answer continues from the sampled
tokens: nothing is decoded and encoded again. Any other list of messages is rendered by the chat template as a new
conversation.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class RecordedTurn:
    """A request and its answer.

    Attributes:
        prompt_ids: all tokens before the turn.
        token_ids, log_probs: of the turn, including its stop token.
        is_complete: it ended with a stop token; False if it reached a limit or a stop text.
        text: without the stop token or the stop text.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    is_complete: bool
    text: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.token_ids


@dataclass(frozen=True)
class MergedRow:
    """Several requests merged into one sequence.

    Attributes:
        ids: token ids of the first request's prompt and everything after it.
        mask: True on tokens that the policy sampled.
        log_probs: of those tokens; 0 elsewhere.
    """

    request_ids: tuple[str, ...]
    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    log_probs: tuple[float, ...]


def merge_turns(turns: Sequence[RecordedTurn]) -> list[MergedRow]:
    """Merge requests into rows: each is joined to the longest earlier one whose prompt and turn are a prefix of its
    prompt.

    If two requests continue the same one, the first joins its row, and the other becomes a separate row that begins
    with the same tokens: these are masked in only for the first, so that no turn is trained twice.
    """
    rows: list[MergedRow] = []
    ends: dict[tuple[int, ...], int] = {}  # tokens of a row as far as they were when a turn ended -> the row
    lengths: list[int] = []  # of those, each once, ascending
    for turn in turns:
        known = [n for n in lengths if n <= len(turn.prompt_ids) and turn.prompt_ids[:n] in ends]
        index = ends[turn.prompt_ids[: known[-1]]] if known else None
        if index is not None and rows[index].ids == turn.prompt_ids[: known[-1]]:
            rows[index] = _joined(rows[index], turn)
        else:
            rows.append(_joined(None, turn))
            index = len(rows) - 1
        ends[turn.ids] = index
        lengths = sorted({*lengths, len(turn.ids)})
    return rows


def _joined(row: MergedRow | None, turn: RecordedTurn) -> MergedRow:
    before = MergedRow((), (), (), ()) if row is None else row
    between, count = len(turn.prompt_ids) - len(before.ids), len(turn.token_ids)
    return MergedRow(
        (*before.request_ids, turn.request_id),
        turn.ids,
        (*before.mask, *[False] * between, *[True] * count),
        (*before.log_probs, *[0.0] * between, *turn.log_probs),
    )


@dataclass(frozen=True)
class KnownConversation:
    """State of a conversation after a turn.

    Attributes:
        number: of the conversation; turns of one conversation share keys and values.
        ids: all tokens, including those of the last turn.
        num_turns: number of turns of the policy.
        takes_images: no turn has a placeholder of an image, which would be taken for that of a later image.
    """

    number: int
    prompt_id: int
    sample_id: int
    ids: tuple[int, ...]
    num_turns: int
    takes_images: bool = True


class KnownConversations:
    """The latest conversations, by their messages. Thread-safe."""

    def __init__(self, limit: int = 4096):
        self._limit = limit
        self._known: OrderedDict[str, KnownConversation] = OrderedDict()
        self._named: OrderedDict[str, list[Message]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, messages: Sequence[Message], tools: Any) -> tuple[KnownConversation, list[Message]] | None:
        """The conversation that a request continues, and its new messages."""
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1].get("role") != "assistant":
                continue
            if (conversation := self._known.get(key_of(messages[:end], tools))) is not None:
                new = list(messages[end:])
                return (conversation, new) if all(message.get("role") != "assistant" for message in new) else None
            return None  # its last turn was not sampled here
        return None

    def named(self, name: str) -> list[Message] | None:
        """The messages of the conversation that was added by this name."""
        return self._named.get(name)

    def add(self, messages: list[Message], tools: Any, conversation: KnownConversation, name: str) -> None:
        """Remember a conversation, whose last message is the policy's."""
        key = key_of(messages, tools)  # outside of the lock: it takes long for long conversations
        with self._lock:
            self._known[key] = conversation
            if not image_urls(messages):  # which take memory, and the API that asks by name has none
                self._named[name] = messages
            for entries in (self._known, self._named):
                while len(entries) > self._limit:
                    entries.popitem(last=False)


def key_of(messages: Sequence[Message], tools: Any) -> str:
    """A key that is equal for equivalent lists of messages: empty fields are ignored."""
    text = json.dumps([[_canonical(message) for message in messages], tools or None], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _canonical(message: Message) -> list[Any]:
    calls = [
        [call.get("id"), call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    return [message.get("role"), content_of(message), calls, message.get("tool_call_id"), message.get("name")]


def image_urls(messages: Sequence[Message]) -> dict[str, str]:
    """The URLs of the images of messages, by their place in the body of the request."""
    return {
        f"messages.{number}.content.{place}.image_url.url": part["image_url"]["url"]
        for number, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for place, part in enumerate(content)
        if part.get("type") == "image_url"
    }


def content_of(message: Message) -> str | list[dict[str, str]]:
    """The text of a message, or if it has images its parts, in the form of an observation."""
    if not image_urls([message]):
        return text_of(message)
    return [
        {"type": "text", "text": x["text"]}
        if x["type"] == "text"
        else {"type": "image", "image": x["image_url"]["url"]}
        for x in message["content"]
    ]


def text_of(message: Message) -> str:
    """The text of a message, whose content may be a list of texts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Session:
    """The requests of one program, for one sample of one prompt.

    The noise of a request is keyed by (prompt, sample, all tokens before the turn, its `seed`, how often that was
    requested before), so that concurrent requests of a program get the same tokens in any order.

    Args:
        max_turns: requests that are answered.
    Attributes:
        recorded: the turns that were answered, in that order.
        cut: the limit by which a request was refused, or empty.
    """

    def __init__(self, prompt_id: int, sample_id: int, max_turns: int):
        self.prompt_id, self.sample_id, self.max_turns = prompt_id, sample_id, max_turns
        self.known = KnownConversations()
        self.recorded: list[RecordedTurn] = []
        self.cut = ""
        self.is_closed = False
        self._counts: Counter[tuple[bytes, int | None]] = Counter()
        self._num_turns = 0
        self._lock = threading.Lock()

    def turn_key(self, ids: Sequence[int], seed: int | None) -> int:
        """Noise key of the next turn.

        Raises:
            ConfigError: the session has ended, or has used all of its turns.
        """
        with self._lock:
            if self.is_closed:
                raise ConfigError("the session has ended")
            if self._num_turns >= self.max_turns:
                self.cut = "turns"
                raise ConfigError(f"the episode has used its {self.max_turns} turns (environment.max_turns)")
            self._num_turns += 1
            digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()
            number = self._counts[digest, seed]
            self._counts[digest, seed] += 1
        key = hashlib.blake2b(digest + repr((seed, number)).encode(), digest_size=4).digest()
        return int.from_bytes(key) >> 1
