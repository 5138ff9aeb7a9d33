"""Context parallelism of a packed line: the tokens of each rank, and the keys that its queries attend to.

    line      | 0 | 1 | 2 | 3 |     cut into 2 * size chunks; rank r has the chunks r and 2 * size - 1 - r, so that
    rank 0      x           x       early queries, with few keys, and late ones balance the work
    rank 1          x   x

The queries of a rank are split into pieces of one segment each. A piece attends only to keys of its own row: those of a
shared prompt and of its segment, in row order, so that index and position of a key are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verl.ops.packing import BLOCK_SLACK, GatherIndex, PackedRows, gather_index

PIECE = 1024  # queries; a piece computes all keys of its last query for each of them
KEPT_MASK = 2**20  # elements of a mask that is cached
# Scores of pieces that attend together, under a mask that is in memory with them. A larger piece attends alone: its
# causal kernel on a CPU needs no mask and leaves out half of the piece's own scores.
MASKED_SCORES = 2**21


@dataclass(frozen=True)
class PieceBlock:
    """Pieces of similar size that attend together.

    Attributes:
        queries: [count, Q], indices into the rank's tokens; padded by repeating the last one of a piece.
        is_query: [count, Q], False on that padding.
        real_slots: [q], their places in the flattened [count * Q].
        real_queries: [q], `queries` there.
        positions: [count, Q], positions of the queries in their rows.
        entries: [E], indices into the whole line of all tokens that any piece attends to.
        keys: [count * K], keys of each piece as indices into `entries`.
        count, width: number of pieces, and of keys per piece (K).
        masks: cache by window and device of small masks, for all layers and their recomputation.
    """

    queries: Tensor
    is_query: Tensor
    real_slots: Tensor
    real_queries: Tensor
    positions: Tensor
    entries: Tensor
    keys: GatherIndex
    count: int
    width: int
    masks: dict[tuple[int | None, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def mask(self, window: int | None) -> Tensor:
        """The attention mask, [count, 1, Q, K]."""
        known = (window, self.positions.device)
        if known in self.masks:
            return self.masks[known]
        behind = self.positions[:, :, None] - torch.arange(self.width, device=self.positions.device)
        seen = (behind >= 0 if window is None else (behind >= 0) & (behind < window))[:, None]
        if seen.numel() <= KEPT_MASK:
            self.masks[known] = seen
        return seen

    def to(self, device: torch.device | str) -> PieceBlock:
        names = ("queries", "is_query", "real_slots", "real_queries", "positions", "entries")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, masks={}, keys=self.keys.to(device), **moved)


@dataclass(frozen=True)
class ContextShard:
    """The share of one rank in a packed line.

    Attributes:
        own: [n], indices into the line of the rank's tokens.
        sizes: n of every rank.
        padded: [N], index of each token of the line in the concatenation over ranks, each padded to the largest n.
        dense: [N], the same without that padding.
        blocks: of attention.
        predictors: gathers the states that predict the response tokens of this rank from its own tokens.
        predicted: [m], indices of those response tokens, in the order of mask.nonzero().
        counts: m of every rank.
        joined: [M], index of each response token in the concatenation over ranks, padded likewise.
        ranges: of the line, which `own` is made of.
        layouts: cached calls of variable-length attention by window and device.
    """

    own: Tensor
    sizes: tuple[int, ...]
    padded: Tensor
    dense: Tensor
    blocks: tuple[PieceBlock, ...]
    predictors: GatherIndex
    predicted: Tensor
    counts: tuple[int, ...]
    joined: Tensor
    ranges: tuple[tuple[int, int], ...]
    layouts: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def to(self, device: torch.device | str) -> ContextShard:
        names = ("own", "padded", "dense", "predicted", "joined")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        blocks = tuple(block.to(device) for block in self.blocks)
        return replace(self, blocks=blocks, predictors=self.predictors.to(device), **moved)


def shard_line(packing: PackedRows, size: int, rank: int) -> ContextShard:
    """The share of a rank in a packed line; a rank without tokens gets the first one, whose result is unused."""
    length = len(packing.tokens)
    ranges = [_ranges(length, size, r) for r in range(size)]
    owned = [torch.cat([torch.arange(*ends) for ends in of_rank]) for of_rank in ranges]
    sizes = tuple(len(own) for own in owned)
    positions = _padded(owned, length)
    holder, counted = positions // max(sizes), torch.tensor(sizes)
    dense = (counted.cumsum(0) - counted)[holder] + positions % max(sizes)
    predicting = [(holder[packing.predictors.index] == r).nonzero()[:, 0] for r in range(size)]
    counts, own = tuple(len(found) for found in predicting), owned[rank]
    local = torch.full((length,), -1)
    local[own] = torch.arange(len(own))
    return ContextShard(
        own,
        sizes,
        positions,
        dense,
        tuple(_blocks(packing, own)),
        gather_index(local[packing.predictors.index[predicting[rank]]], len(own)),
        predicting[rank],
        counts,
        _padded(predicting, len(packing.predictors.index)),
        ranges[rank],
    )


def _ranges(length: int, size: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Half-open token range of each chunk of a rank."""
    edges = [length * i // (2 * size) for i in range(2 * size + 1)]
    chunks = tuple((edges[i], edges[i + 1]) for i in (rank, 2 * size - 1 - rank))
    return chunks if any(start < stop for start, stop in chunks) else ((0, 1),)


def _padded(owned: list[Tensor], length: int) -> Tensor:
    """Index of each of `length` entries in the concatenation over ranks, each padded to the largest."""
    most, positions = max(max(len(own) for own in owned), 1), torch.zeros(length, dtype=torch.int64)
    for rank in reversed(range(len(owned))):  # an entry of two ranks counts for the first
        positions[owned[rank]] = rank * most + torch.arange(len(owned[rank]))
    return positions


@dataclass(frozen=True)
class _Piece:
    """Queries low to high of a segment (block and number in it of the packing), the first of them at `at` of a rank."""

    block: int
    row: int
    low: int
    high: int
    at: int
    prefix: int

    @property
    def queries(self) -> int:
        return self.high - self.low

    @property
    def keys(self) -> int:
        return self.prefix + self.high


def _blocks(packing: PackedRows, own: Tensor) -> Iterator[PieceBlock]:
    pieces = sorted(_pieces(packing, own), key=lambda piece: (-piece.queries, -piece.keys, piece.at))
    while pieces:
        first, taken, remaining = pieces[0], list[_Piece](), list[_Piece]()
        for piece in pieces:
            is_alike = piece.queries >= BLOCK_SLACK * first.queries and (
                BLOCK_SLACK * first.keys <= piece.keys <= first.keys or piece is first
            )
            is_small = (len(taken) + 1) * first.queries * first.keys <= MASKED_SCORES or not taken
            (taken if is_alike and is_small else remaining).append(piece)
        pieces = remaining
        yield _block(packing, taken)


def _pieces(packing: PackedRows, own: Tensor) -> Iterator[_Piece]:
    """Split the tokens of a rank at segment ends, at gaps, and by `PIECE`."""
    layout = packing.slots()
    slots = layout.out.index[own]
    first = 0
    for number, block in enumerate(layout.blocks):
        inside = ((slots >= first) & (slots < first + block.count * block.queries)).nonzero()[:, 0]
        if len(inside):
            slot = slots[inside] - first
            row, query = slot // block.queries, slot % block.queries
            breaks = (row.diff() != 0) | (query.diff() != 1) | (inside.diff() != 1)
            edges = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(inside)]
            for low, high in itertools.pairwise(edges):
                of_prefix = int(block.prefix_lengths[row[low]]) if block.prefix else 0
                for start in range(low, high, PIECE):
                    stop, begin = min(start + PIECE, high), int(query[start])
                    yield _Piece(number, int(row[low]), begin, begin + stop - start, int(inside[start]), of_prefix)
        first += block.count * block.queries


