"""A role whose rows are packed scores and learns as one whose rows are padded."""

import pytest
import torch
from cases import each_value_once
from model_paths.families import FAST
from roles import experience, start_actor, start_critic, weights

from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models.tiny import TinyModel

MODEL = TinyModel(dtype="float64", hidden_size=32, intermediate_size=64)


def pair(start, **options):
    return [start(MODEL, packing=packing, **options) for packing in ("auto", "off")]


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(("budget", "checkpointing"), each_value_once([60, 10_000], [False, True]))
def test_actor_and_critic_do_the_same_packed_and_padded(budget, checkpointing, prompts):
    options = {"micro_batch_tokens": budget, "gradient_checkpointing": checkpointing}
    packed, padded = pair(start_actor, **options)
    rows = experience(padded, prompts(), num_samples=6)
    assert packed.engine.paths(rows).scoring == "packed"
    assert padded.engine.paths(rows).scoring == "padded"
    micros = list(cut_into_micro_batches(rows, budget, FAST))
    assert all(micro.packing is not None for micro in micros)
    for name in ("old_log_probs", "entropies"):
        found = packed.compute_log_probs(rows)[name]
        torch.testing.assert_close(found, padded.compute_log_probs(rows)[name], rtol=0, atol=1e-6)
    agree(packed.update(rows), padded.update(rows))
    for name, weight in weights(padded.model).items():
        torch.testing.assert_close(weights(packed.model)[name], weight, rtol=0, atol=1e-4)
    packed_critic, padded_critic = pair(start_critic, **options)
    agree(packed_critic.update(rows), padded_critic.update(rows))
    values = packed_critic.compute_values(rows)["values"]
    assert values.any()
    torch.testing.assert_close(values, padded_critic.compute_values(rows)["values"], rtol=0, atol=1e-5)


def agree(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_each_row_is_in_one_micro_batch_and_each_within_its_budget(prompts):
    rows = experience(start_actor(MODEL), prompts(), num_samples=5)
    micros = list(cut_into_micro_batches(rows, 48, FAST))
    assert len(micros) > 1
    assert sorted(torch.cat([micro.rows for micro in micros]).tolist()) == list(range(len(rows)))
    assert all(len(micro.packing.tokens) <= 48 or len(micro.rows) == 1 for micro in micros)


def test_rows_that_share_nothing_and_are_equally_long_stay_padded(prompts):
    rows = experience(start_actor(MODEL), prompts(), num_samples=1)
    lengths = rows["attention_mask"].sum(1)
    equal = rows[lengths == lengths.mode().values]
    assert all(micro.packing is None for micro in cut_into_micro_batches(equal, 10_000, FAST))


def test_one_update_without_old_log_probs_is_the_update_with_them(prompts):
    first, second = start_actor(MODEL), start_actor(MODEL)
    rows = experience(first, prompts(), num_samples=4)
    without = rows.select([name for name in rows.batch if name not in ("old_log_probs", "entropies")], [])
    expected, found = first.update(rows), second.update(without)
    assert found["rollout/entropy_nats"] == pytest.approx(
        float(rows["entropies"][rows["response_mask"]].mean()), rel=1e-9
    )
    assert found["rollout/log_prob_gap_nats"] < 1e-6
    agree({name: found[name] for name in expected}, expected)
    for name, weight in weights(first.model).items():
        torch.testing.assert_close(weights(second.model)[name], weight, rtol=0, atol=1e-9)
