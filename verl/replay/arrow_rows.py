"""Rows without padding: a batch of tensors as an Arrow record batch, and record batches as a batch of tensors.

    DataProto [B P], [B T]  ── rows_to_arrow ──>  record batch: lists of tokens, numbers, a JSON object of other columns
    ragged fields, [n_i ...]                      views of lists: rows that share an item share its values
    rows of record batches  ── rows_from_arrow ──>  DataProto, padded to the longest of the rows

B responses, P prompt length, T response length. Prompts lie right-aligned in a batch, responses left-aligned.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pydantic_core import to_json
from torch import Tensor

from verl.model_paths.images import KEYS
from verl.protocol import DataProto
from verl.protocol.fields import FIELDS
from verl.protocol.provenance import contract_error
from verl.protocol.ragged import Ragged
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
_ARROW_DTYPES = (
    torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
_OF_SIZE = {1: torch.uint8, 2: torch.int16}
RAGGED = "ragged"
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True)
class RowField:
    """Storage format of a field.

    Attributes:
        kind: P or T for one value (or a block of `shape`) per token, B for one per row, RAGGED for any number per row.
        column: column of the record batch, if its name is not that of the field.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    column: str | None = None

    def as_json(self) -> list[Any]:
        column = [] if self.column is None else [self.column]
        return [self.kind, str(self.dtype).removeprefix("torch."), list(self.shape), *column]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> RowField:
        kind, dtype, shape, *column = value
        return cls(kind, getattr(torch, dtype), tuple(shape), *column)


class SelectedRows(NamedTuple):
    """Rows of a record batch, by their numbers in it.

    Attributes:
        release: called after they were read; releases pages of a mapped file, and does nothing for rows in memory.
    """

    record: pa.RecordBatch
    rows: np.ndarray
    release: Callable[[], None] = lambda: None


class DeviceRows:
    """Rows of a record batch as padded tensors in device memory, from which `select` gathers."""

    def __init__(self, record: pa.RecordBatch, device: torch.device):
        rows = rows_from_arrow([SelectedRows(record, np.arange(record.num_rows))], 0)
        tensors = {name: x.to(device) for name, x in rows.batch.items() if name not in ("input_ids", "position_ids")}
        ragged = {name: field.to(str(device)) for name, field in rows.ragged.items()}
        self._rows = DataProto.from_dict(tensors, dict(rows.non_tensor_batch), ragged=ragged)
        self._index = {name: record.column(name).to_numpy() for name in INDEX if name not in self._rows}
        held = [*self._rows.batch.values(), *(field.values for field in ragged.values())]
        self.num_rows, self.nbytes = len(self._rows), sum(tensor.nbytes for tensor in held)

    def select(self, rows: np.ndarray) -> SelectedRows:
        """Copy rows to the host."""
        index = {name: column[rows] for name, column in self._index.items()}
        return SelectedRows(rows_to_arrow(self._rows[rows].to("cpu"), index), np.arange(len(rows)))


def _fields_of(record: pa.RecordBatch) -> dict[str, RowField]:
    return _parse_fields((record.schema.metadata or {})[_KEY])


@functools.lru_cache(maxsize=16)
def _parse_fields(text: bytes) -> dict[str, RowField]:
    return {name: RowField.from_json(value) for name, value in json.loads(text).items()}


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
            arrays[column] = _blocks(values) if field.shape else pa.array(values)
        else:
            flat = _unpadded(values, counts[field.kind], is_right=field.kind == "P")
            ends, lists = offsets[field.kind], pa.ListArray
            if field.shape:
                ends, lists = ends.astype(np.int64) * math.prod(field.shape), pa.LargeListArray
            arrays[column] = lists.from_arrays(ends, pa.array(flat))
    for name, field in batch.ragged.items():
        fields[name] = RowField(RAGGED, field.values.dtype, tuple(field.values.shape[1:]))
        arrays[name] = _views(name, field.compact(), math.prod(fields[name].shape))
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


def _views(name: str, field: Ragged, size: int) -> pa.Array:
    """The rows of a ragged field, whose values have so many numbers each."""
    first, lengths = field.offsets[:-1][field.index] * size, field.lengths * size
    values = pa.array(_plain(name, field.values).reshape(-1))
    return pa.LargeListViewArray.from_arrays(pa.array(first.numpy()), pa.array(lengths.numpy()), values)


def _items(column: pa.Array, rows: np.ndarray, field: RowField) -> list[Tensor]:
    """Some rows of a column of `_views`; rows that share an item get the same tensor."""
    values, items = column.values.to_numpy(), {}
    places = [(at, at + size) for at, size in zip(column.offsets.to_numpy()[rows], column.sizes.to_numpy()[rows])]
    for at, end in places:
        if (at, end) not in items:
            items[at, end] = torch.from_numpy(values[at:end].copy()).view(field.dtype).reshape(-1, *field.shape)
    return [items[place] for place in places]


