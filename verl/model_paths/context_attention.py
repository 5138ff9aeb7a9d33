"""Context parallelism: processes share the tokens of one packed line, and attention communicates between them.

allgather  own queries x keys and values of the line, gathered for each layer, and again in its backward pass, which
           adds their gradients up to parts; nothing gathered is kept in between. Where the kernel gives the sums of
           its softmax (a CPU's, and variable-length flash attention), they are kept with what attention gave;
           elsewhere scores are computed again
ulysses    tokens of all heads ── all-to-all ──> all tokens of some heads ── attention ──> all-to-all back

All other layers work on the process's own tokens. Source of the exchanges: Liu et al. 2023, arXiv:2309.14509 (ulysses:
Jacobs et al.), and Llama Team 2024, arXiv:2407.21783, section 3.3.2 (all-gather).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from verl.ops.attention import (
    VarlenLayout,
    attend_heads,
    backward_parts,
    forward_parts,
    gathered_keys,
    layout_of,
    takes_varlen,
)
from verl.ops.context_shards import ContextShard, PieceBlock, shard_line
from verl.ops.packing import GatherIndex, PackedRows, gather_rows, sum_rows

ContextStyle = Literal["allgather", "ulysses"]
AttendLine = Callable[[Tensor, Tensor, Tensor, PackedRows, int | None, float | None], Tensor]


@dataclass(frozen=True)
class ContextGroup:
    """The processes that share the tokens of the same rows.

    Attributes:
        group: of torch.distributed.
        size, rank: number of processes, and the rank of this one among them.
        style: how attention communicates; see the module.
    """

    group: Any
    size: int
    rank: int
    style: ContextStyle = "allgather"

    def shard(self, packing: PackedRows) -> ContextLine:
        """This process's share of a packed line."""
        shard = shard_line(packing, self.size, self.rank)
        return ContextLine(packing.tokens[shard.own], packing.positions[shard.own], packing, shard, self)


