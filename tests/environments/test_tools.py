"""Functions as tools: their annotations become JSON schemas, arguments are validated, and results become text."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional, Union

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from verl.environments.base import Action, EnvironmentDescription, EnvironmentFactory
from verl.environments.calls import CallRunner
from verl.environments.hosted import PythonTools
from verl.environments.hosts.python_tools import PythonTool, as_text
from verl.environments.tool_calls import ToolCall
from verl.environments.tools import Tool, ToolEnvironment
from verl.errors import ConfigError, RolloutError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: float = 0.0


class Box(BaseModel):
    size: int


SEEN = []


def everything(
    maybe: Optional[int],  # noqa: UP045 - as users write it
    either: Union[int, str],  # noqa: UP007
    bar: float | None,
    word: Literal["a", "b"],
    colour: Colour,
    pair: tuple[int, str],
    items: Sequence[int],
    point: Point,
    box: Box,
    day: datetime.date,
    count: int = 3,
) -> str:
    """Takes everything.

    bar: a number or nothing
    """
    SEEN.append((maybe, either, bar, word, colour, pair, items, point, box, day, count))
    return "ok"


async def double(number: int) -> int:
    return 2 * number


GOOD = {
    "maybe": None, "either": "x", "bar": 2, "word": "a", "colour": "blue", "pair": [1, "b"], "items": [1, 2],
    "point": {"x": 1}, "box": {"size": 2}, "day": "2026-11-23",
}  # fmt: skip


def answers(*calls):
    tools = {tool.name: tool for tool in (Tool.of(everything), Tool.of(double))}
    step = asyncio.run(ToolEnvironment(tools, 5.0).step(Action("", tuple(ToolCall(*call) for call in calls))))
    return [record.outcome for record in step.calls], step.observation.splitlines()


def test_annotations_become_a_json_schema():
    schema = Tool.of(everything).parameters
    properties = schema["properties"]
    assert properties["maybe"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert properties["either"] == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert properties["bar"]["description"] == "a number or nothing"
    assert properties["word"] == {"type": "string", "enum": ["a", "b"]}
    assert properties["count"] == {"type": "integer", "default": 3}
    assert properties["items"] == {"type": "array", "items": {"type": "integer"}}
    assert schema["$defs"]["Colour"]["enum"] == ["red", "blue"]
    assert schema["$defs"]["Point"]["required"] == ["x"]
    assert "count" not in schema["required"]
    assert "title" not in json.dumps(schema)


def test_arguments_are_validated_into_the_annotated_types():
    outcomes, lines = answers(("everything", GOOD), ("double", {"number": 4}))
    assert (outcomes, lines) == (["ok", "ok"], ["ok", "8"])
    day = datetime.date(2026, 11, 23)
    assert SEEN[-1] == (None, "x", 2.0, "a", Colour.BLUE, (1, "b"), [1, 2], Point(1), Box(size=2), day, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("double", {}, "'number' of double: Missing required argument. It takes number"),
        ("double", {"number": 1, "other": 2}, "'other' of double: Unexpected keyword argument"),
        ("double", {"number": "four"}, "'number' of double: Input should be a valid integer"),
        ("everything", GOOD | {"word": "c"}, "'word' of everything: Input should be 'a' or 'b'"),
        ("everything", GOOD | {"colour": "green"}, "'colour' of everything"),
        ("everything", GOOD | {"point": {"x": "no"}}, "'point.x' of everything"),
        ("everything", GOOD | {"pair": [1]}, "'pair.1' of everything"),
        ("everything", GOOD | {"box": []}, "'box' of everything"),
    ],
)
def test_wrong_arguments_are_told_to_the_model(name, arguments, said):
    outcomes, lines = answers((name, arguments))
    assert outcomes == ["tool_error"]
    assert said in lines[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"), (None, "null"), (True, "true"), ({"a": [1, "é"]}, '{"a": [1, "é"]}'), (np.int64(3), "3"),
        (np.float32(0.5), "0.5"), (np.bool_(True), "true"), (np.arange(3), "[0, 1, 2]"), (torch.ones(2), "[1.0, 1.0]"),
        ({"a": np.int8(1)}, '{"a": 1}'), (datetime.date(2026, 1, 2), "2026-01-02"), (decimal.Decimal("1.50"), "1.50"),
        ({"b", "a"}, '["a", "b"]'), (b"bytes", "bytes"), (b"\xff", "\ufffd"), ([b"a"], '["a"]'),
        ([b"\xff"], '["_w=="]'),
        (Colour.RED, "red"), (Point(1), '{"x": 1, "y": 0.0}'), (Box(size=2), '{"size": 2}'), (Path("a/b"), "a/b"),
        ((1, 2), "[1, 2]"), ("\ud800", "?"), (["\ud800"], '["?"]'), (float("inf"), "Infinity"),
    ],
    ids=range(25),
)  # fmt: skip
def test_results_become_text(value, text):
    assert as_text(value) == text
    as_text(value).encode()


def ring():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize("value", [object(), ring(), {"a": object}, [{Point: 1}]], ids=range(4))
def test_a_result_that_cannot_be_text_is_the_tools_error(value):
    def give() -> object:
        return value

    with pytest.raises(TypeError, match="cannot be written as JSON"):
        as_text(value)
    step = asyncio.run(ToolEnvironment({"give": Tool.of(give)}, 5.0).step(Action("", (ToolCall("give", {}),))))
    assert [record.outcome for record in step.calls] == ["tool_error"]


def takes_more(*values: int):
    return values


def takes_a_class(x: ring.__class__):
    return x


def takes_what_is_missing(x: Missing):  # noqa: F821
    return x


double_it = lambda number: 2 * number  # noqa: E731


@pytest.mark.parametrize(
    ("function", "name", "said"),
    [
        (double_it, "double_it", "double_it is a lambda: write a tool as `def double_it"),
        (double, "twice", "twice is the function 'double'"),
        (takes_more, "takes_more", r"takes_more takes \*values: a tool names its arguments"),
        (takes_a_class, "takes_a_class", "takes_a_class has an argument without a JSON schema"),
        (takes_what_is_missing, "takes_what_is_missing", "argument without a JSON schema: .*Missing"),
    ],
    ids=range(5),
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function, name, said):
    with pytest.raises(TypeError, match=said):
        PythonTool(function, name)


def test_a_file_with_an_unnamed_function_is_refused_before_the_run(tmp_path):
    (tmp_path / "tools.py").write_text("def add(a: int): return a\ndouble = lambda x: 2 * x")
    with pytest.raises((ConfigError, RolloutError), match="double is a lambda: write a tool as `def double"):
        PythonTools(path=str(tmp_path / "tools.py")).tool_schemas()


async def leaves():
    await asyncio.sleep(0)
    raise SystemExit(3)


async def answers_later():
    return "later"


@pytest.mark.parametrize(
    ("function", "at_once", "outcome", "said"),
    [(leaves, False, "tool_error", "SystemExit"), (answers_later, True, "infra", "answers at once")],
)
def test_a_tool_that_breaks_the_rules_is_an_error_of_its_call_and_ends_no_other(function, at_once, outcome, said):
    tools = {"tool": Tool("tool", "", {}, function), "good": Tool("good", "", {}, lambda: "fine")}
    runner = CallRunner(EnvironmentFactory(), EnvironmentDescription())
    runner.begin_play()
    for name, expected in (("tool", outcome), ("good", "ok")):
        environment = ToolEnvironment(tools, timeout_s=60.0)
        environment.answers_at_once = at_once
        runner.step(0, 0, name, environment, Action("x", (ToolCall(name, {}),), name))
        (result,) = runner.take(60.0)
        (call,) = result.value.calls
        assert call.outcome == expected
        assert said in call.error or name == "good"
