"""Experts of a mixture read back from an engine's layers: whole, cut over ranks, spread over ranks.

Packed as vLLM has them on a CPU: test_vllm_probe.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verl.rollout.proof.fingerprints import Fingerprints, ProbeVectors, fingerprint, join_parts
from verl.rollout.proof.verifier import compare
from verl.rollout.vllm.server.layer_fingerprints import LayerFingerprints, reader_of

EXPERTS, WIDTH, INNER = 4, 24, 16
PARTS = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
VECTORS = ProbeVectors(3)


class RoutedExperts(nn.Module):
    """The experts of one rank, under the name of vLLM's class."""


class MoERunner(nn.Module):
    """What holds them."""


class UnquantizedFusedMoEMethod(SimpleNamespace):
    """How they are computed."""


def full_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"mlp.experts.{number}.{part}.weight": torch.randn(shape, generator=generator)
        for number in range(EXPERTS)
        for part, shape in PARTS.items()
    }


def rank_model(weights: dict[str, Tensor], rank: int, size: int, *, spread: bool = False, **facts: Any) -> nn.Module:
    """One of `size` ranks: each has a part of every expert or, if they are `spread`, some of the experts, backwards."""
    cut = 1 if spread else size
    own = INNER // cut
    part = slice(0, INNER) if spread else slice(rank * own, (rank + 1) * own)
    numbers = [n for n in range(EXPERTS) if not spread or n % size == rank][:: -1 if spread else 1]
    places = torch.tensor([numbers.index(n) if n in numbers else -1 for n in range(EXPERTS)])
    layer: Any = RoutedExperts()
    gate, up, down = ([weights[f"mlp.experts.{n}.{p}.weight"] for n in numbers] for p in PARTS)
    layer.w13_weight = nn.Parameter(torch.stack([torch.cat([g[part], u[part]]) for g, u in zip(gate, up, strict=True)]))
    layer.w2_weight = nn.Parameter(torch.stack([d[:, part] for d in down]))
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = PARTS
    layer.local_num_experts, layer.expert_map = len(numbers), places if spread else None
    layer.moe_config = SimpleNamespace(
        hidden_dim_unpadded=WIDTH,
        intermediate_size=INNER,
        intermediate_size_per_partition_unpadded=own,
        tp_size=cut,
        tp_rank=0 if spread else rank,
        has_bias=False,
        is_act_and_mul=True,
        moe_parallel_config=SimpleNamespace(enable_eplb=False),
    )
    method = {"unquantized_backend": SimpleNamespace(name="TRITON"), "moe_kernel": None, **facts}
    layer.quant_method = UnquantizedFusedMoEMethod(**method)
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = MoERunner()
    model.mlp.experts.routed_experts = layer
    return model


def found(weights: dict[str, Tensor], size: int = 1, **how: Any) -> Fingerprints:
    """The marks that an engine of so many ranks gives."""
    readers = [LayerFingerprints(rank_model(weights, rank, size, **how), torch.float32) for rank in range(size)]
    assert all(reader.unproven == [] for reader in readers)
    return join_parts([reader.parts(VECTORS) for reader in readers])


def expected() -> Fingerprints:
    return {name: fingerprint(tensor, VECTORS) for name, tensor in full_weights().items()}


@pytest.mark.parametrize("spread", [False, True], ids=["cut", "spread"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_matrix_of_every_expert_is_proven(size, spread):
    fingerprints = found(full_weights(), size, spread=spread)
    assert fingerprints.keys() == expected().keys()
    assert compare(expected(), fingerprints) == {}


@pytest.mark.parametrize("spread", [False, True], ids=["cut", "spread"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_stale_expert_and_exchanged_matrices_are_named(size, spread):
    weights = full_weights()
    stale = "mlp.experts.2.down_proj.weight"
    weights[stale] = weights[stale] + 1e-4
    gate, up = (f"mlp.experts.1.{part}_proj.weight" for part in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    assert compare(expected(), found(weights, size, spread=spread)).keys() == {stale, gate, up}


def test_kernels_that_change_more_than_the_order_are_left_to_the_probe():
    model = rank_model(full_weights(), 0, 1, unquantized_backend=SimpleNamespace(name="FLASHINFER_TRTLLM"))
    assert reader_of(model.mlp.experts, "mlp.experts") is None
    reader = LayerFingerprints(model, torch.float32)
    assert reader.unproven == ["mlp.experts."]
    assert reader.parts(VECTORS) == {}
