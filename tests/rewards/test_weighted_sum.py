"""Several rewards as one."""

from __future__ import annotations

import pytest
import torch
from trainer.runs import JSONL, Arbitrary, Echo, ppo_run, read_lines

from verl.component import BuildContext
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rewards.function import CallableReward, RewardFunction
from verl.rewards.rules import ExactMatch, Overlong
from verl.rewards.weighted_sum import SumOfRewards, WeightedSum


@pytest.fixture
def batch():
    return DataProto.from_dict(
        tensors={"response_mask": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)},
        non_tensors={"prompt_text": ["q"] * 3, "response_text": ["1", "12", "1"], "answer": ["1"] * 3},
    )


PARTS = {"correct": ExactMatch(), "overlong": Overlong(max_tokens=3, buffer_tokens=2)}


def test_the_score_is_the_weighted_sum_and_each_part_is_kept_before_its_weight(batch):
    reward = WeightedSum(parts=PARTS, weights={"correct": 2.0, "overlong": 0.5}).build(BuildContext())
    scored = reward.score_tokens(batch)
    assert list(scored["score"]) == [2.0, -0.25, 1.5]
    assert list(scored["reward/correct"]) == [1, 0, 1]
    assert list(scored["reward/overlong"]) == [0, -0.5, -1]
    assert scored["token_level_scores"].tolist() == [[2, 0, 0], [0, -0.25, 0], [0, 0, 1.5]]
    assert len(reward.score_tokens(batch[[]])) == 0


@pytest.mark.slow
def test_a_part_of_weight_0_gives_no_response_a_reward(batch):
    some = CallableReward(lambda prompts, responses: [None, 1.0, 2.0])
    sums = SumOfRewards({"some": some, "overlong": PARTS["overlong"]}, {"some": 1.0, "overlong": 0.0})
    assert list(sums.score_tokens(batch)["score"]) == [None, 1.0, 2.0]
    assert list(SumOfRewards(sums.parts, {"some": 1.0, "overlong": 0.5}).score_tokens(batch)["score"]) == [0, 0.75, 1.5]


def test_sums_may_hold_sums(batch):
    inner = WeightedSum(parts=PARTS, weights={"correct": 1.0, "overlong": 0.0})
    scored = WeightedSum(parts={"rule": inner}, weights={"rule": 3.0}).build(BuildContext()).score_tokens(batch)
    assert list(scored["score"]) == [3, 0, 3]
    assert {"reward/rule", "reward/rule_correct", "reward/rule_overlong"} < set(scored.non_tensor_batch)


def test_closing_a_sum_closes_its_parts_and_failures_carry_the_name_of_their_part(batch, tmp_path):
    (tmp_path / "rule.py").write_text("def score(prompt, response): return 1 / (len(response) - 2)")
    path = f"{tmp_path / 'rule.py'}:score"
    part = RewardFunction(path=path, per_sample=True, num_workers=1, timeout_s=20.0, on_error="score")
    reward = WeightedSum(parts={"judge": part}, weights={"judge": 1.0}).build(BuildContext())
    assert list(reward.score_tokens(batch)["reward/judge_failed"]) == [0, 1, 0]
    pool = reward.parts["judge"].pool
    assert pool.workers
    reward.close()
    assert not pool.workers


@pytest.mark.slow
def test_a_run_logs_each_part_and_shows_it_with_its_samples_and_closes_the_reward(dir32, tmp_path):
    (tmp_path / "rule.py").write_text("def score(prompt, response): return len(response)")
    judge = RewardFunction(path=f"{tmp_path / 'rule.py'}:score", per_sample=True, num_workers=1, timeout_s=20.0)
    parts = {"echo": Echo(), "other": Arbitrary(), "judge": judge}
    reward = WeightedSum(parts=parts, weights={"echo": 1.0, "other": 0.5, "judge": 0.0})
    tracker = JSONL
    run = ppo_run(Pretrained(path=str(dir32)), reward=reward, total_steps=1, tracker=tracker)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        trainer.fit()
        pool = trainer.reward.parts["judge"].pool
        assert pool.workers
    assert not pool.workers
    line = next(line for line in read_lines(tmp_path / "metrics.jsonl") if "reward/mean" in line)
    assert line["reward/mean"] == pytest.approx(line["reward/echo"] + 0.5 * line["reward/other"])
    samples = read_lines(next((tmp_path / "samples").glob("*.jsonl")))
    assert {"reward/echo", "reward/other", "reward/judge"} < set(samples[0])
