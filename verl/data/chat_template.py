"""Chat templates: prompts as text and tokens, conversations as tokens with a mask of the assistant's tokens."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

from verl.data.images import PLACEHOLDER, BadImage, CheckedImage, ImageTokens
from verl.data.readers import DataRows, RowErrors
from verl.errors import ConfigError, end_cut
from verl.models.images import images_of

FinalAssistant = Literal["error", "drop", "answer"]
Messages = Sequence[Mapping[str, Any]]
PINNED_DAY = "verl_day"  # attribute of a tokenizer: the date that its chat template writes
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names of roles
REPLACED = "verl_replaced"  # attribute of a tokenizer: its own template, by the one that stands in its place
GIVEN = ("messages", "tools", "add_generation_prompt", "documents")  # variables that are not settings of a template
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatTemplate:
    """Renders chat messages to text and tokens.

    Attributes:
        template: a Jinja template; None for that of the tokenizer.
        system_prompt: system message for chats without one; with it a text prompt becomes a user message.
        tools: JSON schemas for rows without a column `tools`; ignored if the template does not use tools.
        max_pixels: larger images of observations and requests are scaled down to this many.
    """

    tokenizer: Any
    template: str | None = None
    system_prompt: str | None = None
    tools: tuple[Any, ...] = ()
    max_pixels: int | None = None

    def __post_init__(self):
        if self.template is not None and not all(part in (self.source or "") for part in ("{", "messages")):
            raise ConfigError(
                f"chat_template is {shortened(self.template)}: it writes no messages, and is no file. Give a Jinja "
                "template, or a file that holds one."
            )

    @property
    def reads_tools(self) -> bool:
        """Whether the template writes tool schemas into a prompt."""
        return "tools" in (self.source or "")

    @property
    def is_dated(self) -> bool:
        """Whether the template writes the current date."""
        return "strftime_now" in (self.source or "")

    @functools.cached_property
    def images(self) -> ImageTokens:
        return ImageTokens(self.tokenizer, self.max_pixels)

    @property
    def source(self) -> str | None:
        """The template in use; of several by name all, of which transformers takes `tool_use` where there are tools."""
        own = getattr(self.tokenizer, "chat_template", None)
        if isinstance(own, Mapping):
            return "\n".join(own.values()) if self.template is None else own.get(self.template, self.template)
        return own if self.template is None else self.template

    def with_system(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The messages, after the system prompt unless they begin with a system message."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def tools_of(self, tools: Any, location: str) -> list[Any] | None:
        """Parse the value of a column `tools`, a list of JSON schemas or their JSON text; None if it is empty.

        Raises:
            ConfigError: it is not a list of mappings, or the template does not use tools.
        """
        if tools is None or tools == "" or (not isinstance(tools, str) and len(tools) == 0):
            return None
        try:
            parsed = json.loads(tools) if isinstance(tools, str) else list(tools)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tools is {shortened(tools)} at {location}: not valid JSON ({error}).") from error
        if not isinstance(parsed, list) or not all(isinstance(tool, Mapping) for tool in parsed):
            raise ConfigError(f"tools is {shortened(tools)} at {location}: expected a list of JSON schemas.")
        if not self.reads_tools:
            raise ConfigError(
                f"tools is set at {location}, but the chat template does not use tools: the policy would not see them. "
                "Choose a "
                "chat_template that does, or rename the column."
            )
        return parsed or None

    def refuse_lost_calls(self, messages: Messages, location: str) -> None:
        """Refuse messages with tool calls that the template would leave out."""
        if any(message.get("tool_calls") for message in messages) and "tool_calls" not in (self.source or ""):
            raise ConfigError(
                f"tool_calls are in a message at {location}, but the chat template does not write them. Choose a "
                "chat_template that does, or write the calls into the content."
            )

    def messages_of(self, prompt: str | Messages) -> list[Mapping[str, Any]] | None:
        """The messages of a prompt; None for a text prompt without a system prompt."""
        if not isinstance(prompt, str):
            return self.with_system(prompt)
        return None if self.system_prompt is None else self.with_system([{"role": "user", "content": prompt}])

    def render(self, messages: Messages, location: str, *, reply_follows: bool, tools: Any = None) -> str:
        """The text of a chat.

        Args:
            messages: with `role` and `content`.
            location: file and number of the row, for messages.
            reply_follows: end with the generation prompt.
            tools: value of the row's column `tools`.
        Raises:
            ConfigError: there is no template, or it refuses the messages or does not use tools; names row, roles and
                the template's error.
        """
        if self.source is None:
            raise ConfigError(
                f"chat_template is null: {location} needs one for its chat messages and the tokenizer has none. "
                "Set one, or write the prompts as text."
            )
        known = self.tools_of(tools, location)
        if images_of(self.tokenizer) is not None:  # some of these templates read nothing but parts
            messages = [
                {**x, "content": [{"type": "text", "text": x["content"]}]} if isinstance(x["content"], str) else x
                for x in messages
            ]
        try:
            try:
                return self._applied(messages, known, reply_follows)
            except TypeError:  # some templates add the arguments of calls to a text
                return self._applied(_with_texts_as_arguments(messages), known, reply_follows)
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(f"chat_template refuses the roles {roles} at {location}: {error}.") from error

    def _applied(self, messages: Messages, tools: Any, reply_follows: bool) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=reply_follows,
            tools=tools,
            **pinned_date(self.tokenizer),
        )


def _with_texts_as_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages, with the arguments of tool calls as JSON texts instead of mappings."""
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
            if isinstance(arguments := call["function"].get("arguments"), Mapping)
            else call
            for call in message.get("tool_calls") or ()
        ]
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def template_in_use(tokenizer: Any, options: Any) -> str | None:
    """The template that replaces the tokenizer's, with its variables; None for the tokenizer's own.

    Args:
        options: data with `chat_template` and `chat_template_kwargs`, or without them.
    Raises:
        ConfigError: a variable is no setting of the template.
    """
    template, values = getattr(options, "chat_template", None), getattr(options, "chat_template_kwargs", {})
    own = own_template(tokenizer)
    if template is not None and "{" not in template and Path(template).is_file():
        template = Path(template).read_text()
    elif template is not None and isinstance(own, Mapping):
        template = own.get(template, template)
    if not values:
        return template
    source = own if template is None else template
    if not isinstance(source, str):
        raise ConfigError(
            "chat_template_kwargs is set, and the tokenizer has "
            + (f"several templates. Set chat_template to one of: {', '.join(own)}." if own else "no chat template.")
        )
    for name in values:
        if name in GIVEN or not re.search(rf"\b{re.escape(name)}\b", source):
            raise ConfigError(
                f"chat_template_kwargs.{name} is {values[name]!r}: it is no setting of the chat template."
            )
    # As defaults within the template, which go with the model; on a line of their own, as Jinja strips by lines.
    lines = [f"{{%- if {x} is not defined %}}{{% set {x} = {value!r} %}}{{% endif %}}" for x, value in values.items()]
    return "".join(lines) + "\n" + source


