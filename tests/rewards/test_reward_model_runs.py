"""Whole runs with a reward model, composed as main_ppo.py composes them, and the statistics that it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from random_models import save_random_classifier, word_tokenizer
from refusals import refusal
from rewards.rated import built, described, rollout
from trainer.runs import ppo_run, read_lines

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.models.pretrained import Pretrained
from verl.rewards.rules import ExactMatch
from verl.rewards.weighted_sum import WeightedSum

SMALL = [
    "actor=tiny_scratch", "actor.model.hidden_size=32", "actor.model.num_layers=1", "algorithm=grpo",
    "data.train_size=16", "data.held_out=4", "trainer.prompts_per_step=4", "trainer.total_steps=2",
    "trainer.num_threads=1", "trainer.device=cpu", "trainer.eval_samples=0", "trainer.save_final=false",
]  # fmt: skip


def trained(overrides, run_dir):
    run = validate(compose_root("ppo", [*SMALL, *overrides]))
    with run.build(BuildContext(run_dir=run_dir)) as trainer:
        assert trainer.fit().status == "finished"
        assert trainer.reward is not None
        form = trainer.reward.reader.form
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "reward/mean" in line]
    return form, lines, read_lines(run_dir / "samples" / "step_2.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"), [("llama", "tokens"), pytest.param("bert", "text", marks=pytest.mark.exhaustive)]
)
def test_a_run_takes_its_reward_from_a_model(family, form, tmp_path):
    path = save_random_classifier(tmp_path / "judge", family, word_tokenizer() if family == "bert" else None)
    read, lines, samples = trained(["reward=model", f"reward.model.path={path}"], tmp_path / "run")
    assert read == form
    assert len(lines) == 2
    assert all(line["reward/std"] > 1e-4 for line in lines)
    reward = described(path, reads="text").build(BuildContext())
    batch = rollout([row["prompt_text"] for row in samples], [row["response_text"] for row in samples])
    if form == "text":  # the samples show no <eos>, which the ids of the policy have
        np.testing.assert_allclose(reward.score_batch(batch).scores, [row["score"] for row in samples], atol=1e-4)


@pytest.mark.slow
def test_evaluation_does_not_change_what_scores_are_normalised_by(tmp_path):
    path = save_random_classifier(tmp_path / "judge", "llama")
    overrides = ["reward=model", f"reward.model.path={path}", "reward.normalize=running"]
    run = validate(compose_root("ppo", [*SMALL, *overrides]))
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert list(trainer.fit().evaluations) == [0, 2]
        assert trainer.reward.norm.count == 2 * 4 * 4
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert lines[0]["reward/mean"] == pytest.approx(0.0, abs=1e-9)
    assert lines[0]["reward/std"] == pytest.approx(1.0)
    assert lines[0]["reward/raw"] != pytest.approx(0.0, abs=1e-4)


def test_the_statistics_of_a_part_are_kept_forgotten_and_taken_over_through_the_sum(tmp_path):
    part = described(save_random_classifier(tmp_path, "llama"), normalize="running")
    context = BuildContext(tokenizer=Pretrained(path=str(tmp_path)).load_tokenizer())
    sums = [
        WeightedSum(parts={"judge": part, "rule": ExactMatch()}, weights={"judge": 1.0, "rule": 0.0}).build(context)
        for _ in range(2)
    ]
    batch = rollout(answer=["3"] * 4)
    with sums[0].frozen():
        raw = sums[0].score_batch(batch).scores
    np.testing.assert_array_equal(raw, built(tmp_path).score_batch(batch).scores)
    result = sums[0].score_batch(batch)
    np.testing.assert_allclose(result.parts["judge"], (raw - raw.mean()) / raw.std())
    np.testing.assert_array_equal(result.parts["judge_raw"], raw)
    state = sums[0].state_dict()
    assert list(state) == ["judge"]
    sums[1].load_state_dict(state)
    assert sums[1].state_dict() == state
    sums[1].reset_stats()
    assert sums[1].state_dict()["judge"]["count"] == 0


def test_faults_that_show_when_the_model_is_read_are_told_by_their_path(dir32, tmp_path):
    path = save_random_classifier(tmp_path / "judge", "bert", word_tokenizer())
    run = ppo_run(Pretrained(path=str(dir32)), reward=described(path, reads="chat"))
    with refusal("reward.reads"):
        run.build(BuildContext(run_dir=tmp_path / "run"))
    with refusal("reward.model.path"):
        validate(compose_root("ppo", ["reward=model", f"reward.model.path={dir32}"]))
