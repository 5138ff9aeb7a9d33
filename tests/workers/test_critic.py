"""The critic: silent at first, then nearer to the returns, and saved with its head."""

from dataclasses import replace

import torch
from roles import PPO, experience, start_actor, start_critic

from verl.algorithms.losses import ClippedValueLoss
from verl.engines.optimizer import AdamW
from verl.models.pretrained import Pretrained


def test_an_untrained_critic_expects_nothing(model64, prompts):
    rows = experience(start_actor(model64), prompts())
    values = start_critic(model64).compute_values(rows)["values"]
    assert values.shape == rows["response_mask"].shape
    assert not values.any()


def test_updates_bring_the_values_nearer_to_the_returns(model64, prompts):
    rows = experience(start_actor(model64), prompts())
    plain = replace(PPO, value_loss=ClippedValueLoss(clip=None))
    critic = start_critic(model64, plain, optimizer=AdamW(lr=1e-2))
    losses = [critic.update(rows)["loss"] for _ in range(10)]
    assert losses[-1] < 0.85 * losses[0]


def test_a_value_belongs_to_the_state_before_its_token(model64, prompts):
    rows = experience(start_actor(model64), prompts())
    critic = start_critic(model64, optimizer=AdamW(lr=1e-2))
    critic.update(rows)
    values, p = critic.compute_values(rows)["values"], rows["prompts"].shape[1]
    fields = [rows[name] for name in ("input_ids", "attention_mask", "position_ids")]
    whole = critic.engine.model(*fields).values
    expected = whole[:, p - 1 : -1] * rows["response_mask"]
    torch.testing.assert_close(values, expected.detach(), rtol=0, atol=1e-10)


def test_a_critic_comes_back_from_its_directory_bit_by_bit(model64, prompts, tmp_path):
    rows = experience(start_actor(model64), prompts())
    critic = start_critic(model64)
    critic.update(rows)
    critic.save(tmp_path / "critic")
    again = start_critic(Pretrained(path=str(tmp_path / "critic"), dtype="float64"))
    values = critic.compute_values(rows)["values"]
    assert values.any()
    assert torch.equal(again.compute_values(rows)["values"], values)
