"""Anthropic's Messages API: blocks as messages of chat completions, completions as blocks, and events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.serving.chat_request import Refused, not_understood
from verl.serving.endpoint import Completion, OpenTurn
from verl.serving.translate_chat import Reply, exact

FIELDS = {"model", "messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "stream", "seed"}
ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {404: "not_found_error", 413: "request_too_large", 500: "api_error"}


def chat_body(body: Mapping[str, Any], known: object) -> dict[str, Any]:
    """The body as one of chat completions: each result of a tool is a message, as are consecutive texts.

    Raises:
        Refused: a block, a tool or `tool_choice` cannot be translated, or the last message is the assistant's.
    """
    messages = [] if body.get("system") is None else [{"role": "system", "content": body["system"]}]
    for given in body.get("messages") or ():
        match given:
            case {"role": "user" | "assistant" as role, "content": str() as text}:
                messages.append({"role": role, "content": text})
            case {"role": "user" | "assistant" as role, "content": list(blocks)}:
                _add_blocks(messages, role, blocks)
            case _:
                raise not_understood("messages", given)
    if messages and messages[-1]["role"] == "assistant":
        raise Refused(400, "messages: the last is the assistant's, and the policy begins its turns itself", "messages")
    match body.get("tool_choice"):
        case None | {"type": "auto" | "none"} as choice if not (choice or {}).get("disable_parallel_tool_use"):
            chosen = (choice or {}).get("type")
        case choice:
            raise not_understood("tool_choice", choice)
    tools = []
    for tool in body.get("tools") or ():
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise not_understood("tools", tool)
        described = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        tools.append({"type": "function", "function": {**described, "parameters": tool.get("input_schema")}})
    kept = {name: body.get(name) for name in ("model", "max_tokens", "stream", "seed")}
    return {**kept, "messages": messages, "tools": tools, "tool_choice": chosen, "stop": body.get("stop_sequences")}


def _add_blocks(messages: list[dict[str, Any]], role: str, blocks: Sequence[Any]) -> None:
    message: dict[str, Any] = {"role": role, "content": []}
    if role == "assistant" or not blocks:
        messages.append(message)
    for block in blocks:
        match block:
            case {"type": "text"}:
                if messages[-1] is not message:
                    messages.append(message := {"role": role, "content": []})
                message["content"].append(block)
            case {"type": "tool_result", "tool_use_id": name} if role == "user":
                messages.append({"role": "tool", "tool_call_id": name, "content": block.get("content")})
            case {"type": "tool_use", "id": name, "name": function, "input": dict(given)} if role == "assistant":
                call = {"name": function, "arguments": json.dumps(given)}
                message.setdefault("tool_calls", []).append({"id": name, "type": "function", "function": call})
            case _:
                raise not_understood("messages", block)


def answer(reply: Reply, found: Sequence[Completion]) -> dict[str, Any]:
    """A block for the text, and one for each tool call in it."""
    (completion,) = found
    turn = completion.turn
    blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
    for call in completion.message.get("tool_calls") or ():
        given = {"name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
        blocks.append({"type": "tool_use", "id": call["id"], **given})
    return {
        **_head(reply, len(turn.prompt_ids), len(turn.token_ids)), "content": blocks,
        "stop_reason": "stop_sequence" if completion.stop else ENDS[completion.finish_reason],
        "stop_sequence": completion.stop or None, "token_ids": list(turn.token_ids), **exact(completion),
    }  # fmt: skip


def events(reply: Reply, turns: Sequence[OpenTurn]) -> Iterator[dict[str, Any]]:
    """The events of a stream; those of tool calls follow the text."""
    yield {"type": "message_start", "message": _head(reply, len(turns[0].request.tokens), 0)}
    is_begun, message = False, {}
    for part in turns[0]:
        if not isinstance(part, str):
            message = answer(reply, [part])
            continue
        if not is_begun:
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        is_begun = True
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": part}}
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {name: message[name] for name in ("usage", "token_ids", "prompt_token_ids", "continues")}
    yield {"type": "message_delta", "delta": {name: message[name] for name in ("stop_reason", "stop_sequence")}, **end}
    yield {"type": "message_stop"}


def error_body(refused: Refused) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _head(reply: Reply, num_prompt: int, num_sampled: int) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.name}", "type": "message", "role": "assistant", "model": reply.model, "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": num_prompt, "output_tokens": num_sampled},
    }  # fmt: skip
