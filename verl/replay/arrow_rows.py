"""Rows without padding: a batch of tensors as an Arrow record batch, and rows of many of them as a batch again.

    DataProto [B P], [B T]  ── pack ──>  record batch: lists of tokens, numbers, one JSON object of the other columns
    Segment (flat values)   ── rebuild ──>  DataProto, padded to the longest of the rows that were asked for

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
from verl.protocol.serialization import KEY, column_to_json, in_order, loads

# What a batch has beside, and what is computed anew under the weights of the day.
REBUILT = ("input_ids", "attention_mask", "position_ids", "prompt_mask", "group_ids", "is_replayed")
COMPUTED = (
    "old_log_probs", "is_on_policy", "entropies", "ref_log_probs", "log_probs", "values", "token_level_rewards",
    "returns", "advantages",
)  # fmt: skip
INDEX = ("group", "step", "policy_version", "score", "advantage")  # columns that stay in memory for every row
OTHERS = "columns"  # the column of JSON objects, of `verl.protocol.serialization`
_KEY = b"verl.fields"
_ARROW_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32,
     torch.uint16, torch.uint8}
)  # fmt: skip
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.float64}
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True)
class RowField:
    """How a field is kept.

    Attributes:
        kind: P or T for one value (or a block of `shape`) a token, B for one a row.
        column: its column of the record batch, where that is not called as the field is.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    column: str | None = None

    @property
    def block(self) -> tuple[int, ...]:
        """`shape` in the numbers that Arrow has, of which a complex128 takes two."""
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
    """Rows side by side: of each field the values of all rows in one line.

    Attributes:
        flat: arrays on the host, or tensors on a device.
        ends: of kinds P and T, [rows + 1]: where each row begins, and the last one ends.
        others: JSON objects, one a row.
        num_bytes: of all of it.
    """

    num_rows: int
    fields: Mapping[str, RowField]
    flat: Mapping[str, np.ndarray | Tensor]
    ends: Mapping[str, np.ndarray]
    others: pa.Array
    num_bytes: int

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> RowSegment:
        """A record batch as it lies in memory: nothing is copied."""
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
        """The same, knowing where rows lie without touching the file that they lie in."""
        return replace(self, ends={kind: x.copy() for kind, x in self.ends.items()})

    def last(self, count: int) -> RowSegment:
        """The last rows, in memory of their own."""
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
        """The same with its values in the memory of a device."""
        flat = {name: torch.tensor(values).to(device) for name, values in self.flat.items()}
        return RowSegment(self.num_rows, self.fields, flat, self.ends, self.others, self.num_bytes)


class SegmentRows(NamedTuple):
    """Rows of one segment, and which rows of a batch they become; `file` is the one they are read from, if any."""

    segment: RowSegment
    rows: np.ndarray
    places: np.ndarray
    file: Any = None


def fields_of(schema: pa.Schema) -> dict[str, RowField]:
    """The fields of a record batch, from what its schema tells of them."""
    fields = json.loads((schema.metadata or {})[_KEY])
    return {name: RowField.from_json(value) for name, value in fields.items()}


def rows_to_arrow(batch: DataProto, index: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Scored rows as a record batch.

    Args:
        batch: prompts, prompt_mask, responses, attention_mask and whatever else is known of the rows; what the roles
            compute is left out, and `meta_info` too.
        index: `INDEX` without what the batch holds, [B].
    Raises:
        DataProtoValidationError: a column holds what JSON has no form for, or a registered field has dims that rows
            without padding do not have.
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
    """[B ...] as one list a row; Arrow has none of fixed size 0, for which a list of one number stands."""
    size = math.prod(values.shape[1:])
    flat = values.reshape(-1) if size else np.zeros(len(values), values.dtype)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), size or 1)


def rows_from_arrow(
    parts: Sequence[SegmentRows], pad_token_id: int, after: Callable[[SegmentRows], None] | None = None
) -> DataProto:
    """Rows of several segments as one batch on the host, without group ids.

    Args:
        parts: together they make every row of the batch, each once.
        pad_token_id: fills up prompts and responses.
        after: called with each part once it is read.
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
            objects[place] = loads(part.segment.others[row].as_py())
        if after is not None:
            after(part)
    return DataProto.from_dict(tensors | _rebuilt(tensors, lengths, longest), _columns(objects))


def _common_fields(parts: Sequence[SegmentRows]) -> dict[str, RowField]:
    """The fields that all parts have.

    Raises:
        DataProtoValidationError: one has another dtype or shape in some of them.
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
    """The fields that follow from the others."""
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
    """The columns that are no tensors; None where a row does not have one."""
    names = dict.fromkeys(name for found in objects for name in found)
    return {
        name: np.fromiter((found.get(name) for found in objects), dtype=object, count=len(objects)) for name in names
    }


def _fill(target: Tensor, field: RowField, name: str, part: SegmentRows) -> None:
    """Write rows of a segment into rows of a tensor that holds the padding already."""
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
    """The same where the values lie on a device: gathered there, and brought over in one piece."""
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
        expected = "dims [B], [B P ...] or [B T ...]: the replay buffer keeps prompts and responses apart"
        raise contract_error(name, expected, f"dims {known.shape}", None)
    return RowField(kind, tensor.dtype, tuple(tensor.shape[2:]), column_name)


def _plain(name: str, tensor: Tensor) -> np.ndarray:
    """On the host, in a type that Arrow has; token ids in half the bytes, where they fit."""
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
    """The same memory in a dtype of as many bytes that Arrow has; [... 2] for numbers of 16 bytes."""
    if tensor.dtype in _ARROW_DTYPES:
        return tensor
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor)
    return tensor.view(_OF_SIZE[tensor.itemsize])


def _unpadded(values: np.ndarray, counts: np.ndarray, is_right: bool) -> np.ndarray:
    """The values of all rows in one line, without padding."""
    width = values.shape[1]
    if not len(counts) or int(counts.min()) == width:
        return values.reshape(-1)
    rows = [row[width - n :] if is_right else row[:n] for row, n in zip(values, counts.tolist())]
    return np.concatenate(rows).reshape(-1)


def _json_rows(batch: DataProto) -> list[str]:
    columns = {
        name: column_to_json(f"column `{name}`", array, batch.producer(name))
        for name, array in batch.non_tensor_batch.items()
    }
    rows = zip(*columns.values(), strict=True) if columns else ((),) * len(batch)
    encode = json.JSONEncoder().encode  # made once: json.dumps makes one for each row
    if KEY in columns:  # an object with that key alone would be read as something else
        return [encode({KEY: ["dict", list(zip(columns, row))]}) for row in rows]
    return [encode(dict(zip(columns, row))) for row in rows]
