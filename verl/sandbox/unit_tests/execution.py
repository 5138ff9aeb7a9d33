"""Run one unit test against a program, each in a sandbox of its own; try the tests of a data set without a program."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.sandbox.base import CodeRunner, ExecutionResult, Program
from verl.sandbox.unit_tests.test_names import TestNames, names_of

TESTS_PER_TRIAL = 16  # tests that one program of the sandbox tries


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
    parts = [tests[i : i + TESTS_PER_TRIAL] for i in range(0, len(tests), TESTS_PER_TRIAL)]
    faults: list[str | None] = []
    for part, told in zip(parts, _try_together(runner, parts), strict=True):
        alone = [_try_together(runner, [[test]])[0] for test in part] if isinstance(told, str) else told
        faults += [text[0] if isinstance(text, list) else text for text in alone]
    return [None if text == "called" else text for text in faults]


def _try_together(runner: CodeRunner, parts: Sequence[Sequence[str]]) -> list[list[str] | str]:
    """Results of the tests of each part, or how the part ended as a whole."""
    jobs = [_job(tests=[_described(test, names_of(test)) for test in part]) for part in parts]
    programs = [Program(_source("judge.py"), {**_files(), "job.json": job}) for job, _ in jobs]
    ends = {"timeout": "it does not call the program in time", "infra": "called"}
    told: list[list[str] | str] = []
    for (_, mark), result in zip(jobs, runner.run_all(programs), strict=True):
        verdict = _verdict(result, mark)
        end = ends.get(result.outcome, f"its process ends with {result.outcome} before a call of the program")
        told.append(end if verdict is None else json.loads(verdict))
    return told


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
