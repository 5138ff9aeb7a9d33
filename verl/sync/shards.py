"""From the parts that the ranks of an engine or of the trainer hold to the marks of whole tensors.

A layer cut by its outputs gives each rank some rows of W x; one cut by its inputs gives each rank a term of the sum.
One that is cut both ways gives each a term for some rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl.sync.marks import Mark, Marks


@dataclass(frozen=True)
class Shard:
    """What one rank knows of a tensor's mark.

    Attributes:
        mark: of the rank's part.
        rows: of the whole tensor.
        offset: row at which the part begins.
        is_term: the rows are a sum over ranks, each with other columns of the tensor.
    """

    mark: Mark
    rows: int
    offset: int = 0
    is_term: bool = False


def whole(mark: Mark) -> Shard:
    """A tensor that every rank holds whole."""
    return Shard(mark, mark.values.shape[1])


Shards = dict[str, list[Shard]]  # a layer that is fused in the Hugging Face model too gives several of one tensor


def join(ranks: Sequence[Shards]) -> Marks:
    """The marks of whole tensors from the shards of all ranks.

    Rows that no rank holds, and rows held by several that differ in them, are nan, so that they match nothing.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: _joined([shard for rank in ranks for shard in rank.get(name, ())]) for name in names}


def _joined(shards: Sequence[Shard]) -> Mark:
    mark = shards[0].mark
    if shards[0].is_term:
        shards = list(_sums(shards))
    values = np.full((mark.values.shape[0], shards[0].rows), np.nan, dtype=np.float32)
    is_filled = np.zeros(shards[0].rows, dtype=bool)
    for shard in shards:
        part = slice(shard.offset, shard.offset + shard.mark.values.shape[1])
        both = is_filled[part] & (values[:, part] != shard.mark.values).any(axis=0)
        values[:, part] = np.where(both, np.nan, shard.mark.values)
        is_filled[part] = True
    return replace(mark, values=values)


def _sums(shards: Sequence[Shard]) -> Iterator[Shard]:
    """The terms of each range of rows added up."""
    ranges: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        ranges.setdefault((shard.offset, shard.mark.values.shape[1]), []).append(shard)
    for terms in ranges.values():
        total = np.sum([term.mark.values for term in terms], axis=0, dtype=np.float32)
        yield replace(terms[0], mark=replace(terms[0].mark, values=total))