def use_template(tokenizer: Any, template: str | None) -> None:
    """Put a template in the place of the tokenizer's own, or with None that back: checkpoints hold what is in use."""
    own = own_template(tokenizer)
    if template is not None:
        setattr(tokenizer, REPLACED, {template: own})
    if (template := own if template is None else template) != getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = template


def own_template(tokenizer: Any) -> Any:
    """The chat template of a tokenizer before `use_template`."""
    template = getattr(tokenizer, "chat_template", None)
    return getattr(tokenizer, REPLACED, {}).get(template, template) if isinstance(template, str) else template


def today() -> str:
    return datetime.date.today().isoformat()


def pin_date(tokenizer: Any, day: str) -> None:
    """Make chat templates of this tokenizer write a fixed date, such as 2026-11-23, instead of the current one."""
    setattr(tokenizer, PINNED_DAY, day)


def pinned_date(tokenizer: Any) -> dict[str, Any]:
    """Keyword arguments of `apply_chat_template` for the pinned date."""
    if (day := getattr(tokenizer, PINNED_DAY, None)) is None:
        return {}
    return {"strftime_now": datetime.datetime.fromisoformat(day).strftime}


def render_prompts(rows: DataRows, key: str, chat: ChatTemplate, bad: RowErrors) -> tuple[list[str], list[list[int]]]:
    """Render and tokenise every prompt.

    A text is tokenised with the special tokens that the tokenizer puts before a text, but none after it. Chat messages
    are rendered by the chat template, which writes its own special tokens, and end with the generation prompt.

    Args:
        rows: the data.
        key: column of the prompt.
        chat: the template.
        bad: receives unusable rows.
    Returns:
        Texts and token ids by row; both are empty for unusable rows.
    Raises:
        ConfigError: no row has the column, or there are messages but no chat template.
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
                (prompt, None) if messages is None else _rendered(messages, chat, rows.location(index), tools)
            )
        if fault is not None:
            bad.add(fault)
    expanded = list(texts)
    for index, text in enumerate(texts):
        try:
            expanded[index] = chat.images.expanded(text, rows.images[index]) if text else ""
        except BadImage as error:
            bad.add(f"{key} at {rows.location(index)}: {error}")
            texts[index] = expanded[index] = ""
    is_rendered = any(token.strip() and token in "".join(texts[:1]) for token in chat.tokenizer.all_special_tokens)
    if rows.sources and chat.source is not None and any(texts) and not any(is_chat) and not is_rendered:
        _tell_of_template(key)
    tokens = _tokens(expanded, is_chat, chat.tokenizer)
    for index, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
        if text and not ids:
            bad.add(f"{key} is {shortened(rows.values[index][key])} at {rows.location(index)}: it has no tokens.")
    return texts, tokens


@functools.cache  # once
def _tell_of_template(key: str) -> None:
    _log.warning(
        "The prompts of column %r are texts, and the chat template is not applied to them. For a chat model give "
        "lists of messages, or set data.system_prompt.", key,
    )  # fmt: skip


def messages_fault(messages: Any) -> str | None:
    """Description of what a value must be to be a list of chat messages; None if it is one."""
    if not isinstance(messages, (list, tuple)) or not messages:
        return "a list of chat messages"
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        texts = [x.get("text") for x in content if x != PLACEHOLDER] if _is_parts(content) else [content]
        if not isinstance(message, Mapping) or not all(isinstance(x, str) for x in (message.get("role"), *texts)):
            return "each chat message to have a text `role` and a `content` of text, or of text parts"
        if any(text_fault(str(text)) is not None for text in texts):
            return "each chat message to be valid Unicode"
    return None


def _is_parts(content: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(content, list) and all(isinstance(part, Mapping) for part in content)


def text_fault(text: str) -> str | None:
    """Description of what a text must be to be tokenised (JSON may contain lone surrogates); None if it is that."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "valid Unicode"
    return None


