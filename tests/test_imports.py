"""No import circle: neither of modules nor of packages nor of what stands side by side in one, deferred imports and
those of annotations counted.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

import verl

ROOT = Path(verl.__file__).resolve().parent


def _dotted(path: Path) -> str:
    parts = ("verl", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Module -> modules that it imports at any depth, for type checkers too; packages are left out."""
    files = {_dotted(path): path for path in ROOT.rglob("*.py")}
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            found[name].update(t for t in targets if t in files and t != name and files[t].name != "__init__.py")
    return found


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes each of which leads to all others of its set."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reach[start] = seen
    rings = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph if a in reach[a]}
    return sorted(sorted(ring) for ring in rings)


def test_modules_import_each_other_in_no_circle():
    assert _circles(_imports()) == []


@pytest.mark.parametrize("package", sorted({_dotted(path) for path in ROOT.rglob("__init__.py")}))
def test_the_parts_of_a_package_import_each_other_in_no_circle(package):
    depth = package.count(".") + 2
    graph: dict[str, set[str]] = defaultdict(set)
    for module, targets in _imports().items():
        for target in targets:
            if module.startswith(f"{package}.") and target.startswith(f"{package}."):
                one, other = (".".join(name.split(".")[:depth]) for name in (module, target))
                if one != other:
                    graph[one].add(other)
    assert _circles(graph) == []
