"""Counter-based random numbers: sampling noise as a pure function of its indices, independent of batch, order and
process.

The counters (seed, stream, step, prompt id, sample id, position) are absorbed one after another into a 64-bit state by
an invertible mixer; the top 53 bits of the state are the uniform. Integer arithmetic wraps in the same way on every
device, so the numbers are equal bit for bit.

Source of the mixer: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with the constants
of Stafford's variant 13.
"""

from __future__ import annotations

import torch
from torch import Tensor

TRAINING, EVALUATION, REPLAY = 0, 1, 2
NO_TURN = -1  # in place of the number of a turn: a response outside of an episode

_WORD = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: separates neighbouring counters
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


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