def shortened(value: Any) -> str:
    """A value for a message, in at most 80 characters."""
    return end_cut(repr(value[:80]) if isinstance(value, str) else repr(value), 80)


def _prompt_fault(rows: DataRows, key: str, index: int) -> str | None:
    prompt = rows.values[index][key]
    if isinstance(prompt, str):
        expected = text_fault(prompt) if prompt else "a text that is not empty"
    elif isinstance(prompt, (list, tuple)) and prompt:
        expected = messages_fault(prompt)
    else:
        expected = "a text or a list of chat messages"
    return expected and f"{key} is {shortened(prompt)} at {rows.location(index)}: expected {expected}."


def as_chat(value: Any) -> Any:
    """Chat messages with one text as the content of each; any other value unchanged.

    Messages may be given as JSON text, with a list of text parts as content, and without content if with tool calls.
    The arguments of calls may be JSON text, as OpenAI writes them; templates take mappings. ShareGPT's `from` and
    `value` are `role` and `content`.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[" and '"role"' in value:
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(value)
            value = parsed if all(isinstance(x, dict) and "role" in x for x in parsed) else value
    return [_with_text(message) for message in value] if isinstance(value, (list, tuple)) else value


def _with_text(message: Any) -> Any:
    if isinstance(message, Mapping) and "role" not in message and isinstance(role := message.get("from"), str):
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": SHAREGPT.get(role, role), "content": message.get("value"), **others}
    parts = message.get("content") if isinstance(message, Mapping) else None
    if parts is None and isinstance(message, Mapping) and message.get("tool_calls"):
        parts = []
    texts: list[Any] = (
        [x.get("text") if isinstance(x, Mapping) else x for x in parts] if isinstance(parts, list) else [None]
    )
    message = {**message, "content": "".join(texts)} if all(isinstance(x, str) for x in texts) else message
    is_mapping = isinstance(message, Mapping) and isinstance(message.get("tool_calls"), (list, tuple))
    return {**message, "tool_calls": [_with_mapping(call) for call in message["tool_calls"]]} if is_mapping else message


def _with_mapping(call: Any) -> Any:
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        if isinstance(arguments := json.loads(call["function"]["arguments"]), dict):
            return {**call, "function": {**call["function"], "arguments": arguments}}
    return call


def with_chats(rows: DataRows, *keys: str) -> DataRows:
    """The rows, with `as_chat` applied to these columns."""
    values = [{**row, **{key: as_chat(row[key]) for key in keys if key in row}} for row in rows.values]
    return replace(rows, values=values)


def without_final_assistant(rows: DataRows, key: str, how: FinalAssistant) -> DataRows:
    """Remove a final assistant message from every chat.

    Args:
        rows: the data.
        key: column of the prompt.
        how: see `final_assistant` of `PromptOptions`; `error` returns the rows unchanged, and rendering refuses them.
    Raises:
        ConfigError: `how` is `answer`, and the data have a column `answer`.
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
                f"final_assistant is 'answer', and {rows.location(index)} has a column answer of its own. Set drop, or "
                "rename the column."
            )
        answer = {"answer": last["content"]} if last is not None and how == "answer" else {}
        values.append(row if last is None else {**row, key: prompt, **answer})
    return replace(rows, values=values)


