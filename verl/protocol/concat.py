"""Concatenation of batches: equality, re-padding, and facts that must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from verl.errors import DataProtoValidationError
from verl.protocol.equality import difference
from verl.protocol.fields import FIELDS, Bound, Field
from verl.protocol.provenance import Source, contract_error

WORTH_THREADS = 2**22  # bytes

# a dim of an unregistered field, the same in every part
_FREE = ""


def merged_meta(metas: Sequence[Mapping[str, Any]], verb: str) -> dict[str, Any]:
    """All facts of all batches.

    Raises:
        DataProtoValidationError: two batches hold different values under one key.
    """
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if (found := difference(merged.setdefault(key, value), value)) is not None:
                one, other = found.texts()
                raise DataProtoValidationError(
                    f"meta_info `{key}`{found.path} is {one} in one batch of this {verb} and {other} in another: "
                    "pop it from one of them."
                )
    return merged


def lengths_of(bound: Bound) -> tuple[int, int]:
    """(P, T) of a batch; where one is not bound it is what S leaves, so rows without a prompt are all response."""
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
    places: Sequence[torch.Tensor] | None = None,
    empty: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """The rows of one field from all parts, re-padded to the longest P and the longest T, each copied once.

    Args:
        columns: the field and its producer in each part.
        lengths: (P, T) of each part.
        places: of each part, the rows of the whole that its rows become; None for one part below the other.
        empty: gives memory for the whole on the CPU, by shape and dtype.
    """
    field, (first, maker) = FIELDS.get(name), columns[0]
    dims = field.dims if field else ("B",) + (_FREE,) * (first.ndim - 1)
    prompt, response = max(p for p, _ in lengths), max(t for _, t in lengths)
    for tensor, source in columns[1:]:
        alike = tensor.ndim == first.ndim and (field is not None or tensor.shape[1:] == first.shape[1:])
        if tensor.dtype != first.dtype or not alike:
            by = f" by {maker}" if maker else ""
            raise contract_error(name, f"{_kind(first)} as in another part{by}", _kind(tensor), source)
    is_even = not any(_differs(letter, lengths) for letter in dims)
    if is_even and places is None:
        return torch.cat([tensor for tensor, _ in columns])
    sizes = {"B": sum(len(tensor) for tensor, _ in columns), "P": prompt, "T": response, "S": prompt + response}
    shape = [sizes.get(letter, first.shape[place]) for place, letter in enumerate(dims)]
    on_cpu = empty is not None and first.device.type == "cpu"
    joined = empty(tuple(shape), first.dtype) if on_cpu else first.new_empty(shape)  # type: ignore[misc]
    if not is_even:
        joined.fill_(_pad_value(field, meta_info))
    row = 0
    for part, ((tensor, _), (p, _)) in enumerate(zip(columns, lengths)):
        area = joined
        for dim, (letter, size) in enumerate(zip(dims[1:], tensor.shape[1:]), start=1):
            area = area.narrow(dim, prompt - p if letter in ("P", "S") else 0, size)
        if places is None:
            area[row : row + len(tensor)] = tensor
        else:
            set_rows(area, places[part], tensor)
        row += len(tensor)
    return joined


def set_rows(whole: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """whole[places] = rows, for rows without gradient; numpy copies a row at a time, torch a number at a time."""
    if whole.device.type != "cpu" or not rows.numel():
        whole.index_copy_(0, places.to(whole.device), rows)
        return
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[whole.itemsize]
    rows = rows.detach().resolve_conj().resolve_neg()
    whole.view(same_size).numpy()[places.numpy()] = rows.view(same_size).numpy()


def in_threads(jobs: Sequence[Callable[[], Any]], num_bytes: int) -> list[Any]:
    """What the jobs, which copy so many bytes together, return: in as many threads as torch may use, if it matters."""
    threads = min(torch.get_num_threads(), len(jobs))
    if threads < 2 or num_bytes < WORTH_THREADS:
        return [job() for job in jobs]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda job: job(), jobs))


def _differs(letter: str, lengths: Sequence[tuple[int, int]]) -> bool:
    """Whether the parts disagree in this dim; S does where P or T does, for its two parts move."""
    if letter == "S":
        return len(set(lengths)) > 1
    return letter in ("P", "T") and len({pair[letter == "T"] for pair in lengths}) > 1


def join_arrays(arrays: Sequence[np.ndarray], places: Sequence[torch.Tensor] | None = None) -> np.ndarray:
    """The rows of one column from all parts; `places` as of `join_tensors`."""
    joined = np.concatenate(arrays)
    return joined if places is None else joined[torch.cat(list(places)).argsort().numpy()]


def _pad_value(field: Field | None, meta_info: Mapping[str, Any]) -> Any:
    if field is None:
        return 0
    return meta_info.get("pad_token_id", 0) if field.pad == "pad_token" else field.pad


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
