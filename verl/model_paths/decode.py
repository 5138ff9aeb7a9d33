"""A decode loop over a key-value cache, on the very tensors that train.

prompts ── one prefill each ──> cache ── repeated per sample ──> decode, token by token ──> rows
                                              ^                       |
                                              └── finished rows leave ┘

What of this a model allows is in its `ModelPaths`; at the least each token is computed from its whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.model_paths import packed_attention
from verl.model_paths.paths import ModelPaths
from verl.models.call import call_model, unwrapped
from verl.ops.logprobs import log_probs_of
from verl.utils.progress import report

WORTH_SHARING = 64  # tokens of the longest prompt, from which on reading it once per group saves more than it costs
WORTH_DROPPING = 0.875  # share of the rows that still run, from which down the others leave the batch
CACHES = ("past_key_values", "cache_params", "state")  # what an output names the cache, and what the next call takes

Choose = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Decoded:
    """Responses to some prompts, n to each, side by side.

    Attributes:
        responses: [b * n, T] token ids, the pad token off the mask.
        mask: [b * n, T] which of them are part of a response.
        log_probs: [b * n, T] nats, of the distribution at the temperature asked for.
    """

    responses: Tensor
    mask: Tensor
    log_probs: Tensor


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Decodes with a model as its paths allow.

    Attributes:
        model: a Hugging Face causal language model.
        paths: what was shown to be right for it.
        stop_ids: [k] tokens that end a response.
        pad_id: fills responses off the mask.
        max_new_tokens: T at most.
        temperature: of the log-probs.
        is_exact: sharing a prefix rounds as separate rows do; false in types that are narrower than float32.
        shares: compute each prompt once for all of its samples, where that can be.
        drops: let finished rows leave the batch, where that can be.
    """

    model: Any
    paths: ModelPaths
    stop_ids: Tensor
    pad_id: int
    max_new_tokens: int
    temperature: float = 1.0
    is_exact: bool = True
    shares: bool = True
    drops: bool = True

    def batches(self, lengths: Tensor, most_prompts: int) -> list[Tensor]:
        """Cut prompts of these lengths [b] into batches that may be decoded together, longest first."""
        order = torch.argsort(lengths, descending=True, stable=True)
        if not len(order):
            return []
        cuts = [order]
        if not self.paths.pads_prompts:
            cuts = list(order.split(torch.unique_consecutive(lengths[order], return_counts=True)[1].tolist()))
        return [part for cut in cuts for part in cut.split(max(1, most_prompts))]

    @torch.no_grad()
    def decode(self, tokens: Tensor, mask: Tensor, n: int, choose: Choose) -> Decoded:
        """Draw n responses to each prompt.

        Args:
            tokens, mask: [b P] prompts, padded on the left.
            choose: gives the next tokens [r] for logits [r V], rows [r] of the result and a position in the response.
        """
        state = _Prompts(self, tokens, mask.long()).prefill(n)
        total, device = len(tokens) * n, tokens.device
        live = torch.arange(total, device=device)  # which row of the result each row of the batch is
        running = torch.ones(total, dtype=torch.bool, device=device)
        responses = torch.full((total, self.max_new_tokens), self.pad_id, device=device)
        made = torch.zeros_like(responses, dtype=torch.bool)
        log_probs = torch.zeros(responses.shape, device=device, dtype=state.logits.dtype)
        for t in range(self.max_new_tokens):
            report()
            token = choose(state.logits, live, t)
            responses[live, t] = torch.where(running, token, self.pad_id)
            made[live, t] = running
            log_probs[live, t] = log_probs_of(state.logits[:, None], token[:, None], self.temperature)[:, 0]
            running = running & ~torch.isin(token, self.stop_ids)
            alive = int(running.sum())
            if alive == 0 or t + 1 == self.max_new_tokens:
                break
            if self.drops and self.paths.drops_rows and alive <= WORTH_DROPPING * len(running):
                keep = running.nonzero()[:, 0]
                live, running, token = live[keep], running[keep], token[keep]
                state.keep(keep)
            state.advance(token)
        return Decoded(responses, made, log_probs)


