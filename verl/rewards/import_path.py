"""Imports a function by `module:function` or `file.py:function`. Its source is checked before the import, its signature
afterwards. Imports little itself, since worker processes import it.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import RewardError
from verl.protocol.provenance import source_of
from verl.rewards.deadline import in_thread
from verl.utils.component_exits import raised_by_code

FORMS = "expected `package.module:function` or `file.py:function`"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def path_faults(path: str, kwargs: dict, texts: Sequence[str] = ("prompts", "responses")) -> Iterator[str]:
    """Yield faults of a path and its keyword arguments, from the source alone; nothing is imported.

    Args:
        path: `module:function` or `file.py:function`.
        kwargs: further keyword arguments.
        texts: arguments that the function is always called with.
    """
    seen = f"path is {path!r}"
    module, _, name = path.rpartition(":")
    if not module or not name.isidentifier():
        yield f"{seen}: {FORMS}."
        return
    file, fault = source_file(module)
    if fault:
        yield f"{seen}: {fault}."
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        yield f"{seen}: {file.name} is not valid Python{line} ({getattr(error, 'msg', error)})."
        return
    names = dict(_top_level_names(tree.body))
    if name not in names and "*" not in names:
        functions = [known for known, node in names.items() if isinstance(node, _Function) and known[0] != "_"]
        nearest = difflib.get_close_matches(name, functions, n=1)
        hint = f"Did you mean {nearest[0]}?" if nearest else f"Its functions: {', '.join(functions) or 'none'}."
        yield f"{seen}: {file.name} defines no {name}. {hint}"
    elif isinstance(node := names.get(name), _Function):
        yield from _signature_faults(node, seen, kwargs, texts, file)


def is_defined_in_source(path: str) -> bool:
    """Whether `path_faults` can check a function: it is a `def` of a Python source file, not of a compiled module, an
    assignment or an import.
    """
    module, _, name = path.rpartition(":")
    file, _ = source_file(module)
    if file is None:
        return False
    with contextlib.suppress(SyntaxError, ValueError):
        return isinstance(dict(_top_level_names(ast.parse(file.read_bytes()).body)).get(name), _Function)
    return False


def required_arguments(path: str, given: Sequence[str]) -> list[str]:
    """Arguments without a default of a function, read from its source.

    Args:
        path: as in `path_faults`.
        given: arguments that are always passed; left out of the result.
    Returns:
        Their names; empty if the source does not show them, as for a decorated function.
    """
    module, _, name = path.rpartition(":")
    file, _ = source_file(module) if module else (None, None)
    if file is None:
        return []
    try:
        node = dict(_top_level_names(ast.parse(file.read_bytes()).body)).get(name)
    except (SyntaxError, ValueError, OSError):
        return []
    if not isinstance(node, _Function) or node.decorator_list:
        return []
    placed = [*node.args.posonlyargs, *node.args.args]
    needed = placed[: len(placed) - len(node.args.defaults)]
    needed += [arg for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
    return [arg.arg for arg in needed if arg.arg not in given]


def takes_batch(path: str, kwargs: Mapping[str, object]) -> bool:
    """Whether a function takes a whole DataProto instead of texts, read from its source."""
    module, _, name = path.rpartition(":")
    file, _ = source_file(module) if module else (None, None)
    try:
        node = None if file is None else dict(_top_level_names(ast.parse(file.read_bytes()).body)).get(name)
    except (SyntaxError, ValueError, OSError):
        return False
    return isinstance(node, _Function) and not node.decorator_list and _takes_batch(node, kwargs)


def load_function(path: str) -> Callable:
    """Import a function by its path.

    Raises:
        RewardError: the import raises, the name does not exist, or is not callable.
    """
    module_name, _, name = path.rpartition(":")
    try:
        module = (
            _import_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        )
    except BaseException as error:  # the user's module runs here and may raise anything
        if not raised_by_code(error):
            raise
        raise RewardError(f"path is {path!r}: importing it raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "defines no such name" if function is None else f"{name} is {function!r}, which is not callable"
        raise RewardError(f"path is {path!r}: {module_name} {found}.")
    return function


def named_parameters(function: Callable) -> dict[str, bool] | None:
    """Keyword arguments of a function, each with whether it is required; None if it takes `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def batch_argument(function: Callable, given: Collection[str] = ()) -> str | None:
    """Name of the argument that takes a whole batch; None for a function of texts.

    A function takes a batch if it has one positional argument without a default, or if its first argument is annotated
    `DataProto`.

    Args:
        function: the reward function.
        given: arguments that are passed by keyword.
    """
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
    except (TypeError, ValueError):  # written in C, without a signature
        return None
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not placed or {"prompts", "responses"} & {p.name for p in parameters}:
        return None
    annotation = getattr(placed[0].annotation, "__name__", placed[0].annotation)
    is_annotated = str(annotation).strip("'\"").rpartition(".")[2] == "DataProto"
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return placed[0].name if is_annotated or (needed == [placed[0].name] and not takes_columns) else None


@dataclass(frozen=True)
class Signature:
    """Arguments of a reward function.

    Attributes:
        accepted: keyword arguments, each with whether it is required; None if it takes `**kwargs`.
        takes_batch: whether it takes a whole DataProto instead of texts.
    """

    accepted: dict[str, bool] | None
    takes_batch: bool


def signature_of(function: Callable, given: Collection[str] = ()) -> Signature:
    """The arguments of a function; `given` names those that are always passed by keyword."""
    return Signature(named_parameters(function), batch_argument(function, given) is not None)


def awaited(result: Any) -> Any:
    """Await a coroutine, or a list of coroutines concurrently; anything else is returned unchanged."""
    one = inspect.isawaitable(result)
    items: list = [result] if one else list(result) if isinstance(result, (list, tuple)) else []
    if not any(map(inspect.isawaitable, items)):
        return result

    async def value(item: Any) -> Any:
        return await item if inspect.isawaitable(item) else item

    async def every() -> Any:
        values = await asyncio.gather(*map(value, items))
        return values[0] if one else values

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(every())
    return in_thread(lambda: asyncio.run(every()))  # in a notebook, whose loop already runs in this thread


def own_line(error: BaseException, function: Callable) -> str:
    """The innermost line of the user's file in the traceback of an error, to append to a message."""
    file = source_of(function).file
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"\n  Raised at line {own[-1].lineno}: {own[-1].line}".rstrip(": ") if own else ""


def source_file(module: str) -> tuple[Path | None, str | None]:
    """The source file of a module, or None; and what is wrong if the module cannot be found, or None."""
    if module.endswith(".py"):
        file = Path(module)
        return (file, None) if file.is_file() else (None, f"{module} is not a file")
    if not all(part.isidentifier() for part in module.split(".")):
        return None, FORMS
    origin, search, parts = None, None, module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        spec = _find_spec(name, search)
        if spec is None:
            return None, f"there is no module {name}"
        origin, search = spec.origin, list(spec.submodule_search_locations or [])
    return (Path(origin) if origin and origin.endswith(".py") else None), None


def _find_spec(name: str, search: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    # Unlike importlib.util.find_spec, this does not import the parent package of a submodule.
    if search is not None:
        return importlib.machinery.PathFinder.find_spec(name, search)
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # imported already and without a spec, as `__main__` is
        return importlib.machinery.ModuleSpec(name, None, origin=getattr(sys.modules[name], "__file__", None))


def _top_level_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module binds, including those inside `if`, `try` and `with`; `*` for a star import."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        else:
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    yield target.id, node
            for block in ("body", "orelse", "finalbody"):
                yield from _top_level_names(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level_names(handler.body)


def _signature_faults(node: _Function, seen: str, kwargs: dict, texts: Sequence[str], file: Path) -> Iterator[str]:
    where = f"{node.name}() at line {node.lineno} in {file.name}"
    if node.decorator_list or node.args.kwarg:
        return
    accepted = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    if texts[0] == "prompts" and _takes_batch(node, kwargs):
        texts = ()
    called_with = ", ".join(f"{name}=" for name in texts)
    for name in texts:
        if name not in accepted:
            yield f"{seen}: {where} has no argument `{name}`. It is called with {called_with} and columns of the data."
    for name in kwargs:
        if name not in accepted:
            nearest = difflib.get_close_matches(name, accepted, n=1)
            yield f"kwargs.{name}: {where} has no such argument.{f' Did you mean {nearest[0]}?' if nearest else ''}"


def _takes_batch(node: _Function, kwargs: Mapping[str, object]) -> bool:
    """`batch_argument`, from the source."""
    placed = [*node.args.posonlyargs, *node.args.args]
    needed = [arg.arg for arg in placed[: len(placed) - len(node.args.defaults)] if arg.arg not in kwargs]
    placed = [arg for arg in placed if arg.arg not in kwargs]
    names = {arg.arg for arg in (*placed, *node.args.kwonlyargs)}
    if not placed or {"prompts", "responses"} & names:
        return False
    annotation = placed[0].annotation
    if annotation is not None and ast.unparse(annotation).strip("'\"").rpartition(".")[2] == "DataProto":
        return True
    is_alone = needed == [placed[0].arg] and all(default is not None for default in node.args.kw_defaults)
    return is_alone and node.args.kwarg is None and node.args.vararg is None


def _import_file(file: Path):
    file = file.resolve()
    name = f"verl_reward_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look modules up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
