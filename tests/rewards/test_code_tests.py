"""The reward that runs a response's program against the tests of its row."""

import json

import numpy as np
import pytest
import torch
from refusals import refusal

from verl.component import BuildContext
from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.code_tests import CodeTests, program_of, read_tests
from verl.sandbox.jail import Jail
from verl.sandbox.unprotected import Unprotected

SANDBOX = Jail(timeout_s=5.0) if not list(Jail().faults_here()) else Unprotected(timeout_s=5.0)
CASES = [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "5 6", "stdout": "11\n"}]
UNIT = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
SUM = "a, b = map(int, input().split())\nprint(a + b)"


def rated(responses: list[str], tests: list, **values):
    batch = DataProto.from_dict(
        tensors={"response_mask": torch.ones(len(responses), 2, dtype=torch.bool)},
        non_tensors={
            "prompt_text": np.array(["p"] * len(responses), dtype=object),
            "response_text": np.array(responses, dtype=object),
            "tests": np.array([None, *tests], dtype=object)[1:],
        },
    )
    reward = CodeTests(sandbox=SANDBOX, **values).build(BuildContext())
    try:
        return reward.rate_batch(batch)
    finally:
        reward.close()


def test_cases_and_unit_tests_decide_and_outcomes_are_told():
    responses = [
        f"Here it is:\n```python\n{SUM}\n```\nDone.",
        "```\nprint(3)\n```",
        "def add(a, b): return a + b",
        "def add(a, b): return 3",
        "while True: pass",
        "x = [0] * (1 << 34)",
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
    ]
    tests = [CASES, json.dumps(CASES), UNIT, UNIT, CASES, CASES, UNIT, UNIT]
    result = rated(responses, tests, timeout_s=1.0)
    assert result.scores.tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert result.parts["tests_passed"].tolist() == [1, 0.5, 1, 0.5, 0, 0, 0, 0]
    assert result.parts["test_timeouts"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert result.columns["tests"].tolist() == [
        "pass pass", "pass fail", "pass pass", "pass error", "timeout", "memory", "fail", "fail"
    ]  # fmt: skip


def test_partial_credit_is_the_share_of_tests_that_pass():
    scores = rated(["print(3)", SUM, "1"], [CASES] * 3, partial_credit=True, correct=2.0, wrong=-1.0).scores
    assert scores.tolist() == [0.5, 2.0, -1.0]


def test_the_program_is_the_last_fenced_block():
    assert program_of("```python\nfirst\n```\n```py\nsecond\n```\n") == "second\n"
    assert program_of("```cpp\nint x;\n```") == "```cpp\nint x;\n```"
    assert program_of("print(1)") == "print(1)"


def test_forms_of_tests_are_read_and_others_are_refused():
    assert read_tests({"inputs": ["1"], "outputs": ["2"]}, "") == read_tests([{"stdin": "1", "stdout": "2"}], "")
    assert [test.unit for test in read_tests("assert f()", "")] == ["assert f()"]
    assert [test.unit for test in read_tests("[1, 2] == f()\nassert g()", "")] == ["[1, 2] == f()\nassert g()"]
    for wrong in ("", [], None, 3, [{"stdin": 1, "stdout": "2"}], {"inputs": ["1"], "outputs": []}, [[]]):
        with pytest.raises(RewardError, match="column 'tests' of sample 0"):
            rated(["print(1)"], [wrong])


def test_no_sandbox_and_limits_above_its_own_are_refused():
    with refusal("sandbox"):
        CodeTests(sandbox=None)
    with refusal("timeout_s"):
        CodeTests(sandbox=SANDBOX, timeout_s=60.0)


def test_a_sandbox_that_fails_is_no_reward(monkeypatch):
    from verl.sandbox.base import ExecutionResult

    made = type(SANDBOX.build(BuildContext()))
    monkeypatch.setattr(made, "execute", lambda self, program: ExecutionResult("infra", detail="no memory for a jail"))
    with pytest.raises(RewardError, match=r"The sandbox failed.*no memory for a jail"):
        rated(["print(1)"], [CASES])
