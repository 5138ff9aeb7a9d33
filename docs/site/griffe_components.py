"""Griffe extension for the docstrings and decorators of verl.

Griffe reads source code without running it. This extension states what it cannot find out:

* a class decorated by `verl.component.component` is a keyword-only dataclass, whose fields are the parameters of its
  constructor;
* in `Args` and `Attributes`, `low, high: bounds of ...` describes two names. The second one becomes an entry that
  refers to the first one.

and makes Markdown of docstrings, which are written to be read as text: `Raises:` and `Source:` begin a paragraph, and
examples of doctest are code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Decorator, Expr, ExprCall, ExprKeyword, ExprName, Extension, Object

COMPONENT = "verl.component.component"
SECTION = re.compile(r"(\w+):$")
PARAGRAPH = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$|(Source|Differs|Degenerate): ")
SHARED = re.compile(r"    (\w+)((?:, \w+)+): ")


class Components(Extension):
    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        if any(isinstance(d.value, Expr) and d.value.canonical_path == COMPONENT for d in cls.decorators):
            dataclass = ExprCall(ExprName("dataclasses.dataclass"), [ExprKeyword("kw_only", "True")])
            cls.decorators.append(Decorator(dataclass, lineno=cls.lineno, endlineno=cls.lineno))

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(with_own_entries(obj.docstring.value))


def as_markdown(docstring: str) -> str:
    """The docstring with paragraphs and examples that Markdown recognises."""
    lines: list[str] = []
    in_example = False
    for line in docstring.splitlines():
        if in_example != (begins := line.startswith(">>> ") or (in_example and bool(line.strip()))):
            lines.append("```pycon" if begins else "```")
            in_example = begins
        if PARAGRAPH.match(line) and lines and lines[-1].strip():
            lines.append("")
        lines.append(line)
    return "\n".join([*lines, "```"] if in_example else lines)


def with_own_entries(docstring: str) -> str:
    """The docstring with an entry for each name of `Args` and `Attributes`."""
    lines: list[str] = []
    section, waiting = "", []
    for line in docstring.splitlines():
        if not line.startswith(" " * 5):  # no continuation of an entry: entries that wait follow it
            lines += waiting
            waiting = []
        if found := SECTION.match(line):
            section = found[1]
        elif section in ("Args", "Attributes") and (found := SHARED.match(line)):
            waiting = [f"    {name}: see `{found[1]}`." for name in found[2].removeprefix(", ").split(", ")]
            line = f"    {found[1]}: {line[found.end() :]}"
        lines.append(line)
    return "\n".join(lines + waiting)
