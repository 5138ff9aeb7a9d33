"""The function that produced a field of a batch, for errors about that field."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from verl.errors import DataProtoValidationError

_PACKAGE = Path(__file__).resolve().parents[1]
_WRAPPINGS = 50  # some objects have any attribute, also `__wrapped__`
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


class Source(NamedTuple):
    """The function that made a field.

    Attributes:
        function: its name, with its class if it is a method.
        line: first line of its definition, including decorators; 0 without Python source.
        file: full path, or module name without Python source.
    """

    function: str
    line: int
    file: str

    def __str__(self) -> str:
        name = self.function if self.function.startswith("<module") else f"{self.function}()"
        return f"{name} at line {self._def_line()} in {_short(self.file)}" if self.line else f"{name} in {self.file}"

    def _def_line(self) -> int:
        """The line that holds `def`, below any decorators."""
        if not linecache.getline(self.file, self.line).lstrip().startswith("@"):
            return self.line
        for line in range(self.line + 1, self.line + 50):
            if linecache.getline(self.file, line).lstrip().startswith(("def ", "async def ", "class ")):
                return line
        return self.line


def source_of(producer: Callable | Source) -> Source:
    """The source of any callable: functions, methods, partials, wrapped functions, modules, callable objects.

    A `Source`, from another process, is returned unchanged.
    """
    if isinstance(producer, Source):
        return producer
    kind: Any = producer
    for _ in range(_WRAPPINGS):
        if isinstance(kind, (functools.partial, functools.partialmethod)):
            kind = kind.func
        elif hasattr(kind, "__wrapped__"):
            kind = kind.__wrapped__
        elif inspect.ismethod(kind):
            kind = kind.__func__
        else:
            break
    if (code := getattr(kind, "__code__", None)) is not None:
        return _source_of_code(code, kind.__qualname__)
    if inspect.isclass(kind):
        return _source_of_class(kind)
    if isinstance(getattr(kind, "__name__", None), str):  # written in C
        return Source(kind.__name__, 0, getattr(kind, "__module__", None) or "builtins")
    method = getattr(type(kind), "forward", None) or type(kind).__call__
    if hasattr(method, "__code__") or hasattr(method, "__wrapped__"):
        return source_of(method)
    return Source(type(kind).__name__, 0, type(kind).__module__)


def source_of_caller(depth: int = 1) -> Source:
    """The function `depth` frames above the caller; for code outside of functions its line."""
    frame = sys._getframe(depth + 1)
    while frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "<module>":
        return Source("<module>", frame.f_lineno, frame.f_code.co_filename)
    # before Python 3.11 a frame has no qualified name
    return _source_of_code(frame.f_code, getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def contract_error(
    field: str, expected: str, found: str, source: Source | None, row: int | None = None
) -> DataProtoValidationError:
    """The error for a field that breaks its contract, with the function that made it and the first offending row."""
    lines = [f"Field `{field}` breaks its contract.", f"  Expected: {expected}", f"  Found: {found}"]
    if row is not None:
        lines.append(f"  First offending row: {row}")
    if source is not None:
        lines.append(f"  Source: {source}")
    return DataProtoValidationError("\n".join(lines), str(field), row)


def _source_of_code(code: CodeType, name: str) -> Source:
    return Source(name.rpartition("<locals>.")[2], code.co_firstlineno, code.co_filename)


def _source_of_class(kind: type) -> Source:
    try:
        name, line = kind.__qualname__.rpartition("<locals>.")[2], inspect.getsourcelines(kind)[1]
        return Source(name, line, inspect.getsourcefile(kind) or kind.__module__)
    except (OSError, TypeError):  # built in, or typed at a prompt
        return Source(kind.__name__, 0, kind.__module__)


def _short(file: str) -> str:
    """Inside the package the path from its parent, such as `verl/workers/actor.py`; outside it the bare name."""
    path = Path(file)
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else path.name
