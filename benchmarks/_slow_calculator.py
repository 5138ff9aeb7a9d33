"""`environment=calculator` with a tool that takes time, for benchmarks/async_training.py --tools."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentFactory
from verl.environments.calculator import Calculator, calculate
from verl.environments.tools import Tool, ToolEnvironment


class _Factory(EnvironmentFactory):
    def __init__(self, options: SlowCalculator):
        self.options, self.tools = options, {"calc": options.tool()}
        self.tool_parameters: dict[str, Any] = {name: tool.parameters for name, tool in self.tools.items()}

    def make(self) -> ToolEnvironment:
        return ToolEnvironment(self.tools, self.options.step_timeout_s, self.options.suffix, "stateless")


@component
class SlowCalculator(Calculator):
    """The tool `calc` of `Calculator`, which answers after some seconds.

    Args:
        tool_s: seconds of a call.
    """

    tool_s: float = 0.5

    def tool(self) -> Tool:
        async def calc(expression: str) -> str:
            """Compute a sum, difference or product of whole numbers.

            expression: such as 12*34
            """
            await asyncio.sleep(self.tool_s)
            return calculate(expression, self.max_digits)

        return Tool.of(calc)

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _Factory(self)
