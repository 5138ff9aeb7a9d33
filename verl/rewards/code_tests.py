"""Rewards by running code: the program in a response is tested in a sandbox, with the tests of its data row."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from verl.component import BuildContext, component
from verl.errors import RewardError, faults_below
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription, RewardResult, texts_of
from verl.sandbox.base import CodeRunner, ExecutionResult, Outcome, Program, Sandbox

_FENCED = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_UNIT_TEST = """import solution
globals().update({{name: value for name, value in vars(solution).items() if not name.startswith("__")}})
{test}
print({mark!r})
"""
FORMS = (
    'a list of {"stdin": ..., "stdout": ...}, {"inputs": [...], "outputs": [...]}, or unit tests in Python as a text '
    "or a list of texts; or one of them as JSON"
)


@component
class CodeTests(RewardDescription):
    """Run the program in each response against the tests of its data row.

    The program is the last fenced code block of the response, or the whole response if it has none. Tests are either
    pairs of standard input and expected output, compared line by line without trailing white space, or Python unit
    tests, which run with all names of the program imported and pass if they run to their end. A program that exceeds
    its time, memory or output limit fails the test. A failure of the sandbox itself says nothing about the response: it
    is retried twice, then the run ends.

    Args:
        sandbox: where programs run.
        tests_key: column of the tests.
        partial_credit: score a response that passes a fraction f of its tests `wrong + f * (correct - wrong)`;
            otherwise it must pass all.
        correct, wrong: the score if all tests pass, and if none does.
        timeout_s, memory_mib: limits of one test, at most those of the sandbox; null for those of the sandbox.
    """

    sandbox: Sandbox | None
    tests_key: str = "tests"
    partial_credit: bool = False
    correct: float = 1.0
    wrong: float = 0.0
    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] | None = None
    memory_mib: Annotated[int, Field(ge=16, lt=2**30)] | None = None

    def faults(self) -> Iterator[str]:
        if self.sandbox is None:
            yield (
                "sandbox is null: code that the model wrote must run in a sandbox. Set sandbox=jail (jails on this "
                "machine), sandbox=remote (a server), or sandbox=none, which gives no protection."
            )
        elif self.timeout_s is not None and self.timeout_s > self.sandbox.timeout_s:
            yield f"timeout_s is {self.timeout_s:g}: the sandbox ends programs after {self.sandbox.timeout_s:g} s."
        elif self.memory_mib is not None and self.memory_mib > self.sandbox.memory_mib:
            yield f"memory_mib is {self.memory_mib}: the sandbox gives a program {self.sandbox.memory_mib} MiB."
        if self.correct <= self.wrong:
            yield f"correct is {self.correct}: must exceed wrong, which is {self.wrong}."

    def columns_read(self) -> Iterator[tuple[str, str]]:
        yield f"tests_key is {self.tests_key!r}", self.tests_key

    def build(self, context: BuildContext) -> CodeReward:
        assert self.sandbox is not None
        with faults_below("sandbox"):
            return CodeReward(self, self.sandbox.build(context))


@dataclass(frozen=True)
class CodeTest:
    """One test of a row: a pair of input and output, or a unit test in Python."""

    stdin: str = ""
    stdout: str = ""
    unit: str | None = None


class CodeReward(Reward):
    """The reward that `CodeTests` builds."""

    def __init__(self, described: CodeTests, runner: CodeRunner):
        self.described, self._runner = described, runner

    @property
    def producer(self) -> Callable:
        return self.rate_batch

    def rate_batch(self, batch: DataProto) -> RewardResult:
        """Parts: `tests_passed`, the fraction of a row's tests that pass; `test_timeouts`, 1 if a test ran out of time.
        Column: `tests`, the outcome of each test that ran.
        """
        _, responses, columns = texts_of(batch)
        key = self.described.tests_key
        if key not in columns:
            present = ", ".join(columns) or "none"
            raise RewardError(f"tests_key is {key!r}: the data has no such column. Its columns: {present}.")
        tests = [read_tests(value, f"column {key!r} of sample {row}") for row, value in enumerate(columns[key])]
        threads = self._runner.described.max_concurrency
        with concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="verl code tests") as pool:
            outcomes = list(pool.map(self._run_tests, map(program_of, responses), tests))
        passed = np.array([found.count("pass") / len(row) for found, row in zip(outcomes, tests, strict=True)])
        credit = passed if self.described.partial_credit else (passed == 1.0).astype(float)
        scores = self.described.wrong + credit * (self.described.correct - self.described.wrong)
        late = np.array([float("timeout" in found) for found in outcomes])
        texts = np.array([" ".join(found) for found in outcomes], dtype=object)
        return RewardResult(scores, {"tests_passed": passed, "test_timeouts": late}, {"tests": texts})

    def close(self) -> None:
        self._runner.close()

    def _run_tests(self, code: str, tests: Sequence[CodeTest]) -> list[str]:
        """Outcome (`pass`, `fail`, ...) of each test; without partial credit it stops at the first that fails."""
        outcomes: list[str] = []
        for test in tests:
            outcomes.append(self._run_test(code, test))
            if outcomes[-1] != "pass" and not self.described.partial_credit:
                break
        return outcomes

    def _run_test(self, code: str, test: CodeTest) -> str:
        limits = {"timeout_s": self.described.timeout_s, "memory_mib": self.described.memory_mib}
        if test.unit is None:
            result = self._runner.execute(Program(code, stdin=test.stdin, **limits))
            passes = result.outcome == "ok" and _lines(result.stdout) == _lines(test.stdout)
        else:
            mark = secrets.token_hex(16)  # printed after the test: a program that exits early does not pass
            main = _UNIT_TEST.format(test=test.unit, mark=mark)
            result = self._runner.execute(Program(main, {"solution.py": code}, **limits))
            passes = result.outcome == "ok" and result.stdout.endswith(f"{mark}\n")
        return self._named(result, passes)

    def _named(self, result: ExecutionResult, passes: bool) -> str:
        if result.outcome == "infra":
            raise RewardError(
                f"The sandbox failed, so a response has no score: {result.detail}. This is no fault of the response."
            )
        outcome: Outcome = result.outcome
        return "pass" if passes else "fail" if outcome == "ok" else outcome


def program_of(response: str) -> str:
    """The last fenced block of a response that is marked as Python or unmarked; the whole response if it has none."""
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def read_tests(value: Any, where: str) -> list[CodeTest]:
    """The tests of a row.

    Raises:
        RewardError: `value` has none of the accepted forms, or is empty.
    """
    found = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # a Python unit test may begin with the same characters
            found = json.loads(found)
    tests = _parsed(found)
    if not tests:
        shown = repr(value) if len(repr(value)) <= 120 else repr(value)[:110] + " ..."
        raise RewardError(f"{where} is {shown}: expected {FORMS}.")
    return tests


def _parsed(found: Any) -> list[CodeTest]:
    if isinstance(found, str):
        return [CodeTest(unit=found)] if found.strip() else []
    if isinstance(found, dict):
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)):
            return []
        if len(inputs) != len(outputs):
            return []
        found = [{"stdin": given, "stdout": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    if not isinstance(found, (list, tuple)):
        return []
    tests = []
    for item in found:
        if isinstance(item, str) and item.strip():
            tests.append(CodeTest(unit=item))
        elif isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("stdin", "stdout")):
            tests.append(CodeTest(item["stdin"], item["stdout"]))
        else:
            return []
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
