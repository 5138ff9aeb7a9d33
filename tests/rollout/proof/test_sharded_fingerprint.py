"""The ranks of an engine with tensor parallelism, put together again."""

import pytest
import torch
from rollout.proof.planted import compared, marks_of
from rollout.proof.rank_models import full_weights, rank_model

from verl.errors import WeightSyncError
from verl.rollout.proof import fingerprints
from verl.rollout.proof.fingerprints import ProbeVectors, join_parts
from verl.rollout.proof.verifier import compare
from verl.rollout.vllm.server.layer_fingerprints import LayerFingerprints

VERSION = 2


def proven(models, weights=None) -> bool:
    """Whether every tensor is proven."""
    read = [LayerFingerprints(model, torch.float32).parts(ProbeVectors(VERSION)) for model in models]
    return compared(marks_of(weights or full_weights(), VERSION), join_parts(read))["sync/unproven_tensors"] == 0


def models(size: int):
    return [rank_model(full_weights(), rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_together_hold_every_tensor(size):
    assert proven(models(size))


def test_fingerprints_of_tensors_on_a_device_come_in_one_copy_for_each_rank(monkeypatch):
    copies, copy = [], torch.Tensor.cpu
    monkeypatch.setattr(fingerprints, "is_in_main_memory", lambda x: False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.numel()) or copy(x))
    read = [LayerFingerprints(model, torch.float32).parts(ProbeVectors(VERSION)) for model in models(2)]
    assert len(copies) == 2
    monkeypatch.undo()
    assert compare(marks_of(full_weights(), VERSION), join_parts(read)) == {}


def test_the_trainer_copies_fingerprints_of_a_sync_once(monkeypatch):
    weights = full_weights()
    expected = marks_of(weights, VERSION)
    copies, copy = [], torch.Tensor.cpu
    monkeypatch.setattr(fingerprints, "is_in_main_memory", lambda x: False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.numel()) or copy(x))
    found = marks_of(weights, VERSION)
    assert found.keys() == expected.keys()
    assert all((found[name].values == mark.values).all() for name, mark in expected.items())
    assert len(copies) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_family_that_keeps_its_layers_fused_is_read_as_such(size):
    weights = full_weights()
    for kind in ("weight", "bias"):
        parts = [weights.pop(f"attn.{part}_proj.{kind}") for part in "qkv"]
        weights[f"attn.qkv_proj.{kind}"] = torch.cat(parts)
    parts = [weights.pop(f"mlp.{part}_proj.weight") for part in ("gate", "up")]
    weights["mlp.gate_up_proj.weight"] = torch.cat(parts)
    ranks = models(size)
    for rank in ranks:
        rank.packed_modules_mapping = {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_up_proj"]}
    assert proven(ranks, weights)
    with torch.no_grad():
        ranks[-1].attn.qkv_proj.weight[-1, 3] += 1
    with pytest.raises(WeightSyncError) as caught:
        proven(ranks, weights)
    assert caught.value.names == ("attn.qkv_proj.weight",)


def wrong(size, fault) -> tuple[str, ...]:
    """What is named when `fault` is done to the ranks of an engine."""
    ranks = models(size)
    with torch.no_grad():
        fault(ranks)
    with pytest.raises(WeightSyncError) as caught:
        proven(ranks)
    return caught.value.names


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_one_rank_is_named(rank):
    assert wrong(2, lambda m: m[rank].attn.qkv_proj.weight[0].zero_()) == ("attn.q_proj.weight",)
    assert wrong(2, lambda m: m[rank].attn.qkv_proj.bias[-1].zero_()) == ("attn.v_proj.bias",)
    assert wrong(2, lambda m: m[rank].attn.o_proj.weight[3, 5].mul_(2)) == ("attn.o_proj.weight",)
    assert wrong(2, lambda m: m[rank].mlp.gate_up_proj.weight[-1].zero_()) == ("mlp.up_proj.weight",)
    assert wrong(2, lambda m: m[rank].embed_tokens.weight[1].zero_()) == ("embed_tokens.weight",)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_every_rank_holds_must_be_the_same_on_each(rank):
    assert wrong(2, lambda m: m[rank].norm.weight[0].zero_()) == ("norm.weight",)
    assert wrong(2, lambda m: m[rank].attn.o_proj.bias[0].zero_()) == ("attn.o_proj.bias",)


@pytest.mark.parametrize("rank", range(4))
def test_key_heads_that_several_ranks_hold_must_be_the_same_on_each(rank):
    assert wrong(4, lambda m: m[rank].attn.qkv_proj.weight[SECOND_KEY_ROW].zero_()) == ("attn.k_proj.weight",)


SECOND_KEY_ROW = 9  # after the one query head of a rank


def test_ranks_in_each_others_place_are_seen():
    def fault(ranks):
        first, second = ranks[0].attn.qkv_proj.weight, ranks[1].attn.qkv_proj.weight
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    assert wrong(2, fault) == ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight")


def test_rows_that_no_rank_holds_are_seen():
    with pytest.raises(WeightSyncError, match="no rank holds all of it"):
        proven(models(2)[:1])
