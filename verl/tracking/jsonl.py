"""Metrics and tables of rows as JSON lines in the run directory."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.component import BuildContext, component
from verl.tracking.base import ContinuedTracker, TrackerDescription
from verl.utils.external_input import (
    LARGEST_RECORD,
    ExternalInputError,
    ends_with_partial_line,
    parse_mapping,
    plain,
    read_record,
    write_whole,
)

KEPT_BYTES = 64 * 2**20  # limit of metrics that wait for disk space; the oldest are dropped first
TABLE_BYTES = 256 * 2**20  # limit of a run's tables: `samples/`, `evals/` and `tokens/` together
TABLES = ("samples", "evals", "tokens")

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
    """Writes unbuffered: each call passes complete lines to the operating system.

    Lines of metrics that a full disk refuses are kept in memory and written in order once there is space; a table that
    it refuses is lost.
    """

    def __init__(self) -> None:
        self._metrics = LineFile(Path("metrics.jsonl"))
        self._sampled: set[int] = set()  # steps with a sample file of this run
        self._table_bytes = 0
        self._lost_tables = 0

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._metrics = LineFile(run_dir / "metrics.jsonl")
        self._begin = time.monotonic()
        self._table_bytes = sum(file.stat().st_size for name in TABLES for file in run_dir.glob(f"{name}/step_*.jsonl"))
        with open(self._metrics.path, "ab+", buffering=0) as file:
            is_cut = ends_with_partial_line(file)
        _append(self._metrics.path, b"\n" * is_cut)

    def log(self, metrics: dict[str, float], step: int) -> None:
        record = {"step": step, "time_s": round(time.monotonic() - self._begin, 3), **metrics}
        self._metrics.add(json_line(record))

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        # A step repeated after a resume replaces its table; a second table of the same step is appended.
        replaces = step not in self._sampled
        self._sampled.add(step)
        self._write_table("samples", [{"table": name, **row} for row in rows], step, replaces)

    def evaluated_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        self._write_table("evals", rows, step)

    def token_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        self._write_table("tokens", rows, step)

    def close(self, status: str) -> None:
        try:
            self._metrics.add(b"")
        finally:
            self.num_lost = self._lost_tables + self._metrics.num_lost + self._metrics.waiting.count(b"\n")

    def _write_table(self, table: str, rows: list[dict[str, Any]], step: int, replaces: bool = True) -> None:
        data, file = b"".join(map(json_line, rows)), self._metrics.path.parent / table / f"step_{step}.jsonl"
        before, self._table_bytes = self._table_bytes, self._table_bytes + len(data)
        if self._table_bytes <= TABLE_BYTES:
            try:
                file.parent.mkdir(exist_ok=True)
                write_whole(file, data) if replaces else _append(file, data)
            except OSError:
                self._lost_tables += 1
                raise
        elif before <= TABLE_BYTES:
            names, limit = ", ".join(f"{name}/" for name in TABLES), TABLE_BYTES // 2**20
            _log.warning("%s of this run have reached %d MiB: no more of them is written.", names, limit)


class LineFile:
    """Puts lines behind those of a file; what a full disk refuses waits, up to `KEPT_BYTES`, for the next ones.

    Attributes:
        num_lost: lines that were dropped, the oldest first.
    """

    def __init__(self, path: Path):
        self.path, self.waiting, self.num_lost = path, b"", 0
        self._replaces = False

    def add(self, lines: bytes, replaces: bool = False) -> None:
        """Write whole lines after those that wait, or in place of the file.

        Raises:
            OSError: the file cannot be written; they wait.
        """
        self.waiting, self._replaces = (lines, True) if replaces else (self.waiting + lines, self._replaces)
        while len(self.waiting) > KEPT_BYTES and self.waiting.count(b"\n") > 1:
            self.waiting = self.waiting.partition(b"\n")[2]
            self.num_lost += 1
        (write_whole if self._replaces else _append)(self.path, self.waiting)
        self.waiting, self._replaces = b"", False


def _append(path: Path, data: bytes) -> None:
    """Write all or nothing, so that the file never has a partial line.

    Raises:
        OSError: the write failed; the message includes the path.
    """
    if not data:
        return
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END) if file.seekable() else 0
        try:
            if file.write(data) != len(data):
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


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file. Lines that are none, such as half a line at the end, are left out."""
    for line in lines_of(file):
        with contextlib.suppress(ExternalInputError):
            yield parse_mapping(line)


def lines_of(file: Path) -> Iterator[bytes]:
    """The lines of a file until the first that is longer than `LARGEST_RECORD`; none where it cannot be read."""
    try:
        with open(file, "rb") as lines:
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
