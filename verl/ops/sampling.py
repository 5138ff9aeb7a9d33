"""Sampling: counter-based random numbers, top-k and top-p filtering, and inverse-CDF sampling from one uniform per row.

Noise is a pure function of its indices, independent of batch, order and process. The counters (seed, stream, step,
prompt id, sample id, position) are absorbed one after another into a 64-bit state by an invertible mixer; the top 53
bits of the state are the uniform. Integer arithmetic wraps in the same way on every device, so the numbers are equal
bit for bit.

Source of the mixer: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with the constants
of Stafford's variant 13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# Numbers of top entries in which the nucleus is searched before all V are sorted; the first is nearly always enough.
_NUCLEUS_WIDTHS = (256, 4096)
TRAINING, EVALUATION, REPLAY = 0, 1, 2
NO_TURN = -1  # in place of the number of a turn: a response outside of an episode

_WORD = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: separates neighbouring counters
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


@contextlib.contextmanager
def plain_kernels(device: torch.device) -> Iterator[None]:
    """Inside, deterministic algorithms are not demanded on a GPU, because the result does not depend on the order.

    torch exempts no operation by name: it refuses some (sums along a row), and others take many times as long (writing
    to places that differ from each other, which it sorts first).
    """
    if device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns_only)


def filter_logits(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Set logits outside of the top-k and the nucleus to -inf.

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p, taken within the top-k and with
    its mass renormalised (Holtzman et al. 2020, arXiv:1904.09751, sec. 3.1). Both cut by value: tokens tied with the
    last one kept are kept too, so the result depends neither on the order of tokens nor on the device. The most
    likely token is always kept.

    Args:
        logits: [B, V], already divided by the temperature.
        top_k: number of tokens to keep; 0, or V and more, keeps all.
        top_p: mass to keep, in (0, 1]; 1 keeps all.
    Returns:
        [B, V] of the same dtype; `logits` itself if nothing is filtered.
    Raises:
        ValueError: top_k below 0, or top_p outside (0, 1].
    """
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}: must be 0 (keep all) or more.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: must lie in (0, 1].")
    if 0 < top_k < logits.shape[-1]:
        logits = _cut_below(logits, logits, logits.topk(top_k, dim=-1).values[:, -1:])
    if top_p < 1:
        probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        logits = _cut_below(logits, probs, _nucleus_floor(probs, top_p))
    return logits


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds u * total: one sample per row for u uniform in [0, 1).

    Never returns an index of probability zero, even for u = 0 or u just below 1. Sums are in float64. On a GPU rows
    without mass are not refused, to avoid a synchronisation: their log-probs are NaN, which the caller refuses.

    Args:
        probs: [B, V], not negative; need not sum to 1.
        u: [B] in [0, 1).
    Returns:
        [B] int64.
    Raises:
        ValueError: a row whose mass is zero, infinite or NaN.
    """
    if probs.device.type != "cpu":
        return inverse_cdf_by_blocks(probs, u)
    cumulative = _running_sums(probs)
    total = cumulative[:, -1:]
    target = _below(total, u)
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.shape[-1] - 1)
    is_sound = (probs.gather(-1, index) > 0) & torch.isfinite(total)
    if bool(is_sound.all()):
        return index.squeeze(-1)
    is_mass = (torch.isfinite(total) & (total > 0)).squeeze(-1)
    if not bool(is_mass.all()):
        rows = (~is_mass).nonzero().squeeze(-1).tolist()
        raise ValueError(f"probs has no positive finite mass in rows {rows}: the logits were NaN, inf or all -inf.")
    # rounding of a parallel sum has raised an entry of probability zero
    return first_with_mass(cumulative > target, probs > 0).squeeze(-1)


BLOCK_WIDTHS = (1024, 512, 256, 128, 64)


def inverse_cdf_by_blocks(probs: Tensor, u: Tensor) -> Tensor:
    """`inverse_cdf` for devices with slow float64, without synchronisation.

    Sums of blocks are computed in float64, then only the block of the index: no [B, V] is written.
    """
    width = next((width for width in BLOCK_WIDTHS if probs.shape[-1] % width == 0), BLOCK_WIDTHS[-1])
    short = -probs.shape[-1] % width
    blocks = (torch.nn.functional.pad(probs, (0, short)) if short else probs).unflatten(-1, (-1, width))
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = _running_sums(sums)
    target = _below(ends[:, -1:], u)
    block = first_with_mass(ends > target, sums > 0)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, width)).squeeze(1)
    index = first_with_mass(_running_sums(inside) + before > target, inside > 0)
    return (block * width + index).squeeze(-1)


def _running_sums(x: Tensor) -> Tensor:
    """Cumulative sums in float64 over the last dimension; on a GPU torch calls their kernel nondeterministic."""
    with plain_kernels(x.device):
        return x.cumsum(-1, dtype=torch.float64)


def first_with_mass(exceeds: Tensor, has_mass: Tensor) -> Tensor:
    """[B, 1]: the first index with both; if rounding leaves none, the last index with mass."""
    both = exceeds & has_mass
    last = has_mass.shape[-1] - 1 - has_mass.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.where(both.any(-1, keepdim=True), both.to(torch.uint8).argmax(-1, keepdim=True), last)


def _below(total: Tensor, u: Tensor) -> Tensor:
    """u * total, [B, 1], strictly below total, to which the product may round up."""
    return torch.minimum(u.to(torch.float64).unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))


def _nucleus_floor(probs: Tensor, top_p: float) -> Tensor:
    """[B, 1]: the smallest probability inside the nucleus."""
    for width in _NUCLEUS_WIDTHS:
        if width < probs.shape[-1]:
            best = probs.topk(width).values
            mass = _running_sums(best)
            if bool((mass[:, -1] >= top_p).all()):
                return _floor_among(best, mass, top_p)
    best = probs.sort(-1, descending=True).values
    return _floor_among(best, _running_sums(best), top_p)


def _floor_among(best: Tensor, mass: Tensor, top_p: float) -> Tensor:
    last = (mass < top_p).sum(-1, keepdim=True).clamp(max=best.shape[-1] - 1)
    return best.gather(-1, last)


def _cut_below(logits: Tensor, ranked: Tensor, floor: Tensor) -> Tensor:
    return logits.masked_fill(ranked < floor, -torch.inf)


def uniform(
    seed: int,
    step: int | Tensor,
    prompt_ids: Tensor,
    sample_ids: Tensor,
    positions: Tensor | int,
    stream: int | Tensor = TRAINING,
    turns: Tensor | None = None,
) -> Tensor:
    """One uniform number in [0, 1) per (prompt, sample, position), or per (prompt, sample, turn, position).

    The three broadcast against each other: [B], [B] and a position give [B]; [B, 1], [B, 1] and [T] give [B, T],
    the same numbers, at once.

    Args:
        seed: of the run, any integer.
        step: training step, of all or of each.
        prompt_ids: int64, the stable identity of the data row.
        sample_ids: int64, index of the response among those of its prompt.
        positions: int64 index of the response token.
        stream: 0 for training, 1 for evaluation, 2 for the replay buffer: different noise under the same counters.
        turns: int64, index of the turn within its episode, positions then count from the turn's first token; NO_TURN
            for a response outside of an episode, which has the same noise as without `turns`.
    Returns:
        float64 of the broadcast shape, on the device of `prompt_ids`, multiples of 2^-53.
    """
    state, device = _absorb_int(0, seed), prompt_ids.device
    if isinstance(stream, int) and isinstance(step, int):
        state = _absorb_int(_absorb_int(state, stream), step)
    absorbed = torch.tensor(_signed(state), dtype=torch.int64, device=device)
    if not (isinstance(stream, int) and isinstance(step, int)):
        for counters in (stream, step):
            absorbed = _absorb(absorbed, torch.as_tensor(counters, dtype=torch.int64, device=device))
    for counters in (prompt_ids, sample_ids):
        absorbed = _absorb(absorbed, counters)
    if turns is not None:
        absorbed = torch.where(turns == NO_TURN, absorbed, _absorb(absorbed, turns))
    absorbed = _absorb(absorbed, torch.as_tensor(positions, dtype=torch.int64, device=device))
    return _shift_right(absorbed, 11).to(torch.float64) * 2.0**-53


def _absorb(state: Tensor, counter: Tensor) -> Tensor:
    state = state ^ (counter * _signed(_SPREAD) + _signed(_SPREAD))
    for shift, factor in _MIX:
        state = (state ^ _shift_right(state, shift)) * _signed(factor)
    return state ^ _shift_right(state, _LAST_SHIFT)


def _absorb_int(state: int, counter: int) -> int:
    """The same as `_absorb`, on Python integers in [0, 2^64)."""
    state ^= (counter * _SPREAD + _SPREAD) & _WORD
    for shift, factor in _MIX:
        state = ((state ^ (state >> shift)) * factor) & _WORD
    return state ^ (state >> _LAST_SHIFT)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: zeros come in from the left, where `>>` alone would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of `word`."""
    return word - (1 << 64) if word >> 63 else word