def _ends_with_assistant(prompt: Any) -> TypeGuard[Sequence[Any]]:
    return (
        isinstance(prompt, (list, tuple))
        and bool(prompt)
        and isinstance(prompt[-1], Mapping)
        and prompt[-1].get("role") == "assistant"
    )


def _rendered(messages: Messages, chat: ChatTemplate, location: str, tools: Any) -> tuple[str, str | None]:
    """(text of a chat, None), or an empty text and the reason."""
    if _ends_with_assistant(messages):
        seen = f"final_assistant is 'error': the chat at {location} ends with an assistant's message, maybe the answer"
        return "", f"{seen}. Set it to drop, or to answer to move the message to the column answer"
    try:
        chat.refuse_lost_calls(messages, location)
        text = chat.render(messages, location, reply_follows=True, tools=tools)
        return text, None if text else f"chat_template writes nothing at {location}"
    except ConfigError as error:
        if chat.source is None:  # no row could be rendered
            raise
        return "", str(error)


def _tokens(texts: list[str], is_chat: list[bool], tokenizer: Any) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [index for index, text in enumerate(texts) if text and is_chat[index] is not special]
        if chosen:
            chosen_texts = [texts[index] for index in chosen]
            encoded = (
                text_tokens(chosen_texts, tokenizer)
                if special
                else tokenizer(chosen_texts, add_special_tokens=False)["input_ids"]
            )
            for index, ids in zip(chosen, encoded, strict=True):
                tokens[index] = list(ids)
    return tokens


def text_tokens(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Tokens of texts with the special tokens that the tokenizer puts before a text, once, but none after it."""
    start, end = tokens_around(tokenizer)  # the end, EOS or `[SEP]`, would end a prompt at once
    encoded = [with_one_start(ids, start) for ids in tokenizer(texts, add_special_tokens=True)["input_ids"]]
    return [ids[: -len(end)] if end and ids[-len(end) :] == end else ids for ids in encoded]


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text, and those after it."""
    bare, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
    return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if bare and starts else ([], [])


def with_one_end(ids: Sequence[int], end: int) -> list[int]:
    """Tokens of a text that may end with the end token itself: other tools write it."""
    return [*ids] if ids and ids[-1] == end else [*ids, end]


def with_one_start(ids: Sequence[int], start: list[int]) -> list[int]:
    """Tokens of a text that may begin with the start, such as BOS, itself: a rendered chat does."""
    ids, length = list(ids), len(start)
    return ids[length:] if start and ids[length : 2 * length] == start else ids


GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def conversation_tokens(
    chat: ChatTemplate,
    messages: Messages,
    location: str,
    tools: Any = None,
    images: Sequence[CheckedImage] = (),
    learned_from: int = 0,
) -> tuple[list[int], list[bool], str]:
    """Tokenise a conversation, with a mask of the tokens to learn.

    With a template that marks assistant turns (`{% generation %}`) the marks are used. With any other template the
    conversation is rendered up to the start of each assistant turn, with the generation prompt, and up to its end; the
    text between is learned, including the end token but not the white space that templates put after it. This requires
    that each rendering is a prefix of the next, which is checked.

    Args:
        chat: the template.
        messages: with `role` and `content`.
        location: file and number of the row, for messages.
        tools: value of the row's column `tools`.
        images: of the placeholders in the messages; with some the marks are not used.
        learned_from: number of messages whose assistant turns are not learned, first of all. Nor are turns with
            `weight: 0`, of OpenAI's files, or `train: false`, of axolotl's. With these the marks are not used.
    Returns:
        Tokens, mask, and the text with one placeholder for each image.
    Raises:
        ConfigError: the template refuses the messages, or rewrites earlier turns when later ones follow, or there is no
            assistant turn; names the row. Or the tokenizer gives no offsets.
    """
    if not getattr(chat.tokenizer, "is_fast", False):
        raise ConfigError(
            "conversations need a fast tokenizer: this one does not give the character offsets of its tokens."
        )
    messages = chat.with_system(messages)
    chat.refuse_lost_calls(messages, location)
    turns = learned_turns(messages, learned_from)
    if not turns:
        raise ConfigError(f"messages at {location} have no turn of the assistant to learn.")
    is_whole = not learned_from and len(turns) == sum(message["role"] == "assistant" for message in messages)
    if GENERATION_BLOCK.search(chat.source or "") and not images and is_whole:
        return *_by_template(chat, messages, location, tools), ""
    whole = chat.render(messages, location, reply_follows=False, tools=tools)
    try:
        text = chat.images.expanded(whole, images)
    except BadImage as error:
        raise ConfigError(f"images at {location}: {error}") from None

    def rendered(turns: int, reply_follows: bool) -> str:
        start = chat.render(messages[:turns], location, reply_follows=reply_follows, tools=tools)
        return chat.images.expanded(start, images[: chat.images.count(start)])

    spans = [_span(rendered, chat, turn, text, location) for turn in turns]
    encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        any(start <= first < end and last > first for start, end in spans) for first, last in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), learned, whole


