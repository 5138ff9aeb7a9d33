"""A unit test of a program, each in a sandbox of its own, so that the program cannot decide its verdict."""

from __future__ import annotations

import functools
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.sandbox.base import CodeRunner, ExecutionResult, Program


@dataclass(frozen=True)
class Verdict:
    """Verdict of one test.

    Attributes:
        outcome: `pass`, `fail`, `error`, `timeout`, `memory`, `output`, `infra`, or `object`: something other than
            a plain value would have to be exchanged.
        detail: what failed or was returned, for `infra` and `object`.
    """

    outcome: str
    detail: str = ""


def run_unit_test(runner: CodeRunner, code: str, test: str, **limits: Any) -> Verdict:
    """Run a unit test whose program runs in another process.

    Names that neither the test nor Python defines are those of the program. A test that uses none of them fails.

    Args:
        code: of the program.
        limits: `timeout_s` and `memory_mib` of each of the two.
    """
    mark = secrets.token_hex(16)  # before the verdict
    job = json.dumps({"mark": mark, "test": test})
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


def _verdict(result: ExecutionResult, mark: str) -> str | None:
    _, before, verdict = result.stdout.rpartition(mark)
    return verdict if before and result.outcome == "ok" else None


def _files() -> dict[str, str]:
    return {"verl/sandbox/unit_tests/values.py": _source("values.py")}


@functools.cache
def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text()
