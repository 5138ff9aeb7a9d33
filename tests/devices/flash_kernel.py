"""Stand-in on the CPU for the flash kernel of a GPU, behind torch's own operators, for any dtype.

It takes the arguments that the kernel takes and refuses what it refuses: int32 lengths, ends that cover what is given,
contiguous heads. Its backward pass believes the output and the sums that it is handed. What no segment covers is NaN,
as memory that was never written may be.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.ops import attention


@dataclass
class KernelCalls:
    """Of the stand-in: scores that its segments have, forward, and how often it was called."""

    scores: int = 0
    forward: int = 0
    backward: int = 0
    shapes: list[tuple[int, int]] = field(default_factory=list)


def _segments(query: Tensor, key: Tensor, query_ends: Tensor, key_ends: Tensor, longest: tuple[int, int]):
    for x, ends, most in ((query, query_ends, longest[0]), (key, key_ends, longest[1])):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert ends[0] == 0
        assert ends[-1] == len(x), "the kernel leaves what is not covered as it was in memory"
        assert 0 < ends.diff().min() <= ends.diff().max() <= most
        assert x.stride(-1) == 1
    assert query_ends.shape == key_ends.shape
    assert query.shape[1] % key.shape[1] == 0
    edges = zip(query_ends.tolist(), query_ends[1:].tolist(), key_ends.tolist(), key_ends[1:].tolist())
    return [(slice(a, b), slice(c, d)) for a, b, c, d in edges]


def _scores(query: Tensor, key: Tensor, scale: float | None, left: int, right: int) -> Tensor:
    """[H q k]; queries are aligned with the last keys."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found = torch.einsum("qhd,khd->hqk", query, key) * scale
    place = torch.arange(len(query))[:, None] + len(key) - len(query)
    column = torch.arange(len(key))
    hidden = torch.zeros(len(query), len(key), dtype=torch.bool)
    if left >= 0:
        hidden |= column < place - left
    if right >= 0:
        hidden |= column > place + right
    return found.masked_fill(hidden, float("-inf"))


def _wide(x: Tensor, heads: int) -> Tensor:
    kind = torch.promote_types(x.dtype, torch.float32)
    return x.to(kind).repeat_interleave(heads // x.shape[1], dim=1)


def _sides(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in (left, right))
    return (left, 0) if is_causal else (left, right)


@contextmanager
def flash_on_cpu(monkeypatch, is_used: bool = True) -> Iterator[KernelCalls]:
    """Inside, the kernel runs on the CPU; with `is_used` packed lines are computed by it."""
    calls = KernelCalls()

    def forward(q, k, v, q_ends, k_ends, max_q, max_k, dropout, is_causal, _, *, scale=None, **options):
        assert not dropout
        left, right = _sides(is_causal, options.pop("window_size_left", None), options.pop("window_size_right", None))
        assert not any(x is not None for x in options.values()), options
        heads = q.shape[1]
        out = torch.full_like(q, float("nan"))
        sums = q.new_full((heads, len(q)), float("nan"), dtype=torch.promote_types(q.dtype, torch.float32))
        calls.forward += 1
        for of_query, of_key in _segments(q, k, q_ends, k_ends, (max_q, max_k)):
            query, key, value = _wide(q[of_query], heads), _wide(k[of_key], heads), _wide(v[of_key], heads)
            found = _scores(query, key, scale, left, right)
            calls.scores += int((found[0] > float("-inf")).sum())
            calls.shapes.append((len(query), len(key)))
            sums[:, of_query] = found.logsumexp(dim=-1)
            out[of_query] = torch.einsum("hqk,khd->qhd", found.softmax(dim=-1), value).to(q.dtype)
        empty = q.new_empty(0)
        return out, sums, torch.zeros(2, dtype=torch.uint64), empty, empty

    def backward(grad, q, k, v, out, sums, q_ends, k_ends, max_q, max_k, dropout, is_causal, *_, scale=None, **options):
        left, right = _sides(is_causal, options.pop("window_size_left", None), options.pop("window_size_right", None))
        heads, factor = q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
        assert sums.shape == (heads, len(q))
        assert sums.is_contiguous()
        calls.backward += 1
        made = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        for of_query, of_key in _segments(q, k, q_ends, k_ends, (max_q, max_k)):
            query, key, value = _wide(q[of_query], heads), _wide(k[of_key], heads), _wide(v[of_key], heads)
            given, above = _wide(out[of_query], heads), _wide(grad[of_query], heads)
            weights = (_scores(query, key, scale, left, right) - sums[:, of_query, None]).exp()
            share = torch.einsum("qhd,khd->hqk", above, value) - (above * given).sum(dim=-1).t()[:, :, None]
            of_scores = weights * share * factor
            found = (
                torch.einsum("hqk,khd->qhd", of_scores, key),
                torch.einsum("hqk,qhd->khd", of_scores, query).unflatten(1, (k.shape[1], -1)).sum(dim=2),
                torch.einsum("hqk,qhd->khd", weights, above).unflatten(1, (k.shape[1], -1)).sum(dim=2),
            )
            for into, place, x in zip(made, (of_query, of_key, of_key), found, strict=True):
                into[place] = x.to(into.dtype)
        return tuple(made)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    with monkeypatch.context() as patch:
        if is_used:
            patch.setattr(attention, "mask_reason", lambda query, value: None)
        try:
            yield calls
        finally:
            library._destroy()
