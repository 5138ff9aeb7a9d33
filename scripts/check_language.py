"""Report docstrings and maps of packages that do not follow the conventions of the project; part of `make lint`.

    python scripts/check_language.py

* The first sentence of a docstring is a noun phrase or begins with a verb: it opens with no preposition, relative
  pronoun or `it`, which refer to a name elsewhere.
* The docstring of an `__init__.py` names every module and package beside it; docs/tour.md does so for the root.
* A class name is used once in the package.

Exits 1 if anything was found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "verl"
OPENINGS = frozenset(
    "of for that those what which whose as like with by from to in where how its it".split()  # noqa: SIM905
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def openings(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, Documented) else None
        if text and text.split(None, 1)[0].strip(".,:`*").lower() in OPENINGS:
            name = getattr(node, "name", "the module")
            yield f"{path}:{node.body[0].lineno}: the docstring of {name} opens with {text.split(None, 1)[0]!r}"


def missing_in_map(path: Path, tree: ast.Module) -> Iterator[str]:
    text = ast.get_docstring(tree) or ""
    for entry in sorted(path.parent.iterdir()):
        is_part = entry.suffix == ".py" or (entry / "__init__.py").exists()
        if is_part and not entry.name.startswith("__") and not re.search(rf"(?<![\w.]){re.escape(entry.stem)}\b", text):
            yield f"{path}: its docstring does not name {entry.stem}"


def main() -> int:
    classes, faults = defaultdict(list), []
    for path in sorted(ROOT.rglob("*.py")):
        tree, shown = ast.parse(path.read_text()), path.relative_to(ROOT.parent)
        faults += openings(shown, tree)
        if path.name == "__init__.py" and path.parent != ROOT:
            faults += missing_in_map(path, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(shown))
    classes = {name: sorted(set(paths)) for name, paths in classes.items()}
    faults += [f"class {name} is in {' and '.join(paths)}" for name, paths in sorted(classes.items()) if len(paths) > 1]
    print(*faults, f"{len(faults)} faults of language", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
