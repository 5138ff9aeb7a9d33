"""From logits to the next token of each row: the sampling rule of the rollout engines hf and vllm."""

from __future__ import annotations

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
        if self.min_new_tokens and bool((is_early := positions < self.min_new_tokens).any()):
            stops = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            stops[list(self.stop_ids)] = True
            logits = logits.masked_fill(is_early[:, None] & stops, float("-inf"))
        if self.request.greedy:
            return logits.argmax(dim=-1)
        logits = filter_logits(logits / self.temperature, top_k=self.top_k, top_p=self.top_p)
        noise = uniform(
            self.seed, self.request.step, prompt_ids, sample_ids, positions, stream=self.request.stream, turns=turns
        )
        return inverse_cdf(logits.softmax(dim=-1), noise)

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """log_softmax(logits / temperature) at the tokens, [b], over the whole vocabulary."""
        return log_probs_of(logits[:, None], tokens[:, None], self.temperature)[:, 0]
