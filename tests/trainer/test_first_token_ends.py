"""A response that ends with its first token: its reward lies on that token, never on padding, and the step trains."""

from __future__ import annotations

import pytest
import torch
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.component import BuildContext
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout


@pytest.mark.parametrize("algorithm", [PPO_ALGORITHM, GRPO_ALGORITHM], ids=["ppo", "grpo"])
@pytest.mark.parametrize("share", [1, 2], ids=["every response", "about every second one"])
def test_the_reward_of_an_empty_answer_lies_on_its_end(algorithm, share, model32, tmp_path):
    vocabulary = len(model32.load_tokenizer())
    rollout = HFRollout(max_new_tokens=7, stop_token_ids=tuple(range(0, vocabulary, share)))
    with ppo_run(model32, algorithm, rollout=rollout).build(BuildContext(run_dir=tmp_path)) as trainer:
        batch = trainer.train_data.collate(range(3))
        rows = trainer.score(trainer.sampling.generate(batch, GenerationRequest(1, 2)))
        mask, lengths = rows["response_mask"], rows["response_mask"].sum(dim=1)
        assert (lengths == 1).any()
        assert (lengths == 1).all() or share > 1
        last = torch.nn.functional.one_hot(lengths - 1, mask.shape[1]).bool()
        scores = torch.tensor(rows["score"].astype(float), dtype=rows["token_level_scores"].dtype)
        assert torch.equal(rows["token_level_scores"][last], scores)
        assert not rows["token_level_scores"][~last].any()
        experience, _ = trainer.advantages(rows)
        assert not experience["advantages"][~mask].any()
        metrics = trainer.step(batch, 1)
        assert metrics["actor/grad_norm"] >= 0
        assert metrics["rollout/response_length_tokens"] >= 1
