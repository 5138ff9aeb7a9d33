"""vLLM beside two processes: together they draw what our own loop draws in one, before and after an update."""

import dataclasses

import pytest
import torch
from rollout.engines import agreement, save_family
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.component import BuildContext
from verl.engines.sharding import DDP, FSDP, TP, Parallel
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout

pytestmark = pytest.mark.xdist_group("vllm")
ROLLOUT = VLLMRollout(max_new_tokens=8, kv_cache_gib=0.05, max_num_seqs=16, num_threads=1)


def drawn(model, directory, rollout=ROLLOUT, lora=None, **parts):
    """The responses of two steps, an update between them."""
    algorithm = dataclasses.replace(GRPO_ALGORITHM, mini_batches=1)
    run = ppo_run(model, algorithm, rollout=rollout, lr=1e-2, prompts_per_step=4, total_steps=4, **parts)
    run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=lora))
    with run.build(BuildContext(run_dir=directory)) as trainer:
        batches = [trainer.train_data.collate(trainer.sampler.next_batch()) for _ in range(2)]
        grouped = [batch.union(DataProto.from_dict({"group_ids": torch.arange(4)})) for batch in batches]
        first = trainer.sampling.generate(grouped[0], GenerationRequest(1, 2))
        metrics = trainer.step(batches[0], 1)
        return first, trainer.sampling.generate(grouped[1], GenerationRequest(2, 2)), metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """What one process draws with the very weights that it trains."""
    return drawn(model, tmp_path_factory.mktemp("one"), HFRollout(max_new_tokens=8))


def same_draws(expected, found) -> None:
    for rows, others in list(zip(expected, found, strict=False))[:2]:
        same, gap = agreement(rows, others)
        assert same == 1
        assert gap < 1e-3


def size_of(model) -> int:
    """Bytes of its weights."""
    return sum(p.nbytes for p in model.load_causal_lm("cpu").parameters())


ONE = {"tensor_parallel_size": 1}
HALVES, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CASES = {  # processes, sharding, workers of an engine, engines, traffic of a sync over the bytes of the model, about
    "fsdp": (2, FSDP(), ONE, 2, 1.0),  # each of two processes lacks a half, and has an engine
    "ddp": (2, DDP(), ONE, 2, None),
    "tp": (2, TP(), ONE, 1, 0.5),  # one engine, whose process lacks a half
    "tp, engine too": (2, TP(), HALVES, 1, 0.0),  # each worker takes what a process has already, but for some rows
    "pp": (2, Parallel(pp=2), ONE, 1, 0.5),  # one engine, fed by the first stage, which lacks the second
    "pp, engine of two": (2, Parallel(pp=2), HALVES, 1, None),  # each stage feeds a worker with slices of all layers
    "pp dp": (4, Parallel(pp=2, dp_replicate=2), ONE, 2, 1.0),
    "tp pp": (4, Parallel(tp=2, pp=2), ONE, 1, 0.75),
    "pp fsdp": (4, Parallel(pp=2, dp_shard=2), ONE, 2, 1.5),
    "pp cp": (4, Parallel(pp=2, cp=2), ONE, 1, 0.75),
    "fsdp, engines of two stages": (2, FSDP(), STAGES, 2, 1.0),  # each engine is fed whole tensors by its process
    "tp, engine of two stages": (2, TP(), STAGES, 1, 0.5),  # each lacks a half of a stage
    "pp, engine of two stages": (2, Parallel(pp=2), STAGES, 1, 0.0),  # each stage feeds its own
    "tp pp, engine too": (4, Parallel(tp=2, pp=2), HALVES | STAGES, 1, 0.0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", ["fsdp", *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES if case != "fsdp")]
)
def test_several_processes_and_their_engines_draw_as_one_does(case, model, alone, tmp_path):
    processes, sharding, workers, engines, traffic = CASES[case]
    rollout = dataclasses.replace(ROLLOUT, **workers)
    *found, metrics = drawn(model, tmp_path, rollout, sharding=sharding, n_gpus_per_node=processes)
    assert len(list((tmp_path / "workers").glob("vllm_*.log"))) == engines
    if traffic is not None:
        assert metrics["sync/traffic_mib"] * 2**20 == pytest.approx(traffic * size_of(model), abs=0.06 * size_of(model))
    same_draws(alone, found)
    assert metrics.get("sync/probe_gap_nats", 0.0) < 1e-4  # an engine alone is probed in its first sync
    assert metrics["sync/unproven_tensors"] == 0
    assert metrics["actor/loss"] == pytest.approx(alone[2]["actor/loss"], abs=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("processes", "sharding"),
    [(2, Parallel(ep=2)), (2, Parallel(pp=2)), (4, Parallel(ep=2)), (4, Parallel(ep=2, pp=2))],
    ids=["ep", "pp", "ep fsdp", "ep pp"],
)
def test_a_mixture_of_experts_reaches_its_engines_from_all_that_hold_a_part_of_it(processes, sharding, tmp_path):
    model = save_family(tmp_path / "model", "qwen3_moe")
    *expected, alone = drawn(model, tmp_path / "one", HFRollout(max_new_tokens=8))
    *found, metrics = drawn(model, tmp_path / "many", sharding=sharding, n_gpus_per_node=processes)
    same_draws(expected, found)
    assert metrics["sync/probe_gap_nats"] < 1e-4
    assert metrics["sync/traffic_mib"] > 0
    assert metrics["actor/loss"] == pytest.approx(alone["actor/loss"], abs=1e-4)
