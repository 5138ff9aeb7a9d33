"""Unit tests of programs: static analysis of the names of the program that a test uses, and one test in a sandbox.

A test whose program runs in another process gets only plain values from it. Methods of an object of the program, its
classes and its generators need the program in the same process, where it can change the verdict.

Each test runs in a separate sandbox; the tests of a data set are tried without a program.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import secrets
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.sandbox.base import CodeRunner, ExecutionResult, Program

SOLUTION = "solution"  # the module that a test may import
_VALUES = (str, bytes, bytearray, int, float, complex, list, tuple, set, frozenset, dict)
_METHODS = frozenset(name for kind in _VALUES for name in dir(kind) if not name.startswith("__"))
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__"}
_ITERATES = frozenset({"next", "anext", "aiter"})
_TAKES_CLASS = frozenset({"raises", "assertRaises", "suppress", "assertIsInstance", "isinstance", "issubclass"})
_SEES_INSIDE = frozenset({"mock", "unittest.mock", "inspect"})
TESTS_PER_TRIAL = 16  # tests that one program of the sandbox tries


class TestNames:
    """Names that a test uses.

    Attributes:
        names: of the program, sorted.
        modules: of the standard library that it uses without an import, which programs often import for it.
        calls: whether it calls one of the names.
        needs_object: why the program must run in the same process; None if values are enough.
        broken: why it can never decide anything; None if nothing is known.
    """

    __test__ = False

    def __init__(self, test: str):
        self.names, self.modules, self.calls = tuple[str, ...](), tuple[str, ...](), False
        self.needs_object: str | None = None
        self.broken: str | None = None
        try:
            self._analyse(ast.parse(test), _free_names(symtable.symtable(test, "test", "exec")))
        except SyntaxError as error:
            self.broken = f"line {error.lineno} is no Python ({error.msg})"
        except (ValueError, RecursionError, MemoryError) as error:
            self.broken = f"it is no Python ({error})"

    def _analyse(self, tree: ast.Module, free: set[str]) -> None:
        self._aliases, imported, renamed = self._imports(tree)
        read = set(filter(None, map(_attribute_of_name, ast.walk(tree))))
        bases = {base for base, _ in read}
        self.modules = tuple(sorted(name for name in free & bases if name in sys.stdlib_module_names))
        attributes = {attribute for base, attribute in read if base in self._aliases}
        names = (free - _BUILTINS - set(self.modules)) | imported | attributes
        if not names:
            called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            names = called & free & _BUILTINS
            if len(names) > 1:
                self.needs_object = f"does not show which of {', '.join(sorted(names))} is of the program"
        if not names:
            self.broken = "it uses no name of the program"
            return
        self.names, self._local = tuple(sorted(names)), names | renamed
        self.calls = any(isinstance(n, ast.Call) and self._is_of_program(n.func) for n in ast.walk(tree))
        self._results = set(self._result_names(tree))
        self._own = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        self._modules = {alias.asname or alias.name for n in ast.walk(tree) if isinstance(n, ast.Import)
                         for alias in n.names}  # fmt: skip
        reasons = (reason for node in ast.walk(tree) for reason in self._reasons(node))
        self.needs_object = self.needs_object or next(reasons, None)

    def _reasons(self, node: ast.AST) -> Iterator[str]:
        """Why the program must run in the process of the test, as far as this node shows."""
        yield from self._reasons_of_imports(node)
        if isinstance(node, ast.Attribute):
            base = node.value
            if self._is_of_program(base):
                yield f"reads {_text(node)}"
            elif self._is_result(base) and node.attr not in _METHODS:
                yield f"reads .{node.attr} of what {_text(base)} is"
            elif isinstance(node.ctx, ast.Store) and isinstance(base, ast.Name) and base.id in self._modules:
                yield f"sets {_text(node)}"
        elif isinstance(node, ast.Call):
            yield from self._reasons_of_call(node)
        elif isinstance(node, ast.ClassDef) and any(map(self._is_of_program, node.bases)):
            yield f"derives the class {node.name} from one of the program"
        elif isinstance(node, ast.ExceptHandler) and node.type is not None and self._contains_name(node.type):
            yield f"catches {_text(node.type)}"
        elif isinstance(node, (ast.withitem, ast.Await)):
            inner = node.context_expr if isinstance(node, ast.withitem) else node.value
            if self._is_result(inner):
                yield f"enters or awaits {_text(inner)}"

    def _reasons_of_call(self, node: ast.Call) -> Iterator[str]:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        function = _text(node.func)
        if self._is_of_program(node.func):
            for argument in arguments:
                is_own = isinstance(argument, ast.Name) and argument.id in self._own
                if is_own or isinstance(argument, ast.Lambda):
                    yield f"passes a function or class to {function}"
        elif self._is_result(node.func):
            yield f"calls what {function} is"
        elif function in _ITERATES and any(map(self._is_result, arguments[:1])):
            yield f"calls {function}() on what {_text(arguments[0])} is"
        elif (last := function.rpartition(".")[2]) in _TAKES_CLASS:
            classes = arguments[1:2] if last.lower().startswith(("is", "assertis")) else arguments[:1]
            if any(map(self._contains_name, classes)):
                yield f"names a class of the program in {function}()"
        elif function.startswith("asyncio.") and any(map(self._is_result, arguments)):
            yield f"awaits {_text(arguments[0])}"

    def _reasons_of_imports(self, node: ast.AST) -> Iterator[str]:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module == "unittest":
            names += [f"unittest.{alias.name}" for alias in node.names]
        yield from (f"imports {name}" for name in names if name in _SEES_INSIDE)

    def _imports(self, tree: ast.Module) -> tuple[set[str], set[str], set[str]]:
        """Names of the module of the program, names that the test imports from it, and what it calls these."""
        aliases, names, renamed = set(), set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {alias.asname or alias.name for alias in node.names if alias.name == SOLUTION}
            elif isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
                names |= {alias.name for alias in node.names if alias.name != "*"}
                renamed |= {alias.asname or alias.name for alias in node.names}
        return aliases, names, renamed

    def _is_of_program(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._local
        attribute = _attribute_of_name(node)
        return attribute is not None and attribute[0] in self._aliases

    def _is_result(self, node: ast.AST) -> bool:
        """Whether it is what a function of the program returned."""
        if isinstance(node, ast.Name):
            return node.id in self._results
        return isinstance(node, ast.Call) and self._is_of_program(node.func)

    def _contains_name(self, node: ast.AST) -> bool:
        return any(map(self._is_of_program, ast.walk(node)))

    def _result_names(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and self._is_call(node.value):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and self._is_call(node.value):
                yield from [node.target.id] if isinstance(node.target, ast.Name) else []
            elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
                yield from [node.optional_vars.id] if self._is_call(node.context_expr) else []

    def _is_call(self, node: ast.AST | None) -> bool:
        return isinstance(node, ast.Call) and self._is_of_program(node.func)


names_of = functools.lru_cache(maxsize=4096)(TestNames)


def _free_names(table: symtable.SymbolTable) -> set[str]:
    """Names that some scope reads and none at module level binds."""
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    bound |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_namespace()}
    read: set[str] = set()
    ahead = [table]
    while ahead:
        scope = ahead.pop()
        ahead += scope.get_children()
        for symbol in scope.get_symbols():
            is_outer = scope is table or symbol.is_global()
            if is_outer and symbol.is_declared_global() and symbol.is_assigned():
                bound.add(symbol.get_name())
            elif is_outer and symbol.is_referenced():
                read.add(symbol.get_name())
    return read - bound


def _attribute_of_name(node: ast.AST) -> tuple[str, str] | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id, node.attr
    return None


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:50] + " ..."


@dataclass(frozen=True)
class Verdict:
    """Verdict of one test.

    Attributes:
        outcome: `pass`, `fail`, `error`, `timeout`, `memory`, `output`, `infra`, or `object`: the program returned
            something other than a plain value.
        detail: what failed or was returned, for `infra` and `object`.
    """

    outcome: str
    detail: str = ""


def run_unit_test(runner: CodeRunner, code: str, test: str, **limits: Any) -> Verdict:
    """Run a unit test whose program runs in another process.

    Args:
        code: of the program.
        limits: `timeout_s` and `memory_mib` of each of the two.
    """
    job, mark = _job(test=_described(test, names_of(test)))
    judge = Program(_source("judge.py"), {**_files(), "job.json": job}, **limits)
    program = Program(_source("program_server.py"), {**_files(), "solution.py": code}, **limits)
    judged, served = runner.execute_linked(judge, program)
    if failed := next((result for result in (judged, served) if result.outcome == "infra"), None):
        return Verdict("infra", failed.detail)
    verdict = _verdict(judged, mark)
    if verdict == "pass" and served.outcome == "ok":
        return Verdict("pass")
    if verdict is not None and verdict.startswith("object: "):
        return Verdict("object", verdict.removeprefix("object: "))
    if served.outcome != "ok":  # not what the test made of its end
        return Verdict(served.outcome)
    if judged.outcome != "ok":
        return Verdict(judged.outcome)
    return Verdict(verdict if verdict in ("error", "memory") else "fail")


def try_tests(runner: CodeRunner, tests: Sequence[str]) -> list[str | None]:
    """Run each test up to its first call of a program that is not there.

    Returns:
        For each test what is wrong with it, beginning with `object: ` where only the program's process could run it;
        None if nothing was found. A sandbox that fails finds nothing.
    """
    groups = [tests[i : i + TESTS_PER_TRIAL] for i in range(0, len(tests), TESTS_PER_TRIAL)]
    faults: list[str | None] = []
    for part, names in zip(groups, _try_together(runner, groups), strict=True):
        alone = [_try_together(runner, [[test]])[0] for test in part] if isinstance(names, str) else names
        faults += [text[0] if isinstance(text, list) else text for text in alone]
    return [None if text == "called" else text for text in faults]


def _try_together(runner: CodeRunner, groups: Sequence[Sequence[str]]) -> list[list[str] | str]:
    """Results of the tests of each part, or how the part ended as a whole."""
    jobs = [_job(tests=[_described(test, names_of(test)) for test in part]) for part in groups]
    programs = [Program(_source("judge.py"), {**_files(), "job.json": job}) for job, _ in jobs]
    ends = {"timeout": "it does not call the program in time", "infra": "called"}
    names: list[list[str] | str] = []
    for (_, mark), result in zip(jobs, runner.run_all(programs), strict=True):
        verdict = _verdict(result, mark)
        end = ends.get(result.outcome, f"its process ends with {result.outcome} before a call of the program")
        names.append(end if verdict is None else json.loads(verdict))
    return names


def _described(test: str, use: TestNames) -> dict[str, Any]:
    return {"code": test, "names": use.names, "modules": use.modules, "called": use.calls}


def _job(**content: Any) -> tuple[str, str]:
    """The file that a judge reads, and the mark before its verdict."""
    mark = secrets.token_hex(16)
    return json.dumps({"mark": mark, **content}), mark


def _verdict(result: ExecutionResult, mark: str) -> str | None:
    _, before, verdict = result.stdout.rpartition(mark)
    return verdict if before and result.outcome == "ok" else None


def _files() -> dict[str, str]:
    return {"verl/sandbox/unit_tests/values.py": _source("values.py")}


@functools.cache
def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text()
