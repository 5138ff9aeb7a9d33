"""Ray on this machine for tests: started once for the whole group `ray`, small, without what tests do not need."""

import os
import signal

import pytest
from cluster.processes_of import wait_until_gone

from verl.cluster.ray.ray_init import RaySession, RaySettings
from verl.cluster.ray.ray_placement import RayPlacement
from verl.cluster.ray.ray_worker_group import RayWorkerGroup

SMALL = {"num_cpus": 0.5, "object_store_mib": 80, "start_timeout_s": 300.0}
_sessions: list[RaySession] = []


def small_session() -> RaySession:
    return RaySession(RaySettings(None, 4, 0, 80, 300.0))


def start() -> None:
    """Start Ray, unless it is up."""
    if not _sessions:
        _sessions.append(small_session())


def end() -> None:
    """End what `start` started."""
    while _sessions:
        _sessions.pop().close()


def placed(**options) -> RayPlacement:
    return RayPlacement(**{"max_restarts": 0, **SMALL, **options})


def all_gone(pids) -> bool:
    return wait_until_gone(pids, 30.0) == []


def kill_in(patch: pytest.MonkeyPatch, call: str, step: int, times: int = 1) -> list[int]:
    """Kill a worker in the midst of the first calls of a name in a step; returns the process ids of all workers, which
    come with the calls."""
    submit, left, pids = RayWorkerGroup.submit, [times], list[int]()

    def submit_and_kill(cluster, role, method, args):
        pids.extend(pid for pid in cluster.pids if pid not in pids)
        if f"{role}.{method}" == call and cluster.step == step and left[0]:
            left[0] -= 1
            os.kill(cluster.pids[-1], signal.SIGKILL)
        return submit(cluster, role, method, args)

    patch.setattr(RayWorkerGroup, "submit", submit_and_kill)
    return pids
