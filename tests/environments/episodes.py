"""Small engines of episodes for tests: the embedded model with random weights, and environments that are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, StepResult
from verl.environments.episode_loop import EpisodeEngine
from verl.models.tiny import TinyModel
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, stop_tokens
from verl.rollout.hf import HFRollout


def tiny(context_length: int = 256, dtype: str = "float32") -> tuple[Any, Any]:
    source = TinyModel(context_length=context_length, dtype=dtype)
    return source.load_causal_lm("cpu"), source.load_tokenizer()


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

    def __init__(self, answer: Callable[..., Any]):
        self.answer, self.turn = answer, 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.turn = row, 0

    async def step(self, action: Any) -> Any:
        self.turn += 1
        found = self.answer(self.row, self.turn, action)
        return await found if asyncio.iscoroutine(found) else found


class ScriptedFactory(EnvironmentFactory):
    def __init__(self, answer: Callable[..., Any], tools: Mapping[str, Sequence[str]]):
        self.answer, self.tool_names, self.made = answer, tools, 0

    def make(self) -> ScriptedEnvironment:
        self.made += 1
        return ScriptedEnvironment(self.answer)


@component
class Scripted(EnvironmentDescription):
    """`answer` is a function of the test."""

    answer: Any
    tools: Any = None

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return ScriptedFactory(self.answer, self.tools or {})


def engine_of(
    environment: EnvironmentDescription, max_new_tokens: int = 8, model: Any = None, seed: int = 0, **rollout: Any
) -> EpisodeEngine:
    """An engine of episodes over `rollout=hf`."""
    net, tokenizer = model or tiny()
    options = HFRollout(max_new_tokens=max_new_tokens, **rollout)
    stops = tuple(stop_tokens(net, tokenizer, ()).tolist())
    context = BuildContext(seed=seed, tokenizer=tokenizer)
    return EpisodeEngine(environment, options.attach(net, tokenizer, seed), options, tokenizer, stops, context)


def ends_after(turns: int, observation: str = "37\n", reward: float = 0.0) -> Callable[..., StepResult]:
    """Goes on for so many turns, each with the same observation and reward."""

    def answer(row: Any, turn: int, action: Any) -> StepResult:
        return StepResult(observation if turn < turns else None, reward * turn, terminated=turn >= turns)

    return answer


REQUEST = GenerationRequest(3, 4)
