"""Records of single responses: tokens that belong together, cut, rounded, and read by themselves."""

import math

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.monitoring.ppo_metrics import clipped_ratio, evaluated_rows, token_rows, token_texts
from verl.protocol import DataProto


def experience(tokenizer, lengths=(3, 5)):
    """Rows of these many tokens after a prompt of two; the second token of each is an observation."""
    width = max(lengths)
    attended = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = attended & (torch.arange(width) != 1)
    ids = tokenizer("0123456789", add_special_tokens=False)["input_ids"]
    responses = torch.tensor(ids)[torch.arange(width) % 10].repeat(len(lengths), 1)
    fields = {
        "attention_mask": torch.cat([torch.ones(len(lengths), 2, dtype=torch.int64), attended.long()], dim=1),
        "responses": responses,
        "response_mask": mask,
        "prompt_ids": torch.arange(len(lengths)) + 10,
        "sample_ids": torch.zeros(len(lengths), dtype=torch.int64),
        "policy_version": torch.full((len(lengths),), 4),
        "rollout_log_probs": torch.full((len(lengths), width), -1 / 3),
        "advantages": torch.full((len(lengths), width), math.nan),
    }
    texts = {"score": [0.5] * len(lengths), "prompt_text": ["1+"] * len(lengths)}
    return DataProto.from_dict(fields, non_tensors=texts)


def test_a_row_has_its_own_tokens_with_what_belongs_to_each_and_no_padding(tokenizer):
    first, second = token_rows(experience(tokenizer), 8, tokenizer)
    assert (first["prompt_id"], first["sample_id"], first["score"], first["prompt"]) == (10, 0, 0.5, "1+")
    assert first["texts"] == ["0", "1", "2"]
    assert (first["mask"], first["versions"]) == ([1, 0, 1], [4, 4, 4])
    assert first["rollout_log_probs"] == [-0.333333] * 3
    assert all(map(math.isnan, first["advantages"]))
    assert "old_log_probs" not in first
    assert second["texts"] == ["0", "1", "2", "3", "4"]
    assert len(token_rows(experience(tokenizer), 1, tokenizer)) == 1


def test_a_long_row_is_cut(tokenizer):
    (row,) = token_rows(experience(tokenizer, (5000,)), 8, tokenizer)
    assert {len(value) for value in row.values() if isinstance(value, list)} == {4096}


def test_a_token_has_the_text_that_it_adds_after_another_one():
    backend = Tokenizer(models.BPE({"▁the": 0, "▁c": 1, "at": 2, "<0xC3>": 3, "<unk>": 4}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = token_texts({0, 1, 2, 3}, PreTrainedTokenizerFast(tokenizer_object=backend))
    assert texts == {0: " the", 1: " c", 2: "at", 3: "\ufffd"}


def test_every_response_of_an_evaluation_is_a_record_of_its_kind(tokenizer):
    batch = experience(tokenizer)
    batch["score"][1] = 2
    records = evaluated_rows({"greedy": batch, "sampled": None, "without_tools": batch[:1]}, success=1.0)
    digests = [row.pop("prompt_digest") for row in records]
    assert digests[0] == digests[2]
    assert records == [
        {"kind": "greedy", "prompt_id": 10, "sample_id": 0, "score": 0.5, "tokens": 2, "success": False},
        {"kind": "greedy", "prompt_id": 11, "sample_id": 0, "score": 2.0, "tokens": 4, "success": True},
        {"kind": "without_tools", "prompt_id": 10, "sample_id": 0, "score": 0.5, "tokens": 2, "success": False},
    ]


def test_a_response_is_clipped_if_it_is_as_long_as_the_limit_without_a_stop_token_at_its_end():
    responses = torch.tensor([[5, 5, 5], [5, 5, 1], [5, 1, 0], [5, 5, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    batch = DataProto.from_dict({"responses": responses, "response_mask": mask})
    assert clipped_ratio(batch, 3, [1]) == 0.5
    assert clipped_ratio(batch, 3, [1, 7]) == 0.25
    assert clipped_ratio(batch, 4, [1]) == 0.0
