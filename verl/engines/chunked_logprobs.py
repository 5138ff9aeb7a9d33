"""Log-probabilities and entropies of response tokens, computed in chunks: all logits are never held at once.

    hidden states of the tokens on the mask [n D] ── some at a time ──> logits [c V] ──> log-prob, entropy [c]

In the backward pass the logits of each part are made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl.model_paths.micro_batch import MicroBatch
from verl.models.call import call_model
from verl.models.heads import LMHead
from verl.ops.logprobs import entropy_of, log_probs_of

Entropy = Literal["grad", "value"] | None
LOGITS_AT_A_TIME = 2**24  # numbers: 64 MiB in float32
FACTOR_OF_GPU = 8  # there the head is read once for each part, which takes longer than 512 MiB are worth


@dataclass(frozen=True)
class TokenLogProbs:
    """What a model says of each response token.

    Attributes:
        log_probs: [b t] nats, float32 at least.
        entropies: [b t] nats, or None if they were not asked for.
        is_likeliest: [b t] bool, whether the token is the greedy choice, or None likewise.
    """

    log_probs: Tensor
    entropies: Tensor | None = None
    is_likeliest: Tensor | None = None


def logits_at_a_time(device_type: str) -> int:
    """Numbers of logits that are there at a time, on a device of this type."""
    return LOGITS_AT_A_TIME * (1 if device_type == "cpu" else FACTOR_OF_GPU)


def token_log_probs(
    model: Any,
    head: LMHead,
    micro: MicroBatch,
    temperature: float = 1.0,
    *,
    entropy: Entropy = None,
    rank: bool = False,
    parts: int = 1,
) -> TokenLogProbs:
    """Score the response tokens of a micro-batch; everything is 0 off the mask.

    Args:
        model: any Hugging Face causal language model, and its head.
        temperature: divides the logits.
        entropy: give entropies too, with their gradient or as mere values.
        rank: say too whether each token is the likeliest.
        parts: at least so many parts are made of the tokens.
    """
    tokens = micro.targets()

    def last_states(logits_to_keep: int = 0, **inputs: Any) -> Tensor:
        return call_model(model, **inputs, use_cache=False, logits_to_keep=logits_to_keep).logits

    if not head.is_separable:
        return _place(
            _score_chunk(micro.predict(last_states), tokens, temperature, entropy, rank), micro, entropy, rank
        )
    with head.left_out():
        hidden = micro.predict(last_states)
    fitting = logits_at_a_time(hidden.device.type) // model.config.get_text_config().vocab_size
    at_a_time = max(1, min(fitting, -(-len(tokens) // parts)))

    def part(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        return _score_chunk(head(hidden), tokens, temperature, entropy, rank)

    if len(tokens) <= at_a_time:
        return _place(part(hidden, tokens), micro, entropy, rank)
    parts = [
        checkpoint(part, h, y, use_reentrant=False, preserve_rng_state=False)
        for h, y in zip(hidden.split(at_a_time), tokens.split(at_a_time), strict=True)
    ]
    return _place(tuple(torch.cat(column) for column in zip(*parts, strict=True)), micro, entropy, rank)


def plain_log_probs(model: Any, micro: MicroBatch, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the response tokens [b t] by the model's own forward pass, with all logits at a time."""

    def all_logits(logits_to_keep: int = 0, **inputs: Any) -> Tensor:
        return call_model(model, **inputs, use_cache=False).logits

    logits = micro.predict(all_logits)
    return _place(_score_chunk(logits, micro.targets(), temperature, None, False), micro, None, False).log_probs


def _score_chunk(
    logits: Tensor, tokens: Tensor, temperature: float, entropy: Entropy, rank: bool
) -> tuple[Tensor, ...]:
    found = [log_probs_of(logits, tokens, temperature)]
    if entropy:
        found.append(entropy_of(logits if entropy == "grad" else logits.detach(), temperature))
    if rank:
        found.append(logits.argmax(dim=-1) == tokens)
    return tuple(found)


def _place(found: tuple[Tensor, ...], micro: MicroBatch, entropy: Entropy, rank: bool) -> TokenLogProbs:
    placed = iter(micro.place(*found))
    return TokenLogProbs(next(placed), next(placed) if entropy else None, next(placed) if rank else None)
