"""Chat completions over HTTP for OpenAI's clients: routes, limits of a request, and the form of replies.

    POST /v1/chat/completions     GET /v1/models     GET /v1/models/ID     GET /health

Fields that would change the sampling distribution, and unknown fields, are refused by name: recorded log-probs must be
those of the policy in training. Every refusal and every failure is OpenAI's error object.
"""

from __future__ import annotations

import contextlib
import http
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from verl.errors import ConfigError, RolloutError
from verl.serving.chat_request import Refused, parse_request
from verl.serving.conversations import Session
from verl.serving.endpoint import Completion, PolicyEndpoint

log = logging.getLogger(__name__)

BODY_BYTES, BODY_BYTES_PER_TOKEN = 64 * 2**10, 32  # of a body: the first, and the second for each token of the context
READ_TIMEOUT_S = 60.0  # for the next bytes of a client
LINGER_S, LINGER_IDLE_S = 10.0, 2.0  # to read on after a refusal
SESSION = "/sessions/"  # before the name of a session, in a path
COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/models"


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
        self._token_bytes = TokenBytes(endpoint.tokenizer)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The `base_url` for OpenAI's clients."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/v1"

    def session_url(self, name: str) -> str:
        """The `base_url` for the requests of one session."""
        return f"{self.url.removesuffix('/v1')}{SESSION}{name}/v1"

    @property
    def max_body(self) -> int:
        """Bytes of a body that are read. A longer one cannot fit the context of a conversation."""
        return BODY_BYTES + BODY_BYTES_PER_TOKEN * self.endpoint.row_tokens

    def complete(self, content: bytes, session: Session | None = None) -> dict[str, Any]:
        """The answer to the body of a request.

        Raises:
            Refused: the request is not supported; says why.
            RolloutError: the engine failed.
        """
        body = parse_request(content, self.sampling, self.ignores_sampling)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        try:
            completion = self.endpoint.complete(
                body["messages"], body.get("tools") or None, limit, body.get("seed"), self.timeout_s, session
            )
        except (ConfigError, ValueError) as error:
            raise Refused(400, str(error)) from error
        return self._answer(completion, bool(body.get("logprobs")))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed connection: nearly always a client that has left."""
        log.info("A connection of %s failed.", client_address, exc_info=True)

    def _answer(self, found: Completion, with_logprobs: bool) -> dict[str, Any]:
        turn = found.turn
        choice: dict[str, Any] = {"index": 0, "message": found.message, "finish_reason": found.finish_reason}
        choice["logprobs"] = None
        choice["token_ids"] = list(turn.token_ids)
        if with_logprobs:
            pairs = [(self._token_bytes(i), x) for i, x in zip(turn.token_ids, turn.log_probs, strict=True)]
            content = [
                {"token": data.decode(errors="replace"), "logprob": x, "bytes": list(data), "top_logprobs": []}
                for data, x in pairs
            ]
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
        if path == COMPLETIONS:
            raise Refused(405, f"{COMPLETIONS} takes POST")
        raise Refused(404, f"there is no {path[:80]}: this endpoint has {COMPLETIONS} and {MODELS}")

    def _post(self) -> dict[str, Any]:
        content = self._content()
        path, session = self._route()
        if path != COMPLETIONS:
            raise Refused(404, f"there is no POST {path[:80]}: this endpoint has {COMPLETIONS}")
        return self.server.complete(content, session)

    def _route(self) -> tuple[str, Session | None]:
        """The path below that of the session, if the request has one."""
        path = self.path.partition("?")[0].rstrip("/")
        if not path.startswith(SESSION):
            return path, None
        name, _, rest = path.removeprefix(SESSION).partition("/")
        if (session := self.server.sessions.get(name)) is None:
            raise Refused(404, f"there is no session {name[:80]}")
        return f"/{rest}", session

    def _content(self) -> bytes:
        """The body; one that is too long is not read.

        Raises:
            Refused: its length is not announced or too large, or it does not come.
        """
        is_last, self.close_connection = self.close_connection, True  # until it is read
        self.is_unread = True
        lengths, most = self.headers.get_all("Content-Length") or [], self.server.max_body
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

    def _respond(self, answer: Callable[[], Mapping[str, Any]]) -> None:
        try:
            status, body = 200, answer()
        except Refused as error:
            status, body = error.status, error.body
        except RolloutError as error:
            status, body = 500, Refused(500, str(error)).body
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("A request failed.")
            status, body = 500, Refused(500, f"the request failed: {type(error).__name__}").body
        self._send(status, body)

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


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte
_WORD_START = "▁"  # of SentencePiece, for a space


class TokenBytes:
    """Bytes that a token stands for, by its id, also where they are only a part of a character.

    Tokens of byte-level BPE and byte-fallback tokens of SentencePiece may be parts of a character; those of any other
    vocabulary are whole texts.

    Args:
        tokenizer: of Hugging Face.
    """

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._added = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder, *(decoder.get("decoders") or ()))}
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()} if "ByteLevel" in kinds else {}
        self._has_fallback = "ByteFallback" in kinds

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token; those of its decoded text if its vocabulary has no bytes."""
        token = self._tokenizer.convert_ids_to_tokens(int(token_id))
        if token in self._added or token is None:
            return (token or "").encode()
        if self._byte_of and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        if self._has_fallback:
            byte = _BYTE_FALLBACK.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()
        return self._tokenizer.decode([int(token_id)]).encode()
