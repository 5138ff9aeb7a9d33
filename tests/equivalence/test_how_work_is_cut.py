"""How the rows of a step are cut, ordered, grouped and drawn changes nothing but rounding."""

from __future__ import annotations

import torch
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.component import BuildContext
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest


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
