"""Environments with tools: a turn with tool calls is followed by their results, a turn without calls is the answer."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.environments.base import (
    MAX_ERROR,
    Action,
    CallRecord,
    Environment,
    EnvironmentFactory,
    Fault,
    InfraError,
    Outcome,
    Recovery,
    StepResult,
    ToolError,
    within,
)
from verl.environments.hosts.host_main import as_content
from verl.environments.hosts.python_tools import PythonTool, as_result
from verl.environments.tool_calls import ParseFault, ToolCall
from verl.errors import error_text
from verl.utils.signals import RAISED_BY_CODE


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments.
        function: a function or coroutine function, called with keyword arguments, which it validates (`Tool.of`);
            raises `ToolError` for errors that the model caused.
        keeps_deadline: the function raises TimeoutError at `environment.step_timeout_s` itself.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    keeps_deadline: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A function with its name, docstring and annotations as a tool that validates its arguments."""
        tool = PythonTool(function, function.__name__)
        return cls(tool.name, tool.description, tool.parameters, tool)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolEnvironment(Environment):
    """One episode with tools. The calls of a turn run concurrently; results are returned in the order of the calls.

    Args:
        tools: by name.
        timeout_s: of each call.
        suffix: appended to each result if the prompt is not a chat.
        recovery: see `Environment`.
    """

    keeps_deadlines = True

    def __init__(self, tools: Mapping[str, Tool], timeout_s: float, suffix: str = "\n", recovery: Recovery = "restart"):
        self.tools, self.timeout_s, self.suffix, self.recovery = tools, timeout_s, suffix, recovery
        self.is_chat = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.is_chat = row.get("prompt_messages") is not None

    async def step(self, action: Action) -> StepResult:
        if not action.calls:
            return StepResult(terminated=True)
        calls = [self._call(call, f"{action.call_id}.{number}") for number, call in enumerate(action.calls)]
        answers = [await call for call in calls] if self.answers_at_once else await asyncio.gather(*calls)
        records = tuple(record for record, _ in answers)
        if self.is_chat or not all(isinstance(text, str) for _, text in answers):  # a text takes no images
            messages = [{"role": "tool", "name": record.name, "content": text} for record, text in answers]
            return StepResult(messages, calls=records)
        return StepResult("".join(f"{text}{self.suffix}" for _, text in answers), calls=records)

    async def _call(self, call: ToolCall | ParseFault, call_id: str) -> tuple[CallRecord, Any]:
        """The record of a call, and the content that the model reads."""
        if isinstance(call, ParseFault):
            return CallRecord(call_id, "", "tool_error", 0.0, call.reason), f"error: {call.reason}"
        tool, begin = self.tools[call.name], time.monotonic()
        outcome: Outcome = "ok"
        fault: Fault = "own"
        try:
            result = tool.function(**call.arguments)
            if inspect.isawaitable(result):
                if self.answers_at_once:
                    if inspect.iscoroutine(result):
                        result.close()
                    raise InfraError("a tool waits for something, and its environment says that it answers at once")
                result = await (result if tool.keeps_deadline else within(self.timeout_s, result))
            text = as_content(as_result(result), call.name)
        except RAISED_BY_CODE as error:
            outcome, text = self._failure(call, error)
            fault = getattr(error, "fault", "own")
        reason = "" if outcome == "ok" else text[:MAX_ERROR]
        return CallRecord(call_id, call.name, outcome, time.monotonic() - begin, reason, fault), text

    def _failure(self, call: ToolCall, error: BaseException) -> tuple[Outcome, str]:
        """The outcome of a call that raised, and the text that the model reads."""
        if isinstance(error, TimeoutError):
            return "timeout", f"error: {call.name} gave no answer within {self.timeout_s:g} s"
        if isinstance(error, ToolError):
            return "tool_error", f"error: {error}"
        if isinstance(error, (InfraError, OSError, MemoryError)):
            return "infra", error_text(error)
        return "tool_error", f"error: {error_text(error)}"  # of the tool, on the model's arguments


class ToolFactory(EnvironmentFactory):
    """Environments with the same tools.

    Args:
        options: with a `suffix`.
        answers_at_once: see `Environment`.
    """

    def __init__(self, options: Any, tools: Sequence[Tool], recovery: Recovery, answers_at_once: bool = False):
        self.options, self.answers_at_once = options, answers_at_once
        self.recovery: Recovery = recovery
        self.use(tools)

    def use(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.tool_parameters = {tool.name: tool.parameters for tool in tools}

    def make(self) -> ToolEnvironment:
        environment = ToolEnvironment(self.tools, self.options.step_timeout_s, self.options.suffix, self.recovery)
        environment.answers_at_once = self.answers_at_once
        return environment
