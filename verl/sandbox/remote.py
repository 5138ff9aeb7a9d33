"""A sandbox server over HTTP, with the interface of E2B's code interpreter: code is posted, events come back as lines.

    POST base_url/execute {"code": ..., "language": "python"}
    <- {"type": "stdout", "text": ...}, {"type": "stderr", ...}, {"type": "error", "name", "value"}, ... a line each

The posted code is `limited_run.py`, which runs the model's program in a child process on the server, with the limits of
the run, and prints its outcome. Isolating programs from each other and from that machine is up to the server.
"""

from __future__ import annotations

import base64
import json
import marshal
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl.component import BuildContext, component
from verl.errors import faults_below
from verl.http_client.endpoint import Endpoint
from verl.http_client.request import Request, RetryableAnswer
from verl.sandbox import limited_run
from verl.sandbox.base import CodeRunner, ExecutionResult, Program, Sandbox, closed_error

if TYPE_CHECKING:
    from verl.http_client.client import HTTPClient

# Runs on the server behind the source of `limited_run`. {arguments} and {mark} are filled in.
_MAIN = """
import base64, json, marshal
status, *texts = run_limited(**marshal.loads(base64.b64decode("{arguments}")))
print("{mark}" + json.dumps([status, *(base64.b64encode(text).decode() for text in texts)]))
"""


@component
class RemoteSandbox(Sandbox):
    """Programs on a sandbox server.

    Args:
        endpoint: of the server; its timeout_s must be longer than that of a program.
    """

    endpoint: Endpoint
    links_programs: ClassVar[bool] = False  # two processes of one server could reach each other

    def faults(self) -> Iterator[str]:
        if self.endpoint.timeout_s <= self.timeout_s:
            yield (
                f"endpoint.timeout_s is {self.endpoint.timeout_s:g}: a program may run for timeout_s "
                f"{self.timeout_s:g}, so that its answer comes too late. Set endpoint.timeout_s higher."
            )

    def build(self, context: BuildContext) -> RemoteRunner:
        with faults_below("endpoint"):
            return RemoteRunner(self, self.endpoint.build(context))


class RemoteRunner(CodeRunner):
    """A running `RemoteSandbox`."""

    def __init__(self, described: RemoteSandbox, client: HTTPClient):
        super().__init__(described)
        self._client: HTTPClient | None = client
        self._lock = threading.Lock()

    def execute(self, program: Program) -> ExecutionResult:
        return self.run_all([program])[0]

    def run_all(self, programs: Sequence[Program]) -> list[ExecutionResult]:
        asks = [_ExecuteRequest(self, program) for program in programs]
        with self._lock:
            client = self._client
            if client is None:
                raise closed_error()
            begun = client.begin(asks)
        reports = client.wait(begun)
        return [
            ask.result or ExecutionResult("infra", detail=(report and report.failure) or "not asked")
            for ask, report in zip(asks, reports, strict=True)
        ]

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class _ExecuteRequest(Request):
    path = "/execute"

    def __init__(self, runner: RemoteRunner, program: Program):
        self._runner, self._mark, self._sent_at = runner, secrets.token_hex(16), time.perf_counter()
        self._arguments = marshal.dumps(runner.limited_arguments(program), 2)  # the form of any Python 3
        self.result: ExecutionResult | None = None

    def body(self) -> Any:
        self._sent_at = time.perf_counter()
        arguments = base64.b64encode(self._arguments).decode()
        main = _MAIN.replace("{mark}", self._mark).replace("{arguments}", arguments)
        return {"code": Path(limited_run.__file__).read_text() + main, "language": "python"}

    def parse(self, content: bytes) -> Any:
        return [json.loads(line) for line in content.splitlines() if line.strip()]

    def read(self, answer: Any) -> None:
        text = "".join(event.get("text", "") for event in answer if event.get("type") == "stdout")
        _, mark, remaining = text.rpartition(self._mark)
        if not mark:
            errors = [f"{event.get('name')}: {event.get('value')}" for event in answer if event.get("type") == "error"]
            raise RetryableAnswer(f"the server did not finish the program ({'; '.join(errors) or 'no error reported'})")
        status, *texts = json.loads(remaining)
        stdout, stderr = (base64.b64decode(piece) for piece in texts)
        self.result = self._runner.limited_result(status, stdout, stderr, time.perf_counter() - self._sent_at)
