"""Sampling rule of the rollout engines, from logits to the next token of each row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.ops.logprobs import log_probs_of
from verl.ops.sampling import filter_logits, inverse_cdf, uniform
from verl.rollout.base import Rollout, TurnRequest

NOISE_TOKENS = 64  # positions per call of the noise generator, whose hash consists of many small operations


@dataclass(frozen=True)
class TokenSampler:
    """Sampling rule of an engine; picklable, because it is sent to the process that samples.

    Attributes:
        seed: of the run.
        stop_ids: sorted; not sampled before `min_new_tokens`.
    """

    seed: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0

    @classmethod
    def of(cls, options: Rollout, seed: int, stop_ids: Sequence[int]) -> TokenSampler:
        """A sampler with the options of an engine."""
        names = ("temperature", "top_k", "top_p", "min_new_tokens")
        return cls(seed, tuple(stop_ids), **{name: getattr(options, name) for name in names})

    def noise(self, keys: Tensor, positions: Tensor | int) -> Tensor:
        """Uniform numbers in [0, 1), float64 of the broadcast shape; see `uniform`.

        Args:
            keys: [5, ...] int64, `TurnRequest.noise_key` of each turn.
            positions: number of tokens in the turn so far.
        """
        stream, step, prompt_ids, sample_ids, turns = keys
        return uniform(self.seed, step, prompt_ids, sample_ids, positions, stream, turns)

    def pick(self, logits: Tensor, noise: Tensor, positions: Tensor | int, is_greedy: Tensor | bool = False) -> Tensor:
        """The next token of each row, [b].

        Args:
            logits: [b V], float32 or wider; not modified.
            noise: [b], see `noise`.
            positions: [b] or of all, number of tokens in the turn so far.
            is_greedy: of all or [b] bool, take the likeliest token.
        """
        logits = self._without_early_stops(logits, positions)
        if is_greedy is True:
            return logits.argmax(dim=-1)
        filtered = filter_logits(logits / self.temperature, top_k=self.top_k, top_p=self.top_p)
        sampled = inverse_cdf(filtered.softmax(dim=-1), noise)
        return sampled if is_greedy is False else torch.where(is_greedy, logits.argmax(dim=-1), sampled)

    def _without_early_stops(self, logits: Tensor, positions: Tensor | int) -> Tensor:
        if not self.min_new_tokens or (isinstance(positions, int) and positions >= self.min_new_tokens):
            return logits
        stops = _stop_mask(self.stop_ids, logits.shape[-1], logits.device)
        if isinstance(positions, Tensor):
            stops = (positions < self.min_new_tokens)[:, None] & stops
        return logits.masked_fill(stops, float("-inf"))

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """log_softmax(logits / temperature) at the tokens, [b], over the whole vocabulary."""
        return log_probs_of(logits[:, None], tokens[:, None], self.temperature)[:, 0]


def noise_keys(turns: Sequence[TurnRequest]) -> Tensor:
    """[5 b] int64, the noise keys of turns; see `TokenSampler.noise`."""
    return torch.tensor([turn.noise_key for turn in turns], dtype=torch.int64).view(-1, 5).T


def greedy_rows(turns: Sequence[TurnRequest]) -> Tensor | bool:
    """Mask of the greedy turns, [b] bool; a bool if all or none are."""
    is_greedy = [turn.greedy for turn in turns]
    return is_greedy[0] if len(set(is_greedy)) == 1 else torch.tensor(is_greedy)


@functools.lru_cache(maxsize=4)
def _stop_mask(stop_ids: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Mask [V] of stop tokens, created once per device because it is copied from main memory."""
    stops = torch.zeros(size, dtype=torch.bool)
    stops[list(stop_ids)] = True
    return stops.to(device)
