"""Samples of a training session: responses to prompts with log-probabilities, noise by seed, and stop texts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.errors import ConfigError
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import LMHead
from verl.ops.sampling import NO_TURN
from verl.protocol import DataProto
from verl.rollout.base import RolloutEngine, TurnLimits, TurnRequest, TurnResult, stop_tokens
from verl.rollout.hf import HFEngine
from verl.service.data import CANDIDATES, checked_tokens, finite

MOST_STOPS = 256
LONGEST_STOP = 256  # characters of a stop text
UNKNOWN_ROOM = 4096  # tokens of a response, where the context of the model is not known


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling.

    Args:
        max_new_tokens: None for what the model's context leaves.
        temperature: 0 takes the likeliest token; log-probs are those at this temperature, at 0 those at 1.
        top_k, top_p: 0 and 1 sample from the whole vocabulary.
        stop: texts or token ids that end a response and stay in it, besides the end tokens of the model; None for the
            latter alone. With an empty list only its length ends a response.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: str | tuple[str | int, ...] | None = None

    def checked(self, name: str, vocabulary: int) -> SamplingOptions:
        """The options, valid.

        Raises:
            ConfigError: one is not; begins with `name`.
        """
        limit = self.max_new_tokens
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ConfigError(f"{name}.max_tokens is {limit!r}: expected a whole number of at least 1.")
        finite(self.temperature, f"{name}.temperature")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ConfigError(f"{name}.top_k is {self.top_k!r}: expected a whole number of at least 0.")
        if not 0 < finite(self.top_p, f"{name}.top_p") <= 1:
            raise ConfigError(f"{name}.top_p is {self.top_p!r}: must lie in (0, 1].")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if len(stop or ()) > MOST_STOPS:
            raise ConfigError(f"{name}.stop has {len(stop or ())} items: at most {MOST_STOPS} are allowed.")
        for item in stop or ():
            if isinstance(item, str) and not 0 < len(item) <= LONGEST_STOP:
                raise ConfigError(f"{name}.stop has a text of {len(item)} characters: 1 to {LONGEST_STOP} are allowed.")
            if isinstance(item, int) and not 0 <= item < vocabulary:
                raise ConfigError(f"{name}.stop has {item}: token ids are 0 to {vocabulary - 1}.")
        return dataclasses.replace(self, stop=stop)


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        tokens: with the stop token, or the tokens up to the end of a stop text.
        log_probs: of each, in nats.
        is_stopped: whether a stop ended it; False for its length.
    """

    tokens: list[int]
    log_probs: list[float]
    is_stopped: bool


@dataclass(frozen=True)
class PromptRequest:
    """A prompt with the number of its samples.

    Attributes:
        noise: name of its noise: equal names give equal samples.
        weights: see `TurnRequest`.
    """

    tokens: Sequence[int]
    num_samples: int
    noise: tuple[object, ...] = ()
    weights: str = ""


def sample(
    engine: Any,
    tokenizer: Any,
    prompts: Sequence[PromptRequest],
    options: SamplingOptions,
    longest: int | None,
    may_be_full: bool = False,
) -> list[list[Sample]]:
    """Sample responses to several prompts as one batch. A response does not depend on the others.

    Args:
        engine: a `RolloutEngine` whose options may change, with the weights to sample from.
        longest: tokens of a row that the model reads.
        may_be_full: a prompt without room for a response has empty ones; else it is refused.
    Raises:
        ConfigError: a prompt cannot be read, or leaves no room for a response.
    """
    vocabulary = engine.model.config.get_text_config().vocab_size
    texts = [item for item in options.stop or () if isinstance(item, str)]
    ids = {item for item in options.stop or () if isinstance(item, int)}
    for text in [*texts]:
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(encoded) == 1 and tokenizer.decode(encoded) == text:
            ids.add(encoded[0])
    if options.stop is None or len(options.stop):
        ids |= {*stop_tokens(engine.model, tokenizer, ()).tolist()}
    requests: list[TurnRequest] = []
    for prompt in prompts:
        tokens = checked_tokens(prompt.tokens, "prompt", vocabulary, longest).tolist()
        room = (longest or len(tokens) + UNKNOWN_ROOM) - len(tokens)
        if room < 1 and not may_be_full:
            raise ConfigError(f"prompt has {len(tokens)} tokens: the model reads {longest}, which leaves no response.")
        limit = room if options.max_new_tokens is None else min(room, options.max_new_tokens)
        of_prompt, step = _number(*tokens) % 2**31, _number(*prompt.noise)
        for index in range(prompt.num_samples):
            key = of_prompt, index, NO_TURN, limit, step
            is_greedy = not options.temperature
            requests.append(TurnRequest(len(requests), tokens, *key, greedy=is_greedy, weights=prompt.weights))
    turns = [x for x in requests if x.max_new_tokens > 0]
    engine.options = dataclasses.replace(
        engine.options, temperature=options.temperature or 1.0, top_k=options.top_k, top_p=float(options.top_p),
        max_new_tokens=max((x.max_new_tokens for x in turns), default=1),
    )  # fmt: skip
    stops = sorted(ids)
    if isinstance(engine, HFEngine):
        engine.stop_ids = torch.tensor(stops, dtype=torch.int64, device=engine.device)
    else:
        engine.stop_ids = tuple(stops)
    limits = TurnLimits(max((len(x.tokens) + x.max_new_tokens for x in turns), default=1), is_single=not texts)
    found = _generate(engine, limits, turns, tokenizer, texts) if turns else {}
    empty = Sample([], [], False)
    samples = iter([_cut(found[x.episode], tokenizer, texts) if x.episode in found else empty for x in requests])
    return [[next(samples) for _ in range(prompt.num_samples)] for prompt in prompts]


