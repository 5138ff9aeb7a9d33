"""`environment=calculator`: the tool `calc`, for arithmetic that the built-in model cannot do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, ToolError
from verl.environments.tools import Tool, ToolFactory

_OPERATORS: Mapping[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str, max_digits: int = 12) -> str:
    """Sums, differences and products of whole numbers.

    >>> calculate("12*(3+4)")
    '84'

    Raises:
        ToolError: the expression is invalid or too long.
    """
    if len(expression) > 8 * max_digits:
        raise ToolError(f"the expression has {len(expression)} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, max_digits)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression[:40]!r} is not a sum, difference or product of whole numbers") from error
    return str(value)


def _value(node: ast.AST, max_digits: int) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**max_digits:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_value(node.left, max_digits), _value(node.right, max_digits))
        if abs(result) < 10**max_digits:
            return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, max_digits)
    raise ValueError("not arithmetic")


@component
class Calculator(EnvironmentDescription):
    """The tool `calc(expression)`; a turn without a call is the answer. Rewards come from `reward`.

    Args:
        max_digits: maximum number of digits of any number.
        suffix: appended to a tool result if the prompt is not a chat.
    """

    has_tools: ClassVar[bool] = True

    max_digits: PositiveInt = 12
    suffix: str = "\n"

    def tool(self) -> Tool:
        def calc(expression: str) -> str:
            """Compute a sum, difference or product of whole numbers.

            expression: such as 12*34
            """
            return calculate(expression, self.max_digits)

        return Tool.of(calc)

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return (self.tool().schema,)

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return ToolFactory(self, [self.tool()], "stateless", answers_at_once=True)
