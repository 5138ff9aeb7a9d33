"""Rollout on the very tensors that train: a decode loop over transformers' key-value cache.

prompts ── one prefill each ──> cache ── repeated per sample ──> decode, token by token ──> rows
                                              ^                       |
                                              └── finished rows leave ┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl.description import BuildContext
from verl.models import line_attention
from verl.models.division import compute_device, weights_gathered
from verl.models.precision import Autocast, computing_in
from verl.ops.logprobs import log_probs_of
from verl.protocol import DataProto
from verl.rollout.base import ALONE, Request, Rollout, RolloutEngine, assemble, stop_tokens
from verl.rollout.drawing import Drawing
from verl.utils.progress import report

WORTH_SHARING = 64  # tokens of the longest prompt, from which on reading it once per group saves more than it costs


@dataclass(frozen=True, kw_only=True)
class HFRollout(Rollout):
    """Generate with the training model itself, through transformers; nothing is copied and nothing to sync.

    Args:
        max_rows: responses decoded at a time, or those of one prompt if they are more.
        share_prefix: compute each prompt once for all of its samples. Changes nothing but speed.
        drop_finished: finished rows leave the batch. Changes nothing but speed.
    """

    may_change: ClassVar[bool] = True

    max_rows: int = 512
    share_prefix: bool = True
    drop_finished: bool = True

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.max_rows < 1:
            yield f"max_rows is {self.max_rows}: must be at least 1."

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> HFSampler:
        return HFSampler(self, model, tokenizer, seed, autocast)


class HFSampler(RolloutEngine):
    """The running engine of `HFRollout`."""

    def __init__(self, options: HFRollout, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None):
        self.options, self.model, self.seed, self.autocast = options, model, seed, autocast
        self.pad_id = tokenizer.pad_token_id
        self.device = compute_device(model)
        self.stop_ids = stop_tokens(model, tokenizer, options.stop_token_ids).to(self.device)
        self._stops = tuple(self.stop_ids.tolist())

    @torch.no_grad()
    def generate(self, prompts: DataProto, request: Request) -> DataProto:
        """See `RolloutEngine.generate`. The draws depend on (seed, stream, step, prompt, sample, position) alone."""
        self.model.eval()
        with weights_gathered(self.model):
            return self._generate(prompts, request)

    def _generate(self, prompts: DataProto, request: Request) -> DataProto:
        n, width = request.num_samples, self.options.max_new_tokens
        shape = (len(prompts) * n, width)
        responses = torch.full(shape, self.pad_id, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.bool)
        log_probs = torch.zeros(shape, dtype=torch.promote_types(self.model.dtype, torch.float32))
        lengths = prompts.batch["prompt_mask"].sum(dim=1)
        by_length = torch.argsort(lengths, descending=True, stable=True)
        for rows in by_length.split(max(1, self.options.max_rows // n)) if len(prompts) else ():
            with computing_in(self.autocast, self.model):
                out = self._decode(prompts[rows].to(self.device), int(lengths[rows].max()), request)
            target = (rows[:, None] * n + torch.arange(n)).flatten()
            for whole, part in zip((responses, mask, log_probs), out, strict=True):
                whole[target] = part.to(whole.device)
        return assemble(prompts, n, responses, mask, log_probs, self.pad_id)

    def _decode(self, prompts: DataProto, prompt_width: int, request: Request) -> tuple[Tensor, Tensor, Tensor]:
        """Responses, their mask and log-probs, [b * n, max_new_tokens], for prompts of at most `prompt_width`."""
        options, n = self.options, request.num_samples
        prompt_ids = prompts.batch["prompt_ids"].repeat_interleave(n)
        sample_ids = torch.arange(n, device=self.device).repeat(len(prompts))
        logits, cache, attention = self._prefill(prompts, prompt_width, n)
        position = attention.sum(dim=1)
        total = len(prompt_ids)
        live = torch.arange(total, device=self.device)  # which row of the result each row of the batch is
        running = torch.ones(total, dtype=torch.bool, device=self.device)
        responses = torch.full((total, options.max_new_tokens), self.pad_id, device=self.device)
        mask = torch.zeros_like(responses, dtype=torch.bool)
        log_probs = torch.zeros(responses.shape, device=self.device, dtype=logits.dtype)
        for t in range(options.max_new_tokens):
            report()
            token = self._choose(logits, prompt_ids[live], sample_ids[live], t, request)
            responses[live, t] = torch.where(running, token, self.pad_id)
            mask[live, t] = running
            log_probs[live, t] = log_probs_of(logits[:, None], token[:, None], options.temperature)[:, 0]
            running = running & ~torch.isin(token, self.stop_ids)
            alive = int(running.sum())
            if alive == 0 or t + 1 == options.max_new_tokens:
                break
            if options.drop_finished and alive <= 0.875 * len(running):
                keep = running.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                live, running, token = live[keep], running[keep], token[keep]
                attention, position = attention[keep], position[keep]
            attention = torch.cat([attention, attention.new_ones(len(live), 1)], dim=1)
            logits = self._forward(token[:, None], attention, position[:, None], cache)
            position = position + 1
        return responses, mask, log_probs

    def _prefill(self, prompts: DataProto, prompt_width: int, n: int) -> tuple[Tensor, Any, Tensor]:
        """The logits of the first response token, [b * n, V], with the cache and the attention mask behind them."""
        from verl.rollout.cache import roomy_cache, shared_prefix  # bring transformers

        tokens = prompts.batch["prompts"][:, -prompt_width:]
        attention = prompts.batch["prompt_mask"][:, -prompt_width:].long()
        cache = roomy_cache(self.model.config, prompt_width + self.options.max_new_tokens)
        if not self.options.share_prefix:
            tokens, attention = tokens.repeat_interleave(n, dim=0), attention.repeat_interleave(n, dim=0)
        positions = (attention.cumsum(dim=1) - 1).clamp_min(0)
        self._is_padded = not bool(attention.all())
        logits = self._forward(tokens, attention, positions, cache)
        if self.options.share_prefix and n > 1:
            if not (self._can_share(prompt_width, logits) and shared_prefix(cache, n)):
                cache.batch_repeat_interleave(n)
            logits, attention = logits.repeat_interleave(n, dim=0), attention.repeat_interleave(n, dim=0)
        return logits, cache, attention

    def _can_share(self, prompt_width: int, logits: Tensor) -> bool:
        """Whether attention reads a prompt once for all of its samples, and that is worth it."""
        is_exact = self.autocast is None and self.model.dtype in (torch.float32, torch.float64)
        return is_exact and prompt_width >= WORTH_SHARING and line_attention.is_enabled(self.model)

    def _forward(self, tokens: Tensor, attention: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits of the last position, [b V], float32 at least."""
        logits = self.model(
            input_ids=tokens,
            attention_mask=attention if self._is_padded else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **({"prefix_of": cache} if line_attention.is_enabled(self.model) else {}),
        ).logits[:, -1]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _choose(self, logits: Tensor, prompt_ids: Tensor, sample_ids: Tensor, t: int, request: Request) -> Tensor:
        """The next token of each row, [b]."""
        drawing = Drawing.of(self.options, request, self.seed, self._stops)
        return drawing.choose(logits, prompt_ids, sample_ids, torch.full_like(prompt_ids, t))
