"""A real HTTP server on loopback that answers as a test says, misbehaves on demand, and remembers what it was asked."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.http_client.endpoint import Endpoint


@dataclass
class Asked:
    """One POST as it arrived."""

    path: str
    headers: dict[str, str]
    body: Any
    time_s: float


@dataclass
class Say:
    """An answer: JSON, or content as it is."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None
    delay_s: float = 0.0
    hang_up: bool = False  # close the connection without an answer


class Server(ThreadingHTTPServer):
    """Attributes:
    asked: every POST, in order of arrival.
    most_at_once: POSTs under way at a time, at most.
    """

    daemon_threads = True
    request_queue_size = 128  # else a connection that is one too many waits a second

    def __init__(self, answer: Callable[[Asked], Any], page: Callable[[str], Any]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.page, self.asked = answer, page, []
        self.most_at_once = self._at_once = 0
        self.is_over = False
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def endpoint(self, path: str = "", **settings: Any) -> Endpoint:
        return Endpoint(**{"base_url": self.url + path, "backoff_s": 0.001, "retries": 2, **settings})

    @contextlib.contextmanager
    def counted(self, asked: Asked) -> Iterator[None]:
        with self._lock:
            self.asked.append(asked)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self):
        said = self.server.page(self.path)
        said = said if isinstance(said, Say) else Say(body=said)
        time.sleep(said.delay_s)
        self._send(said)

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.path, headers, json.loads(content), time.monotonic())
        with self.server.counted(asked):  # to the end of its work: once it is sent, the next request may be there first
            said = Say(hang_up=True) if self.server.is_over else self.server.answer(asked)
            said = said if isinstance(said, Say) else Say(body=said)
            time.sleep(said.delay_s)
        self._send(said)

    def _send(self, say: Say) -> None:
        if say.hang_up:
            self.close_connection = True
            return
        content = json.dumps(say.body).encode() if say.content is None else say.content
        with contextlib.suppress(ConnectionError):
            self.send_response(say.status)
            for name, value in {**say.headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(answer: Callable[[Asked], Any], page: Callable[[str], Any] = lambda path: "here") -> Iterator[Server]:
    """A server that answers each POST with what `answer` returns, each GET with what `page` does: JSON, or a `Say`."""
    server = Server(answer, page)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.is_over = True  # connections that are kept open, too
        server.shutdown()
        server.server_close()


def in_turn(*answers: Any) -> Callable[[Asked], Any]:
    """Answers one after another, the last one for ever."""
    left = list(answers)
    lock = threading.Lock()

    def answer(asked: Asked) -> Any:
        with lock:
            said = left.pop(0) if len(left) > 1 else left[0]
        return said(asked) if callable(said) else said

    return answer
