"""Packing: rows of different length as one line of tokens without padding, in which a shared prompt occurs once.

    rows     p p p a a        tokens   p p p | b b b b | a a | ...       p: a prompt, a and b: two responses to it
             p p p b b b b             prompts   responses by prompt, longest first

Attention is computed by a kernel for segments of any length (`verl.ops.attention`), or on blocks of segments of
similar length; everything else runs on the line. The last token of a response predicts no needed token and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

BLOCK_SLACK = 0.8  # minimal ratio of the shortest to the longest segment of a block


@dataclass(frozen=True)
class GatherIndex:
    """A gather from a line of N entries to M slots, with its inverse for the backward pass.

    Attributes:
        index: [M], entry of each slot.
        uses: for consecutive parts of the line, [k, m]: the slots of each of its k entries, padded with M. With them
            the backward pass sums in a fixed order.
        is_identity: whether the slots are the line itself.
    """

    index: Tensor
    uses: tuple[Tensor, ...]
    is_identity: bool = False

    def to(self, device: torch.device | str) -> GatherIndex:
        index, *uses = (x.to(device, non_blocking=True) for x in (self.index, *self.uses))
        return GatherIndex(index, tuple(uses), self.is_identity)


@dataclass(frozen=True)
class AttentionBlock:
    """Segments whose attention is computed together.

    Attributes:
        count: number of segments.
        queries, keys: slots per segment.
        prefix: number of keys of the prompt before those of the segment; 0 if the segment has no prefix.
        prefix_lengths: [count], real keys among the prefix, from the left.
    """

    count: int
    queries: int
    keys: int
    prefix: int
    prefix_lengths: Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a line: a prompt, a response behind a shared prompt, or a whole row.

    Attributes:
        start, length: where it stands in the line.
        prompt: number of the segment that is its prompt; None if it begins its row.
    """

    start: int
    length: int
    prompt: int | None = None


@dataclass(frozen=True)
class BlockSlots:
    """Segments of a line in blocks of slots, for attention under masks.

    Attributes:
        blocks: in the order of their slots.
        queries, keys: gathers from the line to the slots of all blocks, concatenated.
        out: gather from the query slots back to the line.
        masks: cache by block and window, for all layers and their recomputation.
    """

    blocks: tuple[AttentionBlock, ...]
    queries: GatherIndex
    keys: GatherIndex
    out: GatherIndex
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict, compare=False, repr=False)

    def to(self, device: torch.device | str) -> BlockSlots:
        queries, keys, out = (x.to(device) for x in (self.queries, self.keys, self.out))
        return BlockSlots(self.blocks, queries, keys, out)


HOST = torch.device("cpu")


@dataclass(frozen=True)
class PackedRows:
    """The layout of rows [b S] as a line of N tokens.

    Attributes:
        tokens: [N], index of each token in the flattened rows [b * S].
        positions: [N], position of each token in its row.
        predictors: gather from the line to the states that predict the response tokens on the mask, in the order of
            mask.nonzero().
        segments: those with tokens, in the order of the line: prompts of several rows, those without a response at the
            end, then their responses, prompt by prompt.
        multiple: of which the lengths of blocks are.
        layouts: cached calls of variable-length attention by window and device (`verl.ops.attention`).
    """

    tokens: Tensor
    positions: Tensor
    predictors: GatherIndex
    segments: tuple[Segment, ...]
    multiple: int = 1
    layouts: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    _slots: dict[torch.device, BlockSlots] = field(default_factory=dict, compare=False, repr=False)

    def to(self, device: torch.device | str) -> PackedRows:
        tokens, positions = (x.to(device, non_blocking=True) for x in (self.tokens, self.positions))
        return replace(self, tokens=tokens, positions=positions, predictors=self.predictors.to(device))

    def slots(self, device: torch.device = HOST) -> BlockSlots:
        """Blocks on a device, made and moved at first use: variable-length attention needs none."""
        if HOST not in self._slots:
            self._slots[HOST] = block_slots(self.segments, self.multiple)
        if device not in self._slots:
            self._slots[device] = self._slots[HOST].to(device)
        return self._slots[device]


