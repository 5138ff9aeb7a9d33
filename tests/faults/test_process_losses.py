"""A sibling process that is lost at any stage of a step ends the run by name, and nothing is left running."""

import os
import signal

import pytest
from cluster.processes_of import wait_until_gone, workers_of
from same_training import course, newest
from trainer.runs import PPO_ALGORITHM, fit

from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.engines.sharding import DDP, Parallel
from verl.errors import WorkerDied, WorkerHung

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

CALLS = ["actor.compute_log_probs", "actor.generate", "reference.compute_log_probs", "critic.compute_values"]
CALLS += ["critic.update", "actor.update", "actor.sync", "actor.save_part"]
SHARED = {"sharding": DDP(timeout_s=60.0), "n_gpus_per_node": 2}


@pytest.fixture
def striking(monkeypatch):
    """Sends a signal to a worker, the last one unless another is named, in the midst of a call of a name in a step."""

    def strike(call: str, step: int, number: int, rank: int = -1):
        submit = LocalWorkerGroup.submit

        def submit_and_strike(cluster, role, method, args):
            future = submit(cluster, role, method, args)
            if f"{role}.{method}" == call and cluster.step == step:
                os.kill(cluster.pids[rank], number)
            return future

        monkeypatch.setattr(LocalWorkerGroup, "submit", submit_and_strike)

    return strike


@pytest.mark.parametrize(
    "call", [call if call == "critic.update" else pytest.param(call, marks=pytest.mark.exhaustive) for call in CALLS]
)
def test_a_worker_killed_in_any_stage_is_named_and_the_run_goes_on_from_its_checkpoint(
    call, striking, model32, tmp_path, monkeypatch
):
    striking(call, 2, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"rank 1 failed in [\w.]+ at step 2[\s\S]*SIGKILL"):
        fit(course(model32, tmp_path, PPO_ALGORITHM, **SHARED), tmp_path / "run")
    assert wait_until_gone(workers_of(os.getpid())) == []
    assert newest(tmp_path).step == 1
    monkeypatch.undo()
    if call == "critic.update":
        result = fit(course(model32, tmp_path, PPO_ALGORITHM, resume="latest", **SHARED), tmp_path / "again")
        assert result.status == "finished"


@pytest.mark.exhaustive
def test_a_worker_that_crashes_in_native_code_tells_where_it_was(striking, model32, tmp_path):
    striking("actor.update", 2, signal.SIGSEGV)
    told = r"rank 1 failed in [\w.]+ at step 2[\s\S]*SIGSEGV[\s\S]*Segmentation fault[\s\S]*File \S+ line \d+ in "
    with pytest.raises(WorkerDied, match=told):
        fit(course(model32, tmp_path, PPO_ALGORITHM, **SHARED), tmp_path / "run")
    assert wait_until_gone(workers_of(os.getpid())) == []


@pytest.mark.exhaustive
def test_a_worker_that_stops_in_a_step_is_named(striking, model32, tmp_path):
    striking("actor.update", 2, signal.SIGSTOP)
    shared = {**SHARED, "sharding": DDP(timeout_s=600.0, call_timeout_s=20.0)}
    with pytest.raises(WorkerHung, match=r"rank 1 failed in actor\.update at step 2[\s\S]*does not react at all"):
        fit(course(model32, tmp_path, PPO_ALGORITHM, **shared), tmp_path / "run")
    assert wait_until_gone(workers_of(os.getpid())) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("call", ["actor.generate", "actor.update", "critic.update", "actor.save_part"])
def test_a_pipeline_stage_that_is_killed_is_named(call, stage, striking, model32, tmp_path):
    striking(call, 2, signal.SIGKILL, stage)
    shared = {**SHARED, "sharding": Parallel(pp=2, timeout_s=60.0)}
    with pytest.raises(WorkerDied, match=rf"rank {stage} failed in [\w.]+ at step 2[\s\S]*SIGKILL"):
        fit(course(model32, tmp_path, PPO_ALGORITHM, **shared), tmp_path / "run")
    assert wait_until_gone(workers_of(os.getpid())) == []
    assert newest(tmp_path).step == 1
