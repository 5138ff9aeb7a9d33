"""Equality of fields and facts of a batch, and the first difference between two.

Tensors are equal if dtype, shape and every number are. JSON values are equal if types and numbers are: 1, 1.0 and True
all differ, and NaN equals NaN. Other values are equal if they are one object, or by `==`.
"""

from __future__ import annotations

import json
import operator
from typing import Any, NamedTuple

import numpy as np
import torch

from verl.protocol.serialization import raw_bytes


class ValueDifference(NamedTuple):
    """The first difference between two values.

    Attributes:
        path: location within the values, such as `['turns'][2]`; empty for the values themselves.
        left, right: the differing values there.
    """

    path: str
    left: Any
    right: Any

    def texts(self) -> tuple[str, str]:
        """Both values as text, shortened; with their types if these differ."""
        left, right = _shortened(self.left), _shortened(self.right)
        if type(self.left) is type(self.right) and left != right:
            return left, right
        return f"{left} ({_type_name(self.left)})", f"{right} ({_type_name(self.right)})"


def _shortened(value: Any, limit: int = 120) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{list(value.shape)} {_type_name(value)}"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of {str(value.dtype).removeprefix('torch.')}"
    return f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def column_difference(left: np.ndarray, right: np.ndarray) -> tuple[int | None, ValueDifference] | None:
    """The first row in which two columns of JSON values differ, with the difference; None as the row if their lengths
    do.
    """
    if left is right:
        return None
    if left.shape != right.shape:
        return None, ValueDifference("", left, right)
    if all(map(operator.is_, left, right)) or _is_equal_in_bulk(left, right):
        return None
    for row, (a, b) in enumerate(zip(left.tolist(), right.tolist())):
        if (differing := value_difference(a, b)) is not None:
            return row, differing
    return None


_SCALARS = {str, int, bool, float, type(None)}
_AT_ONCE = 4096  # rows


def _is_equal_in_bulk(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two columns of JSON values are equal, compared by NumPy or as JSON texts; False is inconclusive."""
    kinds = list(map(type, left))
    if kinds != list(map(type, right)):
        return False
    if _SCALARS.issuperset(kinds):
        return bool((left == right).all())
    parts = (slice(first, first + _AT_ONCE) for first in range(0, len(left), _AT_ONCE))
    return all(json.dumps(left[part].tolist()) == json.dumps(right[part].tolist()) for part in parts)


def value_difference(left: Any, right: Any) -> ValueDifference | None:
    """The first difference between two JSON values, tensors, arrays or objects; None if they are equal."""
    if left is right:
        return None
    if type(left) is not type(right):
        return ValueDifference("", left, right)
    if isinstance(left, torch.Tensor):
        return tensor_difference(left, right)
    if isinstance(left, dict) and left.keys() == right.keys():
        return _first_difference((key, value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)) and len(left) == len(right):
        return _first_difference(zip(range(len(left)), left, right))
    if isinstance(left, np.ndarray):
        is_equal = left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    else:
        is_equal = not isinstance(left, (dict, list, tuple)) and (left == right or (left != left and right != right))
    return None if is_equal else ValueDifference("", left, right)


def _first_difference(items: Any) -> ValueDifference | None:
    for key, left, right in items:
        if (differing := value_difference(left, right)) is not None:
            return differing._replace(path=f"[{_shortened(key, 40)}]{differing.path}")
    return None


def tensor_difference(left: torch.Tensor, right: torch.Tensor) -> ValueDifference | None:
    """The first entry in which two tensors differ; gradients and devices do not count."""
    if left is right:
        return None
    if left.dtype != right.dtype or left.shape != right.shape:
        return ValueDifference("", left, right)
    left, right = left.detach(), right.detach().to(left.device)
    try:
        if torch.equal(left, right):
            return None
    except NotImplementedError:  # dtypes without operations
        pass
    differs = (raw_bytes(left) != raw_bytes(right)).view(-1, left.itemsize).any(dim=1)  # equal bytes: the same NaN
    if not differs.any():
        return None
    entry = tuple(int(i) for i in np.unravel_index(int(differs.nonzero()[0]), left.shape))
    return ValueDifference(f"[{', '.join(map(str, entry))}]" if entry else "", *_numbers(left[entry], right[entry]))


def _numbers(*entries: torch.Tensor) -> tuple[Any, ...]:
    try:
        return tuple(entry.item() for entry in entries)
    except (NotImplementedError, RuntimeError):  # dtypes without a Python number
        return entries
