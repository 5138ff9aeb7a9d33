"""Decorators that say how the call of a role's method is divided over the processes that hold the role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dispatch:
    """The way a call travels.

    Attributes:
        divides: the first argument is a DataProto whose rows are divided over the processes, balanced by tokens;
            otherwise every process receives all arguments.
        joins: the results are DataProtos to be joined again in the order of the rows; otherwise the result of rank 0
            is the result of the call (the processes agree on it).
        gathers: the result of the call is a list of the results, by rank.
    """

    divides: bool
    joins: bool
    gathers: bool = False


def by_rows(method: Callable) -> Callable:
    """Each process works on its share of the rows; the answers are rows again."""
    method.dispatch = Dispatch(divides=True, joins=True)  # type: ignore[attr-defined]
    return method


def by_rows_to_one(method: Callable) -> Callable:
    """Each process works on its share of the rows; they reduce the answer among themselves."""
    method.dispatch = Dispatch(divides=True, joins=False)  # type: ignore[attr-defined]
    return method


def on_all(method: Callable) -> Callable:
    """Every process does the same; rank 0 answers."""
    method.dispatch = Dispatch(divides=False, joins=False)  # type: ignore[attr-defined]
    return method


def on_each(method: Callable) -> Callable:
    """Every process answers for itself: a list by rank, of one where there is one process."""
    method.dispatch = Dispatch(divides=False, joins=False, gathers=True)  # type: ignore[attr-defined]
    return method


def dispatch_of(worker_type: type, method: str) -> Dispatch:
    """The dispatch of a worker's method.

    Raises:
        AttributeError: the worker has no such method, or it cannot be called from the driver.
    """
    dispatch: Any = getattr(getattr(worker_type, method), "dispatch", None)
    if dispatch is None:
        raise AttributeError(f"{worker_type.__name__}.{method} cannot be called from the driver: it has no dispatch.")
    return dispatch
