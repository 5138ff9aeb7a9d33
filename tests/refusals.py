"""What an error blames: tests ask for its kind and for that; the wording of messages is pinned in one table per group.

A table is a parametrised test that compares whole messages, such as `tests/test_messages.py` for components.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from verl.errors import BadCheckpoint, ConfigError, DataProtoValidationError, VerlError, WeightSyncError, WorkerError


def blamed(error: BaseException) -> tuple[str | int | None, ...]:
    """Config paths, files, the field of a batch, tensors, or the call and its rank; what the error's kind names."""
    match error:
        case ConfigError():
            return error.paths
        case BadCheckpoint():
            return tuple(fault.file for fault in error.faults)
        case DataProtoValidationError():
            return (error.field,) if error.row is None else (error.field, error.row)
        case WeightSyncError():
            return error.names
        case WorkerError():
            return (error.call, error.rank)
    raise TypeError(f"{type(error).__name__} names nothing by a field of its own")


@contextmanager
def refusal(*names: str | int | None, kind: type[VerlError] = ConfigError) -> Iterator[pytest.ExceptionInfo[VerlError]]:
    """What runs within raises an error of this kind that blames these and nothing else."""
    with pytest.raises(kind) as caught:
        yield caught
    assert blamed(caught.value) == names, str(caught.value)