def pack(
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    prompt_of: Tensor,
    response_mask: Tensor,
    prompt_width: int,
    share: bool = True,
    multiple: int = 1,
    starts: Tensor | None = None,
) -> PackedRows:
    """Compute the packed layout of rows with a left-padded prompt and a right-padded response.

    Args:
        prompt_lengths, response_lengths: [b], tokens; a prompt has at least one. It may reach into the response part of
            the row.
        prompt_of: [b], equal for rows with the same prompt.
        response_mask: [b T], the response tokens to predict.
        prompt_width: P of the rows.
        share: whether a prompt of several rows occurs once.
        multiple: lengths of segments and prompts in attention blocks are padded to a multiple of it, so that a device
            that compiles per shape meets few shapes.
        starts: [b], first column of each row; None where a prompt ends at `prompt_width`.
    """
    rows, width = response_mask.shape
    begins = prompt_width - prompt_lengths if starts is None else starts
    order = torch.argsort(
        response_lengths if share else prompt_lengths + response_lengths, descending=True, stable=True
    )
    if share:
        _, prompt_of = torch.unique(prompt_of, return_inverse=True)
        owner = torch.full((int(prompt_of.max()) + 1,), rows).scatter_reduce(0, prompt_of, torch.arange(rows), "amin")
        is_read = torch.zeros_like(owner).index_add_(0, prompt_of, own_tokens(response_lengths)) > 0
        owner = owner[torch.argsort(torch.where(is_read, prompt_lengths[owner], 0), descending=True, stable=True)]
        rank_of = torch.empty_like(owner)
        rank_of[prompt_of[owner]] = torch.arange(len(owner))
        prompt_of = rank_of[prompt_of]  # number prompts by their order in the line
        prefixes = prompt_lengths[owner]
        order = order[torch.argsort(prompt_of[order], stable=True)]
        counts = own_tokens(response_lengths)[order]
        first = (begins + prompt_lengths)[order]
    else:
        owner = prefixes = torch.zeros(0, dtype=torch.int64)
        counts = (prompt_lengths + own_tokens(response_lengths))[order]
        first = begins[order]
    lengths = torch.cat([prefixes, counts])
    at = lengths.cumsum(0) - lengths
    stride = prompt_width + width
    within = _ragged_arange(lengths)
    source = torch.cat([owner * stride + begins[owner], order * stride + first])
    before = torch.cat([torch.zeros_like(prefixes), prompt_lengths[order] if share else torch.zeros_like(counts)])
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    tokens, positions = source[segment] + within, before[segment] + within

    size, cut, prompts = len(tokens), int(prefixes.sum()), len(owner)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(rows)
    own_start = at[prompts + rank]
    row, t = response_mask.nonzero(as_tuple=True)
    predictor = prompt_width - 1 + t - begins[row]  # its position in the row
    if share:
        own = predictor - prompt_lengths[row]
        predictor = torch.where(own < 0, at[prompt_of][row] + predictor, own_start[row] + own)
    else:
        predictor = own_start[row] + predictor
    return PackedRows(
        tokens,
        positions,
        gather_index(predictor, size, cut),
        _segments(at, lengths, prompt_of[order] if share else None),
        multiple,
    )


def block_slots(segments: Sequence[Segment], multiple: int = 1) -> BlockSlots:
    """Blocks of the segments of a line, whose lengths are rounded up to a multiple."""
    starts = torch.tensor([segment.start for segment in segments])
    lengths = torch.tensor([segment.length for segment in segments])
    prompt_of = torch.tensor([-1 if segment.prompt is None else segment.prompt for segment in segments])
    behind = (prompt_of >= 0).nonzero()[:, 0]
    prompts = len(segments) - len(behind)
    blocks, queries, keys = [], _Slots(), _Slots()
    for members in [*_cut(lengths[:prompts], 0), *_cut(lengths[prompts:], prompts)]:
        count, reach, real = len(members), 0, torch.zeros(len(members), dtype=torch.int64)
        grid, is_real = _padded(starts[members], lengths[members], multiple)
        queries.add(grid, is_real)
        if int(members[0]) >= prompts:
            mine = prompt_of[members]
            head, is_head = _padded(starts[mine], real := lengths[mine], multiple)
            grid, is_real, reach = torch.cat([head, grid], 1), torch.cat([is_head, is_real], 1), head.shape[1]
        keys.add(grid, is_real)
        blocks.append(AttentionBlock(count, grid.shape[1] - reach, grid.shape[1], reach, real))
    size, cut = int(lengths.sum()), int(lengths[:prompts].sum()) if len(behind) else 0
    slot_of = torch.empty(size, dtype=torch.int64)
    slot_of[queries.index[queries.is_real]] = queries.is_real.nonzero()[:, 0]
    return BlockSlots(
        tuple(blocks),
        queries=gather_index(queries.index, size, cut, queries.is_real),
        keys=gather_index(keys.index, size, cut, keys.is_real),
        out=gather_index(slot_of, len(queries.index), 0),
    )


