"""A proof passes what is the same, stops at what is not, and says which tensors and what is likely."""

import pickle

import numpy as np
import pytest
import torch
from rollout.proof.planted import proven, some_weights

from verl.errors import WeightSyncError

Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_the_same_is_proven(dtype):
    proof = proven(some_weights(), dtype=dtype, tied=TIED)
    assert proof["sync/unproven_tensors"] == proof["sync/probe_gap_nats"] == 0


def refused(*args, **kwargs) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        proven(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("is_near", [False, True], ids=["other weights", "an update away"])
def test_a_stale_tensor_is_named_as_one(is_near):
    before, now = some_weights(), some_weights(seed=1)
    if is_near:
        now = {name: tensor + 1e-6 * torch.randn_like(tensor).sign() for name, tensor in before.items()}
    error = refused(now, fault=lambda held: held.update({K: before[K]}), before=before)
    assert error.names == (K,)
    assert "stale" in str(error)
    assert "1 of 29 tensors" in str(error)


def test_a_stale_tied_head_is_named_with_what_it_is_tied_to():
    before, now = some_weights(), some_weights(seed=1)
    stale = before["model.embed_tokens.weight"]
    error = refused(now, fault=lambda held: held.update({"lm_head.weight": stale}), before=before, tied=TIED)
    assert error.names == ("lm_head.weight",)
    assert "stale" in str(error)
    assert "tied to model.embed_tokens.weight" in str(error)


def test_swapped_tensors_are_named_with_what_they_hold():
    error = refused(some_weights(), fault=lambda held: held.update({Q: held[K], K: held[Q]}))
    assert error.names == (Q, K)
    assert f"{Q}: " in str(error)
    assert f"it holds what {K} should" in str(error)
    assert f"it holds what {Q} should" in str(error)


def test_one_tensor_of_a_late_layer_is_named():
    late = "model.layers.2.mlp.down_proj.weight"
    error = refused(some_weights(), fault=lambda held: held[late].mul_(1.001))
    assert error.names == (late,)


@pytest.mark.parametrize("left_out", ["model.norm.weight", "model.layers.2.self_attn.q_proj.bias"])
def test_a_vector_left_out_is_named(left_out):
    error = refused(some_weights(), fault=lambda held: held[left_out].zero_())
    assert error.names == (left_out,)
    assert "all zeros" in str(error)


def test_a_block_of_a_matrix_is_seen_in_bfloat16():
    def fault(held):
        held[Q][:, 64:128] = held[K][:, 64:128]  # the columns of one rank

    error = refused(some_weights(), fault=fault, dtype=torch.bfloat16)
    assert error.names == (Q,)


def test_tensors_held_in_a_narrower_type_are_named():
    weights = some_weights()
    held = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    error = refused(weights, held, loaded_as=torch.bfloat16)
    assert len(error.names) == len(weights)
    assert "it is held in bfloat16, where float32 is expected" in str(error)


def test_tensors_rounded_on_their_way_are_named():
    weights = some_weights()
    held = {name: tensor.to(torch.float16).float() for name, tensor in weights.items()}
    error = refused(weights, held)
    assert len(error.names) == len(weights)
    assert "it was rounded to float16 on its way" in str(error)
    assert f"and {len(weights) - 8} more" in str(error)


def test_names_that_one_side_lacks_are_told():
    def fault(held):
        held["model.extra.weight"] = held.pop(Q)

    error = refused(some_weights(), fault=fault)
    assert error.names == (Q, "model.extra.weight")
    assert f"{Q}: the engine has no such tensor" in str(error)
    assert "model.extra.weight: the trainer sent no such tensor" in str(error)


def test_numbers_that_are_not_finite_are_no_proof():
    weights = some_weights()
    weights[Q][3, 3] = np.nan
    assert refused(weights).names == (Q,)


def test_a_function_that_differs_although_the_tensors_agree_is_told():
    error = refused(some_weights(), gap_nats=0.5)
    assert error.names == ()
    assert "computes other log-probs" in str(error)
    assert proven(some_weights(), gap_nats=0.05, dtype=torch.bfloat16)["sync/probe_gap_nats"] > 0.04


def test_the_error_travels_between_processes():
    error = refused(some_weights(), fault=lambda held: held[Q].zero_())
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.names, other.total) == (str(error), error.names, error.total)
    assert isinstance(error, RuntimeError)
