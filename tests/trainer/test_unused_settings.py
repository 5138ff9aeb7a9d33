"""Settings that a run never reads are told in one line, and metrics that no evaluation has are refused or told."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, Prompts, ppo_run

from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.compose.compose import choices_of, compose_root
from verl.compose.run_start import differences
from verl.compose.validate import validate
from verl.monitoring.config import WATCHED, Monitoring

GRPO = ["algorithm=grpo", "trainer.group_size=4"]
TWO_SAMPLERS = ["trainer=ray", "+trainer.placement.workers={rollout:2}"]
ASYNC = [*GRPO, "trainer.mode=async", "algorithm.proximal=behaviour"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "unused"),
    [
        ([*GRPO, "critic.optimizer.lr=1e-3"], ["critic.optimizer.lr (GRPO needs no critic)"]),
        ([*GRPO, "critic.optimizer.lr=1e-3", "algorithm.kl.coef=0.1"], ["critic.optimizer.lr (GRPO needs no critic)"]),
        (["critic.optimizer.lr=1e-3"], []),
        (["algorithm.replay_max_staleness=3"], ["algorithm.replay_max_staleness (algorithm.replay_fraction is 0)"]),
        (
            [*GRPO, "algorithm.mini_batches=1", "algorithm.policy_loss.clip_high=0.3"],
            ["algorithm.policy_loss.clip_high (with one update per batch the ratio of probabilities is 1)"],
        ),
        ([*GRPO, "algorithm.mini_batches=2", "algorithm.policy_loss.clip_high=0.3"], []),
        ([*ASYNC, "algorithm.mini_batches=1", "algorithm.policy_loss.clip_high=0.3"], []),
        (["rollout.weight_update=in_flight"], ["rollout.weight_update (trainer.mode is sync)"]),
        ([*ASYNC, "rollout.kv_cache=recompute"], ["rollout.kv_cache (rollout.weight_update is drain)"]),
        ([*ASYNC, "rollout.weight_update=in_flight", "rollout.kv_cache=recompute"], []),
        (
            [*ASYNC, "trainer.max_staleness=0", "rollout.weight_update=in_flight"],
            ["rollout.weight_update (trainer.max_staleness is 0)"],
        ),
        ([*ASYNC, *TWO_SAMPLERS], []),
        (
            TWO_SAMPLERS,
            ["trainer.placement.workers.rollout (the actor's processes generate: there is no role rollout)"],
        ),
        (
            ["trainer.total_steps=3", "actor.optimizer.warmup_updates=5000"],
            ["actor.optimizer.warmup_updates (the run has"],
        ),
        (["checkpoint.best_mode=min"], ["checkpoint.best_mode (checkpoint.keep_best and save_best are null)"]),
        (["trainer.safety.spike_factor=null", "trainer.safety.spike_window=50"], ["trainer.safety.spike_window ("]),
    ],
)
def test_a_changed_setting_that_is_never_read_is_told_with_the_reason(overrides, unused):
    config = compose_root("ppo", overrides)
    told = validate(config).unused_settings(list(differences(config, "ppo", choices_of("ppo", overrides))))
    assert (told is None) == (not unused)
    for part in unused:
        assert part in str(told)


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
    safety = Monitoring(watched=(*WATCHED, "actor/los"))
    run = ppo_run(model32, PPO_ALGORITHM, safety=safety, total_steps=2, eval_before=False, data=Prompts(eval=()))
    run = dataclasses.replace(run, checkpoint=saved)
    with caplog.at_level(logging.WARNING, logger="verl"), run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        trainer.fit()
    told = [record.getMessage() for record in caplog.records if "no such metric" in record.getMessage()]
    assert told == [
        "trainer.safety.watched has 'actor/los': the first step has no such metric. Did you mean actor/loss?",
        "checkpoint.keep_best is 'reward/men': there is no such metric, so it has no effect. Did you mean reward/mean?",
    ]