def copied(record: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    """A copy of some rows, without items that only other rows have."""
    copy = record.take(pa.array(rows))
    for name, field in _fields_of(record).items():
        if field.kind == RAGGED:
            views = _views(name, Ragged.of(_items(record.column(name), rows, field)), math.prod(field.shape))
            copy = copy.set_column(copy.schema.get_field_index(name), copy.schema.field(name), views)
    return copy


def rows_from_arrow(parts: Sequence[SelectedRows], pad_token_id: int) -> DataProto:
    """Join rows of several record batches into one padded batch on the host, without group ids.

    Raises:
        DataProtoValidationError: dtype or shape of a field differ between record batches.
    """
    fields, count = _common_fields([part.record for part in parts]), sum(len(part.rows) for part in parts)
    columns_of = [dict(zip(part.record.schema.names, part.record.columns)) for part in parts]  # faster than by name
    spans = [
        {kind: _spans(columns[name], part.rows) for kind, name in (("P", "prompts"), ("T", "responses"))}
        for part, columns in zip(parts, columns_of)
    ]
    lengths = {kind: np.concatenate([span[kind][:, 1] - span[kind][:, 0] for span in spans]) for kind in "PT"}
    longest = {kind: max(1, int(x.max(initial=0))) for kind, x in lengths.items()}
    tensors: dict[str, Tensor] = {}
    items: dict[str, list[Any]] = {name: [] for name, field in fields.items() if field.kind == RAGGED}
    dense = {name: field for name, field in fields.items() if name not in items}
    for name, field in dense.items():
        pad: Any = FIELDS[name].pad if name in FIELDS else 0
        shape = field.shape if field.kind == "B" else (longest[field.kind], *field.shape)
        tensors[name] = torch.full((count, *shape), pad_token_id if pad == "pad_token" else pad, dtype=field.dtype)
    objects: list[dict[str, Any]] = []
    for part, columns, span in zip(parts, columns_of, spans):
        theirs, end = _fields_of(part.record), len(objects) + len(part.rows)
        for name, of_rows in items.items():
            of_rows += _items(columns[name], part.rows, fields[name]) if name in theirs else [None] * len(part.rows)
        for name, field in dense.items():
            target = _bits(tensors[name][len(objects) : end]).numpy()
            if target.size and name in theirs:
                _fill(target, field, columns[theirs[name].column or name], part.rows, span.get(field.kind))
        objects += [json.loads(text) for text in columns[OTHERS].take(pa.array(part.rows)).to_pylist()]
        part.release()
    none = {name: torch.zeros(0, *fields[name].shape, dtype=fields[name].dtype) for name in items}
    ragged = {name: Ragged.of([none[name] if x is None else x for x in of_rows]) for name, of_rows in items.items()}
    return DataProto.from_dict(tensors | _rebuilt(tensors, lengths, longest), _columns(objects), ragged=ragged)


def _common_fields(records: Sequence[pa.RecordBatch]) -> dict[str, RowField]:
    """The fields that all record batches have, and those of images that some have: the other rows are without.

    Raises:
        DataProtoValidationError: dtype or shape of a field differ between them.
    """
    fields = dict(_fields_of(records[0]))
    for others in {id(x): x for x in map(_fields_of, records)}.values():
        fields |= {name: x for name, x in others.items() if name not in fields and (x.kind == RAGGED or name == KEYS)}
        for name, field in list(fields.items()):
            if name not in others:
                if field.kind != RAGGED and name != KEYS:
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
    names = dict.fromkeys(name for row in objects for name in row)
    return {name: np.fromiter((row.get(name) for row in objects), dtype=object, count=len(objects)) for name in names}


def _spans(column: pa.Array, rows: np.ndarray) -> np.ndarray:
    """Begin and end of the tokens of rows in the values of a column, [rows, 2]; alike in all columns of a kind."""
    offsets = column.offsets.to_numpy()
    return np.stack([offsets[rows], offsets[rows + 1]], axis=1)


def _fill(target: np.ndarray, field: RowField, column: pa.Array, rows: np.ndarray, spans: np.ndarray | None) -> None:
    """Write rows of a column into an array that is already filled with padding.

    Args:
        spans: of the kinds P and T, see `_spans`.
    """
    if spans is None:
        values = column.flatten() if field.shape else column
        target[:] = values.to_numpy().reshape(len(column), *field.shape)[rows]
        return
    values = column.values.to_numpy().reshape(-1, *field.shape)
    for row, (begin, end) in enumerate(spans.tolist()):
        first = target.shape[1] - (end - begin) if field.kind == "P" else 0
        target[row, first : first + end - begin] = values[begin:end]


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
    """The same memory in a dtype that Arrow has, an integer of equal size."""
    return tensor if tensor.dtype in _ARROW_DTYPES else tensor.view(_OF_SIZE[tensor.itemsize])


def _unpadded(values: np.ndarray, counts: np.ndarray, is_right: bool) -> np.ndarray:
    """The values of all rows as one flat array, without padding."""
    width = values.shape[1]
    if not len(counts) or int(counts.min()) == width:
        return values.reshape(-1)
    rows = [row[width - n :] if is_right else row[:n] for row, n in zip(values, counts.tolist())]
    return np.concatenate(rows).reshape(-1)


def _json_rows(batch: DataProto) -> list[str]:
    """The columns that are not tensors as one JSON object per row."""
    columns = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
    rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)] if columns else [{}] * len(batch)
    try:
        json.dumps(rows)  # refuses what is no JSON value; pydantic would convert it, but writes rows much faster
        return [to_json(row, inf_nan_mode="constants").decode() for row in rows]
    except (TypeError, ValueError):  # a value changed after the batch was made, an overlong integer, half a surrogate
        return [json_text(f"row {number} of the columns ", row) for number, row in enumerate(rows)]
