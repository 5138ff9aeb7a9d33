"""Which keyword arguments a reward function takes, and whether the data has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from verl.rewards.results import reward_error


def named_parameters(function: Callable) -> dict[str, bool] | None:
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


def check_columns(
    accepted: Mapping[str, bool] | None, columns: Mapping[str, list], given: Sequence[str], function: Callable
) -> None:
    """Check that the data has what a function needs.

    Args:
        accepted: what `named_parameters` says of it.
        given: arguments that it gets besides columns.
    Raises:
        RewardError: an argument without a default is no column, and is not given.
    """
    for name, needed in (accepted or {}).items():
        if needed and name not in (*given, *columns):
            present = ", ".join(columns) or "none"
            found = f"no column {name!r} in the data. Its columns: {present}"
            raise reward_error(f"a column or a keyword argument {name!r}", found, function)
