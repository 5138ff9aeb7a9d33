"""Every algorithm teaches a model that starts from nothing to answer each prompt with what it asks for."""

import pytest
from trainer.runs import JSONL, Echo, Prompts, ppo_run, read_lines

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.schema import group_options
from verl.compose.validate import validate
from verl.models.tiny import TinyModel
from verl.rollout.hf import HFRollout

IN_SHORT = ("ppo",)  # the others: make exhaustive
ALGORITHMS = [
    name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in sorted({*group_options()["algorithm"]} - {"distill"})  # which has a teacher
]
LETTERS = ("a", "b", "c", "d")
# The greedy response soon scores far above the mean of a flat policy, and a baseline so far off costs variance: ReMax
# draws nearer to the greedy response, and more.
REMAX = {"temperature": 0.3, "group_size": 48, "total_steps": 60, "mini_batches": 1}


@pytest.mark.learning
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_random_model_learns_to_repeat_the_letter_that_it_is_given(name, tmp_path):
    needs = {"temperature": 1.0, "group_size": 24, "total_steps": 30, "mini_batches": 2}
    needs |= REMAX if name == "remax" else {}
    overrides = [f"algorithm={name}", f"algorithm.mini_batches={needs['mini_batches']}"]
    algorithm = validate(compose_root("ppo", overrides)).algorithm
    run = ppo_run(
        TinyModel(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2),
        algorithm,
        lr=1e-2,
        reward=Echo(),
        rollout=HFRollout(temperature=needs["temperature"], max_new_tokens=5, min_new_tokens=3),
        data=Prompts(train=LETTERS, eval=LETTERS),
        prompts_per_step=4,
        group_size=needs["group_size"],
        total_steps=needs["total_steps"],
        save_final=False,
        tracker=JSONL,
    )
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        result = trainer.fit()
    lines = read_lines(tmp_path / "metrics.jsonl")
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert rewards[0] < 0.05  # chance is one of about a hundred characters
    assert sum(rewards[-5:]) / 5 > 0.9
    assert result.evaluations[0]["eval/accuracy"] == 0.0
    assert result.evaluations[needs["total_steps"]]["eval/accuracy"] == 1.0
