"""Ragged: a field of a batch whose rows differ in length, such as the patches of images; rows may share an item.

    values [n ...]    the items, one after another
    offsets [m + 1]   item i is values[offsets[i] : offsets[i + 1]]; one of length 0 is a row without any
    index [B]         the item of each row

Rows are chosen, repeated and put in order by `index` alone, so the responses to a prompt share what belongs to it.
`values` may be on any device, `offsets` and `index` are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.errors import DataProtoValidationError
from verl.protocol.serialization import raw_bytes


@dataclass(frozen=True, eq=False)
class Ragged:
    """The items of a field, and the item of each row.

    Attributes:
        values: [n ...].
        offsets: [m + 1] int64, from 0 to n, ascending.
        index: [B] int64, in [0, m).
    """

    values: Tensor
    offsets: Tensor
    index: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> Ragged:
        """Rows [n_i ...] that are alike but for n_i; a tensor that several rows are is one item.

        Raises:
            DataProtoValidationError: there are no rows, or they differ in dtype or in other dims.
        """
        items = {id(row): row for row in rows}
        if not items or len({(row.dtype, row.shape[1:]) for row in items.values()}) > 1 or not rows[0].ndim:
            kinds = ", ".join(sorted({f"{list(row.shape)} {row.dtype}" for row in items.values()})) or "none"
            raise DataProtoValidationError(
                f"Ragged.of: expected rows that differ in their first dim alone, got {kinds}."
            )
        numbers = {item: number for number, item in enumerate(items)}
        offsets = _offsets(torch.tensor([len(item) for item in items.values()]))
        return cls(torch.cat(list(items.values())), offsets, torch.tensor([numbers[id(row)] for row in rows]))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Tensor:
        """The item of a row, a view."""
        item = int(self.index[row])
        return self.values[int(self.offsets[item]) : int(self.offsets[item + 1])]

    @property
    def lengths(self) -> Tensor:
        """[B] int64."""
        return self.offsets.diff()[self.index]

    def take(self, rows: Tensor | slice) -> Ragged:
        """Some rows by their indices; items are shared, not copied."""
        return replace(self, index=self.index[rows])

    def to(self, device: str | torch.device) -> Ragged:
        return replace(self, values=self.values.to(device))

    def compact(self) -> Ragged:
        """The same rows without items that no row has, in the order of the first row of each."""
        used = list(dict.fromkeys(self.index.tolist()))
        if used == list(range(len(self.offsets) - 1)):
            return self
        items = torch.tensor(used, dtype=torch.int64)
        lengths, starts = self.offsets.diff()[items], self.offsets[:-1][items]
        offsets = _offsets(lengths)
        places = torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)
        number = torch.zeros(len(self.offsets), dtype=torch.int64)
        number[items] = torch.arange(len(items))
        return Ragged(self.values[places.to(self.values.device)], offsets, number[self.index])

    @staticmethod
    def concat(parts: Iterable[Ragged]) -> Ragged:
        """The rows of all parts, which must agree in dtype and in the dims of `values` but the first; parts that share
        their values go on sharing them, and items without rows are dropped."""
        parts, held = list(parts), {}
        for part in parts:
            held.setdefault((id(part.values), id(part.offsets)), []).append(part)
        if len(held) == 1:
            return replace(parts[0], index=torch.cat([part.index for part in parts]))
        of_part, values, lengths, count = {}, [], [], 0
        for group in held.values():
            whole = replace(group[0], index=torch.cat([part.index for part in group])).compact()
            indices = (whole.index + count).split([len(part) for part in group])
            of_part |= {id(part): index for part, index in zip(group, indices, strict=True)}
            values.append(whole.values)
            lengths.append(whole.offsets.diff())
            count += len(lengths[-1])
        device = parts[0].values.device
        index = torch.cat([of_part[id(part)] for part in parts])
        return Ragged(torch.cat([x.to(device) for x in values]), _offsets(torch.cat(lengths)), index)

    @staticmethod
    def empty(like: Ragged, rows: int) -> Ragged:
        """Rows of length 0 with the dtype and dims of another field."""
        return Ragged(like.values[:0], torch.zeros(2, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))

    def row_of(self, value: int) -> int | None:
        """The first row with an entry of `values`; None if no row has it."""
        item = int(torch.searchsorted(self.offsets, value, right=True)) - 1
        return next(iter((self.index == item).nonzero().flatten().tolist()), None)

    def fault(self) -> str | None:
        """The rule of `offsets` or `index` above that is broken, or None."""
        offsets, index = self.offsets, self.index
        if any(x.dtype != torch.int64 or x.ndim != 1 or x.device.type != "cpu" for x in (offsets, index)):
            return "offsets or index that are not int64 in one dim on the CPU"
        if (
            not len(offsets)
            or int(offsets[0])
            or int(offsets[-1]) != len(self.values)
            or bool((offsets.diff() < 0).any())
        ):
            return f"offsets that do not ascend from 0 to {len(self.values)}"
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(offsets) - 1:
            return f"an index outside its {len(offsets) - 1} items"
        return None

    def first_difference(self, other: Ragged) -> int | None:
        """The first row in which two fields of equally many rows differ, by dtype, shape or bytes."""
        if self.values is other.values and self.offsets is other.offsets and torch.equal(self.index, other.index):
            return None
        known: dict[tuple[int, int], bool] = {}
        for row, pair in enumerate(zip(self.index.tolist(), other.index.tolist(), strict=True)):
            if pair not in known:
                known[pair] = _is_equal(self[row], other[row])
            if not known[pair]:
                return row
        return None

    def __repr__(self) -> str:
        kind = f"{list(self.values.shape[1:])} {str(self.values.dtype).removeprefix('torch.')}"
        return f"Ragged({len(self)} rows of {len(self.offsets) - 1} items, {len(self.values)} x {kind})"


_PARTS = {name: f"::ragged.{name}" for name in ("values", "offsets", "index")}


def flattened(fields: Mapping[str, Ragged]) -> dict[str, Tensor]:
    """The tensors of ragged fields, under names that `pop_ragged` knows; items that no row has are left out."""
    whole = {name: field.compact() for name, field in fields.items()}
    return {name + ending: getattr(x, part) for name, x in whole.items() for part, ending in _PARTS.items()}


def pop_ragged(tensors: dict[str, Tensor]) -> dict[str, Ragged]:
    """Remove the tensors of `flattened` and return their fields."""
    names = [name.removesuffix(_PARTS["index"]) for name in tensors if name.endswith(_PARTS["index"])]
    return {name: Ragged(**{part: tensors.pop(name + ending) for part, ending in _PARTS.items()}) for name in names}


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _is_equal(left: Tensor, right: Tensor) -> bool:
    is_alike = left.dtype == right.dtype and left.shape == right.shape
    return is_alike and torch.equal(raw_bytes(left), raw_bytes(right))
