"""OpenAI's Responses API: items as messages of chat completions, completions as items, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.serving.chat_request import not_understood
from verl.serving.conversations import KnownConversations
from verl.serving.endpoint import Completion, OpenTurn
from verl.serving.translate_chat import Reply, exact

FIELDS = {"model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens",
          "stream", "seed"}  # fmt: skip


def chat_body(body: Mapping[str, Any], known: KnownConversations) -> dict[str, Any]:
    """The body as one of chat completions. The instructions of a previous response are not repeated, as with OpenAI.

    Raises:
        Refused: an item or a tool cannot be translated, or the previous response is not known.
    """
    given, last, messages = body.get("input"), body.get("previous_response_id"), []
    if last is not None:
        if (earlier := known.named(str(last).removeprefix("resp_"))) is None:
            raise not_understood("previous_response_id", last)
        messages = [message for message in earlier if not message.get("is_instructions")]
    for item in given if isinstance(given, list) else [{"role": "user", "content": given}]:
        match item:
            case {"type": "function_call", "call_id": name, "name": function, "arguments": arguments}:
                call = {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
                is_first = not messages or messages[-1]["role"] != "assistant"
                before = {"role": "assistant"} if is_first else messages.pop()
                messages.append({**before, "tool_calls": [*before.get("tool_calls", ()), call]})
            case {"type": "function_call_output", "call_id": name, "output": output}:
                messages.append({"role": "tool", "tool_call_id": name, "content": _texts(output)})
            case {"role": role, "content": content}:
                messages.append({"role": role, "content": _texts(content)})
            case _:
                raise not_understood("input", item)
    if (instructions := body.get("instructions")) is not None:
        messages.insert(0, {"role": "system", "content": instructions, "is_instructions": True})
    tools = []
    for tool in body.get("tools") or ():
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise not_understood("tools", tool)
        names = [name for name in ("name", "description", "parameters") if tool.get(name) is not None]
        tools.append({"type": "function", "function": {name: tool[name] for name in names}})
    kept = {name: body.get(name) for name in ("model", "tool_choice", "stream", "seed")}
    return {**kept, "messages": messages, "tools": tools, "max_tokens": body.get("max_output_tokens")}


def answer(reply: Reply, found: Sequence[Completion]) -> dict[str, Any]:
    """A message, and the tool calls in it."""
    (completion,) = found
    turn, is_cut = completion.turn, completion.finish_reason == "length"
    status, counts = "incomplete" if is_cut else "completed", (len(turn.prompt_ids), len(turn.token_ids))
    calls = [
        {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], **call["function"], "status": status}
        for call in completion.message.get("tool_calls") or ()
    ]
    return {
        **_head(reply, status), "output": [{**_message(reply, status), "content": [_part(turn.text)]}, *calls],
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": counts[0], "output_tokens": counts[1], "total_tokens": sum(counts),
            "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
        },
        "token_ids": list(turn.token_ids), **exact(completion),
    }  # fmt: skip


def events(reply: Reply, turns: Sequence[OpenTurn]) -> Iterator[dict[str, Any]]:
    """The events of a stream; those of tool calls follow the text."""
    for number, (kind, event) in enumerate(_events(reply, turns[0])):
        yield {"type": f"response.{kind}", "sequence_number": number, **event}


def _events(reply: Reply, turn: OpenTurn) -> Iterator[tuple[str, dict[str, Any]]]:
    begun, response = _message(reply, "in_progress"), _head(reply, "in_progress")
    at = {"item_id": begun["id"], "output_index": 0, "content_index": 0}
    yield "created", {"response": response}
    yield "in_progress", {"response": response}
    yield "output_item.added", {"output_index": 0, "item": begun}
    yield "content_part.added", {**at, "part": _part("")}
    for part in turn:
        if isinstance(part, str):
            yield "output_text.delta", {**at, "delta": part, "logprobs": []}
        else:
            response = answer(reply, [part])
    message, *calls = response["output"]
    (part,) = message["content"]
    yield "output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "content_part.done", {**at, "part": part}
    yield "output_item.done", {"output_index": 0, "item": message}
    for index, call in enumerate(calls, 1):
        at = {"item_id": call["id"], "output_index": index}
        yield "output_item.added", {**at, "item": call | {"arguments": "", "status": "in_progress"}}
        yield "function_call_arguments.delta", {**at, "delta": call["arguments"]}
        yield "function_call_arguments.done", {**at, "name": call["name"], "arguments": call["arguments"]}
        yield "output_item.done", {**at, "item": call}
    yield response["status"], {"response": response}


def _head(reply: Reply, status: str) -> dict[str, Any]:
    given = {name: reply.body.get(name) for name in ("instructions", "previous_response_id", "max_output_tokens")}
    return {
        "id": f"resp_{reply.name}", "object": "response", "created_at": int(time.time()), "model": reply.model,
        "status": status, "output": [], "error": None, "incomplete_details": None, "parallel_tool_calls": True,
        "tool_choice": reply.body.get("tool_choice") or "auto", "tools": reply.body.get("tools") or [], **given,
    }  # fmt: skip


def _message(reply: Reply, status: str) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{reply.name}", "role": "assistant", "status": status, "content": []}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _texts(content: Any) -> Any:
    """Texts as parts of chat completions, where anything else is refused."""
    if not isinstance(content, list):
        return content
    return [part | {"type": "text"} if part.get("type") in ("input_text", "output_text") else part for part in content]
