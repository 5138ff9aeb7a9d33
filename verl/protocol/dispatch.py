"""Decorators that declare how a call of a role's method is distributed over the processes of the role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dispatch:
    """Distribution of a call over the processes of a group.

    Attributes:
        splits_rows: whether the first argument is a DataProto whose rows are split over the processes, balanced by
            tokens; otherwise every process receives all arguments.
        concatenates: whether the results are DataProtos that are concatenated in the order of the rows; otherwise the
            result of the call is that of rank 0.
        gathers_list: whether the result of the call is a list of results by rank.
    """

    splits_rows: bool
    concatenates: bool
    gathers_list: bool = False


def by_rows(method: Callable) -> Callable:
    """Each process works on its share of the rows; results are rows, which are joined."""
    method.dispatch = Dispatch(splits_rows=True, concatenates=True)  # type: ignore[attr-defined]
    return method


def by_rows_to_one(method: Callable) -> Callable:
    """Each process works on its share of the rows; the processes reduce the result themselves."""
    method.dispatch = Dispatch(splits_rows=True, concatenates=False)  # type: ignore[attr-defined]
    return method


def on_all(method: Callable) -> Callable:
    """Every process receives all arguments; the result is that of rank 0."""
    method.dispatch = Dispatch(splits_rows=False, concatenates=False)  # type: ignore[attr-defined]
    return method


def on_each(method: Callable) -> Callable:
    """Every process receives all arguments; the result is a list by rank, also for a single process."""
    method.dispatch = Dispatch(splits_rows=False, concatenates=False, gathers_list=True)  # type: ignore[attr-defined]
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
