"""Rewards by running code: the program in a response is tested in a sandbox, with the tests of its data row."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from markdown_it import MarkdownIt
from pydantic import Field

from verl.component import BuildContext, component
from verl.errors import ConfigError, RewardError, end_cut, faults_below
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription, RewardResult, texts_of
from verl.sandbox.base import CodeRunner, Program, Sandbox
from verl.sandbox.unit_tests.run import Verdict, run_unit_test

# Only blocks are parsed: inline marks take quadratic time on some texts, and nothing here reads them.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).disable("inline")
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_END_OF_THOUGHT = "</think>"
_SHOWN = 3  # maximum number of rows in a message
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

    `program_of` finds the program in the response. Tests are either pairs of standard input and expected output,
    compared line by line without trailing white space, or Python unit tests, which use the names of the program and
    pass if they run to their end. A unit test runs in another process than the program, so that the program cannot
    decide its verdict: its calls are sent to the program's process and return copies of plain values (numbers, texts,
    bytes, lists, tuples, sets, dicts). A program that exceeds its time, memory or output limit fails the test. A
    failure of the sandbox itself says nothing about the response: it is retried twice, then the run ends.

    Args:
        sandbox: where programs run.
        tests_key: column of the tests.
        partial_credit: score a response that passes a fraction f of its tests `wrong + f * (correct - wrong)`;
            otherwise it must pass all.
        correct, wrong: the score if all tests pass, and if none does.
        timeout_s, memory_mib: limits of one test, at most those of the sandbox; null for those of the sandbox.
        allow_in_process: run unit tests that need objects, classes or generators of the program again in the program's
            process, where it can pass them without solving them; they fail otherwise.
    """

    sandbox: Sandbox | None
    tests_key: str = "tests"
    partial_credit: bool = False
    correct: float = 1.0
    wrong: float = 0.0
    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] | None = None
    memory_mib: Annotated[int, Field(ge=16, lt=2**30)] | None = None
    allow_in_process: bool = False

    def faults(self) -> Iterator[str]:
        if self.sandbox is None:
            yield (
                "sandbox is null: code that the model wrote must run in a sandbox. Set sandbox=jail (jails on this "
                "machine), or sandbox=none, which gives no protection."
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

    scores_ahead = scores_groups = True

    def __init__(self, described: CodeTests, runner: CodeRunner):
        self.described, self._runner = described, runner

    def check_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Parse all tests.

        Returns: A sentence about unit tests that are no Python.
        Raises:
            ConfigError: a row has no tests.
        """
        key, units = self.described.tests_key, dict[str, int]()
        for row in range(len(rows)):
            try:
                tests = read_tests(rows[row].get(key), f"column {key!r} of row {row} of the {name}")
            except RewardError as error:
                raise ConfigError(f"tests_key is {key!r}: {error}") from error
            units |= {test.unit: row for test in tests if test.unit is not None and test.unit not in units}
        broken = {unit: fault for unit in units if (fault := _syntax_fault(unit)) is not None}
        shown = "; ".join(f"row {units[unit]}: {fault}" for unit, fault in [*broken.items()][:_SHOWN])
        more = f"; and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        return (
            [f"{len(broken)} of {len(units)} unit tests of the {name} are no Python: {shown}{more}."] if broken else []
        )

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Parts: `tests_passed`, the fraction of a row's tests that pass; `test_timeouts`, 1 if a test ran out of time;
        `test_objects`, 1 if a program returned something other than a plain value. Column: `tests`, the outcome of each
        test that ran.
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
        passed = np.array([verdicts.count("pass") / len(row) for verdicts, row in zip(outcomes, tests, strict=True)])
        credit = passed if self.described.partial_credit else (passed == 1.0).astype(float)
        scores = self.described.wrong + credit * (self.described.correct - self.described.wrong)
        late, objects = (np.array([float(kind in verdicts) for verdicts in outcomes]) for kind in ("timeout", "object"))
        texts = np.array([" ".join(verdicts) for verdicts in outcomes], dtype=object)
        parts = {"tests_passed": passed, "test_timeouts": late, "test_objects": objects}
        return RewardResult(scores, parts, {"tests": texts})

    def close(self) -> None:
        self._runner.close()

    def _run_tests(self, code: str, tests: Sequence[CodeTest]) -> list[str]:
        """Outcome (`pass`, `fail`, ...) of each test; without partial credit, stops at the first failure."""
        outcomes: list[str] = []
        for test in tests:
            outcomes.append(self._run_test(code, test))
            if outcomes[-1] != "pass" and not self.described.partial_credit:
                break
        return outcomes

    def _run_test(self, code: str, test: CodeTest) -> str:
        limits: Any = {"timeout_s": self.described.timeout_s, "memory_mib": self.described.memory_mib}
        if test.unit is None:
            program = Program(code, stdin=test.stdin, **limits)
            verdict = self._run_program(program, lambda stdout: _lines(stdout) == _lines(test.stdout))
        else:
            verdict = run_unit_test(self._runner, code, test.unit, **limits)
            if verdict.outcome in ("object", "error") and self.described.allow_in_process:
                mark = secrets.token_hex(16)  # printed after the test: a program that exits early does not pass
                program = Program(_UNIT_TEST.format(test=test.unit, mark=mark), {"solution.py": code}, **limits)
                verdict = self._run_program(program, lambda stdout: stdout.endswith(f"{mark}\n"))
        if verdict.outcome == "infra":
            raise RewardError(
                f"The sandbox failed, so a response has no score: {verdict.detail}. This is no fault of the response."
            )
        return verdict.outcome

    def _run_program(self, program: Program, passes: Callable[[str], bool]) -> Verdict:
        """Run a program; if it exits with 0, `passes` decides by its standard output."""
        result = self._runner.execute(program)
        if result.outcome != "ok":
            return Verdict(result.outcome, result.detail)
        return Verdict("pass" if passes(result.stdout) else "fail")


def _syntax_fault(unit: str) -> str | None:
    try:
        compile(unit, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error)
    return None


def program_of(response: str) -> str:
    """The program in a response: its last fenced code block that is marked as Python; without one, its last that is not
    marked; without either, the whole response.

    Blocks are those of CommonMark, also in lists and quotations, and within a block that is marked as Markdown. A block
    without an end extends to the end of the response. Blocks before the last `</think>` count only if there are none
    after it.
    """
    _, _, answer = response.rpartition(_END_OF_THOUGHT)
    for text in (answer, response):
        blocks = list(_fenced_blocks(text))
        for languages in (_PYTHON, ("",)):
            if programs := [content for language, content in blocks if language in languages]:
                return programs[-1]
    return response


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language, in lower case, and content of each fenced block."""
    for token in _MARKDOWN.parse(text):
        if token.type == "fence":
            match = _LANGUAGE.match(token.info)
            language = match[1].lower() if match else ""
            if language in ("markdown", "md"):
                yield from _fenced_blocks(token.content)
            else:
                yield language, token.content


def read_tests(value: Any, where: str) -> list[CodeTest]:
    """The tests of a row.

    Raises:
        RewardError: `value` has none of the accepted forms, or is empty.
    """
    content = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(content, str) and content.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # a Python unit test may begin with the same characters
            content = json.loads(content)
    tests = _parsed(content)
    if not tests:
        raise RewardError(f"{where} is {end_cut(repr(value), 120)}: expected {FORMS}.")
    return tests


def _parsed(content: Any) -> list[CodeTest]:
    if isinstance(content, str):
        return [CodeTest(unit=content)] if content.strip() else []
    if isinstance(content, dict):
        inputs, outputs = content.get("inputs"), content.get("outputs")
        if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
            return []
        content = [{"stdin": stdin, "stdout": stdout} for stdin, stdout in zip(inputs, outputs, strict=True)]
    if not isinstance(content, (list, tuple)):
        return []
    tests = []
    for item in content:
        if isinstance(item, str) and item.strip():
            tests.append(CodeTest(unit=item))
        elif isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("stdin", "stdout")):
            tests.append(CodeTest(item["stdin"], item["stdout"]))
        else:
            return []
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
