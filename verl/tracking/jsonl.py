"""Metrics and tables of rows as JSON lines in the run directory."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl.component import BuildContext, component
from verl.tracking.base import ContinuedTracker, TrackerDescription
from verl.utils.external_input import (
    LARGEST_RECORD,
    ExternalInputError,
    ends_with_partial_line,
    open_regular,
    parse_mapping,
    read_record,
    regular_opener,
    write_whole,
)

KEPT_BYTES = 64 * 2**20  # limit of records that wait for disk space; the oldest are dropped first
TABLE_BYTES = 256 * 2**20  # limit of a run's tables: `samples/`, `evals/` and `tokens/` together
TABLES = ("samples", "evals", "tokens")
MAX_PENDING = 8  # tables that wait for the writing thread; one more waits for the first of them

_log = logging.getLogger(__name__)


@component
class JsonLines(TrackerDescription):
    """`metrics.jsonl`, one object a line `{"step": 3, "time_s": 12.5, "reward/mean": 0.81, ...}`, and tables of rows.

    Evaluations are lines of the same file. A number that is not finite is written as the text "nan", "inf" or "-inf",
    so that every line is valid JSON and `float(value)` reads each number back. Tables have one row a line and a file
    per step: `samples/step_N.jsonl`, with the table's name under `table`, `evals/step_N.jsonl`, a line per evaluated
    response, and `tokens/step_N.jsonl`, responses token by token. A run writes at most `TABLE_BYTES` of them.
    """

    def build(self, context: BuildContext) -> JsonLinesTracker:
        return JsonLinesTracker()


class JsonLinesTracker(ContinuedTracker):
    """Writes metrics unbuffered: each call passes a complete line to the operating system. A thread writes the tables.

    Records that a full disk refuses are kept in memory and written in order once there is space.
    """

    def __init__(self) -> None:
        self._path = Path("metrics.jsonl")
        self._sampled: set[int] = set()  # steps with a sample file of this run
        self._metrics, self._tables = RecordQueue(), RecordQueue()
        self._table_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._begin = time.monotonic()
        self._table_bytes = sum(file.stat().st_size for name in TABLES for file in run_dir.glob(f"{name}/step_*.jsonl"))
        with open(self._path, "ab+", buffering=0, opener=regular_opener) as file:
            if ends_with_partial_line(file):
                _append(file, self._path, b"\n")

    def log(self, metrics: dict[str, float], step: int) -> None:
        record = {"step": step, "time_s": round(time.monotonic() - self._begin, 3), **metrics}
        self._metrics.add(Record(self._path, json_line(record)))
        self._raise_failures()
        if self._tables.waiting and not self._pending:
            self._in_thread(self._tables.write)

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        # A step repeated after a resume replaces its table; a second table of the same step is appended.
        replaces = step not in self._sampled
        self._sampled.add(step)
        self._in_thread(self._write_table, "samples", [{"table": name, **row} for row in rows], step, replaces=replaces)

    def evaluated_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        self._in_thread(self._write_table, "evals", rows, step, replaces=True)

    def token_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        self._in_thread(self._write_table, "tokens", rows, step, replaces=True)

    def close(self, status: str) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        try:
            try:
                self._metrics.write()
            finally:
                self._tables.write()
        finally:
            self.num_lost = self._metrics.num_lost + self._tables.num_lost
            self.num_lost += len(self._metrics.waiting) + len(self._tables.waiting)
        with contextlib.suppress(OSError):  # what was refused before is written now
            self._raise_failures()

    def _in_thread(self, call: Callable[..., None], *args: Any, **options: Any) -> None:
        """Call in the thread that writes tables, in order.

        Raises:
            OSError: an earlier call could not write.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tables")
        self._pending.append(self._thread.submit(call, *args, **options))
        self._raise_failures()

    def _raise_failures(self) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) > MAX_PENDING):
            self._pending.popleft().result()

    def _write_table(self, table: str, rows: list[dict[str, Any]], step: int, *, replaces: bool) -> None:
        data = b"".join(map(json_line, rows))
        before, self._table_bytes = self._table_bytes, self._table_bytes + len(data)
        if self._table_bytes <= TABLE_BYTES:
            self._tables.add(Record(self._path.parent / table / f"step_{step}.jsonl", data, replaces))
        elif before <= TABLE_BYTES:
            names, limit = ", ".join(f"{name}/" for name in TABLES), TABLE_BYTES // 2**20
            _log.warning("%s of this run have reached %d MiB: no more of them is written.", names, limit)


@dataclass(frozen=True)
class Record:
    """Complete lines for one file, which they replace or continue."""

    path: Path
    data: bytes
    replaces: bool = False

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        if self.replaces:
            write_whole(self.path, self.data)
            return
        with open(self.path, "ab", buffering=0, opener=regular_opener) as file:
            _append(file, self.path, self.data)


class RecordQueue:
    """Writes records in order per file; those that a full disk refuses wait, up to `KEPT_BYTES`.

    Attributes:
        num_lost: records that were dropped.
    """

    def __init__(self) -> None:
        self.waiting: deque[Record] = deque()
        self.num_lost = 0

    def add(self, record: Record) -> None:
        """Write a record after those that wait.

        Raises:
            OSError: a file cannot be written; its records wait.
        """
        self.waiting.append(record)
        while sum(len(waiting.data) for waiting in self.waiting) > KEPT_BYTES and len(self.waiting) > 1:
            self.waiting.popleft()
            self.num_lost += 1
        self.write()

    def write(self) -> None:
        """Write what waits; a file that cannot be written does not block others.

        Raises:
            OSError: see `add`.
        """
        waiting, self.waiting = self.waiting, deque()
        failures: dict[Path, OSError] = {}
        for record in waiting:
            try:
                if record.path not in failures:
                    record.write()
                    continue
            except OSError as error:
                failures[record.path] = error
            self.waiting.append(record)
        for error in failures.values():
            raise error


def _append(file: BinaryIO, path: Path, data: bytes) -> None:
    """Write all or nothing, so that the file never has a partial line.

    Raises:
        OSError: the write failed; the message includes the path.
    """
    end = file.seek(0, os.SEEK_END) if file.seekable() else 0
    try:
        written = file.write(data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise OSError(error.errno, error.strerror, str(path)) from error


def json_line(record: dict[str, Any]) -> bytes:
    text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False)
    for character in "\x85\u2028\u2029":  # valid in JSON, but line ends to many readers
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate, which a byte-level tokenizer can produce, is written as JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def plain(value: Any) -> Any:
    """Convert to a JSON value; numbers that are not finite and unknown objects become texts."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return plain(value.tolist())
    return str(value)


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file. Lines that are none, such as half a line at the end, are left out."""
    for line in lines_of(file):
        with contextlib.suppress(ExternalInputError):
            yield parse_mapping(line)


def lines_of(file: Path) -> Iterator[bytes]:
    """The lines of a file until the first that is longer than `LARGEST_RECORD`; none where it cannot be read."""
    try:
        with open(open_regular(file), "rb") as lines:
            while line := lines.readline(LARGEST_RECORD + 1):
                if len(line) > LARGEST_RECORD:
                    raise OSError(errno.EFBIG, f"it has a line of more than {LARGEST_RECORD} bytes")
                yield line
    except OSError as error:
        _log.warning("%a is not read further: %s", str(file), error)


def json_object(file: Path, kind: type = dict) -> Any:
    """The mapping, or list, in a JSON or YAML file; empty if there is none."""
    with contextlib.suppress(ExternalInputError):
        return value if isinstance(value := read_record(file), kind) else kind()
    return kind()
