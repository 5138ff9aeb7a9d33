"""Trials of text that others wrote (templates, regular expressions) in a child with limits of time and memory.

Both can run for ever or double their memory with every step, and neither can be stopped in the process that runs it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

TIMEOUT_S = 10.0  # wall clock, of the child
PROCESSOR_S = 5  # of its own work
MEMORY_BYTES = 2**30
_LIMITS = """
import json, resource, sys
memory, seconds = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
given = json.load(sys.stdin)
"""
_TEMPLATE = """
import datetime, re
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

def refuse(message):
    raise ValueError(message)

made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
made.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False)
made.globals["raise_exception"] = refuse
made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
try:
    text = re.sub(r"{%[-+]?\\s*(end)?generation\\s*[-+]?%}", "", given["template"])  # a tag of transformers
    made.from_string(text).render(**given["values"])
except MemoryError:
    sys.exit(3)
except Exception:
    pass  # what is wrong with it is told where it is used
"""
_PATTERNS = """
import re
for pattern in given["patterns"]:
    for name in given["names"]:
        try:
            re.fullmatch(pattern, name)
        except re.error:
            pass
"""


def template_fault(template: str, values: dict[str, Any]) -> str | None:
    """Why a Jinja template cannot be rendered with some values: it does not end, or it takes too much memory."""
    return _fault(_TEMPLATE, json.dumps({"template": template, "values": values}, default=str))


def pattern_fault(patterns: Sequence[str], names: Sequence[str]) -> str | None:
    """Why regular expressions cannot be matched with names: it does not end, or it takes too much memory."""
    return _fault(_PATTERNS, json.dumps({"patterns": list(patterns), "names": list(names)}))


@functools.lru_cache(maxsize=64)
def _fault(script: str, given: str) -> str | None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIMITS + script, str(MEMORY_BYTES), str(PROCESSOR_S)],
            input=given,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {TIMEOUT_S:g} s"
    if done.returncode < 0:
        return f"it did not end within {PROCESSOR_S} s of processor time"
    if done.returncode == 3 or "MemoryError" in done.stderr:
        return f"it takes more than {MEMORY_BYTES // 2**30} GiB of memory"
    return None
