"""Metrics and samples as JSON lines in the run directory, written after every step."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl.component import BuildContext, component
from verl.tracking.base import Tracker, TrackerDescription
from verl.utils.external_input import ends_with_partial_line, regular_opener

KEPT_BYTES = 64 * 2**20  # limit of records that wait for disk space; the oldest are dropped first


@component
class JsonLines(TrackerDescription):
    """`metrics.jsonl`, one object a line `{"step": 3, "time_s": 12.5, "reward/mean": 0.81, ...}`, and sample tables.

    Evaluations are lines of the same file. A number that is not finite is written as the text "nan", "inf" or "-inf",
    so that every line is valid JSON and `float(value)` reads each number back. Samples go to `samples/step_N.jsonl`,
    one row a line, with the table's name under `table`.
    """

    def build(self, context: BuildContext) -> JsonLinesTracker:
        return JsonLinesTracker()


class JsonLinesTracker(Tracker):
    """Writes unbuffered: each call passes a complete line to the operating system.

    Records that a full disk refuses are kept in memory and written in order once there is space.
    """

    def __init__(self) -> None:
        self._path = Path("metrics.jsonl")
        self._started = False
        self._sampled: set[int] = set()  # steps with a sample file of this run
        self._waiting: deque[_Record] = deque()
        self.num_lost = 0

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._begin, self._started = time.monotonic(), True
        with open(self._path, "ab+", buffering=0, opener=regular_opener) as file:
            if ends_with_partial_line(file):
                _append(file, self._path, b"\n")

    def log(self, metrics: dict[str, float], step: int) -> None:
        assert self._started, "log before start"
        record = {"step": step, "time_s": round(time.monotonic() - self._begin, 3), **metrics}
        self._write(_Record(self._path, json_line(record)))

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        self.log(metrics, step)

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        path = self._path.parent / "samples" / f"step_{step}.jsonl"
        lines = b"".join(json_line({"table": name, **row}) for row in rows)
        # A step repeated after a resume replaces its table; a second table of the same step is appended.
        self._write(_Record(path, lines, replaces=step not in self._sampled))
        self._sampled.add(step)

    def close(self, status: str) -> None:
        try:
            self._write_waiting()
        finally:
            self.num_lost = (self.num_lost or 0) + len(self._waiting)
            self._waiting.clear()

    def _write(self, record: _Record) -> None:
        self._waiting.append(record)
        while sum(len(waiting.data) for waiting in self._waiting) > KEPT_BYTES and len(self._waiting) > 1:
            self._waiting.popleft()
            self.num_lost = (self.num_lost or 0) + 1
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write waiting records in order per file; a file that cannot be written does not block others."""
        waiting, self._waiting = self._waiting, deque()
        failures: dict[Path, OSError] = {}
        for record in waiting:
            try:
                if record.path not in failures:
                    record.write()
                    continue
            except OSError as error:
                failures[record.path] = error
            self._waiting.append(record)
        for error in failures.values():
            raise error


@dataclass(frozen=True)
class _Record:
    """Complete lines for one file."""

    path: Path
    data: bytes
    replaces: bool = False

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        with open(self.path, "wb" if self.replaces else "ab", buffering=0, opener=regular_opener) as file:
            _append(file, self.path, self.data)


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
