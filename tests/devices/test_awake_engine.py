"""An engine that keeps its GPU memory while the trainer works is counted, and what does not fit is told; and the limit
of the probe by the types of both sides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import exhaustive
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.cluster.local_worker_group import InlineWorkerGroup
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.errors import WeightSyncError
from verl.rollout import hf
from verl.rollout.hf import HFRollout
from verl.rollout.proof.probe import ALLOWED_NATS
from verl.rollout.proof.verifier import SyncVerifier, VerifyReply
from verl.rollout.vllm.gpu_memory import CONTEXT_BYTES, NCCL_BYTES
from verl.trainer import build
from verl.trainer.plan import run_plan
from verl.trainer.plan.memory import memory_plan
from verl.trainer.plan.run_plan import log_plan
from verl.trainer.plan.workload import device_named
from verl.utils import memory

CORRECTION = "algorithm.correction.level=token"
AHEAD = ("trainer.mode=async", CORRECTION)
SLEEPLESS, SLEEPS = ("rollout.sleep=false",), ("rollout.sleep=true",)


def run_of(*choices):
    sizes = ["actor=tiny_scratch", "critic=none", "algorithm=grpo", "rollout=vllm", "rollout.kv_cache_gib=2"]
    return validate(compose_root("ppo", [*sizes, *choices]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, *exhaustive(1)], ids=["two GPUs", "one GPU"])
def test_a_sleeping_engine_keeps_its_context_and_communicators_in_every_phase_but_its_own(workers):
    fsdp = ("sharding=fsdp", "trainer.n_gpus_per_node=2", *SLEEPS, f"rollout.tensor_parallel_size={workers}")
    phases = {phase.name: phase.parts for phase in memory_plan(run_of(*fsdp), device_named("h100")).phases}
    kept = CONTEXT_BYTES + (workers - 1) * NCCL_BYTES
    others = phases.keys() - {"generate"}
    assert {"rest", "score", "update actor", "sync"} <= others
    assert {phases[name]["sleeping engine"] for name in others} == {kept}
    assert phases["generate"]["engine working"] > kept
    assert "sleeping engine" not in phases["generate"]
    for kind in ("cpu", "h100"):
        alone = memory_plan(replace(run_of(), rollout=HFRollout(max_new_tokens=16)), device_named(kind))
        assert not any("sleeping engine" in phase.parts for phase in alone.phases)
    assert not any("sleeping engine" in p.parts for p in memory_plan(run_of(*SLEEPLESS), device_named("h100")).phases)


@pytest.mark.parametrize("choices", [SLEEPLESS, *exhaustive(AHEAD)], ids=["sleepless", "ahead"])
def test_an_engine_that_never_rests_is_in_every_phase(choices):
    h100 = device_named("h100")
    resting, awake = (memory_plan(run_of(*own), h100) for own in (SLEEPS, choices))
    assert not resting.stays_awake
    assert awake.stays_awake
    engine = {"engine weights", "keys and values"}
    for plan, others in ((resting, False), (awake, True)):
        phases = {phase.name: engine <= phase.parts.keys() for phase in plan.phases}
        assert phases["generate"]
        assert phases["score"] is phases["update actor"] is phases["rest"] is others
    assert resting.trainer_bytes < awake.trainer_bytes  # the most that a phase takes, not what rests
    assert not memory_plan(run_of(*choices), device_named("cpu")).stays_awake


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(("gib", "sleeps"), [(40, False), (3.3, True)])
def test_by_default_it_sleeps_only_where_it_does_not_fit_beside_the_trainer(gib, sleeps, monkeypatch, tmp_path):
    monkeypatch.setattr(run_plan, "free_memory", lambda device, processes: int(gib * 2**30))
    monkeypatch.setattr(run_plan, "device_here", lambda device: device_named("h100"))
    run = run_of()
    plan = log_plan(run, BuildContext(device="cuda:0", run_dir=tmp_path), tmp_path)
    assert plan.memory.stays_awake is not sleeps
    assert plan.decided(run).rollout == replace(run.rollout, sleep=sleeps)
    assert plan.memory.engine_cache == 2 << 30
    monkeypatch.undo()
    on_cpu = log_plan(run, BuildContext(device="cpu", run_dir=tmp_path), tmp_path)
    assert on_cpu.decided(run).rollout.sleep is True


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(("gib", "sleeps"), [(40, False), (0.7, True)])
def test_hf_keeps_its_keys_and_graphs_through_a_step_where_they_fit_beside_the_trainer(gib, sleeps):
    run = replace(run_of(), rollout=HFRollout(max_new_tokens=16))
    plan = run_plan.plan_run(run, device_named("h100"), limit=int(gib * 2**30))
    assert plan.decided(run).rollout.sleep is sleeps
    kept = [phase.parts.get("keys and values", 0) for phase in plan.memory.phases]
    assert len(kept) > 2
    assert (min(kept) > 0) is not sleeps
    on_cpu = replace(run, rollout=HFRollout(max_new_tokens=16, sleep=False))
    assert not memory_plan(on_cpu, device_named("cpu")).stays_awake


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_process_whose_engine_stays_awake_keeps_what_torch_has_allocated(is_kept, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    memory.keep_cached(is_kept)
    try:
        memory.release_cached("cuda:0")
        assert calls == [] if is_kept else ["emptied"]
        memory.release_cached("cuda:0", always=True)
        assert calls[-1:] == ["emptied"]
    finally:
        memory.keep_cached(False)


@pytest.mark.parametrize("is_kept", [True, False])
def test_hf_that_keeps_its_keys_keeps_what_torch_has_allocated_unless_others_share_the_device(is_kept, monkeypatch):
    kept = []
    monkeypatch.setattr(hf, "keep_cached", kept.append)
    monkeypatch.setattr(hf, "compute_device", lambda model: torch.device("cuda:0"))
    monkeypatch.setattr(hf, "HFEngine", lambda *_: None)
    for sleep, shares in ((not is_kept, False), (False, not is_kept)):
        HFRollout(sleep=sleep).attach(None, None, 0, None, BuildContext(shares_device=shares))
    assert kept == [is_kept, is_kept]


class Started(Exception):
    pass


def test_a_rollout_worker_that_is_placed_nowhere_shares_the_device_with_the_actor(model32, tmp_path, monkeypatch):
    shares = []

    def start(*given, **_):
        shares.extend(part.shares_device for part in given if isinstance(part, BuildContext))
        if len(shares) == 2:
            raise Started
        return InlineWorkerGroup(*given)

    monkeypatch.setattr(build, "LocalWorkerGroup", start)
    monkeypatch.setattr(build, "start_cluster", lambda host, settings, context: start(host, context))
    run = ppo_run(model32, replace(GRPO_ALGORITHM, proximal="behaviour"), mode="async", max_staleness=1)
    with pytest.raises(Started):
        run.build(BuildContext(run_dir=tmp_path))
    assert shares == [True, True]


@pytest.mark.slow
def test_where_it_does_not_fit_the_start_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(run_plan, "free_memory", lambda device, processes: 4 << 30)
    monkeypatch.setattr(run_plan, "device_here", lambda device: device_named("h100"))
    log_plan(run_of(*SLEEPLESS), BuildContext(device="cuda:0", run_dir=tmp_path), tmp_path)
    (told,) = caplog.messages
    assert "4.3 GiB needed, 4.0 free: rollout.kv_cache_gib=1" in told


@pytest.mark.parametrize(("own", "allowed"), [("float32", 1e-3), ("tf32", 5e-2), ("bfloat16", 3e-1)])
def test_the_probe_allows_what_the_coarser_type_of_both_sides_rounds_away(own, allowed):
    assert ALLOWED_NATS[own] == allowed

    def proven(gap):
        verifier = SyncVerifier(torch.nn.Module(), torch.float32, ((1, 2),), lambda rows: np.zeros((1, 4)), own)
        verifier.question()
        return verifier.verify(VerifyReply({}, np.full((1, 4), gap)))

    assert proven(0.9 * allowed)["sync/probe_gap_nats"] == pytest.approx(0.9 * allowed)
    with pytest.raises(WeightSyncError):
        proven(1.1 * allowed)
