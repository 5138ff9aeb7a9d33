"""OpenAI's chat completions, into which the other APIs are translated: answers, and chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.serving.chat_request import FIELDS as FIELDS
from verl.serving.endpoint import Completion, OpenTurn


@dataclass(frozen=True)
class Reply:
    """A request in the making of its answer: its id ends with `name`, `body` is as it came, `chat` translated."""

    name: str
    model: str
    body: Mapping[str, Any]
    chat: Mapping[str, Any]
    tokenizer: Any


def chat_body(body: Mapping[str, Any], known: object) -> Mapping[str, Any]:
    """The body as one of chat completions, which it is."""
    return body


def answer(reply: Reply, found: Sequence[Completion]) -> dict[str, Any]:
    """A choice for each completion."""
    choices = [{"index": index, "message": one.message, **_end(reply, one)} for index, one in enumerate(found)]
    return {**_head(reply, "chat.completion"), "choices": choices, "usage": _usage(found), **exact(found[0])}


def events(reply: Reply, turns: Sequence[OpenTurn]) -> Iterator[dict[str, Any]]:
    """Choices one after the other; tool calls, token ids and log-probs are in the last chunk of a choice."""
    has_usage = (reply.chat.get("stream_options") or {}).get("include_usage")
    head = _head(reply, "chat.completion.chunk") | ({"usage": None} if has_usage else {})
    completions = []
    for index, turn in enumerate(turns):
        choice = {"index": index, "finish_reason": None}
        yield {**head, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}]}
        for part in turn:
            if isinstance(part, str):
                yield {**head, "choices": [{**choice, "delta": {"content": part}}]}
                continue
            completions.append(part)
            delta = {name: value for name, value in part.message.items() if name not in ("role", "content")}
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
            yield {**head, "choices": [{**choice, "delta": delta, **_end(reply, part)}], **exact(part)}
    if has_usage:
        yield {**head, "choices": [], "usage": _usage(completions)}


def exact(found: Completion) -> dict[str, Any]:
    """Fields that the answers of all APIs have in addition."""
    return {"prompt_token_ids": list(found.turn.prompt_ids), "continues": found.continues}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.name}", "object": kind, "created": int(time.time()), "model": reply.model}


def _end(reply: Reply, found: Completion) -> dict[str, Any]:
    turn, log_probs = found.turn, None
    if reply.chat.get("logprobs"):
        content = [
            {"token": reply.tokenizer.decode([i]), "logprob": x, "bytes": None, "top_logprobs": []}
            for i, x in zip(turn.token_ids, turn.log_probs, strict=True)
        ]
        log_probs = {"content": content, "refusal": None}
    return {"finish_reason": found.finish_reason, "logprobs": log_probs, "token_ids": list(turn.token_ids)}


def _usage(found: Sequence[Completion]) -> dict[str, int]:
    prompt, sampled = len(found[0].turn.prompt_ids), sum(len(one.turn.token_ids) for one in found)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
