"""DataProto: the batch that roles exchange. Every field is validated and records which function produced it.

    experience = rollout.union(scores).union(values)      joined, checked, none of the three changed
    experience["advantages"]                              a tensor; experience.batch is a read-only view of all of them
    DataProto.concat(experience.chunk(2))                 the same rows again

Shape letters: B responses, P prompt length, T response length, S = P + T. A batch binds the size of each by its first
field with that dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl import config
from verl.errors import DataProtoValidationError
from verl.protocol.concat import (
    first_other_row,
    in_threads,
    is_same,
    join_arrays,
    join_ragged,
    join_tensors,
    lengths_of,
    merged_meta,
    shown,
)
from verl.protocol.fields import Bound, bound_dims, check_ragged, check_rows, check_tensor
from verl.protocol.provenance import Source, contract_error, source_of, source_of_caller
from verl.protocol.ragged import Ragged, flattened, pop_ragged
from verl.protocol.serialization import copied, from_buffers, read_file, to_buffers, write_file
from verl.protocol.validation import (
    Indices,
    ReadOnlyFields,
    absent_error,
    check_content,
    object_array,
    only,
    row_indices,
    row_number,
)

_NO_RAGGED = ReadOnlyFields()


class DataProto:
    """A batch: named tensors, columns of JSON values and ragged fields with equal numbers of rows, and `meta_info`.

    Batches are made by `from_dict`. Presence, type, dtype and dims of fields are checked when a batch is made and when
    two are joined; with `VERL_STRICT_DATA_CHECK=1` or `verl.config.strict_data_check` the content is checked too.
    Methods return new batches that may share memory, so tensors of a batch must not be modified. Only `pop` changes its
    batch.

    Attributes:
        batch: tensors by name, read-only.
        non_tensor_batch: object arrays `[B]` of JSON values by name, read-only.
        ragged: `Ragged` fields by name, read-only; those of images are `media.KEY`, with the model's own keyword.
        meta_info: a dict of values for the whole batch.
    """

    __slots__ = ("_arrays", "_bound", "_ragged", "_sources", "_tensors", "meta_info")

    def __init__(self):
        self._fill({}, {}, {}, {}, {})

    def _fill(
        self,
        tensors: dict,
        arrays: dict,
        meta_info: dict,
        sources: dict[str, Source],
        bound: Bound,
        ragged: Mapping[str, Ragged] = {},
    ) -> DataProto:
        self._tensors, self._arrays = ReadOnlyFields(tensors), ReadOnlyFields(arrays)
        self._ragged = ReadOnlyFields(ragged) if ragged else _NO_RAGGED
        self.meta_info, self._sources, self._bound = meta_info, sources, bound
        return self

    # Making

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        producer: Callable | None = None,
        ragged: Mapping[str, Ragged] | None = None,
    ) -> DataProto:
        """Make a batch and check it.

        Args:
            tensors: registered fields with the dims of `verl.protocol.fields.FIELDS`; for other names the first dim is
                B.
            non_tensors: one JSON value per row: numbers, strings, booleans, None, and lists and dicts of these with
                strings as keys. Numbers and arrays of NumPy become Python numbers and lists, tuples become lists.
            meta_info: values for the whole batch.
            producer: the function that errors name; by default the caller.
            ragged: fields whose rows differ in length.
        Raises:
            DataProtoValidationError: a field breaks its contract.
        """
        source = source_of_caller() if producer is None else source_of(producer)
        fields = dict(tensors or {}), dict(non_tensors or {}), dict(meta_info or {})
        return cls()._made(*fields, dict(ragged or {}), source)

    def _made(self, tensors: dict, columns: dict, meta_info: dict, ragged: dict, source: Source) -> DataProto:
        for name in columns.keys() & tensors.keys() or (ragged and ragged.keys() & {**tensors, **columns}.keys()):
            raise contract_error(name, "one kind of field", "both a tensor and a column", source)
        sources = dict.fromkeys([*tensors, *columns, *ragged], source)
        arrays = {name: object_array(name, column, source) for name, column in columns.items()}
        bound = bound_dims(tensors, arrays, sources, ragged)
        if config.strict_data_check:
            check_content(tensors, bound, sources, ragged=ragged)
        return self._fill(tensors, arrays, meta_info, sources, bound, ragged)

    # Reading

    @property
    def batch(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    @property
    def non_tensor_batch(self) -> Mapping[str, np.ndarray]:
        return self._arrays

    @property
    def ragged(self) -> Mapping[str, Ragged]:
        return self._ragged

    def __len__(self) -> int:
        return self._bound["B"][0] if "B" in self._bound else 0

    def __bool__(self) -> bool:
        return True  # a batch with zero rows is true, too

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._arrays or name in self._ragged

    def __getitem__(self, key: str | Indices) -> Any:
        """A field by its name, or the rows by an index, a slice, a list of indices or a bool mask `[B]`.

        Raises:
            DataProtoValidationError: no such field, a mask of another length, or an invalid index.
            IndexError: a row outside the batch.
        """
        if isinstance(key, str):
            fields = self._tensors if key in self._tensors else self._arrays if key in self._arrays else self._ragged
            return fields[key] if key in fields else self._missing(key)
        if (number := row_number(key)) is not None:
            row = number + len(self) if number < 0 else number
            if not 0 <= row < len(self):
                raise IndexError(f"row {number} of a batch of {len(self)} rows")
            key = slice(row, row + 1)
        if isinstance(key, slice) and (key.step is None or key.step > 0):
            count = len(range(*key.indices(len(self))))
            return self._rows(lambda tensor: tensor[key], lambda array: array[key], lambda x: x.take(key), count)
        return self._take(row_indices(key, len(self)))

    def __setitem__(self, name: str, value: Any):
        self._tensors._refuse()

    def __repr__(self) -> str:
        tensors = [f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in self._tensors.items()]
        ragged = [f"{name} {field}" for name, field in self._ragged.items()]
        return f"DataProto({len(self)} rows: {', '.join([*tensors, *self._arrays, *ragged]) or 'no fields'})"

    def producer(self, name: str) -> Source:
        """The function that made a field, with line and file."""
        return self._sources[name] if name in self else self._missing(name)

    def check(self, strict: bool = False) -> DataProto:
        """Check every field again, with its content if `strict` or the process setting is true, and return self.

        Raises:
            DataProtoValidationError: naming field, expected, found, the first offending row and the producer.
        """
        self._bound = bound_dims(self._tensors, self._arrays, self._sources, self._ragged)
        if strict or config.strict_data_check:
            check_content(self._tensors, self._bound, self._sources, ragged=self._ragged)
        return self

    # Choosing and joining fields

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        ragged_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """A batch with the named fields only; None keeps all of that kind."""
        tensors, arrays = only(self._tensors, batch_keys), only(self._arrays, non_tensor_batch_keys)
        ragged = self._ragged if ragged_keys is None else only(self._ragged, ragged_keys)
        return self._with_fields(tensors, arrays, only(self.meta_info, meta_info_keys), ragged)

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
        ragged_keys: Sequence[str] = (),
    ) -> DataProto:
        """Remove the named fields from this batch and return them as a new batch."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or (), ragged_keys or ())
        remaining = self._with_fields(
            {name: tensor for name, tensor in self._tensors.items() if name not in popped._tensors},
            {name: array for name, array in self._arrays.items() if name not in popped._arrays},
            {key: value for key, value in self.meta_info.items() if key not in popped.meta_info},
            {name: field for name, field in self._ragged.items() if name not in popped._ragged},
        )
        self._fill(*remaining._fields())
        return popped

    def union(self, *others: DataProto) -> DataProto:
        """A batch with the fields of all batches.

        A field may be in several batches if its values are equal in type, shape and every number; NaN equals NaN.

        Raises:
            DataProtoValidationError: a field breaks its contract, or differs between batches; names the first row that
                differs, both values and both producers.
        """
        tensors, arrays, bound = dict(self._tensors), dict(self._arrays), dict(self._bound)
        ragged, sources = dict(self._ragged), dict(self._sources)
        for other in others:
            sources = {**other._sources, **sources}
            for name, tensor in other._tensors.items():
                if name in tensors:
                    if not is_same(tensors[name], tensor):
                        raise _conflict(name, tensors[name], sources, other, first_other_row(tensors[name], tensor))
                    continue
                if name in arrays or name in ragged:
                    raise _conflict(name, arrays.get(name, ragged.get(name)), sources, other)
                check_tensor(name, tensor, bound, sources)
                tensors[name] = tensor
            for name, array in other._arrays.items():
                if name in tensors or name in ragged:
                    raise _conflict(name, tensors.get(name, ragged.get(name)), sources, other)
                if name in arrays:
                    if not is_same(arrays[name], array):
                        raise _conflict(name, arrays[name], sources, other, first_other_row(arrays[name], array))
                    continue
                check_rows(name, len(array), bound, sources)
                arrays[name] = array
            for name, field in other._ragged.items():
                if name in tensors or name in arrays:
                    raise _conflict(name, tensors.get(name, arrays.get(name)), sources, other)
                check_ragged(name, field, bound, sources)
                if (row := ragged.setdefault(name, field).first_difference(field)) is not None:
                    raise _conflict(name, ragged[name], sources, other, row)
        meta_info = merged_meta([self.meta_info, *(other.meta_info for other in others)], "union")
        if config.strict_data_check:
            new = (tensors.keys() | ragged.keys()) - self._tensors.keys() - self._ragged.keys()
            check_content(tensors, bound, sources, new, ragged)
        return DataProto()._fill(tensors, arrays, meta_info, sources, bound, ragged)

    # Choosing and joining rows

    def repeat(self, n: int) -> DataProto:
        """Each row n times: `a a b b`."""
        return self._take(torch.arange(len(self)).repeat_interleave(n))

    def chunk(self, k: int) -> list[DataProto]:
        """Split into exactly k parts in order, whose row counts differ by at most one; parts may be empty."""
        if k < 1:
            raise DataProtoValidationError(f"chunk({k}): expected at least 1 part.")
        base, longer = divmod(len(self), k)
        starts = [part * base + min(part, longer) for part in range(k + 1)]
        return [self[start:end] for start, end in pairwise(starts)]

    @staticmethod
    def concat(parts: Iterable[DataProto], indices: Sequence[torch.Tensor] | None = None) -> DataProto:
        """Concatenate batches, re-padded to the longest: P on the left, T on the right, S on both sides.

        Parts without rows need no fields. Padding is that of each field; rows of a part without a ragged field are
        empty in it.

        Args:
            parts: the batches.
            indices: row indices of the result for the rows of each part, together a permutation; None to concatenate.
        Raises:
            DataProtoValidationError: there are no parts, or fields, dtypes, unregistered dims or meta_info differ.
        """
        parts = list(parts)
        if not parts:
            raise DataProtoValidationError("concat needs at least one part.")
        filled = [part for part in parts if len(part)] or parts[:1]
        meta_info, first = merged_meta([part.meta_info for part in parts], "concat"), filled[0]
        for part in filled[1:]:
            first._same_fields(part)
        if len(filled) == 1:
            whole = first._with_fields(first._tensors, first._arrays, meta_info, first._ragged)
            return whole if indices is None else whole._take(torch.cat(list(indices)).argsort())
        at = None if indices is None else [rows for rows in indices if len(rows)]
        assert at is None or [*map(len, at)] == [*map(len, filled)], "places do not match the parts"
        lengths = [lengths_of(part._bound) for part in filled]
        jobs = []
        for name in first._tensors:
            columns = [(part._tensors[name], part._sources.get(name)) for part in filled]
            jobs.append(partial(join_tensors, name, columns, lengths, meta_info, at))
        num_bytes = sum(tensor.nbytes for part in filled for tensor in part._tensors.values())
        tensors = dict(zip(first._tensors, in_threads(jobs, 0 if at is None else num_bytes)))
        arrays = {name: join_arrays([part._arrays[name] for part in filled], at) for name in first._arrays}
        order = None if at is None else torch.cat(at).argsort()
        ragged = {
            name: join_ragged(
                name, [(part._ragged.get(name), len(part), part._sources.get(name)) for part in filled], order
            )
            for name in dict.fromkeys(name for part in filled for name in part._ragged)
        }
        sources = (
            {name: source for part in reversed(filled) for name, source in part._sources.items()} if ragged else None
        )
        return first._with_fields(tensors, arrays, meta_info, ragged, sources)

    # Moving and keeping

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors to `device`; returns a new batch."""
        return self._rows(lambda tensor: tensor.to(device), lambda array: array, lambda x: x.to(device), len(self))

    def save(self, path: str | Path) -> None:
        """Save to a file: tensors as safetensors, everything else as JSON in it, without pickle and without gradients.

        Raises:
            DataProtoValidationError: `meta_info` has a part that is not a JSON value (see `from_dict`).
        """
        write_file(Path(path), self._tensors | flattened(self._ragged), self._arrays, self.meta_info, self._sources)

    @staticmethod
    def load(path: str | Path) -> DataProto:
        """Load a batch that `save` wrote, to the CPU, and check it.

        Raises:
            DataProtoValidationError: there is no such file, or `save` did not write it.
        """
        tensors, arrays, meta_info, sources = read_file(Path(path))
        ragged = pop_ragged(tensors)
        return DataProto()._fill(tensors, arrays, meta_info, sources, {}, ragged).check()

    def __getstate__(self):
        tensors = self._tensors | flattened(self._ragged) if self._ragged else self._tensors
        return to_buffers(tensors), dict(self._arrays), self.meta_info, self._sources, self._bound

    def __setstate__(self, state):
        packed, arrays, meta_info, sources, bound = state
        tensors = from_buffers(packed)
        ragged = pop_ragged(tensors)
        self._fill(tensors, arrays, meta_info, sources, bound, ragged)

    def __copy__(self) -> DataProto:
        return self._rows(lambda tensor: tensor, lambda array: array, lambda x: x, len(self))

    def __deepcopy__(self, memo: dict) -> DataProto:
        tensors = {name: copied(tensor) for name, tensor in self._tensors.items()}
        arrays = {name: copy.deepcopy(array, memo) for name, array in self._arrays.items()}
        meta_info = copy.deepcopy(self.meta_info, memo)
        ragged = {name: copy.deepcopy(field, memo) for name, field in self._ragged.items()}
        return DataProto()._fill(tensors, arrays, meta_info, dict(self._sources), dict(self._bound), ragged)

    # Inner steps

    def _fields(self) -> tuple[Any, ...]:
        """The arguments of `_fill`."""
        return self._tensors, self._arrays, self.meta_info, self._sources, self._bound, self._ragged

    def _names(self) -> dict[str, Any]:
        return {**self._tensors, **self._arrays, **self._ragged}

    def _with_fields(
        self, tensors: Mapping, arrays: Mapping, meta_info: Mapping, ragged: Mapping, sources: Mapping | None = None
    ) -> DataProto:
        """A batch with these fields, and the dims that they bind."""
        known = self._sources if sources is None else sources
        bound = bound_dims(tensors, arrays, known, ragged)
        kept = {name: source for name, source in known.items() if name in tensors or name in arrays or name in ragged}
        return DataProto()._fill(dict(tensors), dict(arrays), dict(meta_info), kept, bound, ragged)

    def _rows(self, of_tensor: Callable, of_array: Callable, of_ragged: Callable, count: int) -> DataProto:
        """Apply a function that returns `count` rows to every field."""
        bound = {**self._bound, "B": (count, self._bound["B"][1])} if "B" in self._bound else {}
        tensors = {name: of_tensor(tensor) for name, tensor in self._tensors.items()}
        arrays = {name: of_array(array) for name, array in self._arrays.items()}
        ragged = self._ragged and {name: of_ragged(field) for name, field in self._ragged.items()}
        return DataProto()._fill(tensors, arrays, dict(self.meta_info), self._sources, bound, ragged)

    def _take(self, rows: torch.Tensor) -> DataProto:
        """Copy rows by index, int64 on the CPU, all within the batch."""
        on = {device: rows.to(device) for device in {tensor.device for tensor in self._tensors.values()}}
        positions = rows.numpy()
        return self._rows(
            lambda t: t.index_select(0, on[t.device]), lambda array: array[positions], lambda x: x.take(rows), len(rows)
        )

    def _missing(self, name: str) -> Any:
        raise absent_error(name, self._names())

    def _same_fields(self, other: DataProto) -> None:
        if differing := sorted(
            (self._tensors.keys() ^ other._tensors.keys()) | (self._arrays.keys() ^ other._arrays.keys())
        ):
            name = differing[0]
            holder = self if name in self else other
            raise contract_error(
                name, "the same fields in every part of a concat", "missing in one of them", holder._sources.get(name)
            )


def _conflict(
    name: str, held: Any, sources: Mapping[str, Source], other: DataProto, row: int | None = None
) -> DataProtoValidationError:
    """The error for a field of a batch that differs from the one that those before it have."""
    source = other._sources.get(name)
    mine, theirs = _described(held, sources.get(name), row), _described(other[name], source, row)
    expected, value = f"the values it has already: {mine}", f"other values: {theirs}. To replace a field, pop it first."
    return contract_error(name, expected, value, source, row)


def _described(value: Any, source: Source | None, row: int | None) -> str:
    text = str(value) if isinstance(value, Ragged) else shown(value)
    if row is not None and not isinstance(value, Ragged):
        text += f", {shown(value[row].tolist() if isinstance(value, torch.Tensor) else value[row])} in row {row}"
    return f"{text} by {source}" if source else text
