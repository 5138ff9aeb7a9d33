"""Runs whose reward is a server's: cut and gone on with, and a part of a sum."""

from __future__ import annotations

import pytest
from http_client.servers import serving
from same_training import course, digest, numbers
from trainer.runs import fit

from verl.rewards.remote.llm_judge import LLMJudge
from verl.rewards.weighted_sum import WeightedSum


def graded(asked):
    """A judge that counts letters."""
    text = asked.body["messages"][0]["content"]
    return {"choices": [{"message": {"content": f"Score: {len(text) % 7}"}, "finish_reason": "stop"}]}


def without_requests(steps):
    return {step: {k: x for k, x in line.items() if "_remote_" not in k} for step, line in steps.items()}


@pytest.mark.exhaustive
def test_a_run_that_was_cut_goes_on_to_the_same_end_and_asks_nothing_twice(model32, tmp_path):
    with serving(graded) as server:

        def described(directory, **options):
            judge = LLMJudge(
                endpoint=server.endpoint("/v1"),
                model="judge",  # a name, where a reward model has files that a checkpoint keeps
                template="{prompt} {response}",
                score_pattern=r"Score: (\d+)",
                cache_dir=str(tmp_path / f"{directory}-cache"),
            )
            reward = WeightedSum(parts={"judge": judge}, weights={"judge": 0.5})
            return course(model32, tmp_path / directory, reward=reward, **options)

        fit(described("whole"), tmp_path / "whole/run")
        asked = [asked.body for asked in server.asked]
        assert len(asked) == len({str(body) for body in asked})
        fit(described("cut", stop_after=2), tmp_path / "cut/first")
        fit(described("cut", resume="latest"), tmp_path / "cut/second")
    assert len(server.asked) == 2 * len(asked)
    whole, second = numbers(tmp_path / "whole/run"), numbers(tmp_path / "cut/second")
    assert without_requests(second) == {step: without_requests(whole)[step] for step in (3, 4)}
    assert digest(tmp_path / "whole") == digest(tmp_path / "cut")
