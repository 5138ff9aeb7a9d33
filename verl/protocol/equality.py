"""Equality of values of a batch, and the first difference between two.

Values are equal if kind, shape and every number agree. Numbers of Python and NumPy compare by value, within
each of bool, whole number, float and complex; texts, bytes, lists, tuples, dicts and sets are separate kinds;
arrays and tensors must have equal dtypes. NaN equals NaN, and 0.0 equals -0.0. Other objects are equal by `==`, or if
their pickles have equal content.
"""

from __future__ import annotations

import dataclasses
import io
import operator
import pickle
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch


class ValueDifference(NamedTuple):
    """The first place where two values differ.

    Attributes:
        path: location within the values, such as `['turns'][2]`; empty for the values themselves.
        left, right: the differing values there.
    """

    path: str
    left: Any
    right: Any

    def texts(self) -> tuple[str, str]:
        """Both values as text, shortened; with their types if these differ."""
        left, right = short(self.left), short(self.right)
        if type(self.left) is type(self.right) and left != right:
            return left, right
        return f"{left} ({_type_name(self.left)})", f"{right} ({_type_name(self.right)})"


def short(value: Any, limit: int = 120) -> str:
    """A value as a text of bounded length."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{list(value.shape)} {_type_name(value)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - repr of user objects
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of {str(value.dtype).removeprefix('torch.')}"
    return f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


# Whole columns


def column_difference(left: np.ndarray, right: np.ndarray) -> tuple[int | None, ValueDifference] | None:
    """Where two object arrays first differ: the row (None where their lengths do), and the place within it.

    Identical objects are found by address, plain numbers and texts are compared by NumPy, and only the rest is compared
    one by one.
    """
    if left is right:
        return None
    if left.shape != right.shape:
        return None, ValueDifference("", left, right)
    if all(map(operator.is_, left, right)) or _is_plainly_equal(left, right):
        return None
    for row in _unsettled(left, right).tolist():
        if (found := difference(left[row], right[row])) is not None:
            return row, found
    return None


# Types with reliable `==` if both sides have equal types; only NaN needs a second look.
_PLAIN = frozenset({str, bytes, int, bool, float, complex, type(None)})


class _ScalarKinds(dict):
    """A code for each scalar type that NumPy can compare in bulk; 0 for all other types."""

    def __missing__(self, kind: type) -> int:
        return 0


_SCALARS = _ScalarKinds(
    {
        kind: number
        for number, kinds in enumerate(
            [(type(None),), (bool, np.bool_), (int, np.int64), (float, np.float64), (str, np.str_), (bytes, np.bytes_),
             (np.float32,), (np.float16,), (np.int32,), (np.int16,), (np.int8,), (np.uint64,), (np.uint32,),
             (np.uint16,), (np.uint8,)],
            start=1,
        )
        for kind in kinds
    }
)  # fmt: skip


def _is_plainly_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two columns of texts, numbers, booleans or None are equal; False if a closer comparison is needed."""
    kinds = set(map(type, left))
    if not kinds <= _PLAIN or kinds != set(map(type, right)):
        return False
    if len(kinds) > 1 and list(map(type, left)) != list(map(type, right)):
        return False
    return bool((left == right).all())


