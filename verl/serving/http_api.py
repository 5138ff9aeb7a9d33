"""Chat completions over HTTP for OpenAI's clients: supported request fields and the form of replies.

    POST /v1/chat/completions     messages, tools, max_tokens, logprobs, seed     GET /v1/models     GET /health

Fields that would change the sampling distribution, and unknown fields, are refused by name: recorded log-probs must be
those of the policy in training.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.errors import ConfigError, RolloutError
from verl.serving.conversations import text_of
from verl.serving.endpoint import Completion, PolicyEndpoint
from verl.serving.sessions import Session

log = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
SESSION = "/sessions/"  # before the name of a session, in a path
UNDERSTOOD = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "logprobs", "seed"}
IGNORED = {"user", "metadata", "store", "parallel_tool_calls", "stream_options", "service_tier", "safety_identifier"}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # values under which a field changes nothing
    "n": (1,), "stream": (False,), "stop": ([],), "top_logprobs": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "response_format": ({"type": "text"},), "tool_choice": ("auto",),
}  # fmt: skip


class BadRequest(Exception):
    """A refused request, with the reason."""


class PolicyServer(ThreadingHTTPServer):
    """Serves an endpoint.

    Args:
        sampling: temperature and top_p of the rollout; a request with other values is refused.
        ignores_sampling: accept such requests and use the rollout's values.
        timeout_s: for a turn.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self,
        endpoint: PolicyEndpoint,
        host: str,
        port: int,
        model: str,
        sampling: Mapping[str, float],
        ignores_sampling: bool = False,
        timeout_s: float = 600.0,
    ):
        self.endpoint, self.model, self.sampling = endpoint, model, dict(sampling)
        self.ignores_sampling, self.timeout_s = ignores_sampling, timeout_s
        self.sessions: dict[str, Session] = {}
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The `base_url` for OpenAI's clients."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/v1"

    def session_url(self, name: str) -> str:
        """The `base_url` for the requests of one session."""
        return f"{self.url.removesuffix('/v1')}{SESSION}{name}/v1"

    def complete(self, body: Any, session: Session | None = None) -> dict[str, Any]:
        """The answer to the body of a request.

        Raises:
            BadRequest: the request is not supported; says why.
        """
        messages, tools = self._checked(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        try:
            found = self.endpoint.complete(messages, tools, limit, body.get("seed"), self.timeout_s, session)
        except (ConfigError, ValueError) as error:
            raise BadRequest(str(error)) from error
        return self._answer(found, bool(body.get("logprobs")))

    def _checked(self, body: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        if not isinstance(body, dict):
            raise BadRequest("expected an object")
        self._refuse_fields(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
            raise BadRequest("messages: expected a list of objects, each with a text `role`")
        for message in messages:
            try:
                text_of(message)
            except ValueError as error:
                raise BadRequest(str(error)) from error
        tools = body.get("tools") or None
        if tools is not None and not (isinstance(tools, list) and all(_is_tool(tool) for tool in tools)):
            raise BadRequest("tools: expected a list of {type: function, function: {name, parameters}}")
        for name in ("max_tokens", "max_completion_tokens"):
            value = body.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise BadRequest(f"{name} is {value!r}: expected a whole number above 0")
        seed = body.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**31):
            raise BadRequest(f"seed is {seed!r}: expected a whole number from 0 to 2^31 - 1")
        return messages, tools

    def _refuse_fields(self, body: Mapping[str, Any]) -> None:
        for name, value in body.items():
            if value is None or name in UNDERSTOOD or name in IGNORED:
                continue
            if name in self.sampling:
                if value != self.sampling[name] and not self.ignores_sampling:
                    raise BadRequest(
                        f"{name} is {value!r}: the policy is drawn with {name} {self.sampling[name]:g}, as it is "
                        "trained. Leave it out, or serve with --ignore-sampling."
                    )
            elif value not in NEUTRAL.get(name, ()):
                raise BadRequest(f"{name} is {str(value)[:80]!r}: this endpoint does not understand it")

    def _answer(self, found: Completion, with_logprobs: bool) -> dict[str, Any]:
        turn, decode = found.turn, self.endpoint.tokenizer.decode
        choice: dict[str, Any] = {"index": 0, "message": found.message, "finish_reason": found.finish_reason}
        choice["logprobs"] = None
        choice["token_ids"] = list(turn.token_ids)
        if with_logprobs:
            pairs = [(decode([i]), x) for i, x in zip(turn.token_ids, turn.log_probs, strict=True)]
            content = [{"token": t, "logprob": x, "bytes": list(t.encode()), "top_logprobs": []} for t, x in pairs]
            choice["logprobs"] = {"content": content, "refusal": None}
        usage = {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(turn.token_ids)}
        return {
            "id": turn.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": usage | {"total_tokens": sum(usage.values())},
            "prompt_token_ids": list(turn.prompt_ids),
            "continues": found.continues,
        }


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    calls = message.get("tool_calls") or []
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        and isinstance(call["function"].get("arguments"), str)
        for call in calls
    )


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PolicyServer  # pyright: ignore[reportIncompatibleVariableOverride] - the server that made the handler

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/health":
            self._send(200, {"status": "ok"})
        elif path == "/v1/models":
            model = {"id": self.server.model, "object": "model", "created": 0, "owned_by": "verl"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"there is no {path}")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            self.close_connection = True
            self._refuse(413, f"a body of {length or 'unknown'} bytes: at most {MAX_BODY} are read")
            return
        content = self.rfile.read(int(length))
        path, session = self.path.partition("?")[0].rstrip("/"), None
        if path.startswith(SESSION):
            name, _, rest = path.removeprefix(SESSION).partition("/")
            path, session = f"/{rest}", self.server.sessions.get(name)
            if session is None:
                self._refuse(404, f"there is no session {name}")
                return
        if path != "/v1/chat/completions":
            self._refuse(404, f"there is no {self.path}: this endpoint has /v1/chat/completions")
            return
        try:
            body = json.loads(content)
        except ValueError as error:
            self._refuse(400, f"the body is not JSON ({error})")
            return
        try:
            self._send(200, self.server.complete(body, session))
        except BadRequest as error:
            self._refuse(400, str(error))
        except RolloutError as error:
            self._refuse(500, str(error))

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _refuse(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._send(status, {"error": {"message": message, "type": kind, "param": None, "code": None}})

    def _send(self, status: int, answer: Mapping[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
