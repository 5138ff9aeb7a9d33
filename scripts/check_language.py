"""Report docstrings and maps of packages that do not follow the conventions of the project; part of `make lint`.

    python scripts/check_language.py

* The first sentence of a docstring is a noun phrase or begins with a verb: it opens with no preposition, relative
  pronoun or `it`, which refer to a name elsewhere.
* The docstring of an `__init__.py` names every module and package beside it; docs/tour.md does so for the root.
* A class name is used once in the package.
* Each name between back ticks exists: in the code, in conf/, or in the module of another package that it is written
  with. Words in capitals are place holders.
* A docstring says more than the name of its function or class.

Exits 1 if anything was found.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib.util
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "verl"
OPENINGS = frozenset(
    "of for that those what which whose as like with by from to in where how its it".split()  # noqa: SIM905
)
WORDS_WITHOUT_MEANING = frozenset(
    "the a an of in to for by is are it its this that and or with from as at on all each one be".split()  # noqa: SIM905
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def openings(path: Path, nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        text = ast.get_docstring(node) if isinstance(node, Documented) else None
        if isinstance(node, Documented) and text and text.split(None, 1)[0].strip(".,:`*").lower() in OPENINGS:
            name = getattr(node, "name", "the module")
            yield f"{path}:{node.body[0].lineno}: the docstring of {name} opens with {text.split(None, 1)[0]!r}"


def missing_in_map(path: Path, tree: ast.Module) -> Iterator[str]:
    text = ast.get_docstring(tree) or ""
    for entry in sorted(path.parent.iterdir()):
        is_part = entry.suffix == ".py" or (entry / "__init__.py").exists()
        if is_part and not entry.name.startswith("__") and not re.search(rf"(?<![\w.]){re.escape(entry.stem)}\b", text):
            yield f"{path}: its docstring does not name {entry.stem}"


def stems(text: str) -> set[str]:
    """The words of a text or name that have a meaning, without their endings."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
    return {re.sub(r"(?<=...)(ing|ed|es|s|e)$", "", word) for word in words if word not in WORDS_WITHOUT_MEANING}


def repetitions(path: Path, nodes: Sequence[ast.AST]) -> Iterator[str]:
    for parent in nodes:
        if not isinstance(parent, (ast.Module, ast.ClassDef)):
            continue
        around = parent.name if isinstance(parent, ast.ClassDef) else ""
        for node in parent.body:
            text = ast.get_docstring(node) if isinstance(node, Definition) else None
            if isinstance(node, Definition) and text and stems(text) <= stems(f"{node.name} {around}"):
                yield f"{path}:{node.body[0].lineno}: the docstring of {node.name} says what its name says: {text!r}"


class Names:
    """All names of the package: identifiers, modules, words of its texts other than docstrings, members of classes."""

    def __init__(self):
        self.known: set[str] = set(dir(builtins)) | {"yield", "return"}
        self.members: dict[str, set[str]] = {}
        self.bases: dict[str, list[str]] = {}
        for path in (ROOT.parent / "conf").rglob("*.yaml"):
            self.known.update(re.findall(r"\w+", path.read_text()), path.with_suffix("").parts)

    def read(self, path: Path, nodes: Sequence[ast.AST]) -> None:
        self.known.update(path.with_suffix("").parts)
        docstrings = {id(_docstring(node)) for node in nodes}
        for node in nodes:
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                    self.known.add(name)
                case ast.alias():
                    self.known.update(node.name.split("."), [node.asname or ""])
                case ast.Constant(value=str(text)) if id(node) not in docstrings:
                    self.known.update(re.findall(r"\w+", text))
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.known.add(node.name)
            if isinstance(node, ast.ClassDef):
                inside = list(ast.walk(node))
                own = {x.name for x in inside if isinstance(x, Definition)}
                own |= {x.id for x in inside if isinstance(x, ast.Name)}
                attributes = [x for x in inside if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)]
                own |= {x.attr for x in attributes if isinstance(x.value, ast.Name) and x.value.id == "self"}
                self.members[node.name] = own
                self.bases[node.name] = [ast.unparse(base).partition("[")[0] for base in node.bases]

    def has(self, name: str) -> bool:
        """Whether a name, which may be dotted, is one of the package or of the module of another package."""
        first, *rest = parts = name.split(".")
        if re.search(r"(^|[._])[A-Z]+([._]|$)", name):  # has a place holder, or is an environment variable
            return True
        if rest and first != "verl" and first not in self.members and importlib.util.find_spec(first) is not None:
            return True
        pairs = itertools.pairwise(parts)
        return all(part in self.known for part in parts) and all(self._has_member(*pair) for pair in pairs)

    def _has_member(self, owner: str, name: str) -> bool:
        """True also where a base class is not one of the package."""
        if owner not in self.members or name in self.members[owner]:
            return True
        ours = [base for base in self.bases[owner] if base not in ("object", "Protocol", "ABC", "Generic", "Enum")]
        return any(self._has_member(base, name) for base in ours)

    def missing(self, path: Path, source: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
        texts = [(node.lineno, node.value) for node in map(_docstring, nodes) if node is not None]
        lines = enumerate(source.splitlines(), start=1)
        texts += [(number, line.partition("#")[2]) for number, line in lines if "#" in line]
        for line, text in texts:
            for quoted in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", str(text)):
                name = re.sub(r"\(.*\)$", "", quoted)
                if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name) and not self.has(name):
                    yield f"{path}:{line}: `{quoted}` is the name of nothing"


def _docstring(node: ast.AST) -> ast.Constant | None:
    if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
        statement = node.body[0]
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.Constant)
        return statement.value
    return None


def main() -> int:
    gc.disable()  # a third of the time goes into looking for garbage among the trees
    classes, faults = defaultdict(list), []
    sources = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    names = Names()
    nodes = {path: [*ast.walk(tree)] for path, tree in trees.items()}
    for path, inside in nodes.items():
        names.read(path.relative_to(ROOT.parent), inside)
    for path, tree in trees.items():
        shown = path.relative_to(ROOT.parent)
        faults += openings(shown, nodes[path])
        faults += repetitions(shown, nodes[path])
        faults += names.missing(shown, sources[path], nodes[path])
        if path.name == "__init__.py" and path.parent != ROOT:
            faults += missing_in_map(path, tree)
        for node in nodes[path]:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(shown))
    classes = {name: sorted(set(paths)) for name, paths in classes.items()}
    faults += [f"class {name} is in {' and '.join(paths)}" for name, paths in sorted(classes.items()) if len(paths) > 1]
    print(*faults, f"{len(faults)} faults of language", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
