"""Rows without padding: a batch of tensors as an Arrow record batch, and rows of many of them as a batch again.

    DataProto [B P], [B T]  ── pack ──>  record batch: lists of tokens, numbers, one JSON object of the other columns
    Segment (flat values)   ── rebuild ──>  DataProto, padded to the longest of the requested rows

B responses, P prompt length, T response length. Prompts lie right-aligned in a batch, responses left-aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.fields import FIELDS
from verl.protocol.provenance import contract_error
from verl.protocol.serialization import in_order, json_text

# Fields that are not stored: derived ones, and those that are recomputed with the current weights.
REBUILT = ("input_ids", "attention_mask", "position_ids", "prompt_mask", "group_ids", "is_replayed")
COMPUTED = (
    "old_log_probs", "is_on_policy", "entropies", "ref_log_probs", "log_probs", "values", "token_level_rewards",
    "returns", "advantages",
)  # fmt: skip
INDEX = ("group", "step", "policy_version", "score", "advantage")  # columns that stay in memory for every row
OTHERS = "columns"  # the column of JSON objects
_KEY = b"verl.fields"
_ARROW_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32,
     torch.uint16, torch.uint8}
)  # fmt: skip
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.float64}
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True)
class RowField:
    """How a field is stored.

    Attributes:
        kind: P or T for one value (or a block of `shape`) per token, B for one per row.
        column: column of the record batch, if its name is not that of the field.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    column: str | None = None

    @property
    def block(self) -> tuple[int, ...]:
        """`shape` in elements of the Arrow type; a complex128 is stored as two."""
        return (*self.shape, 2) if self.dtype == torch.complex128 else self.shape

    def as_json(self) -> list[Any]:
        column = [] if self.column is None else [self.column]
        return [self.kind, str(self.dtype).removeprefix("torch."), list(self.shape), *column]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> RowField:
        kind, dtype, shape, *column = value
        return cls(kind, getattr(torch, dtype), tuple(shape), *column)


@dataclass(frozen=True)
class RowSegment:
    """Consecutive rows; each field is one flat array of the values of all rows.

    Attributes:
        flat: by field, arrays on the host or tensors on a device.
        ends: for kinds P and T, offsets [rows + 1] of the rows in the flat arrays.
        others: JSON objects of the other columns, one per row.
        num_bytes: total size.
    """

    num_rows: int
    fields: Mapping[str, RowField]
    flat: Mapping[str, np.ndarray | Tensor]
    ends: Mapping[str, np.ndarray]
    others: pa.Array
    num_bytes: int

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> RowSegment:
        """Wrap a record batch without copying."""
        fields = fields_of(batch.schema)
        flat, ends = {}, {}
        for name, field in fields.items():
            column = batch.column(field.column or name)
            if field.kind == "B":
                values = column.flatten() if field.block else column
                values = values if math.prod(field.block) else values.slice(0, 0)
            else:
                values, ends[field.kind] = column.values, column.offsets.to_numpy() // (math.prod(field.block) or 1)
            flat[name] = values.to_numpy()
        return cls(batch.num_rows, fields, flat, ends, batch.column(OTHERS), batch.nbytes)

    def with_own_ends(self) -> RowSegment:
        """A copy whose offsets are in memory of their own, so that looking rows up does not touch the mapped file."""
        return replace(self, ends={kind: x.copy() for kind, x in self.ends.items()})

    def last(self, count: int) -> RowSegment:
        """A copy of the last `count` rows."""
        first = max(0, self.num_rows - count)
        begins = {"B": first, **{kind: int(ends[first]) for kind, ends in self.ends.items()}}
        flat = {}
        for name, field in self.fields.items():
            size = math.prod(field.block)
            flat[name] = np.array(self.flat[name][begins[field.kind] * size :])
        ends = {kind: x[first:] - x[first] for kind, x in self.ends.items()}
        num_bytes = self.num_bytes * (self.num_rows - first) // max(self.num_rows, 1)
        others = pa.concat_arrays([self.others.slice(first)])
        return RowSegment(self.num_rows - first, self.fields, flat, ends, others, num_bytes)

    def to(self, device: torch.device) -> RowSegment:
        """A copy with its values on a device."""
        flat = {name: torch.tensor(values).to(device) for name, values in self.flat.items()}
        return RowSegment(self.num_rows, self.fields, flat, self.ends, self.others, self.num_bytes)


class SegmentRows(NamedTuple):
    """Rows of a segment, and their positions in a batch; `file` is the file that they are read from, or None."""

    segment: RowSegment
    rows: np.ndarray
    places: np.ndarray
    file: Any = None


def fields_of(schema: pa.Schema) -> dict[str, RowField]:
    """The fields of a record batch, from the metadata of its schema."""
    fields = json.loads((schema.metadata or {})[_KEY])
    return {name: RowField.from_json(value) for name, value in fields.items()}