@dataclass(frozen=True)
class ContextLine:
    """This process's tokens of a packed line.

    Attributes:
        tokens, positions, predictors: as in `PackedRows`, for this process's tokens.
        whole: the whole line.
    """

    tokens: Tensor
    positions: Tensor
    whole: PackedRows
    shard: ContextShard
    context: ContextGroup

    @property
    def predictors(self) -> GatherIndex:
        return self.shard.predictors

    def to(self, device: torch.device | str) -> ContextLine:
        tokens, positions = (x.to(device, non_blocking=True) for x in (self.tokens, self.positions))
        return replace(
            self, tokens=tokens, positions=positions, whole=self.whole.to(device), shard=self.shard.to(device)
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None, whole: AttendLine
    ) -> Tensor:
        """Attention of this process's queries [n H D] over the keys and values of the line, [n K D] per process.

        Args:
            whole: attention over a whole line.
        """
        if self.context.style == "ulysses":
            return self._by_heads(query, key, value, window, scaling, whole)
        return _GatheredAttention.apply(query, key, value, self, window, scaling)

    def _by_heads(self, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
        window, scaling, whole = how
        size, heads, kv_heads = self.context.size, query.shape[1], key.shape[1]
        if heads % size:
            raise NotImplementedError(f"ulysses over {size} processes cannot divide {heads} heads")
        repeats = next(n for n in range(1, heads // kv_heads + 1) if heads % (kv_heads * n) == 0 == kv_heads * n % size)
        key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
        query, key, value = (_Exchange.apply(x, self, True) for x in (query, key, value))
        return _Exchange.apply(whole(query, key, value, self.whole, window, scaling), self, False)

    def join(self, own: Tensor) -> Tensor:
        """[M ...] of all response tokens, in order, from [m ...] of those that each process predicts.

        Every process must continue with the same computation, since gradients reach only its own part.
        """
        return _Join.apply(own, self)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, line: ContextLine) -> Tensor:
        ctx.line = line
        gathered = _gather(own, max(line.shard.counts), line.context)
        return gathered.index_select(0, line.shard.joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.line.shard.predicted), None


class _Exchange(torch.autograd.Function):
    """[n H D] of all heads to [N H/size D] of all tokens with `by_heads`, otherwise the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: ContextLine, by_heads: bool) -> Tensor:
        ctx.line, ctx.by_heads = line, by_heads
        return _to_heads(x, line) if by_heads else _to_tokens(x, line)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = _to_tokens(grads[0], ctx.line) if ctx.by_heads else _to_heads(grads[0], ctx.line)
        return grad, None, None


def _to_heads(x: Tensor, line: ContextLine) -> Tensor:
    size, sizes, length = line.context.size, line.shard.sizes, x.shape[0]
    parts = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()  # [size n h D]
    received = x.new_empty(sum(sizes), *parts.shape[2:])
    dist.all_to_all_single(received, parts.flatten(0, 1), list(sizes), [length] * size, group=line.context.group)
    return received.index_select(0, line.shard.dense)


def _to_tokens(x: Tensor, line: ContextLine) -> Tensor:
    size, sizes = line.context.size, line.shard.sizes
    length = sizes[line.context.rank]
    sent = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, line.shard.dense, x)
    received = x.new_empty(size * length, *x.shape[1:])
    dist.all_to_all_single(received, sent, [length] * size, list(sizes), group=line.context.group)
    return received.unflatten(0, (size, length)).transpose(0, 1).flatten(1, 2)


def _gather(own: Tensor, most: int, context: ContextGroup) -> Tensor:
    """[size * most ...] from [n ...] of each process."""
    if own.shape[0] < most:
        own = torch.cat([own, own.new_zeros(most - own.shape[0], *own.shape[1:])])
    gathered = own.new_empty(context.size * most, *own.shape[1:])
    if most:
        dist.all_gather_single(gathered, own.contiguous(), group=context.group)
    return gathered


class _GatheredAttention(torch.autograd.Function):
    """Attention of own queries over gathered keys and values, which are gathered again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, line: ContextLine, *how: Any) -> Tensor:
        keys, values = _gather_line(key, value, line)
        ctx.line, ctx.how = line, how
        if takes_varlen(query, value):
            layout = _layout(line, how[0], query.device)
            out, sums = forward_parts(query, gathered_keys(layout, keys), gathered_keys(layout, values), layout, how[1])
            ctx.save_for_backward(query, key, value, out, sums)
            return out
        out, sums = query.new_zeros(*query.shape[:2], value.shape[2]), None
        for block in line.shard.blocks:
            q, k, v = query[block.queries], keys[block.entries], values[block.entries]
            if keeps_sums(query, value):
                output, of_block = _attend_with_sums(block, q, k, v, *how)
                sums = query.new_zeros(query.shape[:2], dtype=of_block.dtype) if sums is None else sums
                sums[block.real_queries] = of_block.flatten(0, 1)[block.real_slots]
            else:
                output = _attend_block(block, q, k, v, *how)
            out[block.real_queries] = output.flatten(0, 1)[block.real_slots]
        ctx.save_for_backward(query, key, value, *([] if sums is None else [out, sums]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, *saved = ctx.saved_tensors
        line, (grad,) = ctx.line, grads
        keys, values = _gather_line(key, value, line)
        if takes_varlen(query, value):
            layout = _layout(line, ctx.how[0], query.device)
            (out, sums), (k, v) = saved, (gathered_keys(layout, x) for x in (keys, values))
            into_query, *into = backward_parts(grad, query, k, v, out, sums, layout, ctx.how[1])
            if layout.gathered is not None:
                into = [sum_rows(x, layout.gathered) for x in into]
            return into_query, *_scatter_line(into[0], into[1], line), None, None, None
        into_query, into = torch.zeros_like(query), [torch.zeros_like(keys), torch.zeros_like(values)]
        for block in line.shard.blocks:
            inputs = [query[block.queries], keys[block.entries], values[block.entries]]
            above = grad[block.queries].masked_fill(~block.is_query[:, :, None, None], 0.0)
            if saved:
                out, sums = (x[block.queries] for x in saved)
                of_query, *of_line = _backward_with_sums(block, *inputs, out, sums, above, *ctx.how)
            else:
                with torch.enable_grad():
                    inputs = [x.detach().requires_grad_() for x in inputs]
                    of_query, *of_line = torch.autograd.grad(_attend_block(block, *inputs, *ctx.how), inputs, above)
            into_query[block.real_queries] = of_query.flatten(0, 1)[block.real_slots]
            for whole, part in zip(into, of_line, strict=True):
                whole[block.entries] += part  # each entry once
        of_key, of_value = _scatter_line(into[0], into[1], line)
        return into_query, of_key, of_value, None, None, None


def _layout(line: ContextLine, window: int | None, device: torch.device) -> VarlenLayout:
    return layout_of(line.shard.layouts, line.whole.segments, line.shard.ranges, window, device)


def keeps_sums(query: Tensor, value: Tensor) -> bool:
    """Whether attention returns the log-sum-exp of its scores, so that backward needs no second forward pass."""
    return query.device.type == "cpu" and query.shape[2] == value.shape[2]


def _ranges(block: PieceBlock, window: int | None, dtype: torch.dtype) -> Sequence[tuple[slice, bool, Tensor | None]]:
    """Ranges of keys with their causal flag and mask; for a single piece, the keys before it and its own."""
    queries = block.queries.shape[1]
    before = block.width - queries
    if block.count == 1 and (window is None or block.width <= window):
        parts = [(slice(0, before), False, None), (slice(before, block.width), True, None)]
        return parts if before else parts[1:]
    mask = block.mask(window)
    return [(slice(0, block.width), False, torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf")))]


def _by_heads(block: PieceBlock, entries: Tensor, heads: int) -> Tensor:
    """[count H K D] of each piece, from [E K D]; keys shared by several heads are repeated."""
    x = gather_rows(entries, block.keys).unflatten(0, (block.count, block.width)).transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _attend_with_sums(
    block: PieceBlock, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """The output of `_attend_block`, and the log-sum-exp of each query's scores, [count Q H]."""
    q = query.transpose(1, 2)
    k, v = (_by_heads(block, x, q.shape[1]) for x in (keys, values))
    out, sums = None, None
    for part, is_causal, mask in _ranges(block, window, q.dtype):
        output, of_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k[:, :, part], v[:, :, part], 0.0, is_causal, attn_mask=mask, scale=scaling
        )
        if out is None or sums is None:
            out, sums = output, of_part
        else:
            total = torch.logaddexp(sums, of_part)
            out = (out * (sums - total).exp()[..., None] + output * (of_part - total).exp()[..., None]).to(q.dtype)
            sums = total
    assert out is not None
    assert sums is not None
    return out.transpose(1, 2), sums.transpose(1, 2)


def _backward_with_sums(
    block: PieceBlock, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, sums: Tensor, grad: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `_attend_with_sums` from its outputs; the sums give each range those of the whole softmax."""
    window, scaling = how
    with torch.enable_grad():  # differentiates `_by_heads`
        entries = [x.detach().requires_grad_() for x in (keys, values)]
        pieces = [_by_heads(block, x, query.shape[2]) for x in entries]
    q, out, grad, sums = (x.transpose(1, 2).contiguous() for x in (query, out, grad, sums))
    k, v = (x.detach() for x in pieces)
    of_query, of_pieces = torch.zeros_like(q), [torch.zeros_like(k), torch.zeros_like(v)]
    for part, is_causal, mask in _ranges(block, window, q.dtype):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k[:, :, part], v[:, :, part], out, sums, 0.0, is_causal, attn_mask=mask, scale=scaling
        )
        of_query += gradients[0]
        for whole, x in zip(of_pieces, gradients[1:], strict=True):
            whole[:, :, part] += x
    of_keys, of_values = torch.autograd.grad(pieces, entries, of_pieces)
    return of_query.transpose(1, 2), of_keys, of_values


def _gather_line(key: Tensor, value: Tensor, line: ContextLine) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole line, [N K D], in one exchange."""
    both = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    line_states = _gather(both, max(line.shard.sizes), line.context).index_select(0, line.shard.padded)
    keys, values = line_states.split([key[0].numel(), value[0].numel()], dim=1)
    return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])


def _scatter_line(keys: Tensor, values: Tensor, line: ContextLine) -> tuple[Tensor, Tensor]:
    """Gradients of this process's tokens: those of the whole line, summed over the processes."""
    sizes, context = line.shard.sizes, line.context
    both = torch.cat([keys.flatten(1), values.flatten(1)], dim=1)
    sent = both.new_zeros(context.size * max(sizes), both.shape[1]).index_copy_(0, line.shard.padded, both)
    own = both.new_empty(max(sizes), both.shape[1])
    dist.reduce_scatter_single(own, sent, group=context.group)
    key, value = own[: sizes[context.rank]].split([keys[0].numel(), values[0].numel()], dim=1)
    return key.unflatten(1, keys.shape[1:]), value.unflatten(1, values.shape[1:])


def _attend_block(
    block: PieceBlock, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """[count Q H D] of the queries [count Q H D] over the entries [E K D] that the block sees."""
    k, v = (gather_rows(x, block.keys).unflatten(0, (block.count, block.width)).transpose(1, 2) for x in (keys, values))
    return attend_heads(query.transpose(1, 2), k, v, block.mask(window), scaling).transpose(1, 2)