class _Prompts:
    """Rows that are being decoded: their attention mask and positions, and the cache behind them.

    Attributes:
        logits: [r V] of the next token, float32 at least.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, attention: Tensor):
        self.decoder, self.tokens, self.attention = decoder, tokens, attention
        self.is_padded = not bool(attention.all())
        self.cache: Any = None
        self.cache_name = CACHES[0]
        self.logits = tokens.new_zeros(0)

    def prefill(self, n: int) -> _Prompts:
        """Read the prompts, once for all of their n samples where that can be."""
        decoder, paths = self.decoder, self.decoder.paths
        repeats = decoder.shares and paths.repeats_rows
        if not repeats:
            self._repeat(n, logits=False)
        if paths.cache == "in_place":
            from verl.model_paths.kv_cache import preallocated_cache  # brings transformers

            self.cache = preallocated_cache(decoder.model.config, self.tokens.shape[1] + decoder.max_new_tokens)
        self._read(self.tokens, self._positions())
        if repeats and n > 1:
            if not self._share(n):
                self._select(torch.arange(len(self.tokens), device=self.tokens.device).repeat_interleave(n))
            self._repeat(n, logits=True)
        self.position = self.attention.sum(dim=1)
        return self

    def advance(self, token: Tensor) -> None:
        """Read one further token [r] of each row."""
        self.attention = torch.cat([self.attention, self.attention.new_ones(len(token), 1)], dim=1)
        if self.decoder.paths.cache == "none":
            self.tokens = torch.cat([self.tokens, token[:, None]], dim=1)
            self._read(self.tokens, self._positions())
            return
        self._read(token[:, None], self.position[:, None])
        self.position = self.position + 1

    def keep(self, rows: Tensor) -> None:
        """Leave some rows in the batch."""
        self.tokens, self.attention, self.position = self.tokens[rows], self.attention[rows], self.position[rows]
        self._select(rows)

    def _positions(self) -> Tensor:
        return (self.attention.cumsum(dim=1) - 1).clamp_min(0)

    def _repeat(self, n: int, *, logits: bool) -> None:
        self.tokens, self.attention = (x.repeat_interleave(n, dim=0) for x in (self.tokens, self.attention))
        if logits:
            self.logits = self.logits.repeat_interleave(n, dim=0)

    def _share(self, n: int) -> bool:
        """Share a prompt's keys and values between its samples, if that is correct and faster."""
        decoder = self.decoder
        if not (decoder.paths.shares_prefix and decoder.is_exact and self.tokens.shape[1] >= WORTH_SHARING):
            return False
        if not packed_attention.is_enabled(decoder.model):
            return False
        from verl.model_paths.kv_cache import shared_prefix

        return shared_prefix(self.cache, n)

    def _select(self, rows: Tensor) -> None:
        if self.cache is not None:
            from verl.model_paths.kv_cache import select_rows

            select_rows(self.cache, rows)

    def _read(self, tokens: Tensor, positions: Tensor) -> None:
        """Store the logits of the last position and the cache."""
        decoder, has_cache = self.decoder, self.decoder.paths.cache != "none"
        inputs: dict[str, Any] = {"use_cache": has_cache, "logits_to_keep": 1}
        if has_cache and self.cache is not None:
            inputs[self.cache_name] = self.cache
        if packed_attention.is_enabled(decoder.model) and decoder.paths.cache == "in_place":
            inputs["prefix_of"] = self.cache
        if self.is_padded:
            inputs["attention_mask"] = self.attention
        if decoder.paths.pads_prompts:  # else the model counts by itself
            inputs["position_ids"] = positions
        out = call_model(decoder.model, input_ids=tokens, **inputs)
        if has_cache and self.cache is None:
            self.cache_name = next((name for name in CACHES if getattr(out, name, None) is not None), "")
            if not self.cache_name:
                raise NotImplementedError(f"{type(unwrapped(decoder.model)).__name__} gives no cache")
            self.cache = getattr(out, self.cache_name)
        logits = out.logits[:, -1]
        self.logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
