"""A real S3 server on loopback (moto's), and a proxy before it that misbehaves as a test says."""

import contextlib
import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

BUCKET = "verl-tests"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing-key-id",
    "AWS_SECRET_ACCESS_KEY": "testing-secret-0123456789",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
IMPASSABLE = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server with the bucket BUCKET; credentials are in the environment meanwhile.

    moto looks for an object and then puts it, in as many threads as there are requests. S3 does so in one: puts
    wait for each other here, since `If-None-Match` promises that one of many creates an object.
    """
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a failing test tells of requests and little else
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_object(response: S3Response) -> Any:
        with one_at_a_time:
            return put(response)

    with patch.dict(os.environ, CREDENTIALS), patch.object(S3Response, "put_object", put_object):
        server.start()
        host, port = server.get_host_and_port()
        try:
            asked = http.client.HTTPConnection(host, port, timeout=30)
            asked.request("PUT", f"/{BUCKET}")
            assert asked.getresponse().status == 200
            asked.close()
            yield f"http://{host}:{port}"
        finally:
            server.stop()


@dataclass
class Request:
    """One request on its way to the store.

    Attributes:
        number: of those so far, from 1.
    """

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Fault:
    """What the proxy does with a request instead of passing it on.

    Args:
        status: answers so, the store never hears of it.
        hang_up: closes the connection without an answer; after `passed_on`, the store has done what was asked.
        passed_on: the store is asked first, and the answer comes late or never.
        delay_s: before the answer.
        body: replaces that of the answer.
        cut: ends the body of the answer after so many bytes.
        size: the length that the answer to a HEAD names.
        path, headers: the store is asked for these instead.
        statuses: status and body of the answer instead of a status of the store.
    """

    status: int | None = None
    hang_up: bool = False
    passed_on: bool = False
    delay_s: float = 0.0
    body: bytes | None = None
    cut: int | None = None
    size: int = 0
    path: str | None = None
    headers: dict[str, str] | None = None
    statuses: dict[int, tuple[int, bytes]] = field(default_factory=dict)


class Proxy(ThreadingHTTPServer):
    """Attributes:
    misbehave: is asked for each request; None passes it on.
    seen: all requests so far, without their bodies.
    """

    daemon_threads = True

    def __init__(self, upstream: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream.removeprefix("http://")
        self.misbehave: Callable[[Request], Fault | None] = lambda request: None
        self.seen: list[Request] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, method: str, part: str = "") -> int:
        """How many requests of a method with this in their path there were."""
        return sum(request.method == method and part in request.path for request in self.seen)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is what tests are about."""


@contextlib.contextmanager
def proxy_before(upstream: str) -> Iterator[Proxy]:
    """A proxy that passes everything on until it is told otherwise."""
    proxy = Proxy(upstream)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.over.set()
        proxy.shutdown()
        proxy.server_close()


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    """By its length or in chunks."""
    if request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    body = b""
    while size := int(request.rfile.readline().split(b";")[0], 16):
        body += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    return body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _serve(self) -> None:
        body = body_of(self)
        with self.server.lock:
            request = Request(len(self.server.seen) + 1, self.command, self.path, dict(self.headers), b"")
            self.server.seen.append(request)
            request.body = body
            fault = self.server.misbehave(request) or Fault(passed_on=True)
            request.body = b""
        if fault.status is not None:
            headers = {"Content-Type": "application/xml", "Content-Length": str(fault.size)}
            self._answer(fault.status, headers, fault.body or b"")
            return
        if fault.passed_on or fault.body is not None or fault.cut is not None:
            status, headers, answer = self._ask(fault, body)
        else:
            status, headers, answer = 500, {}, b""
        status, answer = fault.statuses.get(status, (status, answer))
        self.server.over.wait(fault.delay_s)
        if fault.hang_up or not (fault.passed_on or fault.body is not None or fault.cut is not None):
            self.close_connection = True
            return
        self._answer(status, headers, answer if fault.body is None else fault.body, fault.cut)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _ask(self, fault: Fault, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        headers = dict(self.headers) if fault.headers is None else fault.headers
        passed = {name: value for name, value in headers.items() if name.lower() != "transfer-encoding"}
        upstream.request(self.command, fault.path or self.path, body, passed)
        answer = upstream.getresponse()
        content = answer.read()
        kept = dict(answer.getheaders())
        upstream.close()
        return answer.status, kept, content

    def _answer(self, status: int, headers: dict[str, str], body: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in IMPASSABLE:
                self.send_header(name, value)
        length = len(body)
        if self.command == "HEAD":
            length = int(headers.get("Content-Length", headers.get("content-length", 0)))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def after(number: int, fault: Fault, method: str = "", part: str = "", times: int = 1) -> Callable:
    """Misbehave at the `number`-th matching request and the `times - 1` after it."""
    count = 0

    def decide(request: Request) -> Fault | None:
        nonlocal count
        if (method and request.method != method) or part not in request.path:
            return None
        count += 1
        return fault if number <= count < number + times else None

    return decide


def wait_until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
