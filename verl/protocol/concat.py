"""Concatenation of batches: re-padding, facts that must agree, and the equality of fields and facts.

Tensors are equal if dtype, shape and every number are. JSON values are equal if types and numbers are: 1, 1.0 and True
all differ, and NaN equals NaN. Other values are equal if they are one object, or by `==`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from verl.errors import DataProtoValidationError, end_cut
from verl.protocol.fields import FIELDS, Bound, Field
from verl.protocol.provenance import Source, contract_error
from verl.protocol.ragged import Ragged
from verl.protocol.serialization import raw_bytes

WORTH_THREADS = 2**22  # bytes above which copies run in threads

# a dim of an unregistered field, the same in every part
_FREE = ""


def is_same(left: Any, right: Any) -> bool:
    """Whether two JSON values, tensors, arrays or other objects are equal; gradients and devices do not count."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (torch.Tensor, np.ndarray)) and (left.dtype != right.dtype or left.shape != right.shape):
        return False
    if isinstance(left, torch.Tensor):
        with contextlib.suppress(NotImplementedError):  # of float8
            if torch.equal(left, right.to(left.device)):
                return True
        return torch.equal(raw_bytes(left), raw_bytes(right))  # equal bytes: the same NaN
    if isinstance(left, np.ndarray) and left.dtype != object:
        return left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple, np.ndarray)):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right or (left != left and right != right))


def first_other_row(left: Any, right: Any) -> int | None:
    """The first row in which two fields of equal shape and dtype differ; None if their rows cannot be compared."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return None
    return next((row for row in range(len(left)) if not is_same(left[row], right[row])), None)


def shown(value: Any) -> str:
    """A value for a message."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return end_cut(repr(value), 120)


def merged_meta(metas: Sequence[Mapping[str, Any]], verb: str) -> dict[str, Any]:
    """Merge the `meta_info` of batches.

    Args:
        metas: `meta_info` of each batch.
        verb: the operation, for messages.
    Raises:
        DataProtoValidationError: two batches have different values for a key.
    """
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if not is_same(merged.setdefault(key, value), value):
                raise DataProtoValidationError(
                    f"meta_info `{key}` is {shown(merged[key])} in one batch of this {verb} and {shown(value)} in "
                    "another: pop it from one of them."
                )
    return merged


def lengths_of(bound: Bound) -> tuple[int, int]:
    """(P, T) of a batch; if one is not bound it is computed from S, so rows without a prompt are all response."""
    p, t, s = (bound[letter][0] if letter in bound else None for letter in "PTS")
    if p is None:
        p = 0 if s is None or t is None else s - t
    if t is None:
        t = 0 if s is None else s - p
    return p, t


def join_tensors(
    name: str,
    columns: Sequence[tuple[torch.Tensor, Source | None]],
    lengths: Sequence[tuple[int, int]],
    meta_info: Mapping[str, Any],
    indices: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Join the rows of a field from all parts, re-padded to the longest P, T and N; each row is copied once.

    Args:
        name: of the field.
        columns: the field and its producer in each part.
        lengths: (P, T) of each part.
        meta_info: of the result, for the padding.
        indices: row indices of the result for the rows of each part; None to concatenate the parts.
    """
    field, (first, maker) = FIELDS.get(name), columns[0]
    dims = field.dims if field else ("B",) + (_FREE,) * (first.ndim - 1)
    prompt, response = max(p for p, _ in lengths), max(t for _, t in lengths)
    for tensor, source in columns[1:]:
        alike = tensor.ndim == first.ndim and (field is not None or tensor.shape[1:] == first.shape[1:])
        if tensor.dtype != first.dtype or not alike:
            by = f" by {maker}" if maker else ""
            raise contract_error(name, f"{shown(first)} as in another part{by}", shown(tensor), source)
    shapes = [tensor.shape for tensor, _ in columns]
    is_even = len({shape[1:] for shape in shapes}) == 1 and not ("S" in dims and len(set(lengths)) > 1)
    if is_even and indices is None:
        return torch.cat([tensor for tensor, _ in columns])
    longest = {"P": prompt, "T": response, "S": prompt + response}
    longest |= {"N": max(shape[dims.index("N")] for shape in shapes)} if "N" in dims else {}
    shape = [sum(len(tensor) for tensor, _ in columns)]
    shape += [longest.get(letter, size) for letter, size in zip(dims[1:], first.shape[1:], strict=True)]
    joined = first.new_empty(shape)
    if not is_even:
        joined.fill_(_pad_value(field, meta_info))
    row = 0
    for part, ((tensor, _), (p, _)) in enumerate(zip(columns, lengths)):
        area = joined
        for dim, (letter, size) in enumerate(zip(dims[1:], tensor.shape[1:]), start=1):
            area = area.narrow(dim, prompt - p if letter in ("P", "S") else 0, size)
        if indices is None:
            area[row : row + len(tensor)] = tensor
        else:
            set_rows(area, indices[part], tensor)
        row += len(tensor)
    return joined


def set_rows(whole: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """whole[places] = rows, for rows without gradient, by numpy, which copies whole rows, where torch copies single
    elements.
    """
    if whole.device.type != "cpu" or not rows.numel():
        whole.index_copy_(0, indices.to(whole.device), rows)
        return
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.itemsize]
    rows = rows.detach().resolve_neg()
    whole.view(same_size).numpy()[indices.numpy()] = rows.view(same_size).numpy()


def in_threads(jobs: Sequence[Callable[[], Any]], num_bytes: int) -> list[Any]:
    """Run jobs that together copy `num_bytes`, in as many threads as torch may use if they are many; returns
    results.
    """
    threads = min(torch.get_num_threads(), len(jobs))
    if threads < 2 or num_bytes < WORTH_THREADS:
        return [job() for job in jobs]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda job: job(), jobs))


def join_arrays(arrays: Sequence[np.ndarray], indices: Sequence[torch.Tensor] | None = None) -> np.ndarray:
    """Join the rows of a column from all parts; `indices` as in `join_tensors`."""
    joined = np.concatenate(arrays)
    return joined if indices is None else joined[torch.cat(list(indices)).argsort().numpy()]


def join_ragged(
    name: str, columns: Sequence[tuple[Ragged | None, int, Source | None]], order: torch.Tensor | None
) -> Ragged:
    """Join the rows of a ragged field from all parts.

    Args:
        columns: of each part the field or None for a part without it, the number of rows, and the producer.
        order: indices of the joined rows, in the order of the result; None for that of the parts.
    """
    first, maker = next((field, source) for field, _, source in columns if field is not None)
    for field, _, source in columns:
        if field is not None and shown(field.values[:0]) != shown(first.values[:0]):
            by = f" by {maker}" if maker else ""
            raise contract_error(name, f"{first} as in another part{by}", str(field), source)
    joined = Ragged.concat(Ragged.empty(first, rows) if field is None else field for field, rows, _ in columns)
    return joined if order is None else joined.take(order)


def _pad_value(field: Field | None, meta_info: Mapping[str, Any]) -> Any:
    if field is None:
        return 0
    return meta_info.get("pad_token_id", 0) if field.pad == "pad_token" else field.pad
