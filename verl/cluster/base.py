"""The driver's view of roles: calls that return futures, wherever the roles live."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from verl.component import BuildContext
from verl.dispatch import dispatch_of
from verl.engines.sharding import Sharding


class HostDescription(Protocol):
    """What a process builds: its roles. Travels to other processes by pickle."""

    def worker_types(self) -> Mapping[str, type]: ...

    def shardings(self) -> Mapping[str, Sharding]: ...

    def build(self, context: BuildContext) -> Any: ...


class Cluster(Protocol):
    """A place where roles live.

    Attributes:
        world_size: processes that hold each role.
        shares_memory: the driver sees the roles' own tensors.
        step: the training step, for error messages; set by the driver.
    """

    world_size: int
    shares_memory: bool
    step: int | None

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]: ...

    def close(self) -> None: ...


class RoleHandle:
    """A role as the driver sees it: each of its methods, returning a future.

        log_probs = cluster_role.compute_log_probs(batch).result()

    Calls to one cluster are carried out in the order they were made.
    """

    def __init__(self, cluster: Cluster, role: str, worker_type: type):
        self._cluster, self._role, self._type = cluster, role, worker_type

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        dispatch_of(self._type, method)
        return lambda *args: self._cluster.submit(self._role, method, args)


def role_handles(cluster: Cluster, host: HostDescription) -> dict[str, RoleHandle]:
    """A handle for each role of a host."""
    return {role: RoleHandle(cluster, role, kind) for role, kind in host.worker_types().items()}


class Deadline:
    """A moment in the future, and how far it is."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())
