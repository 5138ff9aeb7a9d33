"""The default name of an experiment names the model, also one that a run has written."""

import pytest
from omegaconf import OmegaConf

from verl.compose.compose import compose_root
from verl.compose.schema import default_experiment


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("outputs/verl/sft_tiny/2026-11-23/10-11-12-123456/actor", "grpo_sft_tiny"),
        ("checkpoints/verl/ppo_qwen/global_step_100/actor/", "grpo_ppo_qwen"),
        ("/runs/my run/actor", "grpo_my-run"),
        ("/cache/hub/models--Qwen--Qwen2-0.5B/snapshots/" + "0a" * 20, "grpo_qwen2-0.5b"),
        ("Qwen/Qwen2-0.5B", "grpo_qwen2-0.5b"),
        ("trained/checkpoint-500", "grpo_trained"),
        ("actor", "grpo_actor"),
        ("../actor", "grpo_actor"),
    ],
)
def test_directories_that_every_run_has_are_no_name_of_a_model(path, name):
    assert default_experiment("grpo", OmegaConf.create({"path": path})) == name


def test_distillation_is_named_by_what_it_is():
    assert compose_root("ppo", ["algorithm=distill"]).trainer.experiment_name.startswith("distill_")
