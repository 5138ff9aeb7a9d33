"""Batches of every kind of tensor and column, and what it takes for two of them to be the same."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from verl.protocol import DataProto

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint64, torch.complex64,
    torch.complex128,
]  # fmt: skip
NAMES = [
    "__rest__",
    "__metadata__",
    "__verl__",
    "__field_0__",
    "columns",
    "group",
    "score",
    "step",
    "",
    "a/b",
    "ä·字",
    "\0",
]


def exact(value: Any) -> Any:
    """A value as nested tuples that are equal where types and numbers are; NaN is NaN, and -0.0 is 0.0."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), _numbers(value)
    if isinstance(value, np.generic):
        return (kind, *exact(np.asarray(value))[1:])
    if isinstance(value, np.ndarray):
        flat, dtype = value.reshape(-1), str(value.dtype.newbyteorder("="))  # which pickle changes, too
        if value.dtype.names:
            return kind, dtype, value.shape, tuple(exact(flat[name]) for name in value.dtype.names)
        held = [exact(x) for x in flat] if value.dtype == object else [_number(x) for x in flat.tolist()]
        return kind, dtype, value.shape, tuple(held)
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(exact, value))
    if isinstance(value, dict):
        return kind, frozenset((key, exact(item)) for key, item in value.items())
    return kind, _number(value)


def alike(value: Any) -> Any:
    """The same where NumPy's scalars count as Python's numbers of that kind, as they do in a union."""
    if isinstance(value, (np.datetime64, np.timedelta64, np.void)):
        return exact(value)
    if isinstance(value, np.generic):
        return exact(value.item())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(alike, value))
    if isinstance(value, dict):
        return "dict", frozenset((key, alike(item)) for key, item in value.items())
    if isinstance(value, np.ndarray) and value.dtype == object:
        return "objects", value.shape, tuple(map(alike, value.reshape(-1)))
    return exact(value)


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(_number(x) for x in tensor.detach().resolve_conj().resolve_neg().reshape(-1).tolist())


def _number(x: Any) -> Any:
    if isinstance(x, float):
        return "nan" if math.isnan(x) else x + 0.0
    if isinstance(x, complex):
        return _number(x.real), _number(x.imag)
    return x


def assert_identical(found: DataProto, expected: DataProto, told: str = "") -> None:
    """The same fields in the same order, with values of the same types, dtypes and numbers."""
    assert list(found.batch) == list(expected.batch)
    assert list(found.non_tensor_batch) == list(expected.non_tensor_batch)
    assert len(found) == len(expected)
    for name in expected.batch:
        assert exact(found[name]) == exact(expected[name]), (told, name)
    for name in expected.non_tensor_batch:
        assert exact(found[name].tolist()) == exact(expected[name].tolist()), (told, name, found[name], expected[name])
    assert exact(found.meta_info) == exact(expected.meta_info), (told, found.meta_info, expected.meta_info)


@st.composite
def tensors(draw, rows: int, dtypes: list[torch.dtype] = DTYPES) -> torch.Tensor:
    """[rows ...] of any dtype, as any kind of view."""
    dtype = draw(st.sampled_from(dtypes))
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    kind = draw(st.sampled_from(["whole", "strided", "transposed", "expanded", "slice", "conjugate", "gradient"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))

    def made(*sizes: int) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.randint(0, 2, sizes, generator=generator).bool()
        x = torch.randint(0, 5, sizes, generator=generator).to(torch.float64)
        if dtype.is_floating_point or dtype.is_complex:
            x[x == 1], x[x == 2] = math.nan, -0.0
        return x.to(dtype) * (1j if dtype.is_complex else 1) if dtype.is_complex else x.to(dtype)

    if kind == "strided":
        return made(*(2 * size for size in shape))[tuple(slice(None, None, 2) for _ in shape)]
    if kind == "transposed":
        return made(*reversed(shape)).permute(*reversed(range(len(shape))))
    if kind == "expanded":
        return made(1, *shape[1:]).expand(shape)
    if kind == "slice":
        return made(rows + 50, *shape[1:])[7 : 7 + rows]
    if kind == "conjugate" and dtype.is_complex:
        return made(*shape).conj() if draw(st.booleans()) else made(*shape).conj().imag
    if kind == "gradient" and dtype in (torch.float32, torch.bfloat16):
        return made(*shape).requires_grad_() * draw(st.sampled_from([1, 2]))
    return made(*shape)


_RECORD = np.dtype([("a", "<f4"), ("b", "<U3"), ("c", "<i2", (2,))])
_SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.complex_numbers()
    | st.text(max_size=4) | st.binary(max_size=3) | st.sampled_from([0.0, -0.0, 1.0, float("nan"), 2**4100, "", b""])
    | npst.from_dtype(np.dtype("float32")) | npst.from_dtype(np.dtype("float64")) | npst.from_dtype(np.dtype("int8"))
    | npst.from_dtype(np.dtype("bool")) | npst.from_dtype(np.dtype("M8[ns]")) | npst.from_dtype(np.dtype("m8[s]"))
    | npst.from_dtype(np.dtype("complex64")) | st.text(max_size=3).map(lambda x: np.str_(x.rstrip("\0")))
    | st.binary(max_size=3).map(lambda x: np.bytes_(x.rstrip(b"\0")))  # whose pickles have no zeros at their end
)  # fmt: skip
_OF_ARRAYS = ("f4", "f8", "f2", "i8", "u1", "?", "c8", "M8[ms]", "U3", "S2", ">i4")
_ARRAYS = npst.arrays(
    st.sampled_from([*map(np.dtype, _OF_ARRAYS), _RECORD]),
    npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)  # fmt: skip


@functools.cache
def values() -> st.SearchStrategy:
    """Anything that a row of a column may hold and that a file keeps."""
    return st.recursive(
        _SCALARS | _ARRAYS | tensors(2),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3) | st.just("__verl__"), inner, max_size=3)
            | st.lists(inner, min_size=1, max_size=3).map(objects)
        ),
        max_leaves=5,
    )


def objects(items: list[Any]) -> np.ndarray:
    """An object array of one entry for each item."""
    return np.fromiter(items, dtype=object, count=len(items))


NAMED = st.sampled_from(NAMES) | st.text(max_size=4).filter(lambda name: name not in ("values", "labels"))


@st.composite
def any_batches(draw, min_rows: int = 0) -> DataProto:
    """Up to five rows of up to four fields, with facts."""
    rows = draw(st.integers(min_rows, 5))
    names = draw(st.lists(NAMED, max_size=4, unique=True))
    of_rows = st.lists(values(), min_size=rows, max_size=rows).map(objects)
    given = {name: draw(tensors(rows) | of_rows) for name in names or (["x"] if min_rows else [])}
    return DataProto.from_single_dict(given, draw(st.dictionaries(NAMED, values(), max_size=2)))
