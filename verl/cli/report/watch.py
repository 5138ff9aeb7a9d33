"""`verl watch`: a run as it goes, in the terminal or as its page in a browser.

metrics.jsonl ── new lines ──> the console of the run            terminal
              ── new bytes ──> the page, which draws them        --web, on this machine only

`verl report`: one HTML page of a run, or of several to compare them.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

import typer

from verl.cli.console import echo, size
from verl.cli.report.read import RUNNING, RunRecord, as_number, read_run, run_status
from verl.errors import ConfigError, VerlError
from verl.tracking.console import PAGE, Console, ConsoleTracker
from verl.utils.external_input import ExternalInputError, open_regular, parse_mapping, write_text

INTERVAL_S = 1.0  # between two looks at the files
FIRST_LINES = 10  # shown of what was there before
LARGEST_METRICS = 2**30  # bytes that are read at once of a file, which may be sparse
CHUNK_BYTES = 2**22  # of one answer with new lines
LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")  # a page of another name that resolves to this machine may not read it


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    web: Annotated[bool, typer.Option("--web", help="Serve its page on this machine instead.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --web; 0 for a free one.")] = 0,
) -> None:
    """Follow a run: its lines as they are written, until it ends, or with --web its page, which grows.

    The page is served to this machine alone, under an address with a random token, and changes nothing. From another
    machine: ssh -L PORT:127.0.0.1:PORT HOST.
    """
    with contextlib.suppress(KeyboardInterrupt):
        record = read_run(run)
        if web:
            _serve(run, port)
        else:
            _follow(record)


# -- terminal ----------------------------------------------------------------------------------------------------------


def _follow(record: RunRecord) -> None:
    from verl.cli.report.page import outcome

    run_dir, total = record.directory, record.config.get("trainer.total_steps")
    file, clock = run_dir / "metrics.jsonl", _RunClock()
    lines, offset = _new_lines(file, 0)
    for row in lines[:-FIRST_LINES]:
        clock.set(row)
    tracker = ConsoleTracker(Console(), clock=clock.read)
    tracker.start(record.name, {}, run_dir, total if isinstance(total, int) and total < 2**53 else None)
    is_running, lines = True, lines[-FIRST_LINES:]
    try:
        while is_running or lines:
            for row in lines:
                clock.set(row)
                _show(tracker, row)
            is_running = run_status(run_dir) == RUNNING  # before the lines: those of the end are read too
            time.sleep(INTERVAL_S if is_running else 0)
            lines, offset = _new_lines(file, offset)
    finally:
        tracker.close(run_status(run_dir))
    echo(outcome(read_run(run_dir)))
    if (run_dir / PAGE).is_file():
        echo(f"page {run_dir / PAGE}")


class _RunClock:
    """Seconds of a run by the `time_s` of its lines, so that its intervals are those of the run."""

    def __init__(self) -> None:
        self._before_s = self._last_s = 0.0

    def set(self, row: dict[str, Any]) -> None:
        time_s = as_number(row.get("time_s"))
        if time_s < self._last_s:  # the run was started again
            self._before_s += self._last_s
        self._last_s = time_s if 0 <= time_s < math.inf else self._last_s

    def read(self) -> float:
        return self._before_s + self._last_s


def _show(tracker: ConsoleTracker, row: dict[str, Any]) -> None:
    step = row.get("step")
    metrics = {key: as_number(value) for key, value in row.items() if key not in ("step", "time_s")}
    if not isinstance(step, int):
        return
    if all(key.startswith("eval/") for key in metrics):
        tracker.evaluation(metrics, step)
    else:
        tracker.log(metrics, step)


def _new_lines(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from an offset on, and the offset behind them."""
    data, rows = _new_bytes(file, offset), []
    for line in data.split(b"\n"):
        with contextlib.suppress(ExternalInputError):
            rows.append(parse_mapping(line))
    return rows, offset + len(data)


def _new_bytes(file: Path, offset: int, most: int = LARGEST_METRICS) -> bytes:
    """The whole lines of a file from an offset on, at most `most` bytes of them; nothing if there is no file."""
    try:
        with open(open_regular(file), "rb") as lines:
            lines.seek(offset)
            data = lines.read(most)
    except OSError:
        return b""
    return data[: data.rfind(b"\n") + 1]


# -- web ---------------------------------------------------------------------------------------------------------------


def _serve(run_dir: Path, port: int) -> None:
    with RunServer(run_dir, port) as server:
        print(server.url, file=sys.__stdout__, flush=True)  # `sys.stdout` would hide the token
        echo(f"Ctrl-C ends it. From another machine: ssh -L {server.port}:{LOOPBACK}:{server.port} HOST")
        server.serve_forever()


class RunServer(ThreadingHTTPServer):
    """Serves the page of a run on the loopback interface.

    GET /TOKEN/                   the page
    GET /TOKEN/metrics?offset=N   whole lines of metrics.jsonl from byte N on, with the run's status in X-Run-Status

    Raises:
        ConfigError: the port is in use, or not allowed.
    """

    daemon_threads = True

    def __init__(self, run_dir: Path, port: int = 0):
        try:
            super().__init__((LOOPBACK, port), _PageHandler)
        except OSError as error:
            raise ConfigError(
                f"--port is {port}: {error.strerror}. Give another one, or none for a free one."
            ) from error
        self.run_dir, self.token = run_dir, secrets.token_urlsafe(24)

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that leave are no fault, and what an answer raises is in it."""

    def page(self) -> bytes:
        from verl.cli.report.page import report

        file = self.run_dir / "metrics.jsonl"
        size = file.stat().st_size if file.is_file() else 0
        start = max(0, size - CHUNK_BYTES)  # lines that come while the page is made are in it, and then sent again
        offset = start + len(_new_bytes(file, start, size - start))
        return report([self.run_dir], live={"url": "metrics", "offset": offset}).encode()


class _PageHandler(BaseHTTPRequestHandler):
    server: Any  # a RunServer
    timeout = 10.0  # s of one read or write

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token, _, name = address.path.strip("/").partition("/")
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in HOSTS:
            self._send(HTTPStatus.FORBIDDEN, b"This page is for this machine alone.", "text/plain")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()) or name not in ("", "metrics"):
            self._send(HTTPStatus.NOT_FOUND, b"No such page.", "text/plain")
        elif not self.server.run_dir.is_dir():
            self._send(HTTPStatus.GONE, b"The directory of the run is not there any more.", "text/plain")
        elif name == "metrics":
            digits = parse_qs(address.query).get("offset", ["0"])[0]
            offset = min(int(digits[:20]), 2**62) if digits.isascii() and digits.isdecimal() else 0
            data = _new_bytes(self.server.run_dir / "metrics.jsonl", offset, CHUNK_BYTES)
            self._send(HTTPStatus.OK, data, "application/jsonl", run_status(self.server.run_dir))
        else:
            try:
                page, status, kind = self.server.page(), HTTPStatus.OK, "text/html"
            except (VerlError, OSError) as error:  # the run is being moved, or was damaged
                page, status, kind = f"{type(error).__name__}: {error}".encode(), HTTPStatus.NOT_FOUND, "text/plain"
            self._send(status, page, kind)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, run_status: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Run-Status": run_status,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the address holds the token."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs; several are compared.")],
    html: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page that shows a run, or compares several. It needs no network and no other file.

    A run may be running, or have been killed. Runs that differ in their seed alone are drawn as one band.
    """
    from verl.cli.report.page import report as page_of

    text = page_of(runs)
    write_text(html, text)
    echo(f"{html}: {size(len(text.encode()))}")
