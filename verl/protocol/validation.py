"""Validation of batch fields: column types and row indices always; finite values, masks, padding and ids when strict.

`ReadOnlyFields` holds the columns of a batch. `check_content` runs under `verl.config.strict_data_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import DataProtoValidationError
from verl.protocol.fields import FIELDS, Bound
from verl.protocol.provenance import Source, contract_error
from verl.protocol.ragged import Ragged
from verl.protocol.serialization import JSON_VALUES, PLAIN, NotJson, json_value

Indices = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


class ReadOnlyFields(dict):
    """The fields of a batch by name: a read-only dict."""

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
    """The named fields in their order; None for all; a single name is accepted too."""
    if names is None:
        return dict(fields)
    names = [names] if isinstance(names, str) else names
    if absent := [name for name in names if name not in fields]:
        raise absent_error(absent[0], fields)
    return {name: value for name, value in fields.items() if name in set(names)}


def absent_error(name: str, fields: Mapping[str, Any]) -> DataProtoValidationError:
    return DataProtoValidationError(
        f"There is no `{name}` in this batch, which has: {', '.join(fields) or 'no fields'}.", name
    )


def object_array(name: str, column: Any, source: Source) -> np.ndarray:
    """Convert a column to one JSON value per row: NumPy numbers become Python numbers, arrays and tuples lists.

    Raises:
        DataProtoValidationError: not a list or an array, or an entry is not a JSON value; names the row, the place in
            it and the type.
    """
    if isinstance(column, np.ndarray) and column.ndim:
        entries = list(column) if column.dtype.kind in "mMV" else column.tolist()
    elif isinstance(column, (list, tuple)):
        entries = list(column)
    else:
        raise contract_error(name, "a list or an array with one entry per row", type(column).__name__, source)
    is_plain = set(map(type, entries)) <= PLAIN
    converted = entries if is_plain else [_json_entry(name, row, entry, source) for row, entry in enumerate(entries)]
    is_unchanged = is_plain or all(new is old for new, old in zip(converted, entries))
    if is_unchanged and type(column) is np.ndarray and column.dtype == object and column.ndim == 1:
        return column
    return np.fromiter(converted, dtype=object, count=len(converted))


def _json_entry(name: str, row: int, entry: Any, source: Source) -> Any:
    try:
        return json_value(entry)
    except NotJson as error:
        fault = f"{error.kind} at {name}[{row}]{error.path}. Convert it before the batch is made"
        fault += ", or pass the column as a tensor." if isinstance(error.value, torch.Tensor) else "."
        raise contract_error(name, JSON_VALUES, fault, source, row) from None


def row_number(key: Any) -> int | None:
    """The row of a single index; None if it is not a single index, such as a list of rows.

    Raises:
        DataProtoValidationError: a bool, or a number that is not an integer.
    """
    if isinstance(key, (bool, np.bool_)):
        raise DataProtoValidationError(f"{key} is not a row: a mask has one bool for each row.")
    if isinstance(key, (int, np.integer)):
        return int(key)
    if getattr(key, "ndim", None) != 0:
        return None
    number = key.item()
    if isinstance(number, bool) or not isinstance(number, int):
        raise DataProtoValidationError(f"{number!r} is not a row: rows are selected by integers.")
    return number


def row_indices(key: Any, rows: int) -> torch.Tensor:
    """Convert an index of several rows to int64 on the CPU, within [0, rows)."""
    if isinstance(key, slice):
        return torch.tensor(range(*key.indices(rows)), dtype=torch.int64)
    index = _as_tensor(key)
    if index.dtype == torch.bool:
        if index.shape != (rows,):
            raise DataProtoValidationError(f"A mask of shape {list(index.shape)} selects rows: expected [{rows}].")
        return index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex():
        raise DataProtoValidationError(
            f"Rows are selected by integers in one dim, not {list(index.shape)} {index.dtype}."
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
            # a copy, since it may be read-only
            return torch.from_numpy(key.astype(key.dtype.newbyteorder("="), order="C"))
        entries = list(key)
        return torch.as_tensor(entries) if entries else torch.zeros(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataProtoValidationError(f"Rows are selected by integers or a mask, not by {key!r}: {error}.") from error


Tensors = Mapping[str, torch.Tensor]
# (field at fault, what was expected, the offending places [B ...])
Offence = tuple[str, str, torch.Tensor]

_COUNTS = {
    "prompts",
    "input_ids",
    "responses",
    "prompt_ids",
    "sample_ids",
    "group_ids",
    "policy_version",
    "position_ids",
}


def check_content(
    batch: Tensors,
    bound: Bound,
    sources: Mapping[str, Source],
    new: Collection[str] | None = None,
    ragged: Mapping[str, Ragged] = {},
) -> None:
    """Check the content of a batch with checked shapes and dtypes.

    Args:
        batch: tensors by name.
        bound: sizes of its dims.
        sources: producers of the fields.
        new: check only rules about these fields; None for all.
        ragged: ragged fields by name.
    Raises:
        DataProtoValidationError: naming the field, its first offending row and its producer.
    """
    new = batch.keys() | ragged.keys() if new is None else new
    for name in ragged.keys() & new:
        if (offence := _own_offence(name, ragged[name].values)) is not None:
            found = f"{int(offence[2].sum())} others of {offence[2].numel()}"
            row = ragged[name].row_of(int(offence[2].nonzero()[0, 0]))
            raise contract_error(name, offence[1], found, sources.get(name), row)
    for name in batch:
        if name in new and (offence := _own_offence(name, batch[name])) is not None:
            _raise(offence, batch, sources)
    for needs, expected, rule in _RULES:
        touched = all(name in batch for name in needs) and any(name in new for name in needs)
        if touched and (offence := _where(needs[0], expected, rule(batch, bound))) is not None:
            _raise(offence, batch, sources)
    if "response_mask" in batch:
        for name in batch:
            if (name in new or "response_mask" in new) and (offence := _off_mask(name, batch)) is not None:
                _raise(offence, batch, sources)


def _raise(offence: Offence, batch: Tensors, sources: Mapping[str, Source]) -> None:
    name, expected, bad = offence
    index = bad.nonzero()[0].tolist()
    values = f"{batch[name][tuple(index)].tolist()} at {index}, {int(bad.sum())} such of {bad.numel()}"
    raise contract_error(name, expected, values, sources.get(name), row=index[0])


def _own_offence(name: str, tensor: torch.Tensor) -> Offence | None:
    if tensor.is_floating_point():
        tensor = tensor.detach() if tensor.dtype in (torch.float32, torch.float64) else tensor.detach().float()
        # A finite sum proves that all entries are finite, at a fraction of the cost; an overflow proves nothing.
        if not torch.isfinite(tensor.sum()):
            return _where(name, "finite numbers", ~torch.isfinite(tensor))
    elif name in _COUNTS:
        return _where(name, "no negative number", tensor < 0)
    elif name == "attention_mask":
        return _where(name, "0 or 1", (tensor != 0) & (tensor != 1))
    return None


def _off_mask(name: str, batch: Tensors) -> Offence | None:
    field = FIELDS.get(name)
    if field is None or field.dims != ("B", "T") or field.dtype != "float" or field.pad != 0:
        return None
    return _where(name, "0 wherever response_mask is False", (batch[name].detach() != 0) & ~batch["response_mask"])


def _where(name: str, expected: str, bad: torch.Tensor) -> Offence | None:
    return (name, expected, bad) if bool(bad.any()) else None


def _prompt_length(bound: Bound) -> int:
    return bound["P"][0] if "P" in bound else bound["S"][0] - bound["T"][0]


def _falls(mask: torch.Tensor) -> torch.Tensor:
    """[B L] bool: True where the mask changes from True to False."""
    bad = torch.zeros_like(mask)
    bad[:, 1:] = mask[:, :-1] & ~mask[:, 1:]
    return bad


def _rises(mask: torch.Tensor) -> torch.Tensor:
    """[B L] bool: True where the mask changes from False to True."""
    bad = torch.zeros_like(mask)
    bad[:, 1:] = ~mask[:, :-1] & mask[:, 1:]
    return bad


def _padding_inside(batch: Tensors, bound: Bound) -> torch.Tensor:
    mask = batch["attention_mask"].bool()
    bad = torch.zeros_like(mask)
    if "P" in bound or "T" in bound:
        prompt = _prompt_length(bound)
        bad[:, :prompt] = _falls(mask[:, :prompt])
        bad[:, prompt:] = _rises(mask[:, prompt:])
    return bad


def _other_prompts(batch: Tensors, bound: Bound) -> torch.Tensor:
    groups, prompts = batch["group_ids"], batch["prompt_ids"]
    order = torch.argsort(groups, stable=True)
    sorted_groups, sorted_prompts = groups[order], prompts[order]
    differs = (sorted_groups[1:] == sorted_groups[:-1]) & (sorted_prompts[1:] != sorted_prompts[:-1])
    bad = torch.zeros_like(groups, dtype=torch.bool)
    bad[order[1:]] = differs
    return bad


# Fields that a batch must have, the first of which is at fault; what was expected of it; and the offending places.
_RULES: tuple[tuple[tuple[str, ...], str, Callable[[Tensors, Bound], torch.Tensor]], ...] = (
    (("prompt_mask",), "padding only on the left of the prompt", lambda x, _: _falls(x["prompt_mask"])),
    (("attention_mask",), "padding only left of the prompt and right of the response", _padding_inside),
    (
        ("response_mask", "attention_mask"),
        "False wherever attention_mask is 0: the policy chose no padding",
        lambda x, bound: x["response_mask"] & ~x["attention_mask"][:, _prompt_length(bound) :].bool(),
    ),
    (
        ("prompt_mask", "attention_mask"),
        "the first P columns of attention_mask",
        lambda x, _: x["prompt_mask"] != x["attention_mask"][:, : x["prompt_mask"].shape[1]].bool(),
    ),
    (
        ("prompts", "input_ids"),
        "the first P columns of input_ids",
        lambda x, _: x["prompts"] != x["input_ids"][:, : x["prompts"].shape[1]],
    ),
    (
        ("responses", "input_ids"),
        "the last T columns of input_ids",
        lambda x, _: x["responses"] != x["input_ids"][:, x["input_ids"].shape[1] - x["responses"].shape[1] :],
    ),
    (
        ("position_ids", "attention_mask"),
        "0, 1, 2, ... over the tokens of each row, padding not counted",
        lambda x, _: (x["position_ids"] != x["attention_mask"].cumsum(1) - 1) & x["attention_mask"].bool(),
    ),
    (("group_ids", "prompt_ids"), "one prompt_ids value within a group", _other_prompts),
    (
        ("loss_mask", "attention_mask"),
        "False wherever attention_mask is 0",
        lambda x, _: x["loss_mask"] & ~x["attention_mask"].bool(),
    ),
)
