"""Rewards by a Python function of the user, named in the configuration or passed as it is."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.contract.source import source_of
from verl.description import BuildContext, Description
from verl.errors import RewardError
from verl.rewards.base import Reward
from verl.rewards.locate import load_function, path_faults
from verl.rewards.results import reward_error


@dataclass(frozen=True, kw_only=True)
class RewardFunction(Description):
    """A function of the user, found by name:

        def my_reward(prompts: list[str], responses: list[str], **columns: list) -> list[float]

    It is called once per batch, by keyword, and returns one finite number per response. A function without `**columns`
    receives only those columns of the data that it names.

    Args:
        path: `package.module:function`, or `file.py:function` with the file relative to the working directory.
        kwargs: further keyword arguments of every call; they win over a column of the same name.
    """

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def faults(self) -> Iterator[str]:
        for name in ("prompts", "responses"):
            if name in self.kwargs:
                yield f"kwargs.{name}: is what the function is called with. Choose another name."
        yield from path_faults(self.path, self.kwargs)

    def build(self, context: BuildContext) -> CallableReward:
        return CallableReward(load_function(self.path), self.kwargs)

    @staticmethod
    def wrap(function: Callable, **kwargs: Any) -> CallableReward:
        """The reward that calls `function`, for use as a library."""
        return CallableReward(function, kwargs)


class CallableReward(Reward):
    """A reward that calls a function of the user.

    Args:
        function: as in `RewardFunction`.
        kwargs: further keyword arguments of every call.
    Raises:
        RewardError: `function` cannot be called, or does not take `prompts` and `responses`.
    """

    def __init__(self, function: Callable, kwargs: Mapping[str, Any] | None = None):
        if not callable(function):
            raise RewardError(f"reward is {function!r}: expected a function of prompts and responses.")
        self.function, self.kwargs = function, dict(kwargs or {})
        self._accepted = _named_parameters(function)
        for name in ("prompts", "responses", *self.kwargs):
            if self._accepted is not None and name not in self._accepted:
                raise reward_error(f"a function that takes `{name}`", f"it takes {', '.join(self._accepted)}", function)

    @property
    def producer(self) -> Callable:
        return self.function

    def rate(self, prompts: list[str], responses: list[str], **columns: list) -> Any:
        """What the function returns, unchecked.

        When it raises, it is called again on halves of the batch to find the first sample on which it does: on about
        as many rows in all as the batch has.

        Raises:
            RewardError: the function raised, or needs a column that the data lacks.
        """
        self._check_columns(columns)
        try:
            return self._call(prompts, responses, columns)
        except Exception as error:  # whatever user code raises is reported with its place
            sample = self._find_sample(prompts, responses, columns, type(error))
            expected = f"{len(responses)} finite numbers, one for each response"
            found = f"{type(error).__name__}: {error}{_own_line(error, self.function)}"
            raise reward_error(expected, found, self.function, prompts, responses, sample) from error

    def _call(self, prompts: list[str], responses: list[str], columns: Mapping[str, list]) -> Any:
        if self._accepted is not None:
            columns = {name: values for name, values in columns.items() if name in self._accepted}
        # Lists of its own, so that a function that changes them does not change what it is checked against.
        columns = {name: list(values) for name, values in columns.items()}
        return self.function(prompts=list(prompts), responses=list(responses), **{**columns, **self.kwargs})

    def _check_columns(self, columns: Mapping[str, list]) -> None:
        for name, needed in (self._accepted or {}).items():
            if needed and name not in ("prompts", "responses", *columns, *self.kwargs):
                present = ", ".join(columns) or "none"
                found = f"no column {name!r} in the data. Its columns: {present}"
                raise reward_error(f"a column or a keyword argument {name!r}", found, self.function)

    def _find_sample(self, prompts: list, responses: list, columns: Mapping[str, list], kind: type) -> int | None:
        """The first sample on which the function raises this kind of error by itself, or None."""
        if len(responses) == 1:
            return 0

        def raises(start: int, end: int) -> bool:
            part = {name: values[start:end] for name, values in columns.items()}
            return self._raises(prompts[start:end], responses[start:end], part, kind)

        start, end = 0, len(responses)
        while end - start > 1:
            middle = (start + end) // 2
            start, end = (start, middle) if raises(start, middle) else (middle, end)
        return start if raises(start, end) else None

    def _raises(self, prompts: list, responses: list, columns: Mapping[str, list], kind: type) -> bool:
        try:
            self._call(prompts, responses, columns)
        except Exception as error:  # noqa: BLE001 user code may raise anything
            return isinstance(error, kind)
        return False


def _named_parameters(function: Callable) -> dict[str, bool] | None:
    """The keyword arguments that a function names, each with whether it is required; None where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _own_line(error: Exception, function: Callable) -> str:
    """The innermost line of the user's own file that the error passed through."""
    file = source_of(function).file
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"\n  Raised at line {own[-1].lineno}: {own[-1].line}".rstrip(": ") if own else ""
