"""Sandboxes that are not jails: a server over HTTP, and none."""

import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.component import BuildContext
from verl.errors import SandboxError
from verl.http_client.endpoint import Endpoint
from verl.sandbox.base import Program
from verl.sandbox.remote import RemoteSandbox
from verl.sandbox.unprotected import Unprotected

KERNEL = """
import contextlib, io, json, sys, traceback
code, events = sys.stdin.read(), []
with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
        exec(code, {})
    except BaseException as error:
        told = {"name": type(error).__name__, "value": str(error), "traceback": traceback.format_exc()}
        events.append({"type": "error", **told})
text = out.getvalue()
events[:0] = [{"type": "stdout", "text": text[:7]}, {"type": "stdout", "text": text[7:]}]
print(json.dumps(events))
"""


class E2BServer(BaseHTTPRequestHandler):
    """The execute request of E2B's code interpreter: runs code in a process, and streams its output as lines."""

    seen: list = []  # noqa: RUF012
    refusals: list = []  # noqa: RUF012

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body["language"], self.headers.get("X-API-Key")))
        if self.refusals:
            self.send_response(self.refusals.pop())
            self.end_headers()
            return
        words = [sys.executable, "-c", KERNEL]
        done = subprocess.run(words, input=body["code"], capture_output=True, text=True, check=True)
        events = json.loads(done.stdout)
        self.send_response(200)
        self.end_headers()
        for event in [*events, {"type": "end_of_execution"}]:
            self.wfile.write(json.dumps(event).encode() + b"\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    E2BServer.seen.clear()
    E2BServer.refusals.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), E2BServer) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()


def remote(url: str, **values) -> RemoteSandbox:
    endpoint = Endpoint(
        base_url=url, timeout_s=20.0, total_timeout_s=20.0, backoff_s=0.0, retries=2, key_variable="KEY"
    )
    endpoint = Endpoint(**{**vars(endpoint), "key_header": "X-API-Key"})
    return RemoteSandbox(endpoint=endpoint, max_output_kib=16, **values)


@pytest.fixture(params=["remote", "none"])
def runner(request, server, monkeypatch):
    monkeypatch.setenv("KEY", "abc")
    described = remote(server) if request.param == "remote" else Unprotected(max_output_kib=16)
    made = described.build(BuildContext())
    yield made
    made.close()
    with pytest.raises(SandboxError, match="was closed"):
        made.run("1")


@pytest.mark.slow
def test_outcomes_are_those_of_a_jail(runner):
    result = runner.run("print(input(), open('a/b').read())\nraise SystemExit(4)", {"a/b": "ä"}, stdin="ö\n")
    assert (result.outcome, result.stdout, result.exit_status) == ("error", "ö ä\n", 4)
    programs = [
        Program("print('fine')"),
        Program("import time; print('so far', flush=True); time.sleep(60)", timeout_s=3.0),
        Program("bytearray(1 << 31)"),
        Program("while True: print('x' * 1000)"),
        Program("import os; os.abort()"),
    ]
    results = runner.run_all(programs)
    assert [result.outcome for result in results] == ["ok", "timeout", "memory", "output", "error"]
    assert results[1].stdout == "so far\n"
    assert len(results[3].stdout) == 16 * 1024
    assert results[4].exit_status == 134


def test_a_server_gets_the_key_and_is_asked_again_after_a_refusal(server, monkeypatch):
    monkeypatch.setenv("KEY", "abc")
    runner = remote(server).build(BuildContext())
    E2BServer.refusals[:] = [503]
    assert runner.run("print(1)").stdout == "1\n"
    assert E2BServer.seen == [("/execute", "python", "abc")] * 2
    E2BServer.refusals[:] = [500, 500, 500]
    result = runner.run("print(1)")
    runner.close()
    assert result.outcome == "infra"
    assert "500" in result.detail


def test_none_says_in_capitals_what_it_does(caplog):
    with caplog.at_level(logging.WARNING):
        Unprotected().build(BuildContext())
    assert "RUNS ON THIS MACHINE WITH ALL RIGHTS OF YOUR USER" in caplog.text
