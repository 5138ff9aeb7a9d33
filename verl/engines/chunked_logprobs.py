"""Log-probabilities and entropies of response tokens, computed in chunks: all logits are never held at once.

    hidden states of the tokens on the mask [n D] ── in chunks ──> logits [c V] ──> log-prob, entropy [c]

The backward pass recomputes the logits of each chunk. Where the head computes in a type narrower than float32, the
gradients of its weights are accumulated over the chunks in float32 and rounded once.

On a GPU a chunk is bound by the memory that its passes read and write. `ScoreKernels` makes fewer of them: 50 bytes for
each logit in bfloat16, forward and backward with entropies, where autograd's operations move 104.
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
from verl.models.heads import LMHead
from verl.models.structure import call_model
from verl.ops.logprobs import entropy_of, log_probs_of
from verl.ops.resharding.dtensor import is_divided
from verl.ops.sampling import plain_kernels

Entropy = Literal["grad", "value"] | None
LOGITS_AT_A_TIME = 2**24  # numbers: 64 MiB in float32
ROWS_AT_A_TIME = 1024  # of a gradient of the head
FACTOR_OF_GPU = 8  # larger chunks on a GPU (512 MiB): each chunk reads the whole head from memory


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probabilities of response tokens, with entropies and greedy choices where they were requested.

    Attributes:
        log_probs: [b t] nats, float32 at least.
        entropies: [b t] nats, or None if not requested.
        is_likeliest: [b t] bool, whether the token is the greedy choice, or None if not requested.
        candidate_log_probs: [b t K] nats, of the candidates that were asked for, or of the likeliest tokens; else None.
        candidates: [b t K] int64, ids of the likeliest tokens, or None if not requested.
    """

    log_probs: Tensor
    entropies: Tensor | None = None
    is_likeliest: Tensor | None = None
    candidate_log_probs: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True)
