"""Small engines of episodes for tests: the built-in model with random weights, and environments that are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, StepResult
from verl.environments.episode_loop import EpisodeGenerator
from verl.models.tiny import TinyModel
from verl.ops.sampling import uniform
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, stop_tokens
from verl.rollout.hf import HFRollout


def tiny(context_length: int = 256, dtype: str = "float32") -> tuple[Any, Any]:
    source = TinyModel(context_length=context_length, dtype=dtype)
    return source.load_causal_lm("cpu"), source.load_tokenizer()


def byte_level_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, and `options` such as `eos_token`."""
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def prompts_of(tokenizer: Any, texts: Sequence[str], ids: Sequence[int] | None = None, **columns: list) -> DataProto:
    """A batch of prompts [B P]."""
    encoded = [tokenizer(text).input_ids for text in texts]
    width = max(map(len, encoded))
    tokens = torch.full((len(texts), width), tokenizer.pad_token_id)
    for row, line in enumerate(encoded):
        tokens[row, width - len(line) :] = torch.tensor(line)
    mask = torch.tensor([[False] * (width - len(line)) + [True] * len(line) for line in encoded])
    numbers = torch.tensor(list(range(len(texts)) if ids is None else ids))
    fields = {"prompts": tokens, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": torch.arange(len(texts))}
    return DataProto.from_dict(fields, non_tensors={"prompt_text": list(texts), **columns})


class ScriptedEnvironment:
    """Answers every turn by what a function of (row, number of the turn, action) gives."""

    def __init__(self, answer: Callable[..., Any], answers_at_once: bool = False):
        self.answer, self.turn, self.answers_at_once = answer, 0, answers_at_once

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.turn = row, 0

    async def step(self, action: Any) -> Any:
        self.turn += 1
        found = self.answer(self.row, self.turn, action)
        return await found if asyncio.iscoroutine(found) else found


class ScriptedFactory(EnvironmentFactory):
    def __init__(
        self, answer: Callable[..., Any], tools: Mapping[str, Mapping[str, Any]], answers_at_once: bool = False
    ):
        self.answer, self.tool_parameters, self.made, self.answers_at_once = answer, tools, 0, answers_at_once

    def make(self) -> ScriptedEnvironment:
        self.made += 1
        return ScriptedEnvironment(self.answer, self.answers_at_once)


@component
class Scripted(EnvironmentDescription):
    """`answer` is a function of the test."""

    answer: Any
    tools: Any = None
    answers_at_once: bool = False

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return ScriptedFactory(self.answer, self.tools or {}, self.answers_at_once)


def engine_of(
    environment: EnvironmentDescription, max_new_tokens: int = 8, model: Any = None, seed: int = 0, **rollout: Any
) -> EpisodeGenerator:
    """An engine of episodes over `rollout=hf`."""
    net, tokenizer = model or tiny()
    options = HFRollout(max_new_tokens=max_new_tokens, **rollout)
    stops = tuple(stop_tokens(net, tokenizer, ()).tolist())
    context = BuildContext(seed=seed, tokenizer=tokenizer)
    return EpisodeGenerator(environment, options.attach(net, tokenizer, seed), options, tokenizer, stops, context)


def tokens_by_sample(rows: DataProto) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """(prompt, sample) -> tokens and log-probs of the response, observations included."""
    found = {}
    for row in range(len(rows)):
        there = rows["turn_ids"][row] >= 0
        key = int(rows["prompt_ids"][row]), int(rows["sample_ids"][row])
        found[key] = rows["responses"][row][there].tolist(), rows["rollout_log_probs"][row][there].tolist()
    return found


@torch.no_grad()
def first_differences(
    left: DataProto, right: DataProto, model: Any, seed: int, request: GenerationRequest
) -> dict[tuple[int, int], tuple[int, float]]:
    """Where two engines drew different tokens: by (prompt, sample) the first such place, and how far the number that
    chose there lies from the bounds of either token in the cumulative distribution of the model."""
    found, others = {}, {key: ids for key, (ids, _) in tokens_by_sample(right).items()}
    for row in range(len(left)):
        key = int(left["prompt_ids"][row]), int(left["sample_ids"][row])
        turns = left["turn_ids"][row]
        mine, other = left["responses"][row][turns >= 0].tolist(), others[key]
        place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if place is None:
            assert len(mine) == len(other)
            continue
        assert left["response_mask"][row, place], "an observation differs"
        turn = int(turns[place])
        start = int((turns == turn).nonzero()[0])
        prompt = left["prompts"][row][left["prompt_mask"][row]].tolist()
        logits = model(torch.tensor([prompt + mine[:place]]), use_cache=False).logits[0, -1].double()
        bounds = logits.softmax(-1).cumsum(-1)
        noise = uniform(seed, request.step, *map(torch.tensor, key), place - start, turns=torch.tensor(turn))
        edges = [float(bounds[token - offset]) for token in (mine[place], other[place]) for offset in (0, 1) if token]
        found[key] = place, min(abs(float(noise) - edge) for edge in edges)
    return found


def ends_after(turns: int, observation: str = "37\n", reward: float = 0.0) -> Callable[..., StepResult]:
    """Goes on for so many turns, each with the same observation and reward."""

    def answer(row: Any, turn: int, action: Any) -> StepResult:
        return StepResult(observation if turn < turns else None, reward * turn, terminated=turn >= turns)

    return answer


def long_turns(row, turn, action):
    """Observations of many lengths, by what the model wrote and by the row."""
    return StepResult("ab" * (len(action.text) % 5 + turn), float(turn), terminated=turn >= 3)


REQUEST = GenerationRequest(3, 4)
