"""`trainer.placement` for Ray: which cluster, which roles share a worker, and the resources of each worker."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from verl.cluster.local_worker_group import InlineWorkerGroup
from verl.cluster.placement import ROLES, ROLLOUT, DivisibleHost, Placement, RoleGroups, single_process_roles
from verl.cluster.rpc import WorkerGroup
from verl.component import BuildContext, component
from verl.engines.sharding import Sharding
from verl.errors import ConfigError, install_command

MAIN = "main"
LEAST_OBJECT_STORE_MIB = 75


@component
class RayPlacement(Placement):
    """Roles in Ray actors: a worker of a pool holds every role of the pool.

    Args:
        address: address of a Ray cluster, which keeps running after the run: `auto` for the cluster of this machine, or
            `HOST:PORT`. null starts one on this machine for the duration of the run.
        pools: pool -> roles that share its workers. Roles without a pool join the actor's; by default all roles share
            one pool. `rm` is a reward model; `rollout` has its own pool, with an engine in each worker.
        workers: number of workers of a pool; by default trainer.nnodes x trainer.n_gpus_per_node, and 1 for `rollout`.
        in_driver: roles that run in the driver's process.
        num_cpus: logical CPUs of each worker.
        num_gpus: GPUs of each worker; null for 1 if trainer.device is a GPU. Workers never share a GPU; roles of a pool
            do.
        strategy: strategy of Ray's placement groups: PACK puts the workers of a pool on as few machines as possible,
            SPREAD on as many; the STRICT_ variants fail otherwise.
        object_store_mib: shared memory for batches of a cluster started here; null for Ray's default.
        start_timeout_s: timeout for an answer of the cluster, and then for free resources.
        call_timeout_s: seconds without progress of any worker during a call, after which the run ends with the name of
            the hanging worker.
        max_restarts: restarts from the last checkpoint after a lost worker; 0 for none.
    """

    address: str | None = None
    pools: dict[str, tuple[str, ...]] = field(default_factory=dict)
    workers: dict[str, PositiveInt] = field(default_factory=dict)
    in_driver: tuple[str, ...] = ()
    num_cpus: NonNegativeFloat = 1.0
    num_gpus: PositiveInt | None = None
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    object_store_mib: Annotated[int, Field(ge=LEAST_OBJECT_STORE_MIB)] | None = None
    start_timeout_s: PositiveFloat = 120.0
    call_timeout_s: PositiveFloat = 1800.0
    max_restarts: NonNegativeInt = 2

    @property
    def spans_machines(self) -> bool:  # a Ray started for the run has only this machine
        return self.address is not None

    def machine_faults(self) -> Iterator[str]:
        if importlib.util.find_spec("ray") is None:
            yield f"address needs Ray, which is not installed. Run: {install_command('ray')}"

    def faults(self) -> Iterator[str]:
        named = [role for pool in self.pools.values() for role in pool] + list(self.in_driver)
        for role in dict.fromkeys(named):
            if role not in ROLES:
                yield f"pools names the role {role!r}: there are {', '.join(ROLES)}."
            elif named.count(role) > 1:
                yield f"pools names the role {role!r} {named.count(role)} times, in_driver counted: a role lives once."
        if ROLLOUT in self.in_driver:
            yield "in_driver has rollout: rollout workers generate while the driver works. Leave it out."
        known = [*(self.pools or [MAIN]), *([] if ROLLOUT in named else [ROLLOUT])]
        for pool in self.workers:
            if pool not in known and pool != MAIN:
                yield f"workers names the pool {pool!r}: there are {', '.join(known)}."
        if self.address is not None and self.address.startswith("ray://"):
            yield (
                f"address is {self.address!r}: a driver outside the cluster is not supported, for it shares no memory "
                "with it. Start the run on a machine of the cluster, with auto or HOST:PORT."
            )
        if self.address is not None and self.object_store_mib is not None:
            yield f"object_store_mib is {self.object_store_mib}: the cluster at address has its own. Set it to null."

    def faults_with(self, shardings: Mapping[str, Sharding], size: int) -> Iterator[str]:
        roles = tuple(shardings)
        for pool, members in self.groups(roles).items():
            count = self._pool_sizes(roles, size)[pool]
            field_name = f"workers.{pool}" if pool in self.workers else "pools"
            if ROLLOUT in members and len(members) > 1:
                yield (
                    f"pools: the pool {pool} has {', '.join(members)}: rollout workers generate while the others work. "
                    "Give it a pool of its own, or leave it out of pools."
                )
            if members != (ROLLOUT,) and count > 1 and (whole := single_process_roles(shardings, members)):
                yield (
                    f"{field_name}: the pool {pool} ({', '.join(whole)}) has {count} workers, and sharding=none is "
                    "for one. Set sharding=ddp, or one worker."
                )
        here = [role for role in roles if role in self.in_driver]
        if len(here) == len(roles):
            yield f"in_driver names {', '.join(here)}: no role is left for Ray. Set trainer=local, or leave one out."

    def preflight(self, context: BuildContext) -> Iterator[str]:
        if self.address is None:
            return
        from verl.cluster.ray.ray_init import RaySession, RaySettings

        try:
            RaySession(RaySettings(self.address, 0, 0, None, self.start_timeout_s)).close()
        except ConfigError as error:
            yield from (fault.removeprefix("trainer.placement.") for fault in error.faults)

    def holds_reward(self) -> bool:
        return "rm" not in self.in_driver

    def sizes(self, roles: Collection[str], size: int) -> dict[str, int]:
        workers, pools = self._pool_sizes(roles, size), self.groups(roles)
        in_pools = {role: workers[pool] for pool, members in pools.items() for role in members}
        return {role: in_pools.get(role, 1) for role in roles}

    def worker_groups(self, roles: Collection[str], size: int) -> list[tuple[tuple[str, ...], int]]:
        here = tuple(role for role in roles if role in self.in_driver)
        workers = self._pool_sizes(roles, size)
        pools = [(members, workers[name]) for name, members in self.groups(roles).items()]
        return [*pools, *([(here, 1)] if here else [])]

    def groups(self, roles: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Roles of a run by pool, without those in the driver."""
        home = next((name for name, members in self.pools.items() if "actor" in members), MAIN)
        where = {ROLLOUT: ROLLOUT} | {role: name for name, members in self.pools.items() for role in members}
        roles_by_group: dict[str, list[str]] = {}
        for role in roles:
            if role not in self.in_driver:
                roles_by_group.setdefault(where.get(role, home), []).append(role)
        return {name: tuple(members) for name, members in roles_by_group.items()}

    def _pool_sizes(self, roles: Collection[str], size: int) -> dict[str, int]:
        """Number of workers of each pool."""
        pools = self.groups(roles).items()
        return {name: self.workers.get(name, 1 if ROLLOUT in members else size) for name, members in pools}

    def start(self, host: DivisibleHost, context: BuildContext, size: int, max_threads: int) -> WorkerGroup:
        from verl.cluster.ray.ray_init import RaySession, RaySettings
        from verl.cluster.ray.ray_worker_group import RayRoleGroup, RayWorkerGroup

        roles = host.worker_types()
        pools, sizes = self.groups(roles), self._pool_sizes(roles, size)
        gpus = int(context.device.startswith("cuda")) if self.num_gpus is None else self.num_gpus
        total = sum(sizes.values())
        sharing = sum(count for name, count in sizes.items() if ROLLOUT not in pools[name])
        num_cpus, wait_s = self.num_cpus * total, self.start_timeout_s
        settings = RaySettings(self.address, num_cpus, gpus * total, self.object_store_mib, wait_s)
        built: list[tuple[Collection[str], WorkerGroup]] = []
        with ExitStack() as undo:
            for name, members in pools.items():
                threads = max(1, max_threads // (sizes[name] if ROLLOUT in members else sharing))
                group = RayRoleGroup(
                    name, sizes[name], self.num_cpus, gpus, threads, self.strategy, self.call_timeout_s
                )
                part = host.only(members, sizes[name])
                cluster = RayWorkerGroup(RaySession(settings), group, part, context)
                undo.callback(cluster.close)
                built.append((members, cluster))
            if here := tuple(role for role in roles if role in self.in_driver):
                # Ray does not count this use of the GPU
                worker_context = replace(context, shares_device=context.device.startswith("cuda"))
                built.append((here, InlineWorkerGroup(host.only(here, 1), worker_context)))
            undo.pop_all()
        return RoleGroups(built)