def rows_to_arrow(batch: DataProto, index: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Scored rows as a record batch.

    Args:
        batch: prompts, prompt_mask, responses, attention_mask and any other fields. Fields that roles compute, and
            `meta_info`, are not stored.
        index: the columns of `INDEX` that the batch does not have, [B] each.
    Raises:
        DataProtoValidationError: a registered field has dims other than [B], [B P ...] or [B T ...].
    """
    prompts = batch["prompts"].shape[1]
    lengths = {"P": batch["prompt_mask"].sum(1), "T": batch["attention_mask"][:, prompts:].sum(1)}
    counts = {kind: x.cpu().numpy() for kind, x in lengths.items()}
    offsets = {kind: np.concatenate([[0], x.cumsum()]).astype(np.int32) for kind, x in counts.items()}
    arrays: dict[str, pa.Array] = {}
    fields: dict[str, RowField] = {}
    for name, tensor in batch.batch.items():
        if name in REBUILT or name in COMPUTED:
            continue
        field = fields[name] = _field_of(name, tensor, taken={*index, *arrays, OTHERS})
        column, values = field.column or name, _plain(name, tensor)
        if field.kind == "B":
            arrays[column] = _blocks(values) if field.block else pa.array(values)
        else:
            flat = _unpadded(values, counts[field.kind], is_right=field.kind == "P")
            ends, lists = offsets[field.kind], pa.ListArray
            if field.block:
                ends, lists = ends.astype(np.int64) * math.prod(field.block), pa.LargeListArray
            arrays[column] = lists.from_arrays(ends, pa.array(flat))
    arrays |= {name: pa.array(values) for name, values in index.items()}
    arrays[OTHERS] = pa.array(_json_rows(batch), type=pa.large_string())
    schema_text = json.dumps({name: field.as_json() for name, field in fields.items()})
    schema = pa.schema([(name, array.type) for name, array in arrays.items()], metadata={_KEY: schema_text.encode()})
    return pa.record_batch(list(arrays.values()), schema=schema)


def _blocks(values: np.ndarray) -> pa.Array:
    """[B ...] as one list per row. Arrow has no lists of fixed size 0, so an empty block is stored as one number."""
    size = math.prod(values.shape[1:])
    flat = values.reshape(-1) if size else np.zeros(len(values), values.dtype)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), size or 1)


def rows_from_arrow(
    parts: Sequence[SegmentRows], pad_token_id: int, after: Callable[[SegmentRows], None] | None = None
) -> DataProto:
    """Join rows of several segments into one padded batch on the host, without group ids.

    Args:
        parts: their positions cover every row of the batch exactly once.
        pad_token_id: padding of prompts and responses.
        after: called with each part after it was read.
    """
    fields, count = _common_fields(parts), sum(len(part.rows) for part in parts)
    lengths = {kind: np.zeros(count, dtype=np.int64) for kind in "PT"}
    for segment, rows, places, _ in parts:
        for kind, ends in segment.ends.items():
            lengths[kind][places] = ends[rows + 1] - ends[rows]
    longest = {kind: max(1, int(x.max(initial=0))) for kind, x in lengths.items()}
    tensors: dict[str, Tensor] = {}
    for name, field in fields.items():
        pad: Any = FIELDS[name].pad if name in FIELDS else 0
        shape = field.shape if field.kind == "B" else (longest[field.kind], *field.shape)
        tensors[name] = torch.full((count, *shape), pad_token_id if pad == "pad_token" else pad, dtype=field.dtype)
    objects: list[dict[str, Any]] = [{}] * count
    for part in parts:
        for name, field in fields.items():
            _fill(tensors[name], field, name, part)
        for row, place in zip(part.rows.tolist(), part.places.tolist(), strict=True):
            objects[place] = json.loads(part.segment.others[row].as_py())
        if after is not None:
            after(part)
    return DataProto.from_dict(tensors | _rebuilt(tensors, lengths, longest), _columns(objects))


def _common_fields(parts: Sequence[SegmentRows]) -> dict[str, RowField]:
    """The fields that all parts have.

    Raises:
        DataProtoValidationError: dtype or shape of a field differ between parts.
    """
    fields = dict(parts[0].segment.fields)
    for part in parts[1:]:
        others = part.segment.fields
        if others is parts[0].segment.fields:
            continue
        for name, field in list(fields.items()):
            if name not in others:
                del fields[name]
            elif (other := replace(others[name], column=field.column)) != field:
                raise contract_error(
                    name, f"{_described(field)} as in other rows of the buffer", _described(other), None
                )
    return fields


def _described(field: RowField) -> str:
    dims = "".join(f" {size}" for size in field.shape)
    return f"[B{'' if field.kind == 'B' else f' {field.kind}'}{dims}] {str(field.dtype).removeprefix('torch.')}"


def _rebuilt(tensors: Mapping[str, Tensor], lengths: Mapping[str, np.ndarray], longest: Mapping[str, int]) -> dict:
    """Fields derived from the stored ones."""
    in_prompt = torch.arange(longest["P"]) >= longest["P"] - torch.from_numpy(lengths["P"])[:, None]
    in_response = torch.arange(longest["T"]) < torch.from_numpy(lengths["T"])[:, None]
    attention = torch.cat([in_prompt, in_response], dim=1).long()
    return {
        "prompt_mask": in_prompt,
        "input_ids": torch.cat([tensors["prompts"], tensors["responses"]], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0),
    }


def _columns(objects: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Columns that are not tensors; None for rows without the column."""
    names = dict.fromkeys(name for found in objects for name in found)
    return {
        name: np.fromiter((found.get(name) for found in objects), dtype=object, count=len(objects)) for name in names
    }


def _fill(target: Tensor, field: RowField, name: str, part: SegmentRows) -> None:
    """Write rows of a segment into a tensor that is already filled with padding."""
    segment, rows, places, _ = part
    flat = segment.flat[name]
    if isinstance(flat, Tensor) and flat.device.type != "cpu":
        _fill_from_device(target, field, flat, part)
        return
    values, bits = np.asarray(flat), _bits(target).numpy()
    if field.kind == "B":
        bits[places] = values.reshape(segment.num_rows, *field.block)[rows]
        return
    ends, values = segment.ends[field.kind], values.reshape(-1, *field.block)
    begins, stops = ends[rows].tolist(), ends[rows + 1].tolist()
    for place, begin, stop in zip(places.tolist(), begins, stops):
        if field.kind == "P":
            bits[place, bits.shape[1] - (stop - begin) :] = values[begin:stop]
        else:
            bits[place, : stop - begin] = values[begin:stop]


def _fill_from_device(target: Tensor, field: RowField, flat: Tensor, part: SegmentRows) -> None:
    """`_fill` for values on a device: gathered there, and copied to the host at once."""
    segment, rows, places, _ = part
    at, bits = torch.from_numpy(places), _bits(target)
    if field.kind == "B":
        chosen = flat.view(segment.num_rows, *field.block)[torch.from_numpy(rows).to(flat.device)]
        bits[at] = chosen.cpu().to(bits.dtype)
        return
    flat = flat.view(-1, *field.block)
    ends, width = torch.from_numpy(segment.ends[field.kind].astype(np.int64)), target.shape[1]
    begins, lengths = ends[rows], ends[rows + 1] - ends[rows]
    shift = width - lengths if field.kind == "P" else torch.zeros_like(lengths)
    within = torch.arange(width) - shift[:, None]
    is_there = (within >= 0) & (within < lengths[:, None])
    source = (begins[:, None] + within)[is_there]
    found = bits[at]
    found[is_there] = flat.index_select(0, source.to(flat.device)).cpu().to(bits.dtype)
    bits[at] = found


def _field_of(name: str, tensor: Tensor, taken: Collection[str]) -> RowField:
    known, column = FIELDS.get(name), name
    while column in taken:
        column = f"_{column}"
    column_name = None if column == name else column
    if known is None or known.dims == ("B",):
        return RowField("B", tensor.dtype, tuple(tensor.shape[1:]), column_name)
    kind = known.dims[1]
    if kind not in "PT" or set(known.dims[2:]) & {"P", "T", "S"}:
        expected = "dims [B], [B P ...] or [B T ...]: the replay buffer stores prompts and responses separately"
        raise contract_error(name, expected, f"dims {known.shape}", None)
    return RowField(kind, tensor.dtype, tuple(tensor.shape[2:]), column_name)


def _plain(name: str, tensor: Tensor) -> np.ndarray:
    """A host array in a dtype that Arrow has; int64 token ids become int32 if they fit."""
    tensor = _bits(in_order(tensor))
    if name in FIELDS and FIELDS[name].unit == "token id" and _fits_int32(tensor):
        tensor = tensor.to(torch.int32)
    return tensor.numpy()


def _fits_int32(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    least, most = torch.aminmax(tensor)
    return bool(least >= _INT32.min) and bool(most <= _INT32.max)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as an integer dtype of equal size; [... 2] for elements of 16 bytes."""
    if tensor.dtype in _ARROW_DTYPES:
        return tensor
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor)
    return tensor.view(_OF_SIZE[tensor.itemsize])


def _unpadded(values: np.ndarray, counts: np.ndarray, is_right: bool) -> np.ndarray:
    """The values of all rows as one flat array, without padding."""
    width = values.shape[1]
    if not len(counts) or int(counts.min()) == width:
        return values.reshape(-1)
    rows = [row[width - n :] if is_right else row[:n] for row, n in zip(values, counts.tolist())]
    return np.concatenate(rows).reshape(-1)


def _json_rows(batch: DataProto) -> list[str]:
    columns = {name: array.tolist() for name, array in batch.non_tensor_batch.items()}
    rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)] if columns else [{}] * len(batch)
    encode = json.JSONEncoder().encode  # json.dumps with options would make an encoder per row
    try:
        return [encode(row) for row in rows]
    except (TypeError, ValueError):  # a value that was changed after the batch was made, or an overlong integer
        return [json_text(f"row {number} of the columns ", row) for number, row in enumerate(rows)]