def learned_turns(messages: Messages, learned_from: int = 0) -> list[int]:
    """Indices of the assistant turns of a conversation that are learned."""
    return [
        turn
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
        and turn >= learned_from
        and message.get("weight") != 0
        and message.get("train") is not False
    ]


def parts_by_turn(chat: ChatTemplate, messages: Messages, location: str, tools: Any) -> list[list[Any]]:
    """The conversation as it is, or, where its template writes a turn otherwise once others follow, one for each turn.

    Such a template is Qwen3's, which leaves out the thoughts of earlier turns: each turn is learned as the last of its
    conversation, as it will be generated.
    """
    turns = learned_turns(messages)
    if turns in ([], [len(messages) - 1]) or GENERATION_BLOCK.search(chat.source or ""):
        return [[*messages]]
    whole = chat.with_system(messages)
    ends = [turn + 1 + len(whole) - len(messages) for turn in turns]
    try:
        text = chat.render(whole, location, reply_follows=False, tools=tools)
        if all(text.startswith(chat.render(whole[:end], location, reply_follows=False, tools=tools)) for end in ends):
            return [[*messages]]
    except ConfigError:  # which `conversation_tokens` reports
        return [[*messages]]
    earlier = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in messages]
    return [[*earlier[:turn], messages[turn]] for turn in turns]


def _span(
    rendered: Callable[[int, bool], str], chat: ChatTemplate, turn: int, text: str, location: str
) -> tuple[int, int]:
    """Start and end of an assistant turn in the text of the conversation, including its end token.

    Args:
        rendered: text of the first turns of the conversation, with the generation prompt or without.
    """
    if not turn:
        raise ConfigError(
            f"messages at {location} begin with a turn of the assistant, and chat_template does not tell where such a "
            "turn starts. Begin with a message of the user or the system, give the turn the weight 0, or mark turns in "
            "the template with {% generation %} and {% endgeneration %}."
        )
    before, after = rendered(turn, True), rendered(turn + 1, False)
    if not after.startswith(before) or not text.startswith(after):
        raise ConfigError(
            f"chat_template renders message {turn} at {location} differently at the end of a conversation and within "
            "it, so the assistant's tokens cannot be determined. Mark it in the template with "
            "{% generation %} and {% endgeneration %}, or give prompt and completion columns."
        )
    turn_text = after.rstrip()
    ends = [token for token in chat.tokenizer.all_special_tokens if token.strip()]
    return len(before), max(len(before), len(turn_text if turn_text.endswith(tuple(ends)) else after))


def _by_template(chat: ChatTemplate, messages: Messages, location: str, tools: Any) -> tuple[list[int], list[bool]]:
    known = chat.tools_of(tools, location)
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
        raise ConfigError(f"chat_template refuses the roles {roles} at {location}: {error}.") from error
    learned = [bool(mark) for mark in encoded["assistant_masks"]]
    if not any(learned):
        raise ConfigError(f"chat_template marks no assistant tokens at {location}: there is nothing to learn.")
    return list(encoded["input_ids"]), learned
