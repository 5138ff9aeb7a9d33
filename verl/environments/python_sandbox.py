"""`environment=python_sandbox`: the tool `python`, which runs a program of the model in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, InfraError, ToolError
from verl.environments.tools import Tool, ToolFactory
from verl.errors import faults_below
from verl.sandbox.base import CodeRunner, Sandbox

NOTES = {  # the last line of a tool result
    "timeout": "the program ran out of time",
    "memory": "the program ran out of memory",
    "output": "the program wrote too much",
}
SPARE_S = 10.0  # for a place in the sandbox, in addition to the program's own time


class _PythonSandboxFactory(ToolFactory):
    def __init__(self, options: PythonSandbox, context: BuildContext):
        super().__init__(options, [options.tool(self._run)], "stateless")  # every program has a fresh jail
        self._context = context
        self._runner: CodeRunner | None = None

    async def start(self) -> None:
        assert self.options.sandbox is not None
        with faults_below("environment.sandbox"):
            self._runner = await asyncio.to_thread(self.options.sandbox.build, self._context)

    async def _run(self, code: str) -> str:
        assert self._runner is not None
        result = await asyncio.to_thread(self._runner.run, code)
        if result.outcome == "infra":
            raise InfraError(f"the sandbox failed: {result.detail}")
        notes = {**NOTES, "error": f"exit status {result.exit_status}"}
        output = (result.stdout + result.stderr).rstrip("\n")
        text = "\n".join(part for part in (output, notes.get(result.outcome)) if part)
        if result.outcome != "ok":
            raise ToolError(text)
        return text

    async def stop(self) -> None:
        if self._runner is not None:
            await asyncio.to_thread(self._runner.close)
            self._runner = None


@component
class PythonSandbox(EnvironmentDescription):
    """The tool `python(code)`: each program runs afresh in the sandbox; a turn without a call is the answer.

    Args:
        sandbox: where programs run.
        suffix: appended to a tool result if the prompt is not a chat.
    """

    has_tools: ClassVar[bool] = True

    sandbox: Sandbox | None
    suffix: str = "\n"
    max_concurrent: PositiveInt = 16

    def faults(self) -> Iterator[str]:
        if self.sandbox is None:
            yield (
                "sandbox is null: code that the model wrote needs a place to run. Set sandbox=jail (jails on this "
                "machine), or sandbox=none, which gives no protection."
            )
        elif self.step_timeout_s < self.sandbox.timeout_s + SPARE_S:
            yield (
                f"step_timeout_s is {self.step_timeout_s:g}: a program may run for sandbox.timeout_s "
                f"{self.sandbox.timeout_s:g} and wait for its place. Set it to {self.sandbox.timeout_s + SPARE_S:g} or "
                "more."
            )

    def tool(self, run: Callable[[str], Awaitable[str]] | None) -> Tool:
        async def python(code: str) -> str:
            """Run a Python program and read what it prints.

            code: a Python program; what it prints is the answer
            """
            assert run is not None
            return await run(code)

        return Tool.of(python)

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return (self.tool(None).schema,)

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _PythonSandboxFactory(self, context)
