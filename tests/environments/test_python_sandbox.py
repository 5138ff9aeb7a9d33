"""The tool `python`: programs of the model run in the sandbox, and what became of them is what the model reads."""

from __future__ import annotations

import asyncio

import pytest

from verl.component import BuildContext
from verl.environments.base import Action
from verl.environments.python_sandbox import PythonSandbox
from verl.environments.tool_calls import ToolCall
from verl.sandbox.base import CodeRunner, ExecutionResult
from verl.sandbox.jail import Jail
from verl.sandbox.unprotected import Unprotected

SANDBOX = (Unprotected if list(Jail().machine_faults()) else Jail)(timeout_s=2.0, max_output_kib=4)


def answered(*programs: str):
    async def play():
        factory = PythonSandbox(sandbox=SANDBOX).factory(BuildContext())
        await factory.start()
        try:
            environment = factory.make()
            await environment.reset({}, 0)
            calls = tuple(ToolCall("python", {"code": code}) for code in programs)
            return environment.recovery, await environment.step(Action("", calls, "0.1"))
        finally:
            await factory.stop()

    return asyncio.run(play())


def test_the_calls_of_a_turn_are_answered_in_their_order_by_what_the_programs_wrote():
    recovery, step = answered("print(6 * 7)", "1 / 0", "while True: pass", "print('x' * 9999)", "open('a', 'w')")
    assert recovery == "stateless"
    lines = step.observation.splitlines()
    assert lines[0] == "42"
    assert "ZeroDivisionError: division by zero" in lines
    assert "exit status 1" in lines
    assert "error: the program ran out of time" in lines
    assert "the program wrote too much" in lines
    records = step.calls
    assert [record.outcome for record in records] == ["ok", "tool_error", "tool_error", "tool_error", "ok"]
    assert [record.call_id for record in records] == [f"0.1.{place}" for place in range(5)]


@pytest.mark.slow
def test_a_sandbox_that_fails_is_not_the_models_fault(monkeypatch):
    failed = ExecutionResult("infra", detail="no memory for a jail")
    monkeypatch.setattr(CodeRunner, "run", lambda self, code: failed)
    _, step = answered("print(1)")
    assert [record.outcome for record in step.calls] == ["infra"]
