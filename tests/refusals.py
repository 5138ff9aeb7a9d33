"""What an error blames. Tests ask for its kind, for that and for the value; the sentences are in `refusals.txt`.

Each directory of tests that has a file `refusals.txt` keeps the whole text of every refusal there, by test. `refusal`
compares; where a sentence was changed on purpose, run the tests with `REFUSALS=refresh` and read the diff.
"""

import inspect
import os
import pkgutil
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl.errors import BadCheckpoint, ConfigError, DataProtoValidationError, WeightSyncError, WorkerError

TESTS = Path(__file__).parent
REQUIRED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)
ANY = object()  # a value that is not asked for
_counted: dict[str, int] = {}  # refusals of each test so far
_refreshed: set[tuple[Path, str]] = set()  # functions whose entries were written again by this process


def blamed(error: BaseException) -> tuple[str | int | None, ...] | None:
    """Config paths, files, the field of a batch, tensors, or the call and its rank; None for a kind without such."""
    match error:
        case ConfigError():
            return error.paths
        case BadCheckpoint():
            return tuple(fault.file for fault in error.faults)
        case DataProtoValidationError():
            return tuple(name for name in (error.field, error.row) if name is not None)
        case WeightSyncError():
            return error.names
        case WorkerError():
            return (error.call, error.rank)
    return None


def shows(text: str, value: Any) -> bool:
    """Whether a message has a value as a word of its own, as Python or YAML writes it."""
    yaml = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
    forms = {str(value), repr(value), str(yaml)} - {""}
    return any(re.search(rf"(?<![\w.]){re.escape(form)}(?![\w])", text) for form in forms)


@contextmanager
def refusal(
    *names: str | int | None, value: Any = ANY, kind: Any = ConfigError, varies: bool = False
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """What runs within raises an error of this kind that blames these and nothing else.

    Args:
        names: what `blamed` gives; of another kind of error, words of its text.
        value: what was given, which the text has.
        kind: of the error; the name of a class of a package that is imported then.
        varies: whether the sentence is another on another machine or with another library, and is not kept.
    """
    with pytest.raises(pkgutil.resolve_name(kind) if isinstance(kind, str) else kind) as caught:
        yield caught
    text, found = str(caught.value), blamed(caught.value)
    assert found == names if found is not None else all(str(name) in text for name in names), text
    assert value is ANY or shows(text, value), text
    if not varies:
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
        _compare(re.sub(r"@[^\]]*$", "", test), text)  # xdist adds the group of the test


def refused(
    *rows: tuple[Any, ...], kind: Any = ConfigError, varies: bool = False, first: int = 1000
) -> Callable[..., None]:
    """A test of one row per refusal: what is blamed (or a tuple), the value, what raises, and a kind of its own.

    What raises is a function without arguments, or one whose arguments are fixtures; rows behind the `first` are slow.
    """

    def name(row: tuple[Any, ...]) -> str:
        shown = f"{row[0]} {'' if row[1] is ANY else row[1]}".strip()[:60]
        return "".join(c if c.isprintable() else "?" for c in shown)

    cases = [pytest.param(*row[:3], *(row[3:] or [kind]), id=name(row)) for row in rows]

    @pytest.mark.first_rows(first)
    @pytest.mark.parametrize(("names", "value", "call", "kind"), cases)
    def test(names: Any, value: Any, call: Callable[..., Any], kind: Any, request: pytest.FixtureRequest) -> None:
        asked = [p.name for p in inspect.signature(call).parameters.values() if (p.kind, p.default) == REQUIRED]
        with refusal(*(names if isinstance(names, tuple) else (names,)), value=value, kind=kind, varies=varies):
            call(**{name: request.getfixturevalue(name) for name in asked})

    return test


def snapshot(file: Path) -> dict[str, str]:
    """The sentences of a `refusals.txt`, by test and number."""
    entries = re.split(r"^== ", file.read_text(), flags=re.MULTILINE)[1:]
    return {key: text.rstrip("\n") for key, _, text in (entry.partition("\n") for entry in entries)}


def plain(text: str, here: Path) -> str:
    """A message without what differs from run to run: directories, ports, numbers of processes, times, and digests.

    Args:
        here: the directory of the test.
    """
    text = text.replace(str(here), "TMP")
    text = re.sub(re.escape(str(here.parent)) + r"/[^/\s'\"]+?(?=\d*[/\s'\":,.])\d*", "SESSION", text)
    text = text.replace(str(TESTS.parent), "ROOT").replace(socket.gethostname(), "HOST")
    if "Traceback (most recent call last)" in text:  # lines of code between the first and the last
        lines = text.strip().splitlines()
        text = f"{lines[0]}\n{lines[-1]}"
    for pattern, word in (
        (r"\b(127\.0\.0\.1|localhost|\[::1\]):\d{4,5}\b", r"\1:PORT"),
        (r"\b(process|pid|PID) \d+", r"\1 N"),
        (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?( ?[+-]\d\d:?\d\d| UTC|Z)?", "TIME"),
        (r"\b0x[0-9a-f]+\b", "ADDRESS"),
        (r"\bline \d+((,)? (in|of) \S*\.py)", r"line N\1"),
        (r"(\.py\"?,?) line \d+", r"\1 line N"),
        (r"\.py:\d+", ".py:N"),
        (r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{8,}\b", "DIGEST"),
    ):
        text = re.sub(pattern, word, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _compare(test: str, text: str) -> None:
    path, _, function = test.partition("::")
    file = TESTS.parent / Path(path).with_name("refusals.txt")
    if not file.exists():
        return
    _counted[test] = _counted.get(test, 0) + 1
    key = f"{Path(path).name}::{function[:200]} {_counted[test]}"
    said, known = plain(text, directory_of_test), snapshot(file)
    if os.environ.get("REFUSALS") == "refresh":
        _refresh(file, known, key, said)
        return
    again = f"Run `REFUSALS=refresh python -m pytest {path}` and read the diff of {file.relative_to(TESTS.parent)}."
    assert key in known, f"a refusal without a sentence in the file: {said!r}. {again}"
    assert known[key] == said, f"the sentence changed. {again}"


def _refresh(file: Path, known: dict[str, str], key: str, said: str) -> None:
    """Write an entry; those of this function that this process has not written are gone, as those of gone functions."""
    function = key.partition("[")[0].rpartition(" ")[0] if "[" not in key else key.partition("[")[0]
    if (file, function) not in _refreshed:
        _refreshed.add((file, function))
        known = {k: v for k, v in known.items() if re.split(r"\[| \d+$", k)[0] != function}
    known = {k: v for k, v in known.items() if exists(file, k)} | {key: said}
    file.write_text("".join(f"== {k}\n{known[k]}\n" for k in sorted(known)))


def exists(file: Path, key: str) -> bool:
    """Whether the test of an entry is still there."""
    path, _, function = re.split(r"\[| \d+$", key)[0].partition("::")
    source = file.parent / path
    return source.exists() and f"{function.rpartition('::')[2]}" in source.read_text()


directory_of_test = Path.cwd()  # set by the fixture `working_directory`
