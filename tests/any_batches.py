"""Batches of every kind of tensor and column, and what it takes for two of them to be the same."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.protocol.ragged import Ragged

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
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
    if isinstance(value, list):
        return kind, tuple(map(exact, value))
    if isinstance(value, dict):
        return kind, frozenset((key, exact(item)) for key, item in value.items())
    return kind, _number(value)


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(_number(x) for x in tensor.detach().resolve_neg().reshape(-1).tolist())


def _number(x: Any) -> Any:
    if isinstance(x, float):
        return "nan" if math.isnan(x) else x + 0.0
    return x


def assert_identical(found: DataProto, expected: DataProto, told: str = "") -> None:
    """The same fields in the same order, with values of the same types, dtypes and numbers."""
    assert list(found.batch) == list(expected.batch)
    assert list(found.ragged) == list(expected.ragged)
    assert list(found.non_tensor_batch) == list(expected.non_tensor_batch)
    assert len(found) == len(expected)
    for name in expected.batch:
        assert exact(found[name]) == exact(expected[name]), (told, name)
    for name, field in expected.ragged.items():
        assert [exact(found[name][row]) for row in range(len(found))] == [exact(x) for x in rows_of(field)], (
            told,
            name,
        )
    for name in expected.non_tensor_batch:
        assert exact(found[name].tolist()) == exact(expected[name].tolist()), (told, name, found[name], expected[name])
    assert exact(found.meta_info) == exact(expected.meta_info), (told, found.meta_info, expected.meta_info)


@st.composite
def tensors(draw, rows: int, dtypes: list[torch.dtype] = DTYPES) -> torch.Tensor:
    """[rows ...] of any dtype, as any kind of view."""
    dtype = draw(st.sampled_from(dtypes))
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    kind = draw(st.sampled_from(["whole", "strided", "transposed", "expanded", "slice", "negated", "gradient"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))

    def made(*sizes: int) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.randint(0, 2, sizes, generator=generator).bool()
        x = torch.randint(0, 5, sizes, generator=generator).to(torch.float64)
        if dtype.is_floating_point:
            x[x == 1], x[x == 2] = math.nan, -0.0
        return x.to(dtype)

    if kind == "strided":
        return made(*(2 * size for size in shape))[tuple(slice(None, None, 2) for _ in shape)]
    if kind == "transposed":
        return made(*reversed(shape)).permute(*reversed(range(len(shape))))
    if kind == "expanded":
        return made(1, *shape[1:]).expand(shape)
    if kind == "slice":
        return made(rows + 50, *shape[1:])[7 : 7 + rows]
    if kind == "negated" and dtype in (torch.float32, torch.float64):
        return torch.complex(made(*shape), made(*shape)).conj().imag
    if kind == "gradient" and dtype in (torch.float32, torch.bfloat16):
        return made(*shape).requires_grad_() * draw(st.sampled_from([1, 2]))
    return made(*shape)


def rows_of(field: Ragged) -> list[torch.Tensor]:
    """A ragged field as what it is a short form of."""
    return [field[row] for row in range(len(field))]


@st.composite
def ragged_rows(draw, rows: int, **options: Any) -> list[torch.Tensor]:
    """[n_i ...] for each row, alike but for n_i; some rows are the very same tensor."""
    whole = draw(tensors(12, **options)).detach()
    ends = sorted(draw(st.lists(st.integers(0, 12), min_size=2, max_size=6)))
    items = [whole[a:b] for a, b in itertools.pairwise(ends)]
    return draw(st.lists(st.sampled_from(items), min_size=rows, max_size=rows))


_SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from([0.0, -0.0, 1.0, float("nan"), 2**4100, ""])
)  # fmt: skip


@functools.cache
def values() -> st.SearchStrategy:
    """Anything that a row of a column may hold."""
    return st.recursive(
        _SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
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
    kinds = tensors(rows) | of_rows
    kinds = kinds | ragged_rows(rows).map(Ragged.of) if rows else kinds
    given = {name: draw(kinds) for name in names or (["x"] if min_rows else [])}
    return of_any_kind(given, draw(st.dictionaries(NAMED, values(), max_size=2)))


def of_any_kind(fields: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
    """A batch of tensors, ragged fields and columns in one mapping."""
    tensors = {name: x for name, x in fields.items() if isinstance(x, torch.Tensor)}
    ragged = {name: x for name, x in fields.items() if isinstance(x, Ragged)}
    columns = {name: x for name, x in fields.items() if name not in tensors and name not in ragged}
    return DataProto.from_dict(tensors, columns, meta_info, ragged=ragged)
