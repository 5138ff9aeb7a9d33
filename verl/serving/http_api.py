"""The APIs over HTTP for OpenAI's and Anthropic's clients: routes, limits of a request, and the form of replies.

    POST /v1/chat/completions     POST /v1/responses     POST /v1/messages
    GET /v1/models     GET /v1/models/ID     GET /health

Fields that would change the sampling distribution, and unknown fields, are refused by name: recorded log-probs must be
those of the policy in training. Every refusal and every failure is an error object of the API.
"""

from __future__ import annotations

import contextlib
import http
import json
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from verl.data.images import MAX_BYTES
from verl.errors import ConfigError, RolloutError
from verl.serving import translate_chat, translate_messages, translate_responses
from verl.serving.chat_request import Refused, parse_request
from verl.serving.conversations import Session
from verl.serving.endpoint import Completion, PolicyEndpoint

log = logging.getLogger(__name__)

BODY_BYTES, BODY_BYTES_PER_TOKEN = 64 * 2**10, 32  # of a body: the first, and the second for each token of the context
IMAGE_BYTES = 2 * MAX_BYTES  # of a body for a policy that reads images
READ_TIMEOUT_S = 60.0  # for the next bytes of a client
LINGER_S, LINGER_IDLE_S = 10.0, 2.0  # to read on after a refusal
SESSION = "/sessions/"  # before the name of a session, in a path
COMPLETIONS, RESPONSES, MESSAGES, MODELS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models"
APIS: Mapping[str, Any] = {COMPLETIONS: translate_chat, RESPONSES: translate_responses, MESSAGES: translate_messages}
Answer = Mapping[str, Any] | Iterator[Mapping[str, Any]]  # or the events of a stream, the `type` of each is its name


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

    def complete(self, path: str, content: bytes, session: Session | None = None) -> Answer:
        """The answer to the body of a request.

        Raises:
            Refused: the request is not supported; says why.
            RolloutError: the engine failed.
        """
        api, known, name = APIS[path], (session or self.endpoint).known, uuid.uuid4().hex
        body, chat = parse_request(content, api, known, self.sampling, self.ignores_sampling)
        limit, stop = chat.get("max_completion_tokens") or chat.get("max_tokens"), chat.get("stop") or ()
        request = chat["messages"], chat.get("tools") or None, limit, chat.get("seed"), self.timeout_s, session, name
        try:
            stops, is_streamed = (stop,) if isinstance(stop, str) else stop, bool(chat.get("stream"))
            options = stops, chat.get("tool_choice") != "none", is_streamed
            turns = [self.endpoint.begin(*request, choice, *options) for choice in range(chat.get("n") or 1)]
        except (ConfigError, ValueError) as error:
            raise Refused(400, str(error), "messages" if str(error).startswith("messages") else None) from error
        reply = translate_chat.Reply(name, self.model, body, chat, self.endpoint.tokenizer)
        if is_streamed:
            return api.events(reply, turns)
        return api.answer(reply, [part for turn in turns for part in turn if isinstance(part, Completion)])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed connection: nearly always a client that has left."""
        log.info("A connection of %s failed.", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of a line that is no request: the answer to 0.9 would have no head
    timeout = READ_TIMEOUT_S
    command = ""
    is_unread = False  # bytes of a refused request may still come
    server: PolicyServer  # pyright: ignore[reportIncompatibleVariableOverride] - the server that made the handler

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def _get(self) -> dict[str, Any]:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = self.is_unread = True  # a body would be taken for the next request
        path, _ = self._route()
        model = {"id": self.server.model, "object": "model", "created": 0, "owned_by": "verl"}
        if path == "/health":
            return {"status": "ok"}
        if path == MODELS:
            return {"object": "list", "data": [model]}
        if path.startswith(f"{MODELS}/"):
            name = unquote(path.removeprefix(f"{MODELS}/"))
            if name == self.server.model:
                return model
            raise Refused(
                404, f"there is no model {name[:80]!r}; there is {self.server.model}", "model", "model_not_found"
            )
        if path in APIS:
            raise Refused(405, f"{path} takes POST")
        raise Refused(404, f"there is no {path[:80]}: this endpoint has {', '.join(APIS)} and {MODELS}")

    def _post(self) -> Answer:
        content = self._content()
        path, session = self._route()
        if path not in APIS:
            raise Refused(404, f"there is no POST {path[:80]}: this endpoint has {', '.join(APIS)}")
        return self.server.complete(path, content, session)

    def _route(self) -> tuple[str, Session | None]:
        """The path below that of the session, if the request has one."""
        path = self.path.partition("?")[0].rstrip("/")
        if not path.startswith(SESSION):
            return path, None
        name, _, remaining = path.removeprefix(SESSION).partition("/")
        if (session := self.server.sessions.get(name)) is None:
            raise Refused(404, f"there is no session {name[:80]}")
        return f"/{remaining}", session

    def _content(self) -> bytes:
        """The body; one that is too long is not read.

        Raises:
            Refused: its length is not announced or too large, or it does not come.
        """
        is_last, self.close_connection = self.close_connection, True  # until it is read
        self.is_unread = True
        lengths = self.headers.get_all("Content-Length") or []
        most = BODY_BYTES + BODY_BYTES_PER_TOKEN * self.server.endpoint.row_tokens  # more cannot fit a conversation
        most += 0 if self.server.endpoint.images_fault else IMAGE_BYTES
        if "Transfer-Encoding" in self.headers or not lengths:
            raise Refused(411, "the body needs a Content-Length; chunks are not supported")
        length = lengths[0].strip()
        if len({*lengths}) > 1 or not (length.isascii() and length.isdigit()):
            raise Refused(400, f"Content-Length is {', '.join(lengths)[:80]!r}: expected one number of bytes")
        if len(length) > len(str(most)) or int(length) > most:
            with contextlib.suppress(Refused):
                if (session := self._route()[1]) is not None:
                    session.cut = "tokens"
            raise Refused(
                413,
                f"the body has {length[:20]} bytes: at most {most} are read, for a conversation has at most "
                f"{self.server.endpoint.row_tokens} tokens",
                code="context_length_exceeded",
            )
        try:
            content = self.rfile.read(int(length))
        except TimeoutError as error:
            raise Refused(408, f"the body did not come: {READ_TIMEOUT_S:g} s without a byte") from error
        if len(content) < int(length):
            raise Refused(400, f"the body ended after {len(content)} of {length} bytes")
        self.close_connection, self.is_unread = is_last, False
        return content

    def _respond(self, answer: Callable[[], Answer]) -> None:
        try:
            found = answer()
            if not isinstance(found, Mapping):
                self._stream(found)
                return
            status, body = 200, found
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - logged there
            status, body = self._failure(error)
        self._send(status, body)

    def _failure(self, error: Exception) -> tuple[int, Mapping[str, Any]]:
        """Status and body for what a request has raised."""
        if not isinstance(error, Refused | RolloutError):
            log.error("A request failed.", exc_info=error)
            error = RolloutError(f"the request failed: {type(error).__name__}")
        refused = error if isinstance(error, Refused) else Refused(500, str(error))
        is_messages = self.path.partition("?")[0].rstrip("/").endswith(MESSAGES)
        return refused.status, translate_messages.error_body(refused) if is_messages else refused.body

    def _stream(self, events: Iterator[Mapping[str, Any]]) -> None:
        """Server-sent events until the connection closes. If the client leaves, turns are recorded all the same."""
        self.close_connection = True
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in events:
                self._send_event(event)
        except OSError:
            for _ in events:
                pass
        except Exception as error:  # noqa: BLE001 - logged there
            self._send_event({"type": "error", **self._failure(error)[1]})
        else:
            self.wfile.write(b"data: [DONE]\n\n" if self._route()[0] == COMPLETIONS else b"")

    def _send_event(self, event: Mapping[str, Any]) -> None:
        name = f"event: {event['type']}\n" if "type" in event else ""
        self.wfile.write(f"{name}data: {json.dumps(event)}\n\n".encode())

    def handle(self) -> None:
        super().handle()
        if self.is_unread:
            self._linger()

    def _linger(self) -> None:
        """Read on for a while: closing a connection with unread bytes resets it, and the answer could be lost."""
        deadline = time.monotonic() + LINGER_S
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_IDLE_S)
            while time.monotonic() < deadline and self.connection.recv(2**16):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the HTTP parser refuses, such as too many headers or an unknown method, by JSON."""
        self.close_connection = self.is_unread = True
        self._send(code, Refused(code, message or http.HTTPStatus(code).phrase).body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _send(self, status: int, answer: Mapping[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
