"""A model that is not what its class says is noticed in the first batch, and takes a plainer way from there on."""

import logging
from typing import Any

import pytest
import torch
from model_paths.families import FAST
from refusals import refusal
from roles import experience, gap_from_plain_rows, start_actor, start_critic
from torch import Tensor

from verl.model_paths import packed_attention
from verl.model_paths.check import bound_of, chosen_rows
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout

LONGER = ("1+2=", "what is 6*7? what is 6*7? what is 6*7? ")


def running_mean(x: Tensor) -> Tensor:
    """[b s D] of all tokens so far: causal, and it sees what else stands on a line, and padding before a row."""
    return x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None]


def rows_mean(x: Tensor) -> Tensor:
    """[b s D] of the rows of a batch."""
    return x.mean(dim=0, keepdim=True).expand_as(x)


def also_sees(layer: Any, seen: Any) -> None:
    """Let a layer of a model look at more than its class says; only the object knows."""
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) + seen(x)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_model_that_looks_at_padding_is_run_with_padding_on_the_right(model32, prompts, caplog):
    actor = start_actor(model32, HFRollout(max_new_tokens=6))
    rows = actor.generate(prompts(*LONGER), GenerationRequest(0, 3))
    assert actor.engine.paths(rows) == FAST
    also_sees(actor.model.model.layers[0], running_mean)
    rows = rows.union(actor.compute_log_probs(rows))
    assert gap_from_plain_rows(actor, rows, "old_log_probs") < 1e-4
    assert actor.engine.paths(rows).scoring == "right_padded"
    actor.compute_log_probs(rows)
    (message,) = told(caplog)
    assert message.startswith(
        "actor.model is a Qwen2ForCausalLM: as packed batches, rows of the first batch have different"
    )
    assert message.endswith("From here on rows are run as right padded batches.")


def test_a_model_that_asks_more_of_attention_than_packed_rows_have_is_run_padded(model32, prompts, monkeypatch, caplog):
    def refuse(*given: Any) -> None:
        raise NotImplementedError("attention with softcap has no such form")

    monkeypatch.setattr(packed_attention, "_attend_packed", refuse)
    actor = start_actor(model32, HFRollout(max_new_tokens=6))
    rows = actor.generate(prompts(*LONGER), GenerationRequest(0, 3))
    rows = rows.union(actor.compute_log_probs(rows))
    assert gap_from_plain_rows(actor, rows, "old_log_probs") < 1e-4
    assert actor.engine.paths(rows).scoring == "padded"
    assert "attention with softcap has no such form" in told(caplog)[0]


def test_a_critic_with_an_untrained_head_is_looked_at_too(model32, prompts, caplog):
    rows = experience(start_actor(model32), prompts(*LONGER))
    critic = start_critic(model32)
    also_sees(critic.engine.model.backbone.layers[0], running_mean)
    assert not critic.compute_values(rows)["values"].any()
    assert critic.engine.paths(rows).scoring == "right_padded"
    assert "critic.model is a ValueHeadModel: as packed batches" in told(caplog)[0]


def test_a_model_that_looks_at_other_rows_is_refused_by_name(model32, prompts):
    actor = start_actor(model32, HFRollout(max_new_tokens=6), packing="off")
    rows = actor.generate(prompts(), GenerationRequest(0, 3))
    also_sees(actor.model.model.layers[0], rows_mean)
    with refusal("actor.model"):
        actor.compute_log_probs(rows)


def test_a_model_that_is_what_its_class_says_keeps_its_way_and_nothing_is_said(model32, prompts, caplog):
    actor, critic = start_actor(model32), start_critic(model32)
    rows = experience(actor, prompts(*LONGER))
    critic.update(rows)
    assert actor.engine.paths(rows) == FAST
    assert critic.engine.paths(rows).scoring == "packed"
    assert told(caplog) == []


def test_one_short_row_among_long_ones_counts_as_much_as_they_do(model32, prompts):
    actor = start_actor(model32, HFRollout(max_new_tokens=40))
    rows = actor.generate(prompts(), GenerationRequest(0, 2))
    lengths = rows["response_mask"].sum(dim=1)
    rows.batch["response_mask"][0, 2:] = False
    wanted = torch.zeros(rows["response_mask"].shape)
    found = wanted.clone()
    found[0, :2] = 0.01
    assert float(found.sum()) / int(lengths.sum()) < 5e-3
    assert actor.first_batch.difference(found, wanted, rows) == pytest.approx(0.01)


def test_a_row_that_differs_by_itself_in_every_shape_is_not_charged_to_the_path(model32, prompts, caplog):
    actor = start_actor(model32, HFRollout(max_new_tokens=6))
    rows = actor.generate(prompts(*LONGER), GenerationRequest(0, 3))

    def of_shape(x: Tensor) -> Tensor:
        """Rounding as a model with massive activations has it: other numbers for each number of tokens of a call."""
        generator = torch.Generator().manual_seed(x.shape[0] * x.shape[1])
        return 0.05 * torch.randn(x.shape[-1], generator=generator)

    also_sees(actor.model.model.layers[0], of_shape)
    noise = gap_from_plain_rows(actor, actor.compute_log_probs(rows).union(rows), "old_log_probs")
    assert noise > 5e-3
    assert not told(caplog)
    also_sees(actor.model.model.layers[0], rows_mean)  # a fault that is larger than that is charged
    actor.engine.packing, actor.first_batch.longest = "off", -1
    with refusal("actor.model"):
        actor.compute_log_probs(rows)


def test_a_response_of_one_token_is_not_judged_alone_in_a_narrow_type(model32, prompts):
    rows = start_actor(model32, HFRollout(max_new_tokens=40)).generate(prompts(), GenerationRequest(0, 2))
    rows.batch["response_mask"][0, 1:] = False
    wanted = torch.zeros(rows["response_mask"].shape)
    one_token, all_tokens = wanted.clone(), wanted.clone()
    one_token[0, 0], all_tokens[1] = 1.2, 1.2
    narrow = start_actor(model32, autocast="bfloat16").first_batch
    bound = bound_of(torch.float32, "bfloat16")
    assert narrow.difference(one_token, wanted, rows) < bound < narrow.difference(all_tokens, wanted, rows)
    assert start_actor(model32).first_batch.difference(one_token, wanted, rows) == pytest.approx(1.2)


def test_a_later_batch_keeps_the_plainer_of_what_is_found_of_it_and_what_the_first_has_shown(model32, prompts):
    actor = start_actor(model32)
    rows = experience(actor, prompts())
    actor.engine.limit("padded")
    assert actor.engine.paths(rows).scoring == "padded"
    assert actor.engine.paths(rows).limited_to("equal_lengths").limited_to("padded").scoring == "equal_lengths"


def test_the_rows_looked_at_are_the_longest_the_shortest_and_a_group(model32, prompts):
    actor = start_actor(model32, HFRollout(max_new_tokens=6))
    rows = actor.generate(prompts(), GenerationRequest(0, 5))
    lengths = rows["attention_mask"].sum(dim=1)
    chosen = chosen_rows(rows)
    assert int(lengths.argmax()) in chosen
    assert int(lengths[chosen].min()) == int(lengths.min())
    of_longest = (rows["prompt_ids"] == rows["prompt_ids"][lengths.argmax()]).nonzero()[:, 0].tolist()
    assert len(set(chosen) & set(of_longest)) >= 3
    assert chosen_rows(rows[[]]) == []
