"""Adapters: nothing changes at first, only they train, and without them the model is what it was."""

import torch
from peft import AutoPeftModelForCausalLM
from refusals import refusal
from roles import experience, largest_difference, start_actor, start_critic, weights
from transformers import AutoModelForCausalLM

from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyModel
from verl.rollout.base import GenerationRequest
from verl.workers.actor import Actor
from verl.workers.reference import Reference

FAST = AdamW(lr=1e-2)
ADAPTER = LoRA(rank=4, alpha=8.0)


def start_reference(model, actor):
    description = Actor(model=model, optimizer=FAST, lora=ADAPTER)
    return Reference().start(BuildContext(), Parallelism(), description, actor, temperature=1.0)


def test_at_the_start_nothing_has_changed(model64, prompts):
    plain, adapted = start_actor(model64), start_actor(model64, lora=ADAPTER)
    rows = plain.generate(prompts(), GenerationRequest(0, 3))
    again = adapted.generate(prompts(), GenerationRequest(0, 3))
    assert torch.equal(rows["responses"], again["responses"])
    torch.testing.assert_close(again["rollout_log_probs"], rows["rollout_log_probs"], rtol=0, atol=1e-12)


def test_only_the_adapter_trains(model64, prompts):
    actor = start_actor(model64, lora=ADAPTER, optimizer=FAST)
    before = weights(actor.model)
    actor.update(experience(actor, prompts()))
    after = weights(actor.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_B" in name}  # A has no gradient while B is zero
    actor.update(experience(actor, prompts()))
    changed = {name for name, weight in weights(actor.model).items() if not torch.equal(before[name], weight)}
    assert changed == {name for name in before if "lora_" in name}
    assert not any("lm_head" in name for name in changed)


def test_without_its_adapter_a_trained_actor_is_the_base_bit_by_bit(model64, prompts):
    actor = start_actor(model64, lora=ADAPTER, optimizer=FAST)
    rows = experience(actor, prompts())
    reference = start_reference(model64, actor)
    assert reference.engine.model is actor.model
    for _ in range(2):
        actor.update(rows)
    base = start_actor(model64).compute_log_probs(rows)["old_log_probs"]
    assert torch.equal(reference.compute_log_probs(rows)["ref_log_probs"], base)
    moved = actor.compute_log_probs(rows)["old_log_probs"]
    assert (moved - base).abs().max() > 1e-3
    assert all(p.requires_grad == ("lora_" in name) for name, p in actor.model.named_parameters())


def test_a_saved_adapter_opens_with_peft_and_with_transformers_and_is_a_whole_model_again(model64, prompts, tmp_path):
    actor = start_actor(model64, lora=ADAPTER, optimizer=FAST)
    rows = experience(actor, prompts())
    actor.update(rows)
    actor.save(tmp_path / "actor")
    tokens = rows["input_ids"][:2, -6:]
    expected = actor.model(tokens).logits
    for opener in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        opened = opener.from_pretrained(tmp_path / "actor", dtype=torch.float64)
        torch.testing.assert_close(opened(tokens).logits, expected, rtol=0, atol=1e-10)
    source = Pretrained(path=str(tmp_path / "actor"), dtype="float64")
    assert source.max_positions() == 64
    merged = source.load_causal_lm("cpu")
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-10)
    assert weights(merged).keys() == weights(model64.load_causal_lm("cpu")).keys()
    assert all(p.requires_grad for p in merged.parameters())
    assert largest_difference(weights(source.load_backbone("cpu")), weights(merged.base_model)) == 0


def test_an_adapter_of_a_model_without_a_name_is_refused(tmp_path):
    actor = start_actor(TinyModel(hidden_size=32), lora=ADAPTER)
    actor.save(tmp_path)
    with refusal("path"):
        Pretrained(path=str(tmp_path)).load_causal_lm("cpu")


def test_a_critic_with_an_adapter_trains_adapter_and_head(model64, prompts, tmp_path):
    critic = start_critic(model64, lora=ADAPTER, optimizer=FAST)
    rows = experience(start_actor(model64), prompts())
    before = weights(critic.engine.model)
    for _ in range(3):
        critic.update(rows)
    after = weights(critic.engine.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_" in name or name.startswith("head.")}

    critic.save(tmp_path / "critic")
    again = start_critic(Pretrained(path=str(tmp_path / "critic"), dtype="float64"))
    found, expected = again.compute_values(rows)["values"], critic.compute_values(rows)["values"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_named_layers_alone_are_adapted(model32):
    model = LoRA(target_modules=("q_proj", "v_proj")).apply(model32.load_causal_lm("cpu"), causal_lm=True)
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted == {"q_proj", "v_proj"}


def test_a_name_that_no_layer_has_is_a_config_error(model32):
    with refusal("lora.target_modules"):
        LoRA(target_modules=("no_such_layer",)).apply(model32.load_causal_lm("cpu"), causal_lm=True)
