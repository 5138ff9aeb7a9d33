"""What a batch is given: columns of tensors or objects, which it keeps read-only, and indices of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.contract.source import Source, contract_error
from verl.errors import DataProtoValidationError

Indices = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


class ReadOnlyFields(dict):
    """The fields of a batch by name: reads like a dict, refuses every change."""

    def _refuse(self, *args, **kwargs):
        raise DataProtoValidationError(
            "The fields of a DataProto are read-only: add or replace them with data.union(DataProto.from_dict({...})), "
            "which checks them and returns a new batch; drop them with data.select(...) or data.pop(...)."
        )

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = _refuse
    update: Any = _refuse
    setdefault: Any = _refuse

    def __missing__(self, name):
        raise absent_error(name, self)

    def __reduce__(self):
        return dict, (dict(self),)


def only(fields: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The named fields in the order they have; None chooses all, and one name may stand by itself."""
    if names is None:
        return dict(fields)
    names = [names] if isinstance(names, str) else names
    if absent := [name for name in names if name not in fields]:
        raise absent_error(absent[0], fields)
    return {name: value for name, value in fields.items() if name in set(names)}


def absent_error(name: str, fields: Mapping[str, Any]) -> DataProtoValidationError:
    return DataProtoValidationError(
        f"There is no `{name}` in this batch, which has: {', '.join(fields) or 'no fields'}."
    )


def object_array(name: str, column: Any, source: Source) -> np.ndarray:
    """One Python object per row. Numbers of NumPy become Python's; dates and records, for which Python has none that
    hold as much, stay NumPy's."""
    if isinstance(column, np.ndarray) and column.ndim:
        if type(column) is np.ndarray and column.dtype == object and column.ndim == 1:
            return column
        column = list(column) if column.dtype.kind in "mMV" else column.tolist()
    elif not isinstance(column, (list, tuple)):
        raise contract_error(name, "a list or an array with one entry per row", type(column).__name__, source)
    return np.fromiter(column, dtype=object, count=len(column))


def row_number(key: Any) -> int | None:
    """The row that a single index names; None where it is something else, such as a list of rows.

    Raises:
        DataProtoValidationError: a truth value, or a number that is not whole.
    """
    if isinstance(key, (bool, np.bool_)):
        raise DataProtoValidationError(f"{key} is no row: a mask has one truth value for each row.")
    if isinstance(key, (int, np.integer)):
        return int(key)
    if getattr(key, "ndim", None) != 0:
        return None
    number = key.item()
    if isinstance(number, bool) or not isinstance(number, int):
        raise DataProtoValidationError(f"{number!r} is no row: rows are chosen by whole numbers.")
    return number


def row_indices(key: Any, rows: int) -> torch.Tensor:
    """Any index of several rows as int64 on the CPU, within [0, rows)."""
    if isinstance(key, slice):
        return torch.tensor(range(*key.indices(rows)), dtype=torch.int64)
    index = _as_tensor(key)
    if index.dtype == torch.bool:
        if index.shape != (rows,):
            raise DataProtoValidationError(
                f"A mask of shape {list(index.shape)} chooses among rows: expected [{rows}]."
            )
        return index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex():
        raise DataProtoValidationError(
            f"Rows are chosen by whole numbers in one dim, not {list(index.shape)} {index.dtype}."
        )
    index = index.to(torch.int64)
    outside = (index < -rows) | (index >= rows)
    if outside.any():
        raise IndexError(f"row {int(index[outside][0])} of a batch of {rows} rows")
    return torch.where(index < 0, index + rows, index)


def _as_tensor(key: Any) -> torch.Tensor:
    if isinstance(key, torch.Tensor):
        return key.detach().cpu()
    try:
        if isinstance(key, np.ndarray) and key.dtype != object:
            return torch.from_numpy(key.astype(key.dtype.newbyteorder("="), order="C"))  # a copy: it may be read-only
        entries = list(key)
        return torch.as_tensor(entries) if entries else torch.zeros(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataProtoValidationError(
            f"Rows are chosen by whole numbers or a mask, not by {key!r}: {error}."
        ) from error
