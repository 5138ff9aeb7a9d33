"""What the Responses and Messages APIs refuse, by name and in the error form of each."""

from __future__ import annotations

import http.client
import json
import re

from environments.episodes import tiny
from serving.test_apis import dictated


def responses_body(**fields):
    return "/v1/responses", {"model": "policy", "input": "1", **fields}


def messages_body(**fields):
    return "/v1/messages", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 5, **fields}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
REFUSED = {
    "input of a number": (responses_body(input=3), "messages"), "no input": (responses_body(input=[]), "messages"),
    "image": (responses_body(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "messages"),
    "part": (responses_body(input=[{"role": "user", "content": ["x"]}]), "another type"),
    "reasoning": (responses_body(input=[{"type": "reasoning", "summary": []}]), "input has .*reasoning"),
    "reference": (responses_body(input=[{"type": "item_reference", "id": "x"}]), "input has .*item_reference"),
    "previous": (responses_body(previous_response_id="resp_x"), "previous_response_id has 'resp_x'"),
    "web search": (responses_body(tools=[{"type": "web_search"}]), "tools has .*web_search"),
    "required": (responses_body(tool_choice="required"), "tool_choice"),
    "named": (responses_body(tool_choice={"type": "function", "name": "two"}), "tool_choice"),
    "effort": (responses_body(reasoning={"effort": "low"}), "reasoning"), "n": (responses_body(n=2), "n is 2"),
    "format": (responses_body(text={"format": {"type": "json_object"}}), "text"),
    "background": (responses_body(background=True), "background"), "sampling": (responses_body(top_p=0.5), "top_p"),
    "chat messages": (responses_body(messages=[]), "messages"),
    "tokens": (responses_body(max_output_tokens=0), "tokens"),
    "any": (messages_body(tool_choice={"type": "any"}), "tool_choice has"),
    "tool": (messages_body(tool_choice={"type": "tool", "name": "two"}), "tool_choice has"),
    "parallel": (messages_body(tool_choice={"type": "auto", "disable_parallel_tool_use": True}), "tool_choice has"),
    "top_k": (messages_body(top_k=5), "top_k"), "temperature": (messages_body(temperature=0.1), "temperature"),
    "thinking": (messages_body(thinking={"type": "enabled", "budget_tokens": 1024}), "thinking"),
    "an image": (messages_body(messages=[{"role": "user", "content": [IMAGE]}]), "messages has .*image"),
    "prefill": (messages_body(messages=[{"role": "assistant", "content": "It"}]), "begins its turns itself"),
    "role": (messages_body(messages=[{"role": "system", "content": "It"}]), "messages has"),
    "no messages": (messages_body(messages=[]), "messages"), "a number": (messages_body(messages=3), "another type"),
    "server tool": (messages_body(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools has .*bash"),
    "schema": (messages_body(tools=[{"name": "f", "input_schema": 3}]), "tools"),
    "stop": (messages_body(stop_sequences=[""]), "stop"), "many": (messages_body(stop_sequences=["x"] * 99), "stop"),
    "mcp": (messages_body(mcp_servers=[{}]), "mcp_servers"), "no JSON": (("/v1/messages", None), "not JSON"),
    "long": (messages_body(system="1" * 5000), "a conversation has at most"),
}  # fmt: skip


def test_what_cannot_be_exact_is_refused_by_name_in_the_error_form_of_its_api():
    with dictated(tiny(512)[1], []) as (server, *_):
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
        for name, ((path, body), told) in REFUSED.items():
            connection.request("POST", path, b"{" if body is None else json.dumps(body))
            reply = connection.getresponse()
            answer = json.loads(reply.read())
            assert reply.status == 400, name
            is_messages = path == "/v1/messages"
            assert answer.get("type") == ("error" if is_messages else None), name
            assert {*answer["error"]} == ({"type", "message"} if is_messages else {"message", "type", "param", "code"})
            assert answer["error"]["type"] == "invalid_request_error", name
            assert re.search(told, answer["error"]["message"]), name
        assert not server.endpoint.recorded
        for path, kind in (("/v1/messages/count", "not_found_error"), ("/sessions/x/v1/messages", "not_found_error")):
            connection.request("POST", path, b"{}")
            reply = connection.getresponse()
            error = json.loads(reply.read())["error"]
            assert (reply.status, error["type"]) == (
                404,
                kind if path.endswith("messages") else "invalid_request_error",
            )
        connection.close()