def _block(packing: PackedRows, pieces: list[_Piece]) -> PieceBlock:
    queries, width = max(piece.queries for piece in pieces), max(piece.keys for piece in pieces)
    lengths = torch.tensor([piece.queries for piece in pieces])[:, None]
    column = torch.arange(queries)
    within = torch.minimum(column, lengths - 1)
    starts = torch.tensor([[piece.at, piece.prefix + piece.low] for piece in pieces])
    keys = torch.stack([_keys(packing, piece, width) for piece in pieces])
    entries, index = torch.unique(keys, return_inverse=True)
    is_key = torch.arange(width) < torch.tensor([piece.keys for piece in pieces])[:, None]
    in_line, is_query = starts[:, :1] + within, column < lengths
    real = is_query.flatten().nonzero()[:, 0]
    return PieceBlock(
        in_line,
        is_query,
        real,
        in_line.flatten()[real],
        starts[:, 1:] + within,
        entries,
        gather_index(index.flatten(), len(entries), is_real=is_key.flatten()),
        len(pieces),
        width,
    )


def _keys(packing: PackedRows, piece: _Piece, width: int) -> Tensor:
    """[width] indices into the line: the row's tokens up to the last query, which is repeated as padding."""
    layout = packing.slots()
    block = layout.blocks[piece.block]
    before = sum(other.count * other.keys for other in layout.blocks[: piece.block])
    slots = layout.keys.index[before + piece.row * block.keys : before + (piece.row + 1) * block.keys]
    row = torch.cat([slots[: piece.prefix], slots[block.prefix : block.prefix + piece.high]])
    return torch.cat([row, row[-1:].expand(width - len(row))])