def own_tokens(response_lengths: Tensor) -> Tensor:
    """Tokens of each response in the line: all but the last one."""
    return (response_lengths - 1).clamp_min(0)


def _segments(starts: Tensor, lengths: Tensor, prompt_of: Tensor | None) -> tuple[Segment, ...]:
    """Segments with tokens. Args: prompt_of: prompt of each response, numbered as in the line; None for whole rows."""
    behind: list[int | None] = [] if prompt_of is None else list(prompt_of.tolist())
    prompts: list[int | None] = [None] * (len(starts) - len(behind))
    segments = zip(starts.tolist(), lengths.tolist(), prompts + behind, strict=True)
    return tuple(Segment(*segment) for segment in segments if segment[1])


def _cut(lengths: Tensor, offset: int) -> list[Tensor]:
    """Numbers of the segments of each block, longest first."""
    by_length = torch.argsort(lengths, descending=True, stable=True)
    longest_first = lengths[by_length].tolist()
    blocks: list[list[int]] = []
    for length, segment in zip(longest_first, by_length.tolist(), strict=True):
        if not blocks or length < BLOCK_SLACK * int(lengths[blocks[-1][0]]):
            blocks.append([])
        blocks[-1].append(segment)
    return [torch.tensor(block) + offset for block in blocks]


class _Slots:
    """Blocks of slots, one after another."""

    def __init__(self) -> None:
        self.index, self.is_real = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)

    def add(self, grid: Tensor, is_real: Tensor) -> None:
        self.index = torch.cat([self.index, grid.flatten()])
        self.is_real = torch.cat([self.is_real, is_real.flatten()])


def _padded(starts: Tensor, lengths: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Entries of segments [count, longest], padded by repeating the last one, and a mask of the real ones."""
    column = torch.arange(-(-int(lengths.max()) // multiple) * multiple)
    is_real = column < lengths[:, None]
    return starts[:, None] + torch.minimum(column, (lengths - 1)[:, None]), is_real


def _ragged_arange(lengths: Tensor) -> Tensor:
    """0 .. n-1 for each n, one after another."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(ends - lengths, lengths)


def gather_index(index: Tensor, size: int, cut: int = 0, is_real: Tensor | None = None) -> GatherIndex:
    """Make a gather from a line of `size` entries to slots.

    Args:
        index: entry of each slot.
        size: number of entries.
        cut: entries before it are used more often than the others.
        is_real: slots that are used; the gradient of the others is zero.
    """
    is_identity = len(index) == size and bool((index == torch.arange(size)).all())
    slots = torch.arange(len(index)) if is_real is None else is_real.nonzero()[:, 0]
    slots = slots[torch.argsort(index[slots], stable=True)]
    return GatherIndex(index, (_uses(index, slots, 0, cut), _uses(index, slots, cut, size)), is_identity)


def gather_rows(line: Tensor, how: GatherIndex) -> Tensor:
    """Slots [M ...] from a line [N ...]."""
    return line if how.is_identity else _Take.apply(line, how)


class _Take(torch.autograd.Function):
    """A gather whose backward pass is also a gather, which is fast and sums in a fixed order."""

    @staticmethod
    def forward(ctx: Any, line: Tensor, how: GatherIndex) -> Tensor:
        ctx.how = how
        return line.index_select(0, how.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_rows(grad, ctx.how), None


def sum_rows(slots: Tensor, how: GatherIndex) -> Tensor:
    """Sum of slots [M ...] for each entry of the line, [N ...]: the backward pass of `gather_rows`."""
    slots = torch.cat([slots, slots.new_zeros(1, *slots.shape[1:])])
    parts = [
        slots.index_select(0, uses.flatten()).unflatten(0, uses.shape).sum(dim=1)
        if uses.shape[1] != 1
        else slots.index_select(0, uses[:, 0])
        for uses in how.uses
        if len(uses)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _uses(index: Tensor, slots: Tensor, low: int, high: int) -> Tensor:
    """[high - low, m]: the slots of each entry; `slots` are sorted by their entry."""
    slots = slots[(index[slots] >= low) & (index[slots] < high)]
    entries = index[slots] - low
    counts = torch.bincount(entries, minlength=high - low)
    uses = torch.full((high - low, int(counts.max()) if len(counts) else 0), len(index))
    uses[entries, _ragged_arange(counts)] = slots
    return uses
