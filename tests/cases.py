"""Which cases of a parametrised test run in `make test`, and which in `make exhaustive` only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def short_where(cases: Iterable[Any], is_short: Callable[[Any], bool]) -> list[Any]:
    """All cases; `make test` runs those for which the claim holds."""
    return [case if is_short(case) else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def each_value_once(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes; `make test` runs the fewest in which each value of each axis occurs."""
    places = [range(len(axis)) for axis in axes]
    shown = {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))}
    return [
        pytest.param(*(axis[n] for axis, n in zip(axes, at)), marks=[] if at in shown else [pytest.mark.exhaustive])
        for at in product(*places)
    ]
