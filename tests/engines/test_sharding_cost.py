"""The cost model against what is known of each sharding by counting."""

from dataclasses import replace

import pytest

from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, NoSharding, Parallel
from verl.models.model_stats import ModelStats

N = 1_000_000
SIZES = ModelStats(  # without an output head, as a critic's
    parameters=N, trained=N, layers=4, hidden=64, vocabulary=1000, attention=64, keys=32, mlp=256, tied=True,
    has_head=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("sharding", "mesh", "bytes_at_rest"),
    [
        (NoSharding(), (4, 1, 1), 16 * N),
        (DDP(), (4, 1, 1), 16 * N),
        (FSDP(), (1, 4, 1), 4 * N),
        (HSDP(replicas=2), (2, 2, 1), 8 * N),
        (TP(tensor_parallel=2), (2, 1, 2), 8 * (N + 64_000)),  # the embedding is whole
        (TP(), (1, 1, 4), 4 * (N + 3 * 64_000)),
        (TPFSDP(tensor_parallel=2), (1, 2, 2), 4 * (N + 64_000)),
        (Parallel(cp=2), (1, 4, 1), 4 * N),
        (Parallel(cp=2, tp=2), (1, 2, 2), 4 * (N + 64_000)),
        (Parallel(dp_replicate=2, cp=2), (2, 2, 1), 8 * N),
    ],
)
def test_what_rests_is_divided_by_shards_and_siblings(sharding, mesh, bytes_at_rest):
    assert sharding.mesh_sizes(4) == mesh
    assert sharding.cost(4, SIZES).persistent_bytes == bytes_at_rest


def test_an_embedding_that_is_the_head_too_is_divided_with_it():
    assert TP(tensor_parallel=2).cost(4, replace(SIZES, has_head=True)).persistent_bytes == 8 * N


def test_traffic_is_that_of_ring_algorithms():
    block = 4 * (N - 64_000)  # bytes; what lies outside of blocks stays from the forward pass to the backward pass
    assert DDP().cost(4, SIZES).per_update == 2 * 3 / 4 * 4 * N
    assert FSDP().cost(4, SIZES).per_micro_batch == 3 / 4 * (8 * N + block)
    assert FSDP(strategy="SHARD_GRAD_OP").cost(4, SIZES).per_micro_batch == 3 / 4 * 8 * N
    assert FSDP().cost(4, SIZES, compute_bytes=2).per_micro_batch == 3 / 4 * (6 * N + block / 2)
    assert HSDP(replicas=2).cost(4, SIZES).per_update == 0  # of each micro-batch
    within = 1 / 2 * (8 * N + block)
    assert HSDP(replicas=2).cost(4, SIZES).per_micro_batch == within + 2 * 1 / 2 * 4 * N / 2
    assert TP().cost(4, SIZES, tokens=10).per_micro_batch == 2 * 3 / 4 * 7 * 4 * 64 * 10 * 4  # sums, layers
    assert FSDP().cost(1, SIZES).per_step(8) == 0
    assert FSDP().cost(4, SIZES).per_step(3, 2) == 3 * FSDP().cost(4, SIZES).per_micro_batch


@pytest.mark.parametrize(
    "sharding", [FSDP(), FSDP(strategy="SHARD_GRAD_OP"), HSDP(replicas=2), TPFSDP(), Parallel(cp=2)], ids=repr
)
def test_gradients_that_are_reduced_once_per_update_are_whole_until_then(sharding):
    each, once = sharding.cost(4, SIZES), replace(sharding, reduce_gradients="update").cost(4, SIZES)
    assert once.per_step(1) == each.per_step(1)
    assert 0 < once.per_update == each.per_micro_batch - once.per_micro_batch
    assert once.whole_gradients == each.gradients * sharding.degrees(4).shards
    assert each.whole_gradients == 0
    assert replace(once, whole_gradients=0, per_update=0, per_micro_batch=0) == replace(each, per_micro_batch=0)


def test_experts_are_reduced_over_fewer_processes_however_often():
    sizes = replace(SIZES, expert_elements=400_000, expert_layers=4, top_k=2)
    each, once = Parallel(ep=2).cost(4, sizes), Parallel(ep=2, reduce_gradients="update").cost(4, sizes)
    assert once.per_step(1) == pytest.approx(each.per_step(1), abs=2)
    assert once.per_update == pytest.approx(4 * (3 / 4 * 600_000 + 1 / 2 * 200_000), abs=2)
    assert once.whole_gradients == 4 * 800_000  # of half of the experts


def test_processes_that_share_tokens_send_keys_and_values_of_each_layer():
    weights = FSDP().cost(4, SIZES).per_micro_batch
    gathered = Parallel(cp=4).cost(4, SIZES, tokens=10).per_micro_batch - weights
    assert gathered == 3 * 10 * (32 + 32) * 3 * 4 * 4  # to three others, keys and values, three times, layers, bytes
    exchanged = Parallel(cp=2, cp_style="ulysses").cost(4, SIZES, tokens=10).per_micro_batch - weights
    assert exchanged == 10 * (64 + 32 + 32 + 64) // 2 * 2 * 4 * 4
    assert Parallel(cp=2).token_shares(4) == 4
    assert Parallel(cp=2).row_shares(4) == Parallel(cp=2, tp=2).token_shares(4) == 2


def test_a_sharded_stage_is_gathered_once_for_all_micro_batches_of_an_update():
    stage = Parallel(pp=2).cost(2, SIZES, tokens=10)
    for sharding in (Parallel(pp=2, dp_shard=2), Parallel(pp=2, cp=2)):
        cost = sharding.cost(4, SIZES, tokens=10)
        assert cost.persistent_bytes == stage.persistent_bytes / 2
        assert cost.gathered == stage.weights + stage.gradients
        assert cost.per_update == 1 / 2 * (stage.weights + stage.gradients)
        assert cost.generating == 4 * N
    assert Parallel(pp=2, dp_shard=2).cost(4, SIZES, tokens=10).per_micro_batch == stage.per_micro_batch
    assert Parallel(pp=2, dp_shard=2).cost(4, SIZES, compute_bytes=2).gathered == stage.weights * 2.5


def test_a_block_and_the_embedding_are_gathered_or_all_weights():
    block = (N - 64_000) // 4
    assert FSDP().cost(4, SIZES).gathered == 4 * (64_000 + block)
    assert FSDP(strategy="SHARD_GRAD_OP").cost(4, SIZES).gathered == 4 * N
    assert FSDP().cost(4, SIZES, compute_bytes=2).generating == 2 * N
    assert DDP().cost(4, SIZES, compute_bytes=2).weights == 6 * N  # with the copy that is computed with
    assert FSDP().cost(4, SIZES, trains=False).persistent_bytes == N


def test_what_is_refused_is_not_named_as_a_smaller_setting():
    assert [setting for setting, _ in Parallel(cp=2).smaller()] == ["sharding.cpu_offload=true"]
    settings = [setting for setting, _ in FSDP(reduce_gradients="update").smaller()]
    assert settings == ["sharding.reduce_gradients=micro_batch", "sharding.cpu_offload=true"]
    assert not [*Parallel(pp=2).smaller(), *Parallel(ep=2).smaller()]


def test_stages_keep_what_is_under_way():
    assert Parallel(pp=4).activation_share(16) == Parallel(cp=2).activation_share(16) == 1
    assert Parallel(pp=4, pp_schedule="gpipe").activation_share(16) == 4
    assert Parallel(pp=4).activation_share(2) == 0.5  # too few for 1f1b: all of them
