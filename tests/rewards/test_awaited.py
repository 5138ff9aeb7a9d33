"""Reward functions of the whole batch that are async."""

from __future__ import annotations

import asyncio

import pytest
import torch

from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.function import CallableReward


@pytest.fixture
def batch():
    return DataProto.from_dict(
        tensors={"response_mask": torch.ones(3, 2, dtype=torch.bool)},
        non_tensors={"prompt_text": ["a", "b", "c"], "response_text": ["1", "2", "3"]},
    )


async def awaited(prompts, responses):
    await asyncio.sleep(0)
    return [float(text) for text in responses]


def test_an_async_function_is_awaited(batch):
    assert list(CallableReward(awaited).score_tokens(batch)["score"]) == [1, 2, 3]


def test_an_async_function_is_awaited_where_a_loop_runs_already(batch):
    async def notebook():
        return CallableReward(awaited).score_tokens(batch)

    assert list(asyncio.run(notebook())["score"]) == [1, 2, 3]


def test_a_list_of_coroutines_is_awaited_concurrently(batch):
    arrived = []

    async def one(text):
        arrived.append(text)
        while len(arrived) < 3:  # one after another, the first would wait for ever
            await asyncio.sleep(0)
        return float(text)

    def my_reward(prompts, responses):
        return [one(text) for text in responses]

    assert list(CallableReward(my_reward).score_tokens(batch)["score"]) == [1, 2, 3]


def test_an_async_function_that_raises_is_traced_to_its_line_and_sample(batch):
    async def my_reward(prompts, responses):
        await asyncio.sleep(0)
        return [1 / (int(text) - 2) for text in responses]

    with pytest.raises(RewardError) as refused:
        CallableReward(my_reward).score_tokens(batch)
    assert "Raised at line" in str(refused.value)
    assert "return [1 / (int(text) - 2) for text in responses]" in str(refused.value)
    assert "Sample: 1, prompt 'b', response '2'" in str(refused.value)