def _unsettled(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Indices of the rows that need a full comparison."""
    rows = np.flatnonzero(~np.fromiter(map(operator.is_, left, right), bool, len(left)))
    a, b = left[rows], right[rows]
    kinds, others = (np.fromiter(map(_SCALARS.__getitem__, map(type, x)), np.int8, len(x)) for x in (a, b))
    (scalars,) = np.nonzero((kinds == others) & (kinds > 0))
    x, y = a[scalars], b[scalars]
    is_open = np.ones(len(rows), dtype=bool)
    is_open[scalars] = ~((x == y) | ((x != x) & (y != y))).astype(bool)
    (containers,) = np.nonzero(is_open & (kinds == 0) & (others == 0))
    for first in range(0, len(containers), _AT_ONCE):
        some = containers[first : first + _AT_ONCE]
        if len(some) > 1 and _are_equal_at_once(a[some].tolist(), b[some].tolist()):
            is_open[some] = False
    return rows[is_open]


_AT_ONCE = 4096  # rows compared in bulk
_SMALL = 2**12  # bytes; larger arrays are compared singly, without copies


def _are_equal_at_once(left: list[Any], right: list[Any]) -> bool:
    """Whether rows of lists, dicts, arrays or tensors have equal bytes; False is inconclusive."""
    kinds = set(map(type, left)) | set(map(type, right))
    try:
        if kinds <= {list, dict, tuple}:
            return _pickled(left) == _pickled(right)
        if kinds == {np.ndarray} and left[0].nbytes < _SMALL and not left[0].dtype.hasobject:
            return _forms(left) == _forms(right) and b"".join(left) == b"".join(right)
        if kinds == {torch.Tensor} and left[0].nbytes < _SMALL and left[0].ndim == 1:
            is_one_dtype = len({x.dtype for x in left}) == 1  # mixed dtypes would be converted and lose digits
            return is_one_dtype and _forms(left) == _forms(right) and torch.equal(torch.cat(left), torch.cat(right))
    except Exception:  # noqa: BLE001 - something in there does not pickle, or does not lie in one piece: it is compared by itself
        return False
    return False


def _forms(values: list[Any]) -> list[Any]:
    return [(x.dtype, x.shape) for x in values]


class _Pickler(pickle.Pickler):
    """A pickler that refuses arrays and tensors: comparing them is faster, and a tensor's pickle has its whole
    storage.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.Tensor, np.ndarray)):
            raise pickle.PicklingError("an array")
        return NotImplemented


def _pickled(values: list[Any]) -> memoryview:
    """Pickle values without memo references, which depend on object identity."""
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5)
    pickler.fast = True
    pickler.dump(values)
    return file.getbuffer()


