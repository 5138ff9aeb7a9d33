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
    """How the tokens of one request are drawn; travels to the process that draws them.

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
        """The drawing that the options of an engine ask for."""
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
            logits: [b V], float32 at least; they stay as they are.
            prompt_ids, sample_ids: [b], whose noise it is.
            positions: [b], how many tokens the response, or the turn, has so far.
            turns: [b], index of the turn within its episode; None where a response is all there is.
        """
        return self.pick(logits, self.noise(prompt_ids, sample_ids, positions, turns), positions)

    def noise(self, prompt_ids: Tensor, sample_ids: Tensor, positions: Tensor, turns: Tensor | None = None) -> Tensor:
        """One number in [0, 1) for each of them; see `uniform`."""
        step, stream = self.request.step, self.request.stream
        return uniform(self.seed, step, prompt_ids, sample_ids, positions, stream=stream, turns=turns)

    def pick(self, logits: Tensor, noise: Tensor, positions: Tensor | int) -> Tensor:
        """The next token of each row, [b], by its number [b] of `noise`; see `choose`."""
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
    """[V], made once for a device: making it copies from main memory."""
    stops = torch.zeros(size, dtype=torch.bool)
    stops[list(stop_ids)] = True
    return stops.to(device)
