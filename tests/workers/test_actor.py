"""The actor: one set of weights that generates, scores, trains and is saved."""

import dataclasses

import pytest
import torch
from roles import PPO, experience, gradients, largest_difference, start_actor, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.algorithms.kl import KLInLoss
from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.models.pretrained import Pretrained
from verl.ops.logprobs import ESTIMATORS
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.workers.actor import Actor
from verl.workers.reference import Reference


def test_updates_raise_the_likelihood_of_what_was_good(model64, prompts):
    actor = start_actor(model64, optimizer=AdamW(lr=1e-2))
    rows = experience(actor, prompts())
    good = rows["advantages"].sum(dim=1) > 0
    signs = torch.where(good, 1.0, -1.0).double()[:, None] * rows["response_mask"]
    rows = rows.select([name for name in rows.batch if name != "advantages"]).union(
        DataProto.from_dict({"advantages": signs})
    )
    for _ in range(3):
        actor.update(rows)
    gain = (actor.compute_log_probs(rows)["old_log_probs"] - rows["old_log_probs"]).sum(dim=1)
    assert gain[good].mean() > 0.1
    assert gain[~good].mean() < -0.1


def test_the_first_ratio_is_one(model64, prompts):
    actor = start_actor(model64, HFRollout(max_new_tokens=8, temperature=0.7))
    metrics = actor.update(experience(actor, prompts()))
    assert abs(metrics["ratio"] - 1) < 1e-10
    assert abs(metrics["approx_kl"]) < 1e-10
    assert metrics["clip_fraction"] == 0


def test_the_sampler_draws_from_the_trained_weights(model64, prompts):
    actor = start_actor(model64, optimizer=AdamW(lr=3e-2))
    rows = experience(actor, prompts())
    actor.update(rows)
    actor.sync()
    drawn = actor.generate(prompts(), GenerationRequest(0, 3))
    assert not torch.equal(drawn["rollout_log_probs"], rows["rollout_log_probs"])
    again = actor.compute_log_probs(drawn)["old_log_probs"]
    torch.testing.assert_close(drawn["rollout_log_probs"], again, rtol=0, atol=1e-10)


def test_a_saved_actor_opens_with_transformers_and_has_the_same_weights(model64, prompts, tmp_path):
    actor = start_actor(model64)
    actor.update(experience(actor, prompts()))
    actor.save(tmp_path / "actor")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "actor", dtype=torch.float64)
    assert largest_difference(weights(opened), weights(actor.model)) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "actor")
    assert tokenizer("12+3=\n")["input_ids"] == actor.tokenizer("12+3=\n")["input_ids"]
    again = start_actor(Pretrained(path=str(tmp_path / "actor"), dtype="float64"))
    assert torch.equal(
        again.generate(prompts(), GenerationRequest(0, 2))["responses"],
        actor.generate(prompts(), GenerationRequest(0, 2))["responses"],
    )


def test_a_reference_of_its_own_stays_where_the_actor_started(model64, prompts):
    actor = start_actor(model64, optimizer=AdamW(lr=1e-2))
    reference = Reference().start(
        BuildContext(), Parallelism(), Actor(model=model64, optimizer=AdamW(lr=1e-3)), actor, temperature=1.0
    )
    rows = experience(actor, prompts()).select(
        ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
    )
    before = actor.compute_log_probs(rows)["old_log_probs"]
    assert torch.equal(reference.compute_log_probs(rows)["ref_log_probs"], before)
    actor.update(experience(actor, prompts()))
    assert torch.equal(reference.compute_log_probs(rows)["ref_log_probs"], before)
    assert not torch.equal(actor.compute_log_probs(rows)["old_log_probs"], before)
    assert not any(p.requires_grad for p in reference.engine.model.parameters())


@pytest.mark.parametrize("coef", [0.1, 1e-50, 5e-324])
def test_the_only_update_of_a_step_measures_the_kl_itself_and_not_its_penalty(coef, model32, prompts):
    algorithm = dataclasses.replace(PPO, kl=KLInLoss(coef=coef))
    actor = start_actor(model32, algorithm=algorithm)
    rows = experience(actor, prompts())
    mask, k3 = rows["response_mask"], ESTIMATORS["k3"](rows["old_log_probs"], rows["ref_log_probs"])
    alone = rows.select([name for name in rows.batch if name != "old_log_probs"])
    assert actor.update(alone)["kl/reference_nats"] == pytest.approx(float(k3[mask].mean()), rel=1e-5)


def test_a_row_is_on_policy_where_the_weights_that_score_it_drew_it(model32, prompts):
    actor = start_actor(model32)
    rows = actor.generate(prompts(), GenerationRequest(0, 2))
    assert actor.compute_log_probs(rows)["is_on_policy"].tolist() == [True] * 8
    actor.update(experience(actor, prompts()))
    assert actor.compute_log_probs(rows)["is_on_policy"].tolist() == [False] * 8
    later = actor.generate(prompts(), GenerationRequest(1, 2))
    assert (rows["policy_version"].tolist(), later["policy_version"].tolist()) == ([0] * 8, [1] * 8)
    mixed = DataProto.concat([rows, later])
    assert actor.compute_log_probs(mixed)["is_on_policy"].tolist() == [False] * 8 + [True] * 8
    nobody_knows = rows.select([name for name in rows.batch if name != "policy_version"])
    assert "is_on_policy" not in actor.compute_log_probs(nobody_knows)


def test_gradients_are_gone_before_the_rollout_engine_takes_its_memory(model64, prompts, monkeypatch):
    actor = start_actor(model64)
    actor.update(experience(actor, prompts()))
    assert gradients(actor.model)
    kept, sync = [], actor.generator.sync
    monkeypatch.setattr(actor.generator, "sync", lambda: kept.append(gradients(actor.model)) or sync())
    actor.sync()
    assert kept == [{}]