# Single values


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal."""
    return difference(left, right) is None


def difference(left: Any, right: Any) -> ValueDifference | None:
    """The first difference between two values; None if they are equal."""
    return _difference(left, right, "", set())


_Pairs = set[tuple[int, int]]  # pairs in comparison, by identity, for values that contain themselves


def _difference(left: Any, right: Any, path: str, open_pairs: _Pairs) -> ValueDifference | None:
    if left is right:
        return None
    kind = _kind(left)
    if kind != _kind(right):
        return ValueDifference(path, left, right)
    if kind in _COMPARE_SCALARS:
        return None if _COMPARE_SCALARS[kind](left, right) else ValueDifference(path, left, right)
    if (pair := (id(left), id(right))) in open_pairs:
        return None
    open_pairs.add(pair)
    try:
        return _COMPARE.get(kind, _object_difference)(left, right, path, open_pairs)
    finally:
        open_pairs.discard(pair)


_BASES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("date", (np.datetime64, np.timedelta64)),  # timedelta64 is an integer type to NumPy
    ("bool", (bool, np.bool_)),
    ("whole number", (int, np.integer)),
    ("float", (float, np.float16, np.float32)),
    ("complex", (complex, np.complex64)),
    ("text", (str,)),
    ("bytes", (bytes,)),
    ("record", (np.void,)),
    ("list", (list,)),
    ("tuple", (tuple,)),
    ("dict", (dict,)),
    ("set", (set,)),
    ("frozenset", (frozenset,)),
    ("array", (np.ndarray,)),
    ("tensor", (torch.Tensor,)),
)
_KIND_OF: dict[type, Any] = {}


def _kind(value: Any) -> Any:
    """The kind that a value is compared as: a word, or its type."""
    kind = type(value)
    found = _KIND_OF.get(kind)
    if found is None:
        found = next((name for name, bases in _BASES if issubclass(kind, bases)), kind)
        if len(_KIND_OF) < 4096:  # limit for classes created dynamically
            _KIND_OF[kind] = found
    return found


def _same_float(left: Any, right: Any) -> bool:
    left, right = float(left), float(right)
    return left == right or (left != left and right != right)


def _same_complex(left: Any, right: Any) -> bool:
    left, right = complex(left), complex(right)
    return _same_float(left.real, right.real) and _same_float(left.imag, right.imag)


def _same_date(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left.dtype == right.dtype and left.view(np.int64) == right.view(np.int64)


_COMPARE_SCALARS: dict[Any, Callable[[Any, Any], bool]] = {
    type(None): lambda left, right: True,
    "bool": lambda left, right: bool(left) == bool(right),
    "whole number": lambda left, right: int(left) == int(right),
    "float": _same_float,
    "complex": _same_complex,
    "text": lambda left, right: bool(str.__eq__(left, right)),
    "bytes": lambda left, right: bool(bytes.__eq__(left, right)),
    "date": _same_date,
}


def _sequence_difference(
    left: Sequence[Any], right: Sequence[Any], path: str, open_pairs: _Pairs
) -> ValueDifference | None:
    if len(left) != len(right):
        return ValueDifference(path, left, right)
    kinds = list(map(type, left))
    if set(kinds) <= _PLAIN and kinds == list(map(type, right)) and list(left) == list(right):
        return None
    for place, (one, other) in enumerate(zip(left, right)):
        if (found := _difference(one, other, f"{path}[{place}]", open_pairs)) is not None:
            return found
    return None


def _dict_difference(left: dict, right: dict, path: str, open_pairs: _Pairs) -> ValueDifference | None:
    """The order of keys does not matter, unless keys are not equal to themselves."""
    if len(left) != len(right):
        return ValueDifference(path, left, right)
    if left.keys() != right.keys():
        keys = _sequence_difference(list(left), list(right), path, open_pairs)
        if keys is not None:
            return ValueDifference(path, left, right)
        pairs: Iterable[tuple[Any, Any, Any]] = zip(left, left.values(), right.values())
    else:
        if not all(type(key) is str for key in left):
            theirs = {key: key for key in right}
            if any(_kind(key) != _kind(theirs[key]) for key in left):
                return ValueDifference(path, left, right)
        pairs = ((key, value, right[key]) for key, value in left.items())
    for key, one, other in pairs:
        if (found := _difference(one, other, f"{path}[{short(key, 40)}]", open_pairs)) is not None:
            return found
    return None


def _set_difference(left: Any, right: Any, path: str, open_pairs: _Pairs) -> ValueDifference | None:
    """Compare sets; NaN counts as often as the set has NaN objects."""
    nans, others = ({x for x in some if x != x} for some in (left, right))
    is_same = len(nans) == len(others) and left - nans == right - others
    if is_same and not all(type(x) is str for x in left):
        theirs = {x: x for x in right - others}
        is_same = all(_kind(x) == _kind(theirs[x]) for x in left - nans)
    return None if is_same else ValueDifference(path, left, right)


def array_difference(left: np.ndarray, right: np.ndarray, path: str, open_pairs: _Pairs) -> ValueDifference | None:
    """Where two arrays of any dtype first differ; the order of bytes does not count."""
    if left.dtype.newbyteorder("=") != right.dtype.newbyteorder("=") or left.shape != right.shape:
        return ValueDifference(path, left, right)
    if left.dtype == object:
        if _is_plainly_equal(left.reshape(-1), right.reshape(-1)):
            return None
        for place in np.ndindex(left.shape):
            if (found := _difference(left[place], right[place], f"{path}{_at(place)}", open_pairs)) is not None:
                return found
        return None
    if isinstance(left, np.ma.MaskedArray) or isinstance(right, np.ma.MaskedArray):
        pairs = [(np.ma.getmaskarray(left), np.ma.getmaskarray(right)), (np.ma.filled(left), np.ma.filled(right))]
        return next((d for x, y in pairs if (d := array_difference(x, y, path, open_pairs)) is not None), None)
    if left.dtype.names:
        for name in left.dtype.names:
            if (found := array_difference(left[name], right[name], f"{path}[{name!r}]", open_pairs)) is not None:
                return found
        return None
    is_same = _same_entries(np.asarray(left), np.asarray(right))
    if is_same.all():
        return None
    place = tuple(int(x) for x in np.argwhere(~is_same)[0])
    return ValueDifference(f"{path}{_at(place)}", left[place], right[place])


def _same_entries(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[...] bool, for arrays of one dtype and one shape."""
    kind = left.dtype.kind
    if kind == "V":  # raw bytes
        is_same = [x.tobytes() == y.tobytes() for x, y in zip(left.reshape(-1), right.reshape(-1))]
        return np.array(is_same, dtype=bool).reshape(left.shape)
    if kind == "c":
        parts = ((np.real(left), np.real(right)), (np.imag(left), np.imag(right)))
        return np.logical_and(*(_same_entries(one, other) for one, other in parts))
    is_same = left == right
    if kind in "mM":
        is_same = is_same | (np.isnat(left) & np.isnat(right))
    elif kind == "f" and not np.all(is_same):
        is_same = is_same | ((left != left) & (right != right))
    return np.asarray(is_same)