class _Scoring:
    """Columns that are computed from the logits of a token; see `token_log_probs`."""

    temperature: float = 1.0
    entropy: Entropy = None
    rank: bool = False
    top_k: int = 0
    num_tokens: int | None = None

    def __call__(
        self, logits: Tensor, tokens: Tensor, candidates: Tensor | None = None, kept: list[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Columns [n] and [n K] for logits [n V], tokens [n] and candidates [n K], in the order of `scatter`.

        Args:
            kept: empty at first, and given again when the same logits were recomputed.
        """
        is_plain = not (self.entropy == "grad" or self.rank or self.top_k or candidates is not None)
        if is_plain and uses_kernels(logits):
            kept = [] if kept is None else kept
            return ScoreKernels.apply(logits, tokens, self.temperature, bool(self.entropy), kept)
        columns = [log_probs_of(logits, tokens, self.temperature)]
        if self.entropy:
            columns.append(entropy_of(logits if self.entropy == "grad" else logits.detach(), self.temperature))
        if self.rank:
            columns.append(logits.argmax(dim=-1) == tokens)
        if self.top_k:
            candidates = logits[:, : self.num_tokens].topk(self.top_k).indices
        if candidates is not None:
            columns.append(log_probs_of(logits, candidates, self.temperature))
        return (*columns, candidates) if self.top_k and candidates is not None else tuple(columns)

    def scatter(self, columns: tuple[Tensor, ...], micro: MicroBatch) -> TokenLogProbs:
        """The columns at the places of their tokens, 0 off the mask."""
        flat = [part for x in columns for part in (x.unbind(dim=1) if x.dim() > 1 else (x,))]
        flat = iter(micro.scatter_shared(*flat))
        whole = iter(
            [torch.stack([next(flat) for _ in range(x.shape[1])], -1) if x.dim() > 1 else next(flat) for x in columns]
        )
        return TokenLogProbs(
            next(whole),
            next(whole) if self.entropy else None,
            next(whole) if self.rank else None,
            next(whole, None),
            next(whole, None),
        )


_LOG_PROBS = _Scoring()


def uses_kernels(logits: Tensor) -> bool:
    """Whether `ScoreKernels` computes the scores of these logits."""
    return logits.device.type != "cpu" and not is_divided(logits)


class ScoreKernels(torch.autograd.Function):
    """Log-probabilities of tokens, and entropies as values, of logits [n V], with few passes over them.

        d log p(token) / d logits = (1[token] - softmax(logits / T)) / T

    The gradient has the type of the logits; that of the token itself, 1 - p, is computed in float32 first.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool, kept: list[Tensor]
    ) -> tuple[Tensor, ...]:
        if not kept:  # else the logits were recomputed for the backward pass
            columns = _warm(logits, temperature).log_softmax(dim=-1, dtype=_wide(logits))
            kept.append(columns.gather(-1, tokens[:, None])[:, 0])
            if with_entropy:
                kept.append(torch.special.entr(columns.exp_(), out=columns).sum(dim=-1))
        ctx.save_for_backward(logits, tokens, kept[0])
        ctx.temperature = temperature
        ctx.mark_non_differentiable(*kept[1:])
        return tuple(x.detach() for x in kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, tokens, log_probs = ctx.saved_tensors
        found = _warm(logits, ctx.temperature).softmax(dim=-1)
        scale = (gradient / -ctx.temperature)[:, None]
        found = found.mul_(scale).to(logits.dtype)
        with plain_kernels(found.device):  # each row has one token
            found.scatter_(1, tokens[:, None], (scale * log_probs[:, None].expm1()).to(found.dtype))
        return found, None, None, None, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _warm(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature; in their own type where it is 1."""
    return logits if temperature == 1.0 else logits.to(_wide(logits)) / temperature


def logits_at_a_time(device_type: str) -> int:
    """Largest number of logits (tokens x vocabulary) of one chunk on a device of this type."""
    return LOGITS_AT_A_TIME * (1 if device_type == "cpu" else FACTOR_OF_GPU)


def token_log_probs(
    model: Any,
    head: LMHead,
    micro: MicroBatch,
    temperature: float = 1.0,
    *,
    entropy: Entropy = None,
    rank: bool = False,
    num_chunks: int = 1,
    top_k: int = 0,
    num_tokens: int | None = None,
    candidates: str | None = None,
) -> TokenLogProbs:
    """Score the response tokens of a micro-batch; everything is 0 off the mask.

    Args:
        model: any Hugging Face causal language model.
        head: its output head.
        micro: the rows to score.
        temperature: divides the logits.
        entropy: also return entropies, with their gradient or as values only; None returns none.
        rank: also return whether each token is the likeliest.
        num_chunks: the least number of chunks that the tokens are split into.
        top_k: number of likeliest tokens to return with their log-probs; 0 for none.
        num_tokens: only ids below it are among the likeliest; None for the whole vocabulary.
        candidates: a field [b t K] of token ids whose log-probs are returned too, with their gradient.
    """
    tokens, scoring = micro.targets(), _Scoring(temperature, entropy, rank, top_k, num_tokens)
    further = None if candidates is None else micro.targets(candidates)

    def last_states(logits_to_keep: int = 0, **inputs: Any) -> Tensor:
        return call_model(model, **inputs, use_cache=False, logits_to_keep=logits_to_keep).logits

    if not head.is_separable:
        return scoring.scatter(scoring(micro.predict(last_states), tokens, further), micro)
    with head.left_out():
        hidden = micro.predict(last_states)
    fitting = logits_at_a_time(hidden.device.type) // model.config.get_text_config().vocab_size
    at_a_time = max(1, min(fitting, -(-len(tokens) // num_chunks)))
    assert head.head is not None
    return scoring.scatter(score_in_chunks(head.head, hidden, tokens, at_a_time, scoring, further), micro)


def score_in_chunks(
    head: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    at_a_time: int,
    scoring: _Scoring = _LOG_PROBS,
    candidates: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Columns of tokens [n] from hidden states [n D], computed in chunks; by default log-probabilities [n] in nats.

    Args:
        head: maps hidden states to logits.
        at_a_time: tokens of one chunk.
    """
    if len(tokens) <= at_a_time:
        return scoring(head(hidden), tokens, candidates)
    sums = HeadGradients(head)

    def part(hidden: Tensor, tokens: Tensor, candidates: Tensor | None, kept: list[Tensor]) -> tuple[Tensor, ...]:
        with sums.counting():
            logits = head(hidden)
        return scoring(logits, tokens, candidates, kept)

    chunks = [hidden.split(at_a_time), tokens.split(at_a_time)]
    chunks.append(candidates.split(at_a_time) if candidates is not None else [None] * len(chunks[0]))
    parts = [
        checkpoint(part, *chunk, [], use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*chunks, strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class HeadGradients:
    """Accumulates in float32 the gradients of an output head that is used several times.

    autograd adds up the gradients of several uses of a tensor in the dtype of that tensor. bfloat16 has 8 significant
    bits, so a sum over many chunks loses every summand below 1/256 of it. Each chunk therefore uses an alias of the
    weight, whose gradient is added to one float32 buffer; the weight receives the rounded sum after the last chunk.

        weight ──> source ──> alias of each part ──> logits
               <── sum, rounded once ─┴──< gradient of each part, added in float32

    Weights in float32 or wider, and frozen weights, are used directly.
    """

    def __init__(self, head: nn.Module):
        sources: dict[int, tuple[Any, _Float32Sum]] = {}
        self._aliased: list[tuple[dict[str, Any], str, Any, _Float32Sum]] = []
        for module in head.modules() if torch.is_grad_enabled() else ():
            for name, weight in module._parameters.items():
                if weight is None or not weight.requires_grad or not weight.is_floating_point():
                    continue
                if weight.dtype.itemsize >= torch.float32.itemsize:
                    continue
                if id(weight) not in sources:
                    total = _Float32Sum()
                    sources[id(weight)] = _Source.apply(weight, total), total
                self._aliased.append((module._parameters, name, *sources[id(weight)]))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside this context the head computes with aliases of its weights."""
        before = [(parameters, name, parameters[name]) for parameters, name, _, _ in self._aliased]
        try:
            for parameters, name, source, total in self._aliased:
                parameters[name] = _Part.apply(source, total)
            yield
        finally:
            for parameters, name, weight in before:
                parameters[name] = weight


class _Float32Sum:
    """float32 gradient of one weight, or of the local shard of it."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        if self._total is None:
            self._total = gradient.to(torch.float32)
        elif gradient.device.type != "cpu":
            self._total.add_(gradient)
        else:  # `add_` of another dtype first makes a float32 copy
            for total, part in zip(self._total.split(ROWS_AT_A_TIME), gradient.split(ROWS_AT_A_TIME), strict=True):
                total.add_(part)

    def take(self, dtype: torch.dtype) -> Tensor | None:
        total, self._total = self._total, None
        return None if total is None else total.to(dtype)


class _Source(torch.autograd.Function):
    """Identity on a weight; its backward pass returns the float32 sum of all chunks in place of their gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Float32Sum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.dtype = total, weight.dtype
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        assert gradient is None, "gradients of the chunks belong in the float32 sum"
        return ctx.total.take(ctx.dtype), None


class _Part(torch.autograd.Function):
    """Identity for one chunk; its backward pass adds the gradient to the float32 sum."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, total: _Float32Sum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = total
        return source.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:  # type: ignore[override]
        if gradient is not None:
            ctx.total.add(gradient)
        return None, None


def plain_log_probs(model: Any, micro: MicroBatch, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the response tokens [b t] by the model's own forward pass, all logits in memory at once."""

    def all_logits(logits_to_keep: int = 0, **inputs: Any) -> Tensor:
        return call_model(model, **inputs, use_cache=False).logits

    logits, scoring = micro.predict(all_logits), _Scoring(temperature)
    return scoring.scatter(scoring(logits, micro.targets()), micro).log_probs
