"""A critic of another family than the actor's: it works where the tokenizer is shared."""

from __future__ import annotations

import json

import pytest
import torch
from random_models import save_random_model
from trainer.runs import JSONL, ppo_run, read_lines

from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.models.heads import ValueHeadModel
from verl.models.pretrained import Pretrained
from verl.workers.critic import Critic


def test_a_critic_of_another_family_with_the_tokenizer_of_the_actor_trains(tmp_path):
    actor = save_random_model(tmp_path / "llama", "llama", torch.float32)
    critic = save_random_model(tmp_path / "gpt_neox", "gpt_neox", torch.float32)
    run = ppo_run(
        Pretrained(path=str(actor)),
        critic=Critic(model=Pretrained(path=str(critic)), optimizer=AdamW(lr=1e-2)),
        total_steps=3,
        tracker=JSONL,
    )
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert trainer.fit().status == "finished"
    kinds = [
        json.loads((tmp_path / "run" / name / "config.json").read_text())["model_type"] for name in ("actor", "critic")
    ]
    assert kinds == ["llama", "gpt_neox"]
    losses = [line["critic/loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "critic/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.exhaustive
def test_a_critic_whose_last_states_have_another_size_than_those_between_layers_trains(tmp_path):
    """OPT-350m has states of 1024 numbers between layers and of 512 at its end."""
    path = save_random_model(tmp_path / "opt", "opt", torch.float32, word_embed_proj_dim=16)
    model = Pretrained(path=str(path))
    run = ppo_run(model, critic=Critic(model=model, optimizer=AdamW(lr=1e-2)), total_steps=2)
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert trainer.cluster.worker("critic").engine.model.head.in_features == 16
        assert trainer.fit().status == "finished"
    skeleton = model.load_skeleton("backbone")
    assert ValueHeadModel(skeleton).head.in_features == 16
