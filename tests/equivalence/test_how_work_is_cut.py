"""How the rows of a step are cut, ordered, grouped and drawn changes nothing but rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from same_training import ROUNDING, run_course, same_training
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.critic_free_advantages import ReinforcePlusPlus
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import KLInLoss
from verl.algorithms.losses import GSPO
from verl.component import BuildContext
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout

STEPS = [[0, 1, 2, 3], [7, 6, 5, 2], [4, 3, 1, 0]]
PPO_KL_IN_LOSS = dataclasses.replace(PPO_ALGORITHM, kl=KLInLoss(coef=0.1))
NORMED_GSPO = dataclasses.replace(
    PPO_KL_IN_LOSS,
    advantage=ReinforcePlusPlus(),
    policy_loss=GSPO(),
    aggregation="seq-mean-token-sum-norm",
    norm_length=7,
    correction=TruncatedIS(level="sequence"),
)


@pytest.mark.parametrize(
    "algorithm",
    [
        PPO_ALGORITHM,
        pytest.param(PPO_KL_IN_LOSS, marks=pytest.mark.exhaustive),
        pytest.param(GRPO_ALGORITHM, marks=pytest.mark.exhaustive),
        pytest.param(NORMED_GSPO, marks=pytest.mark.exhaustive),
    ],
    ids=["ppo", "ppo, kl in loss", "grpo", "gspo, normed"],
)
def test_the_budget_of_a_micro_batch_changes_no_number(algorithm, model64, tmp_path):
    group_size = 3 if algorithm is GRPO_ALGORITHM else 1
    whole = run_course(ppo_run(model64, algorithm, group_size=group_size), STEPS, tmp_path / "whole")
    single_rows = ppo_run(model64, algorithm, group_size=group_size, micro_batch_tokens=1)
    same_training(whole, run_course(single_rows, STEPS, tmp_path / "single"), ROUNDING)
    if algorithm is PPO_ALGORITHM:
        pairs = ppo_run(model64, algorithm, group_size=group_size, micro_batch_tokens=40)
        same_training(whole, run_course(pairs, STEPS, tmp_path / "pairs"), ROUNDING)


@pytest.mark.exhaustive
def test_how_responses_are_decoded_changes_no_number(model64, tmp_path):
    together = run_course(ppo_run(model64, GRPO_ALGORITHM, group_size=3), STEPS, tmp_path / "together")
    rollout = HFRollout(max_new_tokens=7, max_rows=3, share_prefix=False, drop_finished=False)
    apart = ppo_run(model64, GRPO_ALGORITHM, group_size=3, rollout=rollout)
    same_training(together, run_course(apart, STEPS, tmp_path / "apart"), ROUNDING)


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(PPO_ALGORITHM, id="ppo", marks=pytest.mark.exhaustive),
        pytest.param(dataclasses.replace(GRPO_ALGORITHM, mini_batches=1), id="grpo"),
    ],
)
def test_the_order_of_the_prompts_changes_no_number(algorithm: Algorithm, model64, tmp_path):
    run = ppo_run(model64, algorithm, group_size=2)
    reversed_steps = [rows[::-1] for rows in STEPS]
    same_training(run_course(run, STEPS, tmp_path / "a"), run_course(run, reversed_steps, tmp_path / "b"), ROUNDING)


def test_the_names_of_the_groups_change_no_advantage(model64, tmp_path):
    with ppo_run(model64, GRPO_ALGORITHM, group_size=3).build(BuildContext(run_dir=tmp_path)) as trainer:
        scored = trainer.score(trainer.sampling.generate(trainer.train_data.collate(range(4)), GenerationRequest(1, 3)))
        names = torch.tensor([90, -7, 4, 11])
        renamed = scored.select([name for name in scored.batch if name != "group_ids"])
        renamed = renamed.union(DataProto.from_dict({"group_ids": names[scored["group_ids"]]}))
        before, _ = trainer.advantages(scored)
        after, _ = trainer.advantages(renamed)
    assert before["advantages"].abs().max() > 0.1
    assert torch.equal(before["advantages"], after["advantages"])


def test_a_response_depends_on_its_prompt_and_number_and_not_on_its_company(model64, tmp_path):
    with ppo_run(model64, GRPO_ALGORITHM, group_size=3).build(BuildContext(run_dir=tmp_path)) as trainer:

        def drawn(rows: list[int], num_samples: int) -> dict[tuple[str, int], str]:
            made = trainer.sampling.generate(trainer.train_data.collate(rows), GenerationRequest(1, num_samples))
            keys = zip(made["prompt_text"], made["sample_ids"].tolist(), strict=True)
            return dict(zip(keys, made["response_text"], strict=True))

        four_by_four = drawn([0, 1, 2, 3], 4)
        one_by_two, two_by_four = drawn([2], 2), drawn([3, 1], 4)
    assert len(set(four_by_four.values())) > 8  # the responses differ, so that equality says something
    for part in (one_by_two, two_by_four):
        assert {key: four_by_four[key] for key in part} == part
