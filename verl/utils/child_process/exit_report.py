"""Exit report of a process: status or signal as text, and the relevant lines of its log."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 20
TRACEBACK_LINES = 60  # limit for the traceback of the cause; longer ones lose their middle
READ_BYTES = 1 << 20  # read from the end of a log

# Lines that libraries print in normal operation: logging below ERROR (vLLM's form, then that of logging's own
# examples), glog and c10 below ERROR, warnings of Python
LEVEL = "DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL"
DATE, TIME = r"\d\d-\d\d", r"\d\d:\d\d:\d\d"
LOGGED = re.compile(
    rf"^(?:\([^)]*\) )?(?P<level>{LEVEL}) {DATE} {TIME} \[[^]]*\] ?(?P<text>.*)$"
    rf"|^\d{{4}}-{DATE} {TIME}[,.\d]* .{{0,60}}?\b(?P<level2>{LEVEL})\b.{{0,3}}(?P<text2>.*)$"
)
GLOG = re.compile(r"^\[?[WI]\d{4} \d\d:\d\d:\d\d")
WARNED = re.compile(r"^\S.*:\d+: \w*Warning: ")
QUIET = ("DEBUG", "INFO", "WARNING")
TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored in"
CHAIN = ("The above exception was the direct cause", "During handling of the above exception")
ABORTS = ("Fatal Python error: ", "terminate called ", "  what(): ")


@dataclass(frozen=True)
class LogExcerpt:
    """Lines of a log about the end of a process.

    Attributes:
        lines: the relevant lines, in order.
        cause: the exception or abort that ended the process, in one line; None if the log has none.
    """

    lines: tuple[str, ...] = ()
    cause: str | None = None


def describe_exit(code: int, memory_kills_before: int | None = None) -> str:
    """`exit status 3`, `signal SIGSEGV`, `signal SIGKILL (...)`.

    Args:
        code: `subprocess.Popen.returncode`.
        memory_kills_before: `memory_kills()` before the process was started; None if unknown.
    """
    if code >= 0:
        return f"exit status {code}"
    name = next((known.name for known in signal.Signals if known == -code), str(-code))
    if -code != signal.SIGKILL:
        return f"signal {name}"
    now = memory_kills()
    if now is None or memory_kills_before is None:
        return f"signal {name} (out of memory, unless somebody sent it)"
    if now > memory_kills_before:
        return f"signal {name}: out of memory (the kernel has killed a process for lack of memory)"
    return f"signal {name}, sent by another process (the kernel has killed none for lack of memory)"


def memory_kills() -> int | None:
    """Counter of processes that the kernel has killed for lack of memory, here or in this container; None if
    unknown.
    """
    counts = []
    for file in _counters():
        try:
            match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            counts.append(int(match[1]))
    return sum(counts) if counts else None


def excerpt(log: str | Path | int, start: int = 0) -> LogExcerpt:
    """Lines of a log that may explain the end of a process, without normal output of libraries.

    Args:
        log: path, or descriptor of the open file.
        start: size of the log before the process was started.
    """
    try:
        text = _read(log, start)
    except OSError as error:
        return LogExcerpt((f"(its log cannot be read: {error})",))
    lines = list(_relevant(text.splitlines()))
    begin, cause = _cause(lines)
    if cause is None:
        return LogExcerpt(tuple(lines[-TAIL_LINES:]))
    excerpt_lines = lines[begin:]
    if len(excerpt_lines) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        excerpt_lines = [
            *excerpt_lines[:half],
            f"  ... ({len(excerpt_lines) - 2 * half} lines)",
            *excerpt_lines[-half:],
        ]
    return LogExcerpt(tuple(excerpt_lines), cause)


def log_size(log: str | Path | int) -> int:
    """Size of a log in bytes; 0 if it does not exist."""
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _read(log: str | Path | int, start: int) -> str:
    size = log_size(log)
    begin = max(start, size - READ_BYTES)
    if isinstance(log, int):
        return os.pread(log, max(0, size - begin), begin).decode(errors="replace")
    with open(log, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def _relevant(lines: Sequence[str]) -> Iterator[str]:
    """Yield the relevant lines; logged errors without the prefix of the logger."""
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if WARNED.match(line):
            number += number < len(lines) and lines[number].startswith("  ")  # the line of code
        elif line.startswith(IGNORED):
            number = _after_traceback(lines, number)
        elif (logged := LOGGED.match(line)) is not None:
            if (logged["level"] or logged["level2"]) not in QUIET:
                yield logged["text"] if logged["level"] else logged["text2"]
        elif line.strip() and not GLOG.match(line):
            yield line


def _after_traceback(lines: Sequence[str], number: int) -> int:
    """The number of the first line after a traceback that begins at this line, if one does."""
    if number >= len(lines) or lines[number] != TRACEBACK:
        return number
    number += 1
    while number < len(lines) and lines[number].startswith(" "):
        number += 1
    return number + 1


def _cause(lines: Sequence[str]) -> tuple[int, str | None]:
    """Line number at which the report of the fatal error begins, and the error in one line."""
    for last in range(len(lines) - 1, -1, -1):
        if lines[last].startswith(ABORTS):
            begin = last
            while begin > 0 and lines[begin - 1].startswith(ABORTS):
                begin -= 1
            return begin, " ".join(line.strip() for line in lines[begin : last + 1])
        if lines[last].startswith(TRACEBACK):
            end = _after_traceback(lines, last) - 1
            if end >= len(lines):
                continue
            begin = last
            for before in range(last - 1, -1, -1):  # chained exceptions before it
                if lines[before].startswith(TRACEBACK):
                    if not any(line.startswith(CHAIN) for line in lines[before:begin]):
                        break
                    begin = before
            return begin, lines[end]
    return len(lines), None


def _counters() -> Iterable[Path]:
    """Files with counters of OOM kills: of the control groups of this process, and of the machine."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        if controllers == "":
            yield Path(f"/sys/fs/cgroup{path}/memory.events")
        if controllers == "memory":
            yield Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    yield Path("/proc/vmstat")
