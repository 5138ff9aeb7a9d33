"""Metrics and samples as JSON lines in the run directory: complete, readable by anything, there after every step."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl.description import BuildContext
from verl.tracking.tracker import Tracker, TrackerDescription


@dataclass(frozen=True, kw_only=True)
class JsonLines(TrackerDescription):
    """`metrics.jsonl`, one object a line `{"step": 3, "time_s": 12.5, "reward/mean": 0.81, ...}`, and sample tables.

    Evaluations are lines of the same file. A number that is not finite is written as the text "nan", "inf" or "-inf",
    so that every line is valid JSON and `float(value)` reads each number back. Samples go to `samples/step_N.jsonl`,
    one row a line, with the table's name under `table`.
    """

    def build(self, context: BuildContext) -> JsonLinesTracker:
        return JsonLinesTracker()


class JsonLinesTracker(Tracker):
    """Writes unbuffered: a line is on its way to the disk, whole, when the call returns."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._path = Path("metrics.jsonl")
        self._sampled: set[int] = set()  # steps whose sample file this run has begun

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("ab", buffering=0)
        self._begin = time.monotonic()
        if _ends_within_a_line(self._path):
            _append(self._file, self._path, b"\n")

    def log(self, metrics: dict[str, float], step: int) -> None:
        record = {"step": step, "time_s": round(time.monotonic() - self._begin, 3), **metrics}
        assert self._file is not None, "log before start"
        _append(self._file, self._path, json_line(record))

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        self.log(metrics, step)

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        path = self._path.parent / "samples" / f"step_{step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        # A step that is replayed replaces its table; a second table of the same step joins the first.
        with path.open("ab" if step in self._sampled else "wb", buffering=0) as file:
            _append(file, path, b"".join(json_line({"table": name, **row}) for row in rows))
        self._sampled.add(step)

    def close(self, status: str) -> None:
        if self._file is not None:
            self._file.close()


def _append(file: BinaryIO, path: Path, data: bytes) -> None:
    """Write all or nothing, so that no later reader meets half a line.

    Raises:
        OSError: with the path, which the system's own error lacks.
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


def _ends_within_a_line(path: Path) -> bool:
    """Whether an earlier run, killed while writing, left half a line that ours must not join."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def json_line(record: dict[str, Any]) -> bytes:
    text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
    for character in "\x85\u2028\u2029":  # legal within a JSON text, yet line ends to many readers
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half a surrogate pair, which a byte-level tokenizer can give, becomes the JSON escape of the same name.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    """The nearest JSON value: numbers that are not finite and unknown objects become texts."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return _plain(value.tolist())
    return str(value)
