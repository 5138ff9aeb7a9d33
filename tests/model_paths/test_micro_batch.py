"""Micro-batches: every row once, each as narrow as its longest prompt and response, within the budget."""

import torch
from batches import rollout

from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.protocol import DataProto

BATCH = rollout(b=12, p=6, t=7)


def test_every_row_is_in_one_micro_batch_and_the_budget_holds():
    micros = list(cut_into_micro_batches(BATCH, 24))
    assert sorted(torch.cat([m.rows for m in micros]).tolist()) == list(range(12))
    for micro in micros:
        longest = int(micro.tensors["attention_mask"].sum(dim=1).max())
        assert len(micro.rows) * longest <= 24


def test_prompts_are_cut_on_the_left_and_responses_on_the_right():
    for micro in cut_into_micro_batches(BATCH, 13):
        x, rows = micro.tensors, micro.rows
        p, t = x["prompts"].shape[1], micro.response_width
        assert p == BATCH["prompt_mask"][rows].sum(dim=1).max()
        assert t == BATCH["response_mask"][rows].sum(dim=1).max()
        assert x["input_ids"].shape == x["position_ids"].shape == (len(rows), p + t)
        assert torch.equal(x["prompts"], BATCH["prompts"][rows][:, 6 - p :])
        assert torch.equal(x["values"], BATCH["values"][rows][:, :t])
        assert torch.equal(x["input_ids"], torch.cat([x["prompts"], x["responses"]], dim=1))


def test_fields_that_no_table_knows_keep_their_width():
    for micro in cut_into_micro_batches(BATCH, 13):
        assert torch.equal(micro.tensors["hidden"], BATCH["hidden"][micro.rows])


def test_no_rows_give_no_micro_batches():
    assert list(cut_into_micro_batches(BATCH[:0], 10)) == []


def test_a_batch_without_responses_keeps_one_prompt_position():
    tensors = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "attention_mask": torch.zeros(2, 3, dtype=torch.int64),
        "responses": torch.zeros(2, 0, dtype=torch.int64),
    }
    (micro,) = cut_into_micro_batches(DataProto.from_dict(tensors), 10)
    assert micro.tensors["input_ids"].shape == (2, 1)
    assert micro.response_width == 0
