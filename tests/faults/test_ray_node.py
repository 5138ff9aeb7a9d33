"""A run that started Ray starts it anew after a loss, and ends it."""

import os
import signal

import pytest
import ray
from cluster.ray_here import all_gone, placed
from same_training import course
from trainer.runs import fit

from verl.cluster.ray.ray_worker_group import RayWorkerGroup

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.exhaustive, pytest.mark.slow]


def test_a_run_that_started_ray_starts_it_anew_after_a_loss_and_ends_it(model32, tmp_path, monkeypatch):
    submit, pids = RayWorkerGroup.submit, []

    def submit_and_kill(cluster, role, method, args):
        if method == "update" and cluster.step == 2 and not pids:
            pids.extend(cluster.pids)
            os.kill(cluster.pids[0], signal.SIGKILL)
        return submit(cluster, role, method, args)

    monkeypatch.setattr(RayWorkerGroup, "submit", submit_and_kill)
    result = fit(course(model32, tmp_path, placement=placed(max_restarts=1)), tmp_path / "run")
    assert (result.status, len(result.restarts)) == ("finished", 1)
    assert not ray.is_initialized()
    assert all_gone(pids)
