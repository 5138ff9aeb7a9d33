"""A sandbox server over HTTP, with the interface of E2B's code interpreter: code is posted, events come back as lines.

    POST base_url/execute {"code": ..., "language": "python"}
    <- {"type": "stdout", "text": ...}, {"type": "stderr", ...}, {"type": "error", "name", "value"}, ... a line each

The posted code is a wrapper that runs the model's program in a child process on the server, with the limits of the run,
and prints its outcome. Isolating programs from each other and from that machine is up to the server.
"""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from verl.component import BuildContext, component
from verl.errors import faults_below
from verl.http_client.endpoint import Endpoint
from verl.http_client.request import Request, RetryableAnswer
from verl.sandbox.base import CodeRunner, ExecutionResult, Program, Sandbox, closed_error, outcome_of

if TYPE_CHECKING:
    from verl.http_client.client import HTTPClient

# Runs on the server, in whatever Python 3 it has. {job} and {mark} are filled in.
_SUPERVISOR = r"""
import base64, json, os, resource, shutil, signal, subprocess, sys, tempfile
def _verl_run(job):
    home = tempfile.mkdtemp()
    for name, content in job["files"].items():
        path = os.path.join(home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    def limit():
        space = (job["memory_mib"] + 64) << 20
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["most"] + 1, job["most"] + 1))
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    given = tempfile.TemporaryFile()
    given.write(base64.b64decode(job["stdin"]))
    given.seek(0)
    child = subprocess.Popen([sys.executable, "-X", "utf8", "-c", base64.b64decode(job["code"]).decode()], cwd=home,
        stdin=given, stdout=out, stderr=err, preexec_fn=limit, start_new_session=True)
    try:
        status = child.wait(job["timeout_s"])
    except subprocess.TimeoutExpired:
        status = None
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except OSError:
        pass
    child.wait()
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(base64.b64encode(file.read(job["most"] + 1)).decode())
    shutil.rmtree(home, ignore_errors=True)
    return [status, *texts]
print("{mark}" + json.dumps(_verl_run(json.loads({job!r}))))
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
        asks = [_ExecuteRequest(program, *self.limits(program), self.described.max_output_kib) for program in programs]
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

    def __init__(self, program: Program, timeout_s: float, memory_mib: int, max_output_kib: int):
        self._most = max_output_kib * 1024
        self._job = {
            "code": _base64(program.code.encode("utf-8", "surrogatepass")),
            "files": {name: _base64(content) for name, content in program.contents().items()},
            "stdin": _base64(program.stdin.encode("utf-8", "surrogatepass")),
            "timeout_s": timeout_s,
            "memory_mib": memory_mib,
            "most": self._most,
        }
        self._mark = secrets.token_hex(16)
        self._asked = time.perf_counter()
        self.result: ExecutionResult | None = None

    def body(self) -> Any:
        self._asked = time.perf_counter()
        code = _SUPERVISOR.replace("{mark}", self._mark).replace("{job!r}", repr(json.dumps(self._job)))
        return {"code": code, "language": "python"}

    def parse(self, content: bytes) -> Any:
        return [json.loads(line) for line in content.splitlines() if line.strip()]

    def read(self, answer: Any) -> None:
        text = "".join(event.get("text", "") for event in answer if event.get("type") == "stdout")
        _, found, rest = text.rpartition(self._mark)
        if not found:
            errors = [f"{event.get('name')}: {event.get('value')}" for event in answer if event.get("type") == "error"]
            raise RetryableAnswer(f"the server did not finish the program ({'; '.join(errors) or 'no error reported'})")
        status, *texts = json.loads(rest)
        stdout, stderr = (base64.b64decode(piece) for piece in texts)
        self.result = self._result(status, stdout, stderr)

    def _result(self, status: int | None, stdout: bytes, stderr: bytes) -> ExecutionResult:
        seconds = time.perf_counter() - self._asked
        out, err = (piece[: self._most].decode("utf-8", "replace") for piece in (stdout, stderr))
        if status is None:
            return ExecutionResult("timeout", out, err, seconds=seconds)
        if max(len(stdout), len(stderr)) > self._most:
            return ExecutionResult("output", out, err, seconds=seconds)
        code = 128 - status if status < 0 else status
        return ExecutionResult(outcome_of(code, err), out, err, code, seconds=seconds)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
