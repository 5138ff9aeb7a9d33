"""Where roles live: the description of it, and several groups of roles behind one interface.

placement.start(host, context, size) ──> RoleGroups ── actor, reference ──> one group of workers
                                                    ── critic ───────────> another, on other devices
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from verl.cluster.base import Cluster, HostDescription
from verl.component import BuildContext, Description
from verl.engines.sharding import Sharding

ROLES = ("actor", "critic", "reference", "rm")


class DivisibleHost(HostDescription, Protocol):
    """A host of which some roles can live here and some there."""

    def only(self, roles: Collection[str], size: int) -> HostDescription: ...


@dataclass(frozen=True, kw_only=True)
class Placement(Description):
    """Base of what `trainer.placement` may be.

    Attributes:
        spans_machines: workers may be on other machines than the driver.
        max_restarts: of a run that lost a worker.
    """

    spans_machines: ClassVar[bool] = False
    max_restarts: ClassVar[int] = 0

    def faults_with(self, shardings: Mapping[str, Sharding], size: int) -> Iterator[str]:
        """Yield what is wrong between this and a run, opening with the field.

        Args:
            shardings: of ROLES, those that the run has, and how each is divided where it has several workers.
            size: workers that the run asks for.
        """
        yield from ()

    def sizes(self, roles: Collection[str], size: int) -> dict[str, int]:
        """Role -> processes that hold it."""
        raise NotImplementedError

    def holds_reward(self) -> bool:
        """Whether a reward model is a role `rm` of its own, and not the driver's."""
        return False

    def start(self, host: DivisibleHost, context: BuildContext, size: int, max_threads: int) -> Cluster:
        """Build the roles where they belong.

        Args:
            size: workers of a group for which nothing else is said.
            max_threads: that all workers on this machine may use together.
        """
        raise NotImplementedError


class RoleGroups:
    """Several clusters as one: each call goes to the one that holds the role.

    Args:
        groups: each with the roles that it holds.
    """

    shares_memory = False

    def __init__(self, groups: Iterable[tuple[Collection[str], Cluster]]):
        self._groups = list(groups)
        self._of: Mapping[str, Cluster] = {role: cluster for roles, cluster in self._groups for role in roles}
        self.world_size = max(cluster.world_size for _, cluster in self._groups)

    @property
    def step(self) -> int | None:
        return self._groups[0][1].step

    @step.setter
    def step(self, step: int | None) -> None:
        for _, cluster in self._groups:
            cluster.step = step

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        return self._of[role].submit(role, method, args)

    def close(self) -> None:
        """Close every group, even if another one fails to."""
        with ExitStack() as ending:
            for _, cluster in self._groups:
                ending.callback(cluster.close)


def undivided(shardings: Mapping[str, Sharding], roles: Collection[str]) -> list[str]:
    """Those of some roles that cannot have several workers."""
    return [role for role in roles if not shardings[role].needs_processes]
