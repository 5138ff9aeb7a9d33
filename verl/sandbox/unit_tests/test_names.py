"""Static analysis of a unit test: the program's names that it uses, and what it asks of them.

A test whose program runs in another process gets only plain values from it. Methods of an object of the program, its
classes and its generators need the program in the same process, where it can change the verdict.
"""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass

SOLUTION = "solution"  # the module that a test may import
_VALUES = (str, bytes, bytearray, int, float, complex, list, tuple, set, frozenset, dict)
_METHODS = frozenset(name for kind in _VALUES for name in dir(kind) if not name.startswith("__"))
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__"}
_ITERATES = frozenset({"next", "anext", "aiter"})
_TAKES_CLASS = frozenset({"raises", "assertRaises", "suppress", "assertIsInstance", "isinstance", "issubclass"})
_SEES_INSIDE = frozenset({"mock", "unittest.mock", "inspect"})


@dataclass(frozen=True)
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

    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    calls: bool = False
    needs_object: str | None = None
    broken: str | None = None


@functools.lru_cache(maxsize=4096)
def names_of(test: str) -> TestNames:
    """Analyse a test."""
    try:
        tree = ast.parse(test)
        free = _free_names(symtable.symtable(test, "test", "exec"))
    except SyntaxError as error:
        return TestNames(broken=f"line {error.lineno} is no Python ({error.msg})")
    except (ValueError, RecursionError, MemoryError) as error:
        return TestNames(broken=f"it is no Python ({error})")
    use = _Use(tree, free)
    names, modules = use.names, use.modules
    if not names:
        return TestNames(modules=modules, broken="it uses no name of the program")
    of_nodes = next((reason for node in ast.walk(tree) for reason in use.reasons(node)), None)
    return TestNames(names, modules, use.calls, use.ambiguous or of_nodes)


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


class _Use:
    """Use of the names of the program by a test.

    Attributes:
        names, modules, calls: as of `TestNames`.
        ambiguous: why it is unknown which names are those of the program.
    """

    def __init__(self, tree: ast.Module, free: set[str]):
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._aliases, imported, renamed = self._imports(tree)
        read = set(filter(None, map(_attribute_of_name, ast.walk(tree))))
        self.modules = tuple(
            sorted(name for name in free & {base for base, _ in read} if name in sys.stdlib_module_names)
        )
        attributes = {attribute for base, attribute in read if base in self._aliases}
        names = (free - _BUILTINS - set(self.modules)) | imported | attributes
        self.ambiguous: str | None = None
        if not names:
            called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            names = called & free & _BUILTINS
            if len(names) > 1:
                self.ambiguous = f"does not show which of {', '.join(sorted(names))} is of the program"
        self.names, self._local = tuple(sorted(names)), names | renamed
        self.calls = any(isinstance(n, ast.Call) and self._is_of_program(n.func) for n in ast.walk(tree))
        self._results = set(self._result_names(tree))
        self._own = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        self._modules = {alias.asname or alias.name for n in ast.walk(tree) if isinstance(n, ast.Import)
                         for alias in n.names}  # fmt: skip

    def reasons(self, node: ast.AST) -> Iterator[str]:
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


def _attribute_of_name(node: ast.AST) -> tuple[str, str] | None:
    """The name and the attribute of `name.attribute`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id, node.attr
    return None


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:50] + " ..."
