"""Placement of roles: its configuration, role groups behind one interface, and a device mesh on this machine.

placement.start(roles, context, size) ──> RoleGroups ── actor, reference ──> one group of workers
                                                     ── critic ───────────> another, on other devices

DeviceMesh(devices=["cuda:0", "cuda:1"], sub_meshes={"critic": ["cuda:1"], "rm": ["cuda:2"]})
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import ColocatedRoles, WorkerGroup
from verl.component import BuildContext, Description, component
from verl.engines.sharding import Sharding
from verl.errors import ConfigError
from verl.utils.env_check import num_cores

ROLLOUT = "rollout"  # generates while other roles work, so it has its own processes
ROLES = ("actor", "critic", "reference", "rm", ROLLOUT)


class DivisibleHost(ColocatedRoles, Protocol):
    """A host whose roles can be split over groups of processes."""

    def only(self, roles: Collection[str], size: int) -> ColocatedRoles: ...


@component
class Placement(Description):
    """Base class of `trainer.placement`.

    Attributes:
        max_restarts: maximum number of restarts of a run that lost a worker.
    """

    max_restarts = 0  # a subclass may have a field of this name

    @property
    def spans_machines(self) -> bool:
        """Whether workers may be on other machines than the driver."""
        return False

    def faults_with(self, shardings: Mapping[str, Sharding], size: int) -> Iterator[str]:
        """Yield the faults of this placement with a run, each beginning with the field.

        Args:
            shardings: sharding of each role of the run.
            size: number of workers of the run.
        """
        yield from ()

    def sizes(self, roles: Collection[str], size: int) -> dict[str, int]:
        """Number of processes of each role."""
        raise NotImplementedError

    def worker_groups(self, roles: Collection[str], size: int) -> list[tuple[tuple[str, ...], int]]:
        """Groups of roles that share processes, with the number of processes."""
        sizes = self.sizes(roles, size)
        return [(tuple(sizes), max(sizes.values()))] if sizes else []

    def apart(self, roles: Collection[str], size: int) -> int:
        """Number of devices that hold only rollout workers."""
        return self.sizes(roles, size).get(ROLLOUT, 0)

    def holds_reward(self) -> bool:
        """Whether the reward model is a separate role `rm`, not part of the driver."""
        return False

    def start(self, host: DivisibleHost, context: BuildContext, size: int, max_threads: int) -> WorkerGroup:
        """Start the groups of workers and build their roles.

        Args:
            size: default number of workers of a group.
            max_threads: total torch threads of the workers of this machine; rollout workers get as many again.
        """
        raise NotImplementedError


class RoleGroups:
    """Several worker groups behind one interface: each call goes to the group that holds the role.

    Args:
        groups: each with its roles.
    """

    shares_memory = False

    def __init__(self, groups: Iterable[tuple[Collection[str], WorkerGroup]]):
        self.groups = list(groups)
        self.group_of: Mapping[str, WorkerGroup] = {role: cluster for roles, cluster in self.groups for role in roles}
        self.world_size = max(cluster.world_size for _, cluster in self.groups)

    @property
    def step(self) -> int | None:
        return self.groups[0][1].step

    @step.setter
    def step(self, step: int | None) -> None:
        for _, cluster in self.groups:
            cluster.step = step

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        return self.group_of[role].submit(role, method, args)

    def close(self) -> None:
        """Close all groups, even if one of them raises."""
        with ExitStack() as ending:
            for _, cluster in self.groups:
                ending.callback(cluster.close)


def single_process_roles(shardings: Mapping[str, Sharding], roles: Collection[str]) -> list[str]:
    """The given roles that cannot have several workers."""
    return [role for role in roles if not shardings[role].needs_processes]


@component
class DeviceMesh(Placement):
    """Devices of this machine, and the roles on each.

    A role without a sub-mesh uses the `devices` that are in no sub-mesh, or all of them if none is left. Roles on the
    same devices share their processes; a device may be in several sub-meshes.

    Args:
        devices: `cuda:N`, or `cpu:N` for a process that is bound to the N-th core that this process may use.
        sub_meshes: role (actor, critic, reference, rm, rollout) -> its devices, from `devices` or others. With several
            devices the role is sharded; `rollout` has an engine on each, by default one on the first free device.
    """

    devices: tuple[str, ...]
    sub_meshes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def faults(self) -> Iterator[str]:
        if not self.devices:
            yield "devices is empty: name at least one, such as cuda:0 or cpu:0."
        for path, names in self._paths().items():
            for name in names:
                if not re.fullmatch(r"(cpu|cuda):\d+", name):
                    yield f"{path} has {name!r}: expected cuda:N or cpu:N."
            if twice := sorted({name for name in names if names.count(name) > 1}):
                yield f"{path} has {', '.join(twice)} twice: a role has one process on a device."
        for role, names in self.sub_meshes.items():
            if role not in ROLES:
                yield f"sub_meshes has {role!r}: there are the roles {', '.join(ROLES)}."
            if not names:
                yield f"sub_meshes.{role} is empty: name at least one device, such as cuda:0, or leave it out."
            if len({name.split(":")[0] for name in names}) > 1:
                yield f"sub_meshes.{role} is {', '.join(names)}: the devices of a role are of one kind."

    def machine_faults(self) -> Iterator[str]:
        there = {"cpu": num_cores(), "cuda": num_gpus_of(self.all_devices)}
        for path, names in self._paths().items():
            for kind, what in (("cpu", "cores"), ("cuda", "GPUs")):
                if missing := [x for x in names if x.startswith(kind) and int(x.split(":")[1]) >= there[kind]]:
                    yield f"{path} has {', '.join(missing)}: this machine has {there[kind]} {what}, numbered from 0."

    def faults_with(self, shardings: Mapping[str, Sharding], size: int) -> Iterator[str]:
        if size != 1:
            yield f"devices: the mesh says how many processes there are. Set trainer.n_gpus_per_node=1, not {size}."
        for devices, members in self.groups(shardings):
            if members != (ROLLOUT,) and len(devices) > 1 and (whole := single_process_roles(shardings, members)):
                yield (
                    f"sub_meshes puts {', '.join(whole)} on {', '.join(devices)}: sharding=none is for one device. "
                    "Set sharding=ddp, or give each role one device."
                )

    def _paths(self) -> dict[str, tuple[str, ...]]:
        """Every list of devices, by its field."""
        return {"devices": self.devices, **{f"sub_meshes.{role}": names for role, names in self.sub_meshes.items()}}

    @property
    def all_devices(self) -> tuple[str, ...]:
        """All devices: `devices` and those of the sub-meshes."""
        return tuple(dict.fromkeys([*self.devices, *(x for names in self.sub_meshes.values() for x in names)]))

    def holds_reward(self) -> bool:
        return True

    def sizes(self, roles: Collection[str], size: int) -> dict[str, int]:
        return {role: len(devices) for devices, members in self.groups(roles) for role in members}

    def worker_groups(self, roles: Collection[str], size: int) -> list[tuple[tuple[str, ...], int]]:
        return [(members, len(devices)) for devices, members in self.groups(roles)]

    def apart(self, roles: Collection[str], size: int) -> int:
        groups = self.groups(roles)
        others = {name for devices, members in groups if members != (ROLLOUT,) for name in devices}
        return sum(name not in others for devices, members in groups if members == (ROLLOUT,) for name in devices)

    def groups(self, roles: Collection[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Sets of devices, each with the roles that share processes on it."""
        taken = {name for role, names in self.sub_meshes.items() if role in roles for name in names}
        free = tuple(name for name in self.devices if name not in taken) or self.devices
        roles_by_devices: dict[tuple[str, ...], list[str]] = {}
        for role in roles:
            if role != ROLLOUT:
                roles_by_devices.setdefault(self.sub_meshes.get(role, free), []).append(role)
        alone = [(self.sub_meshes.get(ROLLOUT, free[:1]), (ROLLOUT,))] if ROLLOUT in roles else []
        return [*((devices, tuple(members)) for devices, members in roles_by_devices.items()), *alone]

    def start(self, host: DivisibleHost, context: BuildContext, size: int, max_threads: int) -> WorkerGroup:
        groups = self.groups(host.worker_types())
        uses = Counter(name for devices, _ in groups for name in devices)
        threads = max(1, max_threads // sum(len(devices) for devices, members in groups if ROLLOUT not in members))
        built: list[tuple[Collection[str], WorkerGroup]] = []
        with ExitStack() as undo:
            for devices, members in groups:
                count, part = len(devices), host.only(members, len(devices))
                is_pinned = devices[0].startswith("cpu")
                allowed = max(1, max_threads // len(devices)) if ROLLOUT in members else threads
                cluster = LocalWorkerGroup(
                    part,
                    replace(context, shares_device=any(uses[name] > 1 for name in devices)),
                    count,
                    num_threads=1 if is_pinned else allowed,
                    devices=devices,
                    name="_".join(members),
                    call_timeout_s=min(sharding.call_timeout_s for sharding in part.shardings().values()),
                )
                undo.callback(cluster.close)
                built.append((members, cluster))
            undo.pop_all()
        return RoleGroups(built)


def num_gpus_of(devices: Collection[str]) -> int:
    """Number of GPUs that this process sees; 0 if none of the devices is a GPU."""
    if not any(name.startswith("cuda") for name in devices):
        return 0
    import torch

    return torch.cuda.device_count()


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a role.

    Attributes:
        ranks: global ranks, in order.
        backend: backend of collective operations, or `none` for a single process.
    """

    ranks: tuple[int, ...] = (0,)
    backend: str = "none"

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        size = len(self.ranks)
        return f"{size} process{'es' if size > 1 else ''} [{listed}] over {self.backend}"


def check_process_groups(roles: Mapping[str, Any] | None = None, **named: Any) -> ProcessGroup:
    """Check that roles have the same processes; a batch divided over one set cannot be joined over another.

        check_process_groups(actor=actor, critic=critic)

    Args:
        roles, named: by name, a torch.distributed group, an object with one as `process_group`, or None for a role in a
            single process.
    Returns: The group that all roles share.
    Raises:
        ConfigError: size, ranks or backend differ, or this process is not in a role's group.
    """
    by_role = {**(roles or {}), **named}
    if not by_role:
        raise ConfigError("roles is empty: give at least one role by its name, such as actor=actor.")
    groups = {name: group_of(name, role) for name, role in by_role.items()}
    first, expected = next(iter(groups.items()))
    others = {name: group for name, group in groups.items() if group != expected}
    if others:
        raise ConfigError(
            [
                f"{name} has {group}, {first} has {expected}, so rows that one divides the other cannot join. Make "
                "both in the same group."
                for name, group in others.items()
            ]
        )
    return expected


def group_of(name: str, role: Any) -> ProcessGroup:
    """The processes of a role; see `check_process_groups`."""
    import torch.distributed as dist

    group = getattr(role, "process_group", role) if not isinstance(role, dist.ProcessGroup) else role
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"{name}: this process, rank {dist.get_rank()}, is not in its group. Ask those that are.")
    if isinstance(group, ProcessGroup):
        return group
    if not isinstance(group, dist.ProcessGroup):
        return ProcessGroup()
    return ProcessGroup(tuple(dist.get_process_group_ranks(group)), dist.get_backend(group))
