"""Episodes that several rows are parts of: joined for what is about an episode, divided again for what is about a row.

    rows      turn 0 | turn 1 | turn 2 of episode a, turn 0 | turn 1 of b, ...          [B T]
    joined    turn 0, turn 1, turn 2 of a side by side; turn 0, turn 1 of b; ...        [E T']

Rewards, the KL penalty and advantages are computed of joined rows, so that every estimator sees whole episodes. Rows of
which each is an episode have no `episode_tokens`, and pass as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.fields import FIELDS

PART = "episode_tokens"  # the field that rows have where an episode may have several


@dataclass(frozen=True)
class EpisodeIndex:
    """Which rows are parts of which episode; parts stand side by side, in their order.

    Attributes:
        episode: [B], of each row.
        first, last: [E], its rows.
        source: two [N], row and column of each token of a response, observations included.
        target: two [N], the same among joined rows.
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
    """Rows of episodes: fields [E T'] of all that belong to tokens of responses, [E] and [E P] as the first part has
    them, and columns as the last part has them. Rows of which each is an episode are given back."""
    if PART not in rows.batch:
        return rows
    index = EpisodeIndex.of(rows)
    made: dict[str, Any] = {}
    for name, x in rows.batch.items():
        dims = FIELDS[name].dims if name in FIELDS else ("B",) if x.dim() == 1 else ()
        if dims == ("B", "T"):
            pad = FIELDS[name].pad
            pad = rows.meta_info.get("pad_token_id", 0) if pad == "pad_token" else pad
            made[name] = torch.full((len(index.first), index.width), pad, dtype=x.dtype)
            made[name][index.target] = x[index.source]
        elif dims and "S" not in dims and name != PART:
            made[name] = x[index.first]
    columns = {name: values[index.last.numpy()] for name, values in rows.non_tensor_batch.items()}
    return DataProto.from_dict(made, non_tensors=columns, meta_info=rows.meta_info)


def divided(found: DataProto, rows: DataProto) -> DataProto:
    """What was found of `joined_episodes(rows)`, for the rows: of tokens in their places, of episodes for each part."""
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
    """One row of each episode, its last."""
    return rows if PART not in rows.batch else rows[EpisodeIndex.of(rows).last]


def rows_by_episode(rows: DataProto) -> list[Tensor] | None:
    """The rows of each episode; None where each row is one."""
    if PART not in rows.batch:
        return None
    index = EpisodeIndex.of(rows)
    return [torch.arange(int(a), int(b) + 1) for a, b in zip(index.first, index.last, strict=True)]