def _generate(
    engine: RolloutEngine, limits: TurnLimits, requests: Sequence[TurnRequest], tokenizer: Any, texts: Sequence[str]
) -> dict[int, TurnResult]:
    found: dict[int, TurnResult] = {}
    tail_tokens = max(map(len, texts), default=0) + 4  # a token has a character, but for the few of a split one
    turns = engine.turns(limits)
    try:
        for request in requests:
            turns.add(request)
        while turns.num_pending:
            for result in turns.advance():
                found[result.episode] = result
                turns.forget(result.episode)
            for result in turns.open_turns() if texts else ():  # a stop text ends in the last token, or ended it before
                tail = tokenizer.decode(result.tokens[-tail_tokens:])
                if any(text in tail for text in texts):
                    turns.end(result.episode)
    finally:
        turns.close()
    return found


def _stop_in(tokens: Sequence[int], tokenizer: Any, texts: Sequence[str]) -> int | None:
    """The number of tokens up to the end of the first stop text; None if there is none."""
    whole = tokenizer.decode(tokens)
    if not any(text in whole for text in texts):
        return None
    low, high = 1, len(tokens)  # the text grows with the tokens: the fewest that have a stop text
    while low < high:
        middle = (low + high) // 2
        if any(text in tokenizer.decode(tokens[:middle]) for text in texts):
            high = middle
        else:
            low = middle + 1
    return low


def _cut(result: TurnResult, tokenizer: Any, texts: Sequence[str]) -> Sample:
    end = _stop_in(result.tokens, tokenizer, texts) if texts else None
    if end is None:
        return Sample(result.tokens, result.log_probs, result.is_complete)
    return Sample(result.tokens[:end], result.log_probs[:end], True)


def _number(*parts: object) -> int:
    """A number below 2^62 for a name, equal in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of the tokens of a row after the first, [n].

    Attributes:
        log_probs: [n] nats.
        likeliest, of_likeliest: [n k] the likeliest tokens at each place and their log-probs; None if not asked for.
        of_targets: [n K] log-probs of chosen tokens; None if not asked for.
    """

    log_probs: Tensor
    likeliest: Tensor | None = None
    of_likeliest: Tensor | None = None
    of_targets: Tensor | None = None


def token_scores(
    engine: TrainingEngine, head: LMHead, tokens: Sequence[int], top_k: int = 0, targets: Tensor | None = None
) -> TokenScores:
    """Score a row under the active weights.

    Args:
        engine: of the model.
        top_k: number of likeliest tokens at each place.
        targets: [n K] token ids to score at each place; those below 0 give 0.
    """
    row = torch.tensor([*tokens])[None]
    fields = {
        "input_ids": row,
        "attention_mask": torch.ones_like(row),
        "position_ids": torch.arange(row.shape[1])[None],
        "responses": row[:, 1:],
        "response_mask": torch.ones_like(row[:, 1:], dtype=torch.bool),
    }
    if targets is not None:
        fields[CANDIDATES] = targets.clamp_min(0)[None]

    def compute(model: Any, micro: MicroBatch) -> dict[str, Tensor]:
        scores = token_log_probs(model, head, micro, top_k=top_k)
        found = {"log_probs": scores.log_probs}
        if scores.candidates is not None and scores.candidate_log_probs is not None:
            found |= {f"likeliest_{k}": x for k, x in enumerate(scores.candidates.unbind(dim=-1))}
            found |= {f"of_likeliest_{k}": x for k, x in enumerate(scores.candidate_log_probs.unbind(dim=-1))}
        if targets is not None:
            chosen = token_log_probs(model, head, micro, candidates=CANDIDATES).candidate_log_probs
            assert chosen is not None
            found |= {f"of_targets_{k}": x for k, x in enumerate(chosen.unbind(dim=-1))}
        return found

    found = engine.infer(DataProto.from_dict(fields), compute)

    def columns(name: str, count: int) -> Tensor | None:
        return torch.stack([found[f"{name}_{k}"][0] for k in range(count)], dim=-1) if count else None

    of_targets = columns("of_targets", 0 if targets is None else targets.shape[1])
    if of_targets is not None and targets is not None:
        of_targets = of_targets.masked_fill(targets < 0, 0.0)
    return TokenScores(found["log_probs"][0], columns("likeliest", top_k), columns("of_likeliest", top_k), of_targets)
