"""Which cases of a parametrised test run in `make test`, and which in `make exhaustive` only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def exhaustive(*cases: Any) -> list[Any]:
    """Cases of one argument that `make exhaustive` alone runs."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def short_where(cases: Iterable[Any], is_short: Callable[[Any], bool]) -> list[Any]:
    """All cases; `make test` runs those for which the claim holds."""
    return [case if is_short(case) else exhaustive(case)[0] for case in cases]


def each_value_once(*axes: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    """All combinations of the axes; `make test` runs the fewest in which each value of each axis occurs.

    Args:
        axes: the values of each; a mapping gives them names.
    """
    named = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes]
    shown = {tuple(list(axis)[n % len(axis)] for axis in named) for n in range(max(map(len, named)))}
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, names)),
            id=" ".join(names) if all(isinstance(axis, Mapping) for axis in axes) else None,
            marks=[] if names in shown else [pytest.mark.exhaustive],
        )
        for names in product(*named)
    ]


def has_tests(request: pytest.FixtureRequest, mark: str) -> bool:
    """Whether tests of the file of a fixture run that have this mark."""
    return any(item.path == request.path and item.get_closest_marker(mark) for item in request.session.items)
