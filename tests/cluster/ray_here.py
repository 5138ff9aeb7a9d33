"""Ray on this machine for the tests of a module: started once, small, and without what tests do not need."""

from __future__ import annotations

import pytest
from cluster.processes_of import wait_until_gone

from verl.cluster.ray.ray_init import RaySession, RaySettings
from verl.cluster.ray.ray_placement import RayPlacement

SMALL = {"num_cpus": 0.5, "object_store_mib": 80, "start_timeout_s": 60.0}


def small_session() -> RaySession:
    return RaySession(RaySettings(None, 4, 0, 80, 60.0))


@pytest.fixture(scope="module")
def ray_here():
    """Keeps Ray up between the tests of a module."""
    session = small_session()
    yield session
    session.close()


def placed(**options) -> RayPlacement:
    return RayPlacement(**{"max_restarts": 0, **SMALL, **options})


def all_gone(pids) -> bool:
    return wait_until_gone(pids, 30.0) == []
