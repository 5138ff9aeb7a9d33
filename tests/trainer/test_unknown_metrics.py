"""Metrics that settings name and no evaluation has are refused or told."""

import dataclasses
import logging

import pytest
from refusals import refusal
from trainer.runs import BRIEF, BRIEF_GRPO, GRPO_ALGORITHM, ppo_run

from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate


@pytest.mark.parametrize("name", ["keep_best", "save_best"])
def test_a_metric_that_evaluations_do_not_have_is_refused_with_the_nearest(name):
    with refusal(f"checkpoint.{name}", value="eval/accuracy?"):
        validate(compose_root("ppo", [f"checkpoint.{name}=eval/acuracy"]))


def test_the_metrics_that_evaluations_have_are_those_that_are_known(model32, tmp_path):
    from verl.monitoring.ppo_metrics import evaluation_keys

    with ppo_run(model32, eval_samples=2, critic=None, algorithm=GRPO_ALGORITHM).build(
        BuildContext(run_dir=tmp_path)
    ) as trainer:
        assert list(trainer.evaluate(0)) == evaluation_keys(2, has_episodes=False)


def test_a_metric_that_does_not_come_is_told_after_the_first_step(model32, tmp_path, caplog):
    saved = Checkpointing(save_dir=str(tmp_path / "saved"), keep_best="reward/men")
    run = ppo_run(model32, BRIEF_GRPO, total_steps=2, **BRIEF)
    run = dataclasses.replace(run, checkpoint=saved)
    with caplog.at_level(logging.WARNING, logger="verl"), run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        trainer.fit()
    told = [record.getMessage() for record in caplog.records if "no such metric" in record.getMessage()]
    assert told == [
        "checkpoint.keep_best is 'reward/men': there is no such metric, so it has no effect. Did you mean reward/mean?"
    ]
