"""Samples of a training session: responses to prompts with log-probabilities, noise by seed, and stop texts."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from verl.component import Description, component
from verl.ops.sampling import NO_TURN
from verl.rollout.base import LOWEST_TEMPERATURE, RolloutEngine, TurnLimits, TurnRequest, TurnResult, stop_tokens
from verl.rollout.hf import HFEngine
from verl.service.data import checked_tokens
from verl.utils.seeding import derive_seed

UNKNOWN_ROOM = 4096  # tokens of a response, where the context of the model is not known
StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopToken = Annotated[int, Field(ge=0, lt=2**31)]


@component
class SamplingOptions(Description):
    """Options of sampling.

    Args:
        max_new_tokens: None for what the model's context leaves.
        temperature: 0 takes the likeliest token; log-probs are those at this temperature, at 0 those at 1.
        top_k, top_p: 0 and 1 sample from the whole vocabulary.
        stop: texts or token ids that end a response and stay in it, besides the end tokens of the model; None for the
            latter alone. With an empty list only its length ends a response.
    """

    max_new_tokens: PositiveInt | None = None
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: StopText | Annotated[tuple[StopText | StopToken, ...], Field(max_length=256)] | None = None

    def faults(self) -> Iterator[str]:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            yield f"temperature is {self.temperature}: expected 0, for the likeliest, or at least {LOWEST_TEMPERATURE}."


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

    tokens: list[int]
    num_samples: int
    noise: tuple[object, ...] = ()
    weights: str = ""


def sample(
    engine: Any,
    tokenizer: Any,
    prompts: Sequence[PromptRequest],
    options: SamplingOptions,
    longest: int | None,
    late: Callable[[], Sequence[PromptRequest]] = tuple,
) -> list[list[Sample]]:
    """Sample responses to several prompts as one batch. A response does not depend on the others. A prompt that leaves
    no room for one has empty ones.

    Args:
        engine: a `RolloutEngine` whose options may change, with the weights to sample from.
        longest: tokens of a row that the model reads.
        late: gives further prompts, whose samples follow, between two steps of an engine that can add them.
    Raises:
        ConfigError: a token of `stop` is none.
    """
    vocabulary = engine.model.config.get_text_config().vocab_size
    stop = (options.stop,) if isinstance(options.stop, str) else options.stop or ()
    texts, ids = [x for x in stop if isinstance(x, str)], {x for x in stop if isinstance(x, int)}
    if ids:
        checked_tokens([*ids], "stop", vocabulary, None)
    if options.stop != ():
        ids |= {*stop_tokens(engine.model, tokenizer, ()).tolist()}
    requests: list[TurnRequest] = []
    sizes: list[int] = []

    def turns_of(prompts: Sequence[PromptRequest]) -> list[TurnRequest]:
        begin = len(requests)
        for prompt in prompts:
            tokens = prompt.tokens
            room = longest - len(tokens) if longest else UNKNOWN_ROOM
            limit = room if options.max_new_tokens is None else min(room, options.max_new_tokens)
            of_prompt, step = derive_seed(0, *tokens) % 2**31, derive_seed(0, *prompt.noise) // 2
            for index in range(prompt.num_samples):
                key = of_prompt, index, NO_TURN, limit, step
                requests.append(
                    TurnRequest(len(requests), tokens, *key, greedy=not options.temperature, weights=prompt.weights)
                )
            sizes.append(prompt.num_samples)
        return [x for x in requests[begin:] if x.max_new_tokens > 0]

    turns = turns_of(prompts)
    engine.options = dataclasses.replace(
        engine.options, temperature=options.temperature or 1.0, top_k=options.top_k, top_p=float(options.top_p),
        max_new_tokens=max((x.max_new_tokens for x in turns), default=1),
    )  # fmt: skip
    stops = tuple(sorted(ids))
    is_hf = isinstance(engine, HFEngine)
    engine.stop_ids = torch.tensor(stops, dtype=torch.int64, device=engine.device) if is_hf else stops
    limits = TurnLimits(max((len(x.tokens) + x.max_new_tokens for x in turns), default=1), is_single=not texts)

    def has_stop(tokens: Sequence[int]) -> bool:
        text = tokenizer.decode(tokens) if texts else ""
        return any(stop in text for stop in texts)

    tail = max((len(text.encode()) for text in texts), default=-4) + 4  # a token has a byte, but for added ones
    found = _generate(engine, limits, turns, lambda: turns_of(late()), tail, has_stop) if turns else {}
    empty = Sample([], [], False)
    samples = iter([_cut(found[x.episode], has_stop) if x.episode in found else empty for x in requests])
    return [[next(samples) for _ in range(size)] for size in sizes]


def _generate(
    engine: RolloutEngine, limits: TurnLimits, requests: Sequence[TurnRequest],
    late: Callable[[], list[TurnRequest]], tail: int, has_stop: Callable[[Sequence[int]], bool],
) -> dict[int, TurnResult]:  # fmt: skip
    found: dict[int, TurnResult] = {}
    turns = engine.turns(limits)
    turns.late = lambda: () if found else late()
    try:
        for request in requests:
            turns.add(request)
        while turns.num_pending:
            for result in turns.advance():
                found[result.episode] = result
                turns.forget(result.episode)
            for result in turns.open_turns() if tail else ():  # a stop text ends in the last token, or ended it before
                if has_stop(result.tokens[-tail:]):
                    turns.end(result.episode)
    finally:
        turns.close()
    return found


def _cut(result: TurnResult, has_stop: Callable[[Sequence[int]], bool]) -> Sample:
    """The sample of a turn, up to the end of the first stop text."""
    if not has_stop(result.tokens):
        return Sample(result.tokens, result.log_probs, result.is_complete)
    places = range(len(result.tokens))
    end = bisect.bisect_left(places, True, key=lambda n: has_stop(result.tokens[:n]))  # the text grows with the tokens
    return Sample(result.tokens[:end], result.log_probs[:end], True)