def _record_difference(left: np.void, right: np.void, path: str, open_pairs: _Pairs) -> ValueDifference | None:
    return array_difference(np.asarray(left), np.asarray(right), path, open_pairs)


def tensor_difference(
    left: torch.Tensor, right: torch.Tensor, path: str = "", open_pairs: _Pairs | None = None
) -> ValueDifference | None:
    """Where two tensors first differ; gradients and devices do not count."""
    place = differing_place(left, right)
    if place is None:
        return None
    if not place and not (left.ndim == right.ndim == 0 and left.dtype == right.dtype):
        return ValueDifference(path, left, right)
    left, right = left.detach()[place], right.detach()[place]
    return ValueDifference(f"{path}{_at(place)}", _number_of(left), _number_of(right))


def differing_place(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    """The index of the first entry that differs; empty where dtypes or shapes do, or there is no such index."""
    if left is right:
        return None
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return ()
    if left.is_meta or right.is_meta:  # no data
        return None if left.is_meta and right.is_meta else ()
    if left.layout != torch.strided or left.is_quantized or left.is_nested:
        return None if same(_reduced(left), _reduced(right)) else ()
    left, right = left.detach(), right.detach().to(left.device)
    if _is_one_memory(left, right):
        return None
    try:
        if torch.equal(left, right):
            return None
        is_same = _same_numbers(left, right)
    except NotImplementedError:  # dtypes without operations: byte by byte
        one, other = (x.contiguous().reshape(-1).view(torch.uint8).view(-1, x.itemsize) for x in (left, right))
        is_same = (one == other).all(dim=1).view(left.shape)
    if bool(is_same.all()):
        return None
    return tuple((~is_same).nonzero()[0].tolist())


def _same_numbers(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.is_complex():
        left, right = (torch.view_as_real(x.resolve_conj()) for x in (left, right))
        return _same_numbers(left, right).all(dim=-1)
    is_same = left == right
    return is_same | (torch.isnan(left) & torch.isnan(right)) if left.is_floating_point() else is_same


def _is_one_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.stride() != right.stride() or left.is_conj() != right.is_conj() or left.is_neg() != right.is_neg():
        return False
    return left.numel() == 0 or left.data_ptr() == right.data_ptr() != 0


def _number_of(entry: torch.Tensor) -> Any:
    try:
        return entry.item() if entry.numel() == 1 else entry
    except RuntimeError:  # dtypes without a Python number
        return entry


def _object_difference(left: Any, right: Any, path: str, open_pairs: _Pairs) -> ValueDifference | None:
    """Compare objects of one class, whose `==` may not handle NaN and arrays, or only compare addresses."""
    here = ValueDifference(path, left, right)
    if isinstance(left, (type, FunctionType, BuiltinFunctionType, ModuleType)):
        return here
    if not dataclasses.is_dataclass(left) and type(left).__eq__ is not object.__eq__ and _says_equal(left, right):
        return None
    try:
        parts, others = _reduced(left), _reduced(right)
    except Exception:  # noqa: BLE001 - it cannot be pickled, so its content is unknown
        return here
    if isinstance(parts, str) or isinstance(others, str):
        return None if parts == others else here
    return None if _sequence_difference(parts, others, path, open_pairs) is None else here


def _reduced(value: Any) -> Any:
    """The content of the value's pickle, with items in lists; for a global its name."""
    made = value.__reduce_ex__(4)
    if isinstance(made, str):
        return made
    return [*made[:3], *(None if items is None else list(items) for items in made[3:5]), *made[5:]]


def _says_equal(left: Any, right: Any) -> bool:
    try:
        answer = left == right
    except Exception:  # noqa: BLE001 - e.g. objects with arrays
        return False
    return answer is True or (isinstance(answer, np.bool_) and bool(answer))


def _at(place: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, place))}]" if place else ""


_COMPARE: dict[Any, Callable[[Any, Any, str, _Pairs], ValueDifference | None]] = {
    "list": _sequence_difference,
    "tuple": _sequence_difference,
    "dict": _dict_difference,
    "set": _set_difference,
    "frozenset": _set_difference,
    "array": array_difference,
    "tensor": tensor_difference,
    "record": _record_difference,
}
