"""A decode loop over a key-value cache, on the very tensors that train.

prompts ── one prefill each ──> cache ── repeated per sample ──> decode, token by token ──> rows
                                              ^                       |
                                              └── finished rows leave ┘

What of this a model allows is in its `ModelPaths`; at the least each token is computed from its whole row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl.model_paths import packed_attention
from verl.model_paths.expert_routing import ExpertRouting
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
        routed: [b * n, T layers k] int16, experts that routers chose for each token; -1 off the mask. None if they were
            not asked for.
    """

    responses: Tensor
    mask: Tensor
    log_probs: Tensor
    routed: Tensor | None = None


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
        routing: whose choices are recorded.
        key_multiple: of which the lengths of keys are that a new token attends to, where the cache and attention are
            ours; more than 1 where `padded_keys_distance` has shown it to be right.
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
    routing: ExpertRouting | None = None
    key_multiple: int = 1

    def batches(self, lengths: Tensor, most_prompts: int) -> list[Tensor]:
        """Cut prompts of these lengths [b] into batches that may be decoded together, longest first."""
        order = torch.argsort(lengths, descending=True, stable=True)
        if not len(order):
            return []
        cuts = [order]
        if not self.paths.pads_prompts:
            cuts = list(order.split(torch.unique_consecutive(lengths[order], return_counts=True)[1].tolist()))
        return [part for cut in cuts for part in cut.split(max(1, most_prompts))]

    def decode(self, tokens: Tensor, mask: Tensor, n: int, choose: Choose) -> Decoded:
        """Draw n responses to each prompt.

        Args:
            tokens, mask: [b P] prompts, padded on the left.
            choose: gives the next tokens [r] for logits [r V], rows [r] of the result and a position in the response.
        """
        with contextlib.nullcontext() if self.routing is None else self.routing.recording():
            return self._decode(tokens, mask, n, choose)

    @torch.no_grad()
    def _decode(self, tokens: Tensor, mask: Tensor, n: int, choose: Choose) -> Decoded:
        state = _Prompts(self, tokens, mask.long()).prefill(n)
        total, device = len(tokens) * n, tokens.device
        live = torch.arange(total, device=device)  # which row of the result each row of the batch is
        running = torch.ones(total, dtype=torch.bool, device=device)
        responses = torch.full((total, self.max_new_tokens), self.pad_id, device=device)
        made = torch.zeros_like(responses, dtype=torch.bool)
        log_probs = torch.zeros(responses.shape, device=device, dtype=state.logits.dtype)
        routed = (
            None if state.routed is None else state.routed.new_full((*responses.shape, *state.routed.shape[1:]), -1)
        )
        for t in range(self.max_new_tokens):
            report()
            token = choose(state.logits, live, t)
            responses[live, t] = torch.where(running, token, self.pad_id)
            made[live, t] = running
            log_probs[live, t] = log_probs_of(state.logits[:, None], token[:, None], self.temperature)[:, 0]
            if routed is not None and state.routed is not None:
                routed[live, t] = torch.where(running[:, None, None], state.routed, routed[live, t])
            running = running & ~torch.isin(token, self.stop_ids)
            alive = int(running.sum())
            if alive == 0 or t + 1 == self.max_new_tokens:
                break
            if self.drops and self.paths.drops_rows and alive <= WORTH_DROPPING * len(running):
                keep = running.nonzero()[:, 0]
                live, running, token = live[keep], running[keep], token[keep]
                state.keep(keep)
            state.advance(token)
        return Decoded(responses, made, log_probs, routed)


KEY_MULTIPLE = 64  # on a GPU: its kernels prepare themselves for each length of keys
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # nats between two ways of decoding; 0.3 in narrower types


def key_multiple(device: torch.device) -> int:
    """Multiple to which key lengths are padded while decoding on a device; 1 on a CPU."""
    return 1 if device.type == "cpu" else KEY_MULTIPLE


def allowed(model: Any, autocast: str | None) -> float:
    """Nats that two right ways of decoding may differ by, for the type that a model computes in."""
    return 0.3 if autocast is not None else TOLERANCE.get(model.dtype, 0.3)


# Tokens of a prompt, new ones behind it, samples, padding on the left: past a length of keys, and of a shared prompt
TRIALS = ((60, 6, 1, 0), (70, 3, 2, 20))


@torch.no_grad()
def padded_keys_distance(decoder: Decoder, device: torch.device, longest: int) -> float:
    """Largest difference, in nats, that `decoder.key_multiple` makes to the log-probs of given tokens.

    Args:
        longest: tokens of a row of this run; no row of the trial is longer.
    """
    if decoder.paths.cache != "in_place" or not packed_attention.is_enabled(decoder.model):
        return 0.0  # lengths of keys are those of the model's own cache
    size, worst = decoder.model.config.get_text_config().vocab_size, 0.0
    for prompt, new, n, padding in TRIALS:
        new = max(1, min(new, longest - 1))
        prompt = max(1, min(prompt, longest - new))
        tokens = torch.stack([torch.arange(prompt) * step + 5 for step in (7, 3)]).remainder(size).to(device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if decoder.paths.pads_prompts:
            mask[1, : min(padding, prompt - 1)] = False
        given = (torch.arange(new) * 11 + 2).remainder(size).tolist()

        def choose(logits: Tensor, rows: Tensor, t: int, given: list[int] = given) -> Tensor:
            return rows * 0 + given[t]

        own, plain = (
            replace(decoder, key_multiple=multiple, max_new_tokens=new, stop_ids=decoder.stop_ids[:0], routing=None)
            .decode(tokens, mask, n, choose)
            .log_probs
            for multiple in (decoder.key_multiple, 1)
        )
        worst = max(worst, float((own - plain).abs().max()))
    return worst


class _Prompts:
    """Rows that are being decoded: their attention mask and positions, and the cache behind them.

    Attributes:
        logits: [r V] of the next token, float32 at least.
        routed: [r layers k] experts in the pass that gave them; None if they are not recorded.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, attention: Tensor):
        self.decoder, self.tokens, self.attention = decoder, tokens, attention
        self.is_padded = not bool(attention.all())
        self.cache: Any = None
        self.cache_name = CACHES[0]
        self.logits = tokens.new_zeros(0)
        self.routed: Tensor | None = None

    def prefill(self, n: int) -> _Prompts:
        """Read the prompts, once for all of their n samples where that can be."""
        decoder, paths = self.decoder, self.decoder.paths
        repeats = decoder.shares and paths.repeats_rows
        if not repeats:
            self._repeat(n, logits=False)
        if paths.cache == "in_place":
            from verl.model_paths.kv_cache import preallocated_cache  # brings transformers

            multiple = decoder.key_multiple if packed_attention.is_enabled(decoder.model) else 1
            longest = self.tokens.shape[1] + decoder.max_new_tokens
            self.cache = preallocated_cache(decoder.model.config, longest, multiple)
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
            self.routed = None if self.routed is None else self.routed.repeat_interleave(n, dim=0)

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
        if decoder.routing is not None:
            self.routed = decoder.routing.last_chosen(len(tokens))
