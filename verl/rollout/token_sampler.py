"""From logits to the next token of each row: the sampling rule of the rollout engines hf and vllm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.ops.counter_rng import uniform
from verl.ops.logprobs import log_probs_of
from verl.ops.sampling import filter_logits, inverse_cdf
from verl.rollout.base import GenerationRequest, Rollout


@dataclass(frozen=True)
class TokenSampler:
    """Sampling rule of one request; picklable, because it is sent to the process that samples.

    Attributes:
        seed: of the run.
        stop_ids: sorted; not drawn before `min_new_tokens`.
    """

    request: GenerationRequest
    seed: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0

    @classmethod
    def of(cls, options: Rollout, request: GenerationRequest, seed: int, stop_ids: Sequence[int]) -> TokenSampler:
        """A sampler with the options of an engine."""
        names = ("temperature", "top_k", "top_p", "min_new_tokens")
        return cls(request, seed, tuple(stop_ids), **{name: getattr(options, name) for name in names})

    def choose(
        self,
        logits: Tensor,
        prompt_ids: Tensor,
        sample_ids: Tensor,
        positions: Tensor,
        turns: Tensor | None = None,
    ) -> Tensor:
        """The next token of each row, [b].

        Args:
            logits: [b V], float32 or wider; not modified.
            prompt_ids, sample_ids: [b], key of the noise of each row.
            positions: [b], number of tokens in the response (or turn) so far.
            turns: [b], index of the turn within its episode; None outside of episodes.
        """
        return self.pick(logits, self.noise(prompt_ids, sample_ids, positions, turns), positions)

    def noise(self, prompt_ids: Tensor, sample_ids: Tensor, positions: Tensor, turns: Tensor | None = None) -> Tensor:
        """One uniform number in [0, 1) per row; see `uniform`."""
        step, stream = self.request.step, self.request.stream
        return uniform(self.seed, step, prompt_ids, sample_ids, positions, stream=stream, turns=turns)

    def pick(self, logits: Tensor, noise: Tensor, positions: Tensor | int) -> Tensor:
        """The next token of each row, [b], for given `noise` [b]; see `choose`."""
        logits = self._without_early_stops(logits, positions)
        if self.request.greedy:
            return logits.argmax(dim=-1)
        logits = filter_logits(logits / self.temperature, top_k=self.top_k, top_p=self.top_p)
        return inverse_cdf(logits.softmax(dim=-1), noise)

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


@functools.lru_cache(maxsize=4)
def _stop_mask(stop_ids: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Mask [V] of stop tokens, created once per device because it is copied from main memory."""
    stops = torch.zeros(size, dtype=torch.bool)
    stops[list(stop_ids)] = True
    return stops.to(device)
