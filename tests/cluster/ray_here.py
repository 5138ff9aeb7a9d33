"""Ray on this machine for tests: started once for the whole group `ray`, small, without what tests do not need."""

from cluster.processes_of import wait_until_gone

from verl.cluster.ray.ray_init import RaySession, RaySettings
from verl.cluster.ray.ray_placement import RayPlacement

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
