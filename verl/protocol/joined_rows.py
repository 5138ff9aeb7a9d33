"""Joins the rows of an episode for computations per episode, and splits results over the rows again.

    rows      turn 0 | turn 1 | turn 2 of episode a, turn 0 | turn 1 of b, ...          [B T]
    joined    turn 0, turn 1, turn 2 of a side by side; turn 0, turn 1 of b; ...        [E T']

Rewards, the KL penalty and advantages are computed on joined rows, so that every estimator gets whole episodes. If each
row is an episode, there is no field `episode_tokens`, and rows are unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.fields import FIELDS

PART = "episode_tokens"  # the field that marks rows of episodes with several rows


@dataclass(frozen=True)
class EpisodeIndex:
    """Maps rows to episodes; the rows of an episode are joined in order.

    Attributes:
        episode: [B], episode of each row.
        first, last: [E], first and last row of each episode.
        source: two [N], row and column of each response token, including observations.
        target: two [N], row and column of the token in the joined rows.
        width: T'.
    """

    episode: Tensor
    first: Tensor
    last: Tensor
    source: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor]
    width: int

    @classmethod
    def of(cls, rows: DataProto) -> EpisodeIndex:
        key = torch.stack([rows["group_ids"], rows["sample_ids"]], dim=1)
        begins = torch.ones(len(rows), dtype=torch.bool)
        begins[1:] = (key[1:] != key[:-1]).any(dim=1)
        episode = begins.cumsum(0) - 1
        first = begins.nonzero().flatten()
        last = torch.cat([first[1:], torch.tensor([len(rows)])]) - 1
        there = rows["turn_ids"] >= 0
        lengths = there.sum(dim=1)
        before = lengths.cumsum(0) - lengths  # tokens of all rows before
        offset = before - before[first][episode]
        row, column = there.nonzero(as_tuple=True)
        target = episode[row], offset[row] + column
        return cls(episode, first, last, (row, column), target, int((offset + lengths).max()) if len(rows) else 0)


def joined_episodes(rows: DataProto) -> DataProto:
    """Join rows to episodes: fields of response tokens become [E T'], fields [B] and [B P] are those of the first row,
    and columns those of the last row of each episode. If each row is an episode, rows are returned unchanged.
    """
    if PART not in rows.batch:
        return rows
    index = EpisodeIndex.of(rows)
    made: dict[str, Any] = {}
    for name, x in rows.batch.items():
        dims = FIELDS[name].dims if name in FIELDS else ("B",) if x.dim() == 1 else ()
        if dims == ("B", "T"):
            pad = FIELDS[name].pad
            pad = rows.meta_info.get("pad_token_id", 0) if isinstance(pad, str) else pad
            made[name] = torch.full((len(index.first), index.width), pad, dtype=x.dtype)
            made[name][index.target] = x[index.source]
        elif dims and "S" not in dims and name != PART:
            made[name] = x[index.first]
    columns = {name: values[index.last.numpy()] for name, values in rows.non_tensor_batch.items()}
    return DataProto.from_dict(made, non_tensors=columns, meta_info=rows.meta_info)


def divided(found: DataProto, rows: DataProto) -> DataProto:
    """Split results of `joined_episodes(rows)` over the rows: token fields by position, fields [E] repeated per row."""
    if PART not in rows.batch:
        return found
    index = EpisodeIndex.of(rows)
    made = {}
    for name, x in found.batch.items():
        if x.dim() == 1:
            made[name] = x[index.episode]
            continue
        made[name] = torch.zeros(rows["response_mask"].shape, dtype=x.dtype)
        made[name][index.source] = x[index.target]
    columns = {name: values[index.episode.numpy()] for name, values in found.non_tensor_batch.items()}
    return DataProto.from_dict(made, non_tensors=columns)


def last_parts(rows: DataProto) -> DataProto:
    """The last row of each episode."""
    return rows if PART not in rows.batch else rows[EpisodeIndex.of(rows).last]


def rows_by_episode(rows: DataProto) -> list[Tensor] | None:
    """Row indices of each episode; None if each row is an episode."""
    if PART not in rows.batch:
        return None
    index = EpisodeIndex.of(rows)
    return [torch.arange(int(a), int(b) + 1) for a, b in zip(index.first, index.last, strict=True)]
