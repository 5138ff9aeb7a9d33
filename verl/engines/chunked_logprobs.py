"""Log-probabilities and entropies of response tokens, computed in chunks: all logits are never held at once.

    hidden states of the tokens on the mask [n D] ── some at a time ──> logits [c V] ──> log-prob, entropy [c]

In the backward pass the logits of each part are made again. Where the head computes in a type narrower than float32,
the gradients that the parts give to its weights are added up in float32 and rounded once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl.model_paths.micro_batch import MicroBatch
from verl.models.call import call_model
from verl.models.heads import LMHead
from verl.ops.logprobs import entropy_of, log_probs_of

Entropy = Literal["grad", "value"] | None
LOGITS_AT_A_TIME = 2**24  # numbers: 64 MiB in float32
ROWS_AT_A_TIME = 1024  # of a gradient of the head
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
    assert head.head is not None
    return _place(
        score_in_parts(head.head, hidden, tokens, at_a_time, temperature, entropy=entropy, rank=rank),
        micro,
        entropy,
        rank,
    )


def score_in_parts(
    head: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    at_a_time: int,
    temperature: float = 1.0,
    *,
    entropy: Entropy = None,
    rank: bool = False,
) -> tuple[Tensor, ...]:
    """Log-probs [n] of tokens [n], then entropies and whether they are the likeliest where asked for, with the logits
    of `at_a_time` of the hidden states [n D] at a time."""
    if len(tokens) <= at_a_time:
        return _score_chunk(head(hidden), tokens, temperature, entropy, rank)
    sums = HeadGradients(head)

    def part(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        with sums.counting():
            logits = head(hidden)
        return _score_chunk(logits, tokens, temperature, entropy, rank)

    parts = [
        checkpoint(part, h, y, use_reentrant=False, preserve_rng_state=False)
        for h, y in zip(hidden.split(at_a_time), tokens.split(at_a_time), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class HeadGradients:
    """Gradients of an output head that is used several times, added up in float32.

    autograd adds what the uses of a tensor give in the type of the tensor. In bfloat16, which has 8 bits, a sum over
    many parts loses what is less than a 256th of it. So each use gets an alias of the weight, whose gradient goes to
    one sum in float32; the weight gets that sum once all uses have given theirs.

        weight ──> source ──> alias of each part ──> logits
               <── sum, rounded once ─┴──< gradient of each part, added in float32

    Weights in float32 or wider, and those that are not trained, are left as they are.
    """

    def __init__(self, head: nn.Module):
        sources: dict[int, tuple[Any, _Float32Sum]] = {}
        self._places: list[tuple[dict[str, Any], str, Any, _Float32Sum]] = []
        for module in head.modules() if torch.is_grad_enabled() else ():
            for name, weight in module._parameters.items():
                if weight is None or not weight.requires_grad or not _is_narrow(weight):
                    continue
                if id(weight) not in sources:
                    own = _Float32Sum()
                    sources[id(weight)] = _Source.apply(weight, own), own
                self._places.append((module._parameters, name, *sources[id(weight)]))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Within, the head computes with aliases of its weights."""
        before = [(parameters, name, parameters[name]) for parameters, name, _, _ in self._places]
        try:
            for parameters, name, source, own in self._places:
                parameters[name] = _Part.apply(source, own)
            yield
        finally:
            for parameters, name, weight in before:
                parameters[name] = weight


def _is_narrow(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize


class _Float32Sum:
    """The gradient of one weight, or of what this process holds of it."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        if self._total is None:
            self._total = gradient.to(torch.float32)
        elif gradient.device.type != "cpu":
            self._total.add_(gradient)
        else:  # which makes a copy in float32 of what it adds
            for total, part in zip(self._total.split(ROWS_AT_A_TIME), gradient.split(ROWS_AT_A_TIME), strict=True):
                total.add_(part)

    def take(self, dtype: torch.dtype) -> Tensor | None:
        total, self._total = self._total, None
        return None if total is None else total.to(dtype)


class _Source(torch.autograd.Function):
    """A weight as its parts see it: none of them gives it a gradient, all of them one sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, own: _Float32Sum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.own, ctx.dtype = own, weight.dtype
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        assert gradient is None, "the parts give their gradients to the sum"
        return ctx.own.take(ctx.dtype), None


class _Part(torch.autograd.Function):
    """One use of a weight."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, own: _Float32Sum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.own = own
        return source.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:  # type: ignore[override]
        if gradient is not None:
            ctx.own.add(gradient)
        return None, None


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
