"""Attention by the kernels of the device: grouped queries, and packed lines without a mask or slots for padding.

On a GPU torch has three kernels, and runs the first that supports the call:

    flash               float16 and bfloat16, only a causal mask; may have fewer key heads
    memory-efficient    any mask and dtype; as many key heads as query heads
    math                everything, but materialises all scores [B, H, Q, K]

So where flash is not available keys and values are repeated per query head: otherwise the scores of a block would be
materialised.

The variable-length flash kernel of torch serves a packed line:

    own     every segment over itself, causally              p p p | b b b b | a a
    prompt  responses over the keys of their shared prompt   queries b b b b a a, keys p p p: one segment, not causal

The two softmaxes of a response are joined by the logarithms of their sums. Going backward each part gets the joined
output and the joined sums, as in ring attention: then its gradients are those of its share of the whole softmax, and
they add up. (torch's varlen_attn takes the gradient of its sums to be zero, so that a join by autograd is wrong.)

A window hides another part of the prompt from each query, which the kernel knows only for consecutive keys. Those that
a segment sees, at most a window more than it has tokens, are gathered then, and each segment is one causal part.

`ops.aten._flash_attention_forward` and its backward are what `torch.nn.attention.varlen.varlen_attn` calls; its own
backward pass does not take joined sums. Keys of a causal segment end where its queries end.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.ops.packing import GatherIndex, Segment, gather_index, gather_rows

FLASH_TYPES = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  # the largest head dimension that flash supports
_log = logging.getLogger(__name__)
WIDTH_MULTIPLE = 8  # of a head, for the flash kernel
EVERY_GPU_WIDTH = 192  # of a head: wider ones have a backward pass on the GPUs of `WIDE_CAPABILITIES` alone
WIDE_CAPABILITIES = ((8, 0), (9, 0), (10, 0))


def attend_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention [B, H, Q, D] of queries [B, H, Q, D] over keys and values [B, K, L, D], where K divides H.

    Args:
        mask: bool, broadcastable to [B, H, Q, L]; true for the keys that a query attends to. None: causal.
        scaling: factor of the scores; None for 1 / sqrt(D).
    """
    heads, kinds = query.shape[1], key.shape[1]
    if heads != kinds and not takes_fewer_heads(query, value, mask):
        key, value = (x.repeat_interleave(heads // kinds, dim=1) for x in (key, value))
        kinds = heads
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != kinds
    )


def takes_fewer_heads(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel other than math supports fewer key heads than query heads."""
    if query.device.type == "cpu":
        return True
    return mask is None and query.dtype in FLASH_TYPES and query.shape[-1] == value.shape[-1] <= FLASH_WIDTH


@dataclass(frozen=True)
class PromptGroups:
    """Groups of b rows by the p prompts that they stand behind.

    Attributes:
        rows: [p n] the rows behind each prompt; any row where there are fewer than n.
        cells: [b] where each row stands in `rows`, flattened.
        mask: [p 1 1 P] bool, true for tokens of the prompt; None: all are.
    """

    rows: Tensor
    cells: Tensor
    mask: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.rows)


def attend_behind_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    groups: PromptGroups,
    prompt_key: Tensor,
    prompt_value: Tensor,
) -> Tensor:
    """Attention [b 1 H D] of one query per row over the keys of its prompt, which are read once for all rows behind it,
    and its own.

    Both parts are summed with the largest score of each taken out, and joined as one softmax:

        m   = max(m_1, m_2)
        out = sum_i exp(m_i - m) sum_j exp(s_ij - m_i) v_ij / sum_i exp(m_i - m) sum_j exp(s_ij - m_i)

    Args:
        query: [b H 1 D].
        key, value: [b K W D], where K divides H.
        mask: [b 1 1 W] bool, true for the row's own keys; None: all are.
        prompt_key, prompt_value: [p K P D].
    Raises:
        NotImplementedError: keys and values are not those that the cache has.
    """
    if value.shape[1::2] != prompt_value.shape[1::2] or key.shape[1::2] != prompt_key.shape[1::2]:
        raise NotImplementedError("the keys and values of this layer are not those of its cache")
    queries = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    queries = queries * (query.shape[3] ** -0.5 if scaling is None else scaling)
    together = queries[groups.rows].transpose(1, 2)  # [p K n h D]
    joined = _summed(together.flatten(2, 3), prompt_key, prompt_value, groups.mask)
    cells = joined.unflatten(2, together.shape[2:4]).transpose(1, 2).flatten(0, 1)
    parts = [cells[groups.cells], _summed(queries, key, value, mask)]  # [b K h D + 2]
    largest = torch.maximum(parts[0][..., :1], parts[1][..., :1])
    prompt, remaining = ((part[..., :1] - largest).exp() * part[..., 1:] for part in parts)
    summed = prompt + remaining
    return (summed[..., 1:] / summed[..., :1]).flatten(1, 2).unsqueeze(1)


def _summed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[.. Q D + 2]: the largest score m, sum_j exp(s_j - m) and sum_j exp(s_j - m) v_j."""
    scores = query @ key.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    largest = scores.amax(dim=3, keepdim=True)
    weights = scores.sub_(largest).exp_()
    return torch.cat([largest, weights.sum(dim=3, keepdim=True), weights @ value], dim=3)


@dataclass(frozen=True)
class VarlenPart:
    """One call of the kernel: segments of queries, each over consecutive keys.

    Attributes:
        queries, keys: where they are among those that are given.
        query_ends, key_ends: [segments + 1] int32, cumulative lengths.
        longest_query, longest_key: tokens of the longest segment.
        is_causal: a segment's last query sees its last key, and each query before it one less; else it sees all.
        is_joined: the queries have seen other keys in a part before.
    """

    queries: slice
    keys: slice
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    is_causal: bool
    is_joined: bool = False


@dataclass(frozen=True)
class VarlenLayout:
    """The calls that compute the attention of some tokens of a line.

    Attributes:
        parts: each token is a query of one that is not joined.
        num_queries: tokens.
        gathered: index of keys and values in the line; None to use those of the line directly.
        window: keys that a query sees of its row; None for all before it.
    """

    parts: tuple[VarlenPart, ...]
    num_queries: int
    gathered: GatherIndex | None = None
    window: int | None = None

    def to(self, device: torch.device | str) -> VarlenLayout:
        parts = tuple(
            replace(
                part,
                query_ends=part.query_ends.to(device, non_blocking=True),
                key_ends=part.key_ends.to(device, non_blocking=True),
            )
            for part in self.parts
        )
        return replace(self, parts=parts, gathered=None if self.gathered is None else self.gathered.to(device))


def mask_reason(query: Tensor, value: Tensor) -> str | None:
    """Why attention of [N H D] needs masks on its device; None if the variable-length kernel computes it."""
    device, width = query.device, query.shape[-1]
    if device.type != "cuda" or torch.version.hip is not None:
        return "the device is no CUDA device"
    if query.dtype not in FLASH_TYPES:
        return (
            f"the model computes in {str(query.dtype).removeprefix('torch.')}, the kernel in bfloat16 or float16 only"
        )
    if width != value.shape[-1]:
        return f"the head size is {width} for queries and {value.shape[-1]} for values, the kernel has one for both"
    if width % WIDTH_MULTIPLE or width > FLASH_WIDTH:
        return f"the head size is {width}, the kernel takes multiples of {WIDTH_MULTIPLE} up to {FLASH_WIDTH}"
    if not (torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()):
        return "flash attention is not built into torch, or turned off"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the kernel needs compute capability 8.0, the device has {'.'.join(map(str, capability))}"
    if width > EVERY_GPU_WIDTH and capability not in WIDE_CAPABILITIES:
        return f"the head size is {width}, on this device the kernel takes up to {EVERY_GPU_WIDTH}"
    return None


def takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes attention of [N H D]; on a GPU the log says once why it does not."""
    reason = mask_reason(query, value)
    if reason is not None and query.device.type != "cpu":
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning(
        "Packed rows are computed under masks, not by variable-length flash attention: %s. Responses behind a shared "
        "prompt, and windows, take about twice the scores, copies of their keys, and memory for the masks.",
        reason,
    )


def layout_of(
    cache: dict[Any, VarlenLayout],
    segments: Sequence[Segment],
    ranges: Iterable[tuple[int, int]],
    window: int | None,
    device: torch.device,
) -> VarlenLayout:
    """See `varlen_layout`; made at first use, for all layers and their recomputation."""
    key = window, device
    if key not in cache:
        cache[key] = varlen_layout(segments, ranges, window).to(device)
    return cache[key]


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scaling: float | None) -> Tensor:
    """[n H D] of the queries of a layout over keys and values [N K D] of the line, where K divides H."""
    return _VarlenAttention.apply(query, *(gathered_keys(layout, x) for x in (key, value)), layout, scaling)


def gathered_keys(layout: VarlenLayout, line: Tensor) -> Tensor:
    """Keys or values [N K D] as the parts of a layout take them."""
    return line if layout.gathered is None else gather_rows(line, layout.gathered)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scaling: Any) -> Tensor:
        out, sums = forward_parts(query, key, value, layout, scaling)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.how = layout, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return *backward_parts(grads[0], *ctx.saved_tensors, *ctx.how), None, None


def forward_parts(
    query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Outputs [n H D], and the logarithms of the sums of each query's scores [H n] in float32."""
    out = sums = query.new_empty(0)
    for part in layout.parts:
        q, k, v = query[part.queries], key[part.keys], value[part.keys]
        output, of_part, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_lengths(part), 0.0, _is_plainly_causal(part, layout), False, **_options(part, layout, scaling)
        )
        if len(q) == layout.num_queries and not part.is_joined:
            out, sums = output, of_part
            continue
        if not out.numel():
            out, sums = torch.empty_like(query), of_part.new_empty(of_part.shape[0], layout.num_queries)
        _join(out[part.queries], sums[:, part.queries], output, of_part, part.is_joined)
    return out, sums


def _join(out: Tensor, sums: Tensor, found: Tensor, of_part: Tensor, is_joined: bool) -> None:
    """Into outputs [q H D] and sums [H q] what further keys give."""
    if not is_joined:
        out.copy_(found)
        sums.copy_(of_part)
        return
    share = torch.sigmoid(of_part - sums).t().unsqueeze(-1)  # of the further keys in the softmax
    out.addcmul_(found - out, share)
    torch.logaddexp(sums, of_part, out=sums)


def backward_parts(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    layout: VarlenLayout,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values by what `forward_parts` gave."""
    inputs, added = (query, key, value), list[Tensor]()
    unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)  # of dropout
    for part in layout.parts:
        places = part.queries, part.keys, part.keys
        gradients = torch.ops.aten._flash_attention_backward(
            grad[part.queries],
            *(x[rows] for x, rows in zip(inputs, places, strict=True)),
            out[part.queries],
            sums[:, part.queries].contiguous(),
            *_lengths(part),
            0.0,
            _is_plainly_causal(part, layout),
            *unused,
            **_options(part, layout, scaling),
        )
        if not added:  # the whole line, mostly
            pairs = list(zip(inputs, gradients, strict=True))
            whole = [len(x) == len(gradient) for x, gradient in pairs]
            added = [gradient if len(x) == len(gradient) else torch.zeros_like(x) for x, gradient in pairs]
        else:
            whole = [False] * 3
        for into, gradient, rows, is_all in zip(added, gradients, places, whole, strict=True):
            if not is_all:
                into[rows] += gradient
    return added[0], added[1], added[2]


def _lengths(part: VarlenPart) -> tuple[Tensor, Tensor, int, int]:
    # For a single query the kernel reorders heads into queries, and assumes one in each segment.
    return part.query_ends, part.key_ends, max(part.longest_query, 2), part.longest_key


def _is_plainly_causal(part: VarlenPart, layout: VarlenLayout) -> bool:
    return part.is_causal and layout.window is None


def _options(part: VarlenPart, layout: VarlenLayout, scaling: float | None) -> dict[str, Any]:
    left = -1 if layout.window is None else layout.window - 1  # keys before the query's own
    return {"scale": scaling, "window_size_left": left, "window_size_right": 0 if part.is_causal else -1}


def varlen_layout(segments: Sequence[Segment], ranges: Iterable[tuple[int, int]], window: int | None) -> VarlenLayout:
    """The layout of the tokens of a line in these ranges, one after another; in main memory.

    Args:
        segments: of the line, as `PackedRows` has them.
        ranges: from the first token to behind the last one of each.
        window: keys that a query sees of its row, its own among them.
    """
    chunks = [_pieces(segments, *chunk) for chunk in ranges]
    chunks = [pieces for pieces in chunks if pieces]
    num_queries = sum(piece.queries for pieces in chunks for piece in pieces)
    if window is not None and all(piece.last_key <= window for pieces in chunks for piece in pieces):
        window = None
    if window is not None and any(piece.prompt for pieces in chunks for piece in pieces):
        return _windowed(segments, [piece for pieces in chunks for piece in pieces], num_queries, window)
    parts, joined, first = [], [], 0
    for pieces in chunks:
        keys = slice(pieces[0].segment.start, pieces[-1].segment.start + pieces[-1].high)
        parts.append(_part(first, keys, [(piece.queries, piece.high) for piece in pieces], is_causal=True))
        behind = [piece for piece in pieces if piece.prompt is not None]
        if behind:
            before = first + sum(piece.queries for piece in pieces if piece.prompt is None)
            joined.append(_over_prompts(before, behind))
        first += sum(piece.queries for piece in pieces)
    return VarlenLayout((*parts, *joined), num_queries, None, window)


@dataclass(frozen=True)
class _QueryRange:
    """Queries low to high of a segment, and the segment of its prompt."""

    segment: Segment
    prompt: Segment | None
    low: int
    high: int

    @property
    def queries(self) -> int:
        return self.high - self.low

    @property
    def last_key(self) -> int:
        """Keys in the row up to the last query."""
        return self.high + (0 if self.prompt is None else self.prompt.length)


def _pieces(segments: Sequence[Segment], start: int, stop: int) -> list[_QueryRange]:
    pieces = []
    for segment in segments:
        low, high = max(start - segment.start, 0), min(stop - segment.start, segment.length)
        if low < high:
            pieces.append(_QueryRange(segment, None if segment.prompt is None else segments[segment.prompt], low, high))
    return pieces


def _over_prompts(first: int, pieces: Sequence[_QueryRange]) -> VarlenPart:
    """Responses, prompt by prompt, over the keys of their prompts, which are consecutive in the line."""
    prompts, lengths = [], []
    for prompt, members in itertools.groupby(pieces, key=lambda piece: piece.prompt):
        assert prompt is not None
        prompts.append(prompt)
        lengths.append((sum(piece.queries for piece in members), prompt.length))
    keys = slice(prompts[0].start, prompts[-1].start + prompts[-1].length)
    assert keys.stop - keys.start == sum(prompt.length for prompt in prompts)
    return _part(first, keys, lengths, is_causal=False, is_joined=True)


def _windowed(
    segments: Sequence[Segment], pieces: Sequence[_QueryRange], num_queries: int, window: int
) -> VarlenLayout:
    """Each piece over the keys that its first query sees, and those up to its last."""
    index, lengths = [], []
    for piece in pieces:
        before = 0 if piece.prompt is None else piece.prompt.length
        first = max(0, before + piece.low + 1 - window)  # position in the row
        if piece.prompt is not None:
            index.append(torch.arange(piece.prompt.start + min(first, before), piece.prompt.start + before))
        index.append(torch.arange(piece.segment.start + max(0, first - before), piece.segment.start + piece.high))
        lengths.append((piece.queries, before + piece.high - first))
    size = segments[-1].start + segments[-1].length
    gathered = gather_index(torch.cat(index), size)
    part = _part(0, slice(0, len(gathered.index)), lengths, is_causal=True)
    return VarlenLayout((part,), num_queries, gathered, window)


def _part(
    first: int, keys: slice, lengths: Sequence[tuple[int, int]], *, is_causal: bool, is_joined: bool = False
) -> VarlenPart:
    counts = torch.tensor(lengths, dtype=torch.int32)
    ends = torch.cat([counts.new_zeros(1, 2), counts.cumsum(0, dtype=torch.int32)])
    longest_query, longest_key = counts.amax(dim=0).tolist()
    queries = slice(first, first + int(ends[-1, 0]))
    query_ends, key_ends = ends.t().contiguous()
    return VarlenPart(queries, keys, query_ends, key_ends, longest_query, longest_key, is_causal, is_joined)
