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
    """The named fields in the order they have; None chooses all."""
    if names is None:
        return dict(fields)
    if absent := [name for name in names if name not in fields]:
        raise absent_error(absent[0], fields)
    return {name: value for name, value in fields.items() if name in set(names)}


def absent_error(name: str, fields: Mapping[str, Any]) -> DataProtoValidationError:
    return DataProtoValidationError(
        f"There is no `{name}` in this batch, which has: {', '.join(fields) or 'no fields'}."
    )


def object_array(name: str, column: Any, source: Source) -> np.ndarray:
    """One Python object per row."""
    if isinstance(column, np.ndarray) and column.ndim:
        column = column if column.dtype == object and column.ndim == 1 else column.tolist()
    elif not isinstance(column, (list, tuple)):
        raise contract_error(name, "a list or an array with one entry per row", type(column).__name__, source)
    return column if isinstance(column, np.ndarray) else np.fromiter(column, dtype=object, count=len(column))


def row_indices(key: Any, rows: int) -> torch.Tensor:
    """Any index of several rows as int64 on the CPU, within [0, rows)."""
    if isinstance(key, slice):
        return torch.tensor(range(*key.indices(rows)), dtype=torch.int64)
    index = torch.as_tensor(key).detach().cpu() if len(key) else torch.zeros(0, dtype=torch.int64)
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
