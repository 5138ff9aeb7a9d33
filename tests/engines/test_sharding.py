"""One process alone: every sum is what it was."""

import torch

from verl.component import BuildContext
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, NoSharding, Parallel
from verl.engines.tensor_parallel import heads_fault


def test_alone_sums_and_gradients_stay_as_they_are():
    parallel = NoSharding().build(BuildContext())
    assert (parallel.rank, parallel.world_size) == (0, 1)
    assert parallel.sums({"a": 1.5}) == {"a": 1.5}
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, 2.0])
    parallel.sum_gradients([weight])
    assert weight.grad.tolist() == [1.0, 2.0]
    parallel.close()


def test_groups_of_processes_must_be_equal():
    assert HSDP(replicas=3).size_fault(4).startswith("replicas is 3: it does not divide the 4 processes")
    assert TP(tensor_parallel=2).size_fault(3).endswith("1, 3 would.")
    assert TPFSDP(tensor_parallel=4).size_fault(6).endswith("1, 2, 3, 6 would.")
    assert [FSDP().size_fault(n) for n in (1, 2, 7)] == [None, None, None]
    assert [TP().size_fault(n) for n in (1, 2, 7)] == [None, None, None]
    assert HSDP(replicas=2).size_fault(4) is None


def test_key_value_heads_must_divide_and_the_sizes_that_fit_are_told():
    fault = heads_fault(14, 2, 4)
    assert fault == "is 4: it must divide the model's 2 key-value heads and 14 heads. Set it to 1 or 2."
    assert heads_fault(32, 8, 4) is None
    assert heads_fault(6, 6, 4).endswith("Set it to 1 or 2 or 3 or 6.")
    assert TP().heads_fault(14, 2, 4).startswith("tensor_parallel is 4: it must divide")  # all processes
    assert TPFSDP(tensor_parallel=2).heads_fault(14, 2, 4) is None
    assert FSDP().heads_fault(14, 2, 4) is None


def test_siblings_of_tensor_parallelism_work_on_the_same_rows():
    assert DDP().row_share_by_rank(3) == FSDP().row_share_by_rank(3) == HSDP().row_share_by_rank(3) == (0, 1, 2)
    assert TP().row_share_by_rank(2) == (0, 0)
    assert TP(tensor_parallel=2).row_share_by_rank(4) == TPFSDP().row_share_by_rank(4) == (0, 0, 1, 1)


def test_the_usual_shardings_are_layouts_of_one_mesh():
    found = {kind: kind.degrees(4) for kind in (DDP(), FSDP(), HSDP(), TP(tensor_parallel=2), TPFSDP())}
    assert all(degrees.world_size == 4 for degrees in found.values())
    preset = {HSDP(): Parallel(dp_replicate=2), TPFSDP(): Parallel(tp=2), FSDP(): Parallel()}
    for kind, same in preset.items():
        assert kind.degrees(4) == same.degrees(4)
        assert (kind.row_share_by_rank(4), kind.mesh_sizes(4)) == (same.row_share_by_rank(4), same.mesh_sizes(4))


def test_processes_along_cp_and_tp_work_on_the_same_rows_and_weights_are_divided_over_cp():
    sharding = Parallel(dp_replicate=2, cp=2, tp=2)
    degrees = sharding.degrees(16)
    assert degrees == ParallelDegrees(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert sharding.row_share_by_rank(16) == tuple(rank // 4 for rank in range(16))
    assert sharding.mesh_sizes(16) == (2, 4, 2)
    assert [degrees.context_ranks(rank) for rank in (0, 1, 2, 7)] == [(0, 2), (1, 3), (0, 2), (5, 7)]
    staged = ParallelDegrees(pp=2, dp_shard=2, tp=2)
    assert [staged.row_share(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_sizes_that_are_not_the_number_of_processes_name_the_nearest_layout():
    fault = Parallel(tp=2, cp=3).size_fault(8)
    assert fault.startswith("cp is 3: pp 1 x dp_replicate 1 x cp 3 x tp 2 is 6, which does not divide the 8 processes")
    assert fault.endswith("The nearest layout that fits: sharding.cp=4 sharding.tp=2.")
    assert Parallel(dp_shard=3).size_fault(4).endswith("The nearest layout that fits: sharding.dp_shard=4.")
    assert Parallel(tp=2, dp_shard=2).size_fault(4) is Parallel(cp=2).size_fault(6) is None


def test_heads_that_do_not_divide_name_the_nearest_layout():
    fault = Parallel(tp=4).heads_fault(14, 2, 8)
    assert "tp is 4: it must divide the model's 2 key-value heads" in fault
    assert fault.endswith("The nearest layout that fits: sharding.dp_shard=4 sharding.tp=2.")
    ulysses = Parallel(cp=4, cp_style="ulysses")
    assert ulysses.heads_fault(14, 2, 4).startswith("cp is 4: with cp_style=ulysses it must divide the 14 heads")
    assert "sharding.cp=2" in ulysses.heads_fault(14, 2, 4)
    assert Parallel(cp=4).heads_fault(14, 2, 4) is ulysses.heads_fault(16, 2, 4) is None


def test_experts_that_do_not_divide_name_the_nearest_layout():
    assert Parallel(ep=3).size_fault(4) == (
        "ep is 3: it does not divide dp_shard x cp, which is 4. The nearest layout that fits: sharding.dp_shard=4 "
        "sharding.ep=4."
    )
    assert Parallel(ep=2).size_fault(4) is Parallel(ep=2).experts_fault("mixtral", 8, 4) is None
    told = Parallel(ep=4).experts_fault("mixtral", 6, 4)
    assert told.startswith("ep is 4: it does not divide the 6 experts of a layer.")
    assert told.endswith("The nearest layout that fits: sharding.dp_shard=4 sharding.ep=2.")
    told = Parallel(ep=2, dp_replicate=2).experts_fault("gpt_oss", 32, 4)
    assert told.startswith("ep is 2: expert parallelism is not tested with gpt_oss, only with deepseek_v2, ")
    assert told.endswith("The nearest layout that fits: sharding.dp_replicate=2 sharding.dp_shard=2.")
    assert "a qwen2 has no experts" in Parallel(ep=2).experts_fault("qwen2", None, 2)
    assert Parallel().experts_fault("gpt_oss", 32, 4) is FSDP().experts_fault("qwen2", None, 4) is None
