"""Functions of a user by `module:function` or `file.py:function`: source and signature are checked before the import.

This module imports little, since worker processes import it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.errors import RewardError, VerlError, error_text
from verl.protocol.provenance import source_of
from verl.utils.signals import RAISED_BY_CODE

FORMS = "expected `package.module:function` or `file.py:function`"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def path_faults(
    path: str, kwargs: dict, texts: Sequence[str] = ("prompts", "responses"), others: str = " and columns of the data"
) -> Iterator[str]:
    """Yield faults of a path and its keyword arguments, from the source alone; nothing is imported.

    Args:
        path: `module:function` or `file.py:function`.
        kwargs: further keyword arguments.
        texts: arguments that the function is always called with.
        others: other arguments that it is called with; if empty, `kwargs` must provide the rest.
    """
    seen = f"path is {path!r}"
    file, names, fault = _parsed(path)
    name = path.rpartition(":")[2]
    if fault:
        yield f"{seen}: {fault}."
    elif file is None:
        return
    elif name not in names and "*" not in names:
        functions = [known for known, node in names.items() if isinstance(node, _Function) and known[0] != "_"]
        nearest = difflib.get_close_matches(name, functions, n=1)
        hint = f"Did you mean {nearest[0]}?" if nearest else f"Its functions: {', '.join(functions) or 'none'}."
        yield f"{seen}: {file.name} defines no {name}. {hint}"
    elif (signature := source_signature(path)) is not None:
        where = f"{name}() at line {names[name].lineno} in {file.name}"
        yield from _argument_faults(seen, where, signature_of(signature, kwargs), kwargs, texts, others)


def _argument_faults(
    seen: str, where: str, signature: Signature, kwargs: dict, texts: Sequence[str], others: str
) -> Iterator[str]:
    missing = [] if others else [name for name in signature.required if name not in (*texts, *kwargs)]
    yield from (f"{seen}: {where} needs the argument {name}. Set kwargs.{name}." for name in missing)
    if signature.accepted is None:
        return
    if texts[0] == "prompts" and signature.takes_batch:
        texts = ()
    called_with = ", ".join(f"{name}=" for name in texts)
    for name in texts:
        if name not in signature.accepted:
            yield f"{seen}: {where} has no argument `{name}`. It is called with {called_with}{others}."
    for name in kwargs:
        if name not in signature.accepted:
            nearest = difflib.get_close_matches(name, signature.accepted, n=1)
            yield f"kwargs.{name}: {where} has no such argument.{f' Did you mean {nearest[0]}?' if nearest else ''}"


def source_signature(path: str) -> inspect.Signature | None:
    """The signature of a function, read from its source: defaults are None, and annotations are texts.

    Returns:
        None if the source does not show it: the function is decorated, imported, assigned or compiled.
    """
    node = _parsed(path)[1].get(path.rpartition(":")[2])
    if not isinstance(node, _Function) or node.decorator_list:
        return None
    arguments, none = node.args, ast.Constant(None)
    arguments.defaults = [none for _ in arguments.defaults]
    arguments.kw_defaults = [default and none for default in arguments.kw_defaults]
    scope: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef empty({ast.unparse(arguments)}): ...", scope)
    return inspect.signature(scope["empty"])


def _parsed(path: str) -> tuple[Path | None, dict[str, ast.stmt], str | None]:
    """The source file of a function, the statements by which it binds names, and what is wrong with the path."""
    module, _, name = path.rpartition(":")
    if not module or not name.isidentifier():
        return None, {}, FORMS
    file, fault = source_file(module)
    if file is None:
        return None, {}, fault
    try:
        return file, dict(_top_level_names(ast.parse(file.read_bytes(), filename=str(file)).body)), None
    except (SyntaxError, ValueError, OSError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return file, {}, f"{file.name} is not valid Python{line} ({getattr(error, 'msg', error)})"


def load_function(path: str, error_kind: type[VerlError] = RewardError) -> Callable:
    """Import a function by its path.

    Raises:
        RewardError: the import raises, the name does not exist, or is not callable; or another `error_kind`.
    """
    module_name, _, name = path.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except RAISED_BY_CODE as error:  # the user's module runs here and may raise anything
        raise error_kind(f"path is {path!r}: importing it raised {error_text(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        fault = "defines no such name" if function is None else f"{name} is {function!r}, which is not callable"
        raise error_kind(f"path is {path!r}: {module_name} {fault}.")
    return function


@dataclass(frozen=True)
class Signature:
    """Arguments of a user's function.

    Attributes:
        accepted: keyword arguments, each with whether it is required; None if it takes `**kwargs`.
        required: arguments without a default.
        takes_batch: whether it takes a whole DataProto instead of texts: it has one positional argument without a
            default, or its first argument is annotated `DataProto`.
        convention: for a reward function of verl or TRL, see `verl.rewards.signatures`.
    """

    accepted: dict[str, bool] | None
    required: tuple[str, ...] = ()
    takes_batch: bool = False
    convention: Literal["verl", "trl"] | None = None


CONVENTIONS: dict[str, Literal["verl", "trl"]] = {"solution_str": "verl", "completions": "trl"}
GIVEN = ("prompts", "completions", "solution_str", "data_source", "extra_info")  # to functions of these conventions


def signature_of(function: Callable | inspect.Signature, given: Collection[str] = ()) -> Signature:
    """The arguments of a function; `given` names those that are always passed by keyword."""
    try:
        signature = function if isinstance(function, inspect.Signature) else inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
        return Signature(None)
    parameters = list(signature.parameters.values())
    by_name = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    convention = CONVENTIONS.get("".join({"solution_str", "completions", "responses"} & by_name.keys()))
    single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Signature(
        accepted=None if convention or any(p.kind is p.VAR_KEYWORD for p in parameters) else by_name,
        required=tuple(p.name for p in single if p.default is p.empty and not (convention and p.name in GIVEN)),
        takes_batch=convention is None and _takes_batch([p for p in parameters if p.name not in given]),
        convention=convention,
    )


def _takes_batch(parameters: Sequence[inspect.Parameter]) -> bool:
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not positional or {"prompts", "responses"} & {p.name for p in parameters}:
        return False
    annotation = getattr(positional[0].annotation, "__name__", positional[0].annotation)
    is_annotated = str(annotation).strip("'\"").rpartition(".")[2] == "DataProto"
    return is_annotated or [p.name for p in parameters if p.default is p.empty] == [positional[0].name]


def own_line(error: BaseException, function: Callable) -> str:
    """The innermost line of the user's file in the traceback of an error, to append to a message."""
    file = source_of(function).file
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"\n  Raised at line {user_frames[-1].lineno}: {user_frames[-1].line}".rstrip(": ") if user_frames else ""


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


def _import_file(file: Path):
    file = file.resolve()
    name = f"verl_function_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
