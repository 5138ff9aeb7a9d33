"""Generates the turns of all requests as one batch, in a separate thread, and records each with its tokens.

request ── messages ──> tokens ──> queue ──> turns of the engine, as one batch ──> answer, or its parts
              ^                                               |
              └── sampled tokens of the conversation <────────┴──> record: ids and log-probs
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import queue
import threading
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pydantic_core

from verl.data.chat_template import ChatTemplate, text_tokens
from verl.data.images import PLACEHOLDER, CheckedImage, named
from verl.environments.base import EnvironmentDescription
from verl.environments.observation_tokens import ObservationEncoder
from verl.environments.tool_calls.parse import ToolCall, ToolFormat, parse_calls
from verl.environments.tool_calls.round_trip import format_of
from verl.errors import ConfigError, RolloutError, error_text
from verl.model_paths.images import RowMedia
from verl.ops.sampling import EVALUATION
from verl.rollout.base import GenerationRequest, TurnEngine, TurnRequest, TurnResult
from verl.serving.conversations import (
    KnownConversation,
    KnownConversations,
    Message,
    RecordedTurn,
    Session,
    content_of,
    image_urls,
    text_of,
)
from verl.serving.token_text import TurnText
from verl.utils.memory import on_current_device

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.2
END_TIMEOUT_S = 10.0
SHOW_S = 0.05  # interval at which parts of unfinished turns are sent


@dataclass(frozen=True)
class Completion:
    """The answer to a request.

    Attributes:
        message: of the assistant, in the format of chat completions.
        continues: whether the turn continues the sampled tokens of an earlier request.
        stop: the stop text that ended it; empty if none did.
    """

    turn: RecordedTurn
    message: dict[str, Any]
    finish_reason: str
    continues: bool
    stop: str


@dataclass
class OpenTurn:
    """A turn in generation. Iterate once: parts of its text, immediately if it `is_watched`, and the completion.

    Attributes:
        finish: makes the completion, and records the turn.
        is_over: the engine may stop its generation.
        shown: tokens so far and whether they are all, or the error that ended the turn.
    """

    request: TurnRequest
    text: TurnText
    finish: Callable[[TurnResult, str, str], Completion]
    timeout_s: float | None
    is_watched: bool
    is_over: bool = False
    shown: queue.SimpleQueue[tuple[TurnResult, bool] | RolloutError] = field(default_factory=queue.SimpleQueue)
    begun_s: float = field(default_factory=time.monotonic)

    def __iter__(self) -> Iterator[str | Completion]:
        sent = ""
        while True:
            left_s = None if self.timeout_s is None else max(0.0, self.begun_s + self.timeout_s - time.monotonic())
            try:
                found = self.shown.get(timeout=left_s)
            except queue.Empty:
                raise RolloutError(f"no turn was generated within {self.timeout_s:g} s") from None
            if isinstance(found, RolloutError):
                raise found
            sampled, text, stop = self.text.cut(found[0])
            self.is_over = found[1] or bool(stop)
            part = text if self.is_over else self.text.settled(text, sampled.tokens)
            if len(part) > len(sent):
                yield part[len(sent) :]
                sent = part
            if self.is_over:
                yield self.finish(sampled, text, stop)
                return


class PolicyEndpoint:
    """Answers chat requests with the policy. Thread-safe. Call `close` when done.

    Args:
        turns: creates the turn engine; called in the endpoint's thread, which is its only user.
        stop_ids: tokens that end a turn.
        max_new_tokens: maximum length of a turn.
        row_tokens: maximum length of a conversation.
        record: file to which each request is appended as a line of JSON; None: no file.
        tool_format: format of the policy's tool calls; `auto` finds that of the chat template.
        environment: that of the training. Its tools are those of requests without `tools`; without a chat template,
            messages are joined as its episodes are. None for none.
        joins_texts: join messages as one text, without the chat template, as in a training whose prompts were texts.
        request: step and stream of the sampling noise; None for step 0 of the evaluation.
        max_pixels: larger images are scaled down to this many; None for the limits of the model's processor.
    Attributes:
        recorded: all answered requests, in the order of the answers.
        format_fault: why calls of the model cannot be parsed, so that requests with tools are refused; None if they
            can.
        images_fault: why images are refused; None if they are not.
        failure: why turns are no longer generated; None while they are.
    """

    def __init__(
        self,
        turns: Callable[[], TurnEngine],
        tokenizer: Any,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        row_tokens: int,
        record: Path | None = None,
        tool_format: ToolFormat = "auto",
        environment: EnvironmentDescription | None = None,
        joins_texts: bool = False,
        request: GenerationRequest | None = None,
        max_pixels: int | None = None,
    ):
        self.tokenizer, self.max_new_tokens, self.row_tokens = tokenizer, max_new_tokens, row_tokens
        self.chat = ChatTemplate(tokenizer, max_pixels=max_pixels)
        self.style: ToolFormat = "plain"
        self.format_fault: str | None = None
        try:
            self.style = format_of(self.chat, tool_format)
        except ConfigError as error:
            self.format_fault = str(error)
        self.encoder = ObservationEncoder(tokenizer, self.chat, stop_ids, row_tokens, self.style)
        self.tools = [] if environment is None else [dict(schema) for schema in environment.tool_schemas()]
        self._is_text = joins_texts or (environment is not None and self.chat.source is None)
        self.images_fault = "the policy reads no images" if self.chat.images.token is None or self._is_text else None
        self._images = functools.lru_cache(4)(self._read_images)  # for the choices of a request
        self._suffix = str(getattr(environment, "suffix", ""))  # after a tool result in a text
        self._continues = environment is None or environment.history == "append"
        self.recorded: list[RecordedTurn] = []
        self._noise_of = request or GenerationRequest(0, stream=EVALUATION)
        self.known, self._lock = KnownConversations(), threading.Lock()
        self._begun: Counter[int] = Counter()
        self._numbers = itertools.count(1)
        self._record = None if record is None else open(record, "a", encoding="utf-8")  # noqa: SIM115
        self._waiting: queue.SimpleQueue[OpenTurn | None] = queue.SimpleQueue()
        self.failure: str | None = None
        self._is_closed = False
        tokenizer("", add_special_tokens=False)  # resets truncation and padding: later calls only read, in any thread
        self._thread = threading.Thread(
            target=on_current_device(self._draw_all), args=(turns,), name="verl policy", daemon=True
        )
        self._thread.start()

    def complete(self, *args: Any, **options: Any) -> Completion:
        """The completion of `begin`, which has the same arguments."""
        *_, completion = self.begin(*args, **options)
        assert isinstance(completion, Completion)
        return completion

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        sample: int | None = None,
        timeout_s: float | None = None,
        session: Session | None = None,
        name: str = "",
        choice: int = 0,
        stops: Sequence[str] = (),
        reads_calls: bool = True,
        is_watched: bool = False,
    ) -> OpenTurn:
        """Begin the next turn of a chat.

        Args:
            sample: key of the noise of a new conversation; None: the number of earlier conversations with the same
            first tokens.
            session: that of the agent program that asks; None for any other client.
            name: of the request, by which a later one can name the conversation; any if empty.
            choice: number of the turn among several of one request.
            stops: texts that end the turn; the token that completes one is its last.
            reads_calls: whether tool calls are parsed.
            is_watched: whether parts of the text are returned during generation; otherwise they come at the end.
        Raises:
            ConfigError: the chat template rejects the messages, or they are too long.
            RolloutError: the engine failed, or did not finish the turn within `timeout_s`.
        """
        if tools and self.format_fault is not None:
            raise ConfigError(f"tools: {self.format_fault}")
        known = {tool["function"]["name"] for tool in self.tools}
        if self._is_text and (others := sorted({tool["function"]["name"] for tool in tools or ()} - known)):
            raise ConfigError(
                f"tools: the policy was trained on texts, which list no tools: it cannot see {', '.join(others)}. It "
                f"knows {', '.join(sorted(known)) or 'none'}."
            )
        conversations = self.known if session is None else session.known
        tools = tools or self.tools or None
        urls = image_urls(messages)
        if urls and (session is not None or self.images_fault is not None):
            reason = self.images_fault or "environment=agent_program takes none"
            raise ConfigError(f"{next(iter(urls))}: an image, and {reason}")
        images, media = self._images(tuple(urls.items()))
        before, continues = self._conversation_of(messages, tools, sample, conversations, images)
        room = self.row_tokens - len(before.ids)
        if room < 1:
            if session is not None:
                session.cut = "tokens"
            raise ConfigError(f"messages: {len(before.ids)} tokens, and a conversation has at most {self.row_tokens}.")
        limit = min(max_tokens or self.max_new_tokens, self.max_new_tokens, room)
        ids = list(before.ids)
        if choice and (continues or sample is not None):  # the noise of the choices would be the same
            before = replace(before, sample_id=_noise_key(repr((before.sample_id, choice)).encode()))
        if session is not None:
            turn = session.turn_key(ids, sample)
            before = replace(before, prompt_id=session.prompt_id, sample_id=session.sample_id, num_turns=turn)
        key = before.prompt_id, before.sample_id, before.num_turns
        noise = self._noise_of.step, self._noise_of.stream, self._noise_of.greedy
        request = TurnRequest(before.number, ids, *key, limit, *noise, media_key=media[0], media=media[1])
        name = (name or uuid.uuid4().hex) + (f"-{choice}" if choice else "")

        def finish(sampled: TurnResult, text: str, stop: str) -> Completion:
            columns = before.ids, tuple(sampled.tokens), tuple(sampled.log_probs), sampled.is_complete, text
            turn = RecordedTurn(f"chatcmpl-{name}", *columns)
            message, finish_reason = self._message(turn, tools if reads_calls else None)
            takes_images = before.takes_images and self.chat.images.token not in turn.token_ids
            after = replace(before, ids=turn.ids, num_turns=before.num_turns + 1, takes_images=takes_images)
            conversations.add([*messages, message], tools, after, name)
            with self._lock:
                (self.recorded if session is None else session.recorded).append(turn)
                if self._record is not None:
                    try:
                        self._record.write(json.dumps(asdict(turn) | {"continues": continues}) + "\n")
                        self._record.flush()
                    except OSError as error:
                        raise RolloutError(f"{self._record.name} cannot be written ({error.strerror})") from error
            return Completion(turn, message, "stop" if stop else finish_reason, continues, stop)

        turn = OpenTurn(request, TurnText(self.tokenizer, stops), finish, timeout_s, is_watched or bool(stops))
        self._waiting.put(turn)
        if self.failure is not None or self._is_closed:  # checked after the put: the thread may have ended before it
            raise RolloutError(self.failure or "the endpoint was closed")
        return turn

    def close(self) -> None:
        """Stop the thread; pending requests fail. Idempotent."""
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(END_TIMEOUT_S)
        with self._lock:  # a request may be answered just now
            record, self._record = self._record, None
        if record is not None:
            with contextlib.suppress(OSError):  # every line was flushed, or its request has failed
                record.close()

    def _read_images(self, urls: tuple[tuple[str, str], ...]) -> tuple[list[CheckedImage], RowMedia]:
        """The images of a request, by place and data URL, and what the model reads of them."""
        images = [named(path, self.chat.images.read, url) for path, url in urls]
        return images, self.chat.images.joined((0, None), images)

    def _conversation_of(
        self,
        messages: Sequence[Message],
        tools: Any,
        sample: int | None,
        conversations: KnownConversations,
        images: Any,
    ) -> tuple[KnownConversation, bool]:
        """The tokens before the turn, and whether they continue those of an earlier one.

        Messages are rendered and tokenised outside of the lock, so that a long one delays no other request.
        """
        if self._continues and (position := conversations.find(messages, tools)) is not None:
            known, new = position
            if image_urls(new) and not known.takes_images:
                raise ConfigError("messages: the policy has written the token of images, so no image can follow.")
            texts = [{**text, "content": self._content(text)} for text in _with_tool_names(messages, new)]
            ids = self.encoder.encode(texts, is_chat=not self._is_text, last=known.ids[-1])
            # A new number: two requests may continue the same turn, and keys and values belong to one of them.
            known = replace(known, number=next(self._numbers), ids=(*known.ids, *ids))
            return known, True
        ids = self._rendered(messages, tools, images)
        if not ids:
            raise ConfigError("messages: no token of the policy is in them.")
        prompt_id = _noise_key(b"".join([array("q", ids).tobytes(), *(image.digest for image in images)]))
        if sample is None:
            with self._lock:
                sample = self._begun[prompt_id]
                self._begun[prompt_id] += 1
        return KnownConversation(next(self._numbers), prompt_id, sample, ids, 0), False

    def _content(self, message: Message) -> Any:
        is_result = self._is_text and message["role"] == "tool"
        return text_of(message) + self._suffix if is_result else content_of(message)

    def _rendered(self, messages: Sequence[Message], tools: Any, images: Sequence[CheckedImage]) -> tuple[int, ...]:
        """The tokens of a new conversation, as in training: by the chat template, or as one text without one."""
        if self._is_text:
            return tuple(text_tokens(["".join(map(self._content, messages))], self.tokenizer)[0])
        written = None if tools is self.tools and not self.chat.reads_tools else tools
        text = self.chat.render([_for_template(m) for m in messages], "messages", reply_follows=True, tools=written)
        text = self.chat.images.expanded(text, images)  # refuses a text that has the placeholder of images
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _message(self, turn: RecordedTurn, tools: Any) -> tuple[dict[str, Any], str]:
        text = turn.text
        if not turn.is_complete:  # what was cut is never a call
            return {"role": "assistant", "content": text}, "length"
        parsed = parse_calls(text, self.style, _parameters(tools))
        calls = [call for call in parsed if isinstance(call, ToolCall)]
        faults = [call.reason for call in parsed if not isinstance(call, ToolCall)]
        if not calls or faults:  # one that cannot be read is the client's to see, as text
            return {"role": "assistant", "content": text} | ({"tool_call_errors": faults} if faults else {}), "stop"
        try:
            functions = [
                {"name": call.name, "arguments": json.dumps(dict(call.arguments), allow_nan=False)} for call in calls
            ]
        except (TypeError, ValueError):  # literals of Python that JSON lacks
            return {"role": "assistant", "content": text}, "stop"
        tool_calls = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": f} for f in functions]
        return {"role": "assistant", "content": text, "tool_calls": tool_calls}, "tool_calls"

    # The thread that generates

    def _draw_all(self, turns: Callable[[], TurnEngine]) -> None:
        pending: dict[int, OpenTurn] = {}
        next_show_s = 0.0
        try:
            engine = turns()
            try:
                while not self._is_closed:
                    self._take(engine, pending)
                    for sampled in engine.advance() if engine.num_pending else ():
                        engine.forget(sampled.episode)
                        pending.pop(sampled.episode).shown.put((sampled, True))
                    if any(turn.is_watched for turn in pending.values()) and time.monotonic() >= next_show_s:
                        self._show(engine, pending)
                        next_show_s = time.monotonic() + SHOW_S
            finally:
                engine.close()
        except BaseException as error:
            log.exception("The policy's endpoint has failed.")
            self.failure = f"the engine has failed: {error_text(error)}"
        reason = RolloutError(self.failure or "the endpoint was closed")
        while not self._waiting.empty():
            if (left := self._waiting.get()) is not None:
                pending[left.request.episode] = left
        for turn in pending.values():
            turn.shown.put(reason)

    def _show(self, engine: TurnEngine, pending: Mapping[int, OpenTurn]) -> None:
        with contextlib.suppress(RolloutError):  # of an engine that has died: `advance` restarts it or raises
            for sampled in engine.open_turns():
                turn = pending[sampled.episode]
                if turn.is_over:
                    engine.end(sampled.episode)
                elif turn.is_watched and sampled.tokens:
                    turn.shown.put((sampled, False))

    def _take(self, engine: TurnEngine, pending: dict[int, OpenTurn]) -> None:
        """The requests that have arrived; waits for one if no turn is being generated."""
        is_idle = not engine.num_pending
        while True:
            try:
                item = self._waiting.get(timeout=IDLE_WAIT_S) if is_idle else self._waiting.get_nowait()
            except queue.Empty:
                return
            if item is None:
                return
            pending[item.request.episode] = item
            engine.add(item.request)
            is_idle = False


def _noise_key(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest()) >> 1


def _parameters(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    functions = [tool["function"] for tool in tools or ()]
    return {f["name"]: parameters if isinstance(parameters := f.get("parameters"), Mapping) else {} for f in functions}


def _with_tool_names(messages: Sequence[Message], new: Sequence[Message]) -> list[dict[str, Any]]:
    """New messages; the result of a tool gets the name of the call that it answers."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {str(call.get("id")): call["function"]["name"] for call in calls}
    return [
        {"role": message["role"], "content": message.get("content")}
        | ({"name": name} if (name := message.get("name") or names.get(str(message.get("tool_call_id")))) else {})
        for message in new
    ]


def _for_template(message: Message) -> dict[str, Any]:
    """A message in the form that chat templates take: a text, or parts with bare images, and call arguments as
    mappings."""
    content = content_of(message)
    if isinstance(content, list):
        content = [x if x["type"] == "text" else PLACEHOLDER for x in content]
    converted: dict[str, Any] = {"role": message["role"], "content": content}
    converted |= {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with contextlib.suppress(TypeError, ValueError):  # also of JSON that is nested too deeply, which stays a text
            arguments = pydantic_core.from_json(arguments)
        calls.append({"type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}})
    return converted | ({"tool_calls": calls, "content": ""} if calls else {})
