"""Roles on different devices of this machine, a process for each device of a role.

DeviceMesh(devices=["cuda:0", "cuda:1"], sub_meshes={"critic": ["cuda:1"], "rm": ["cuda:1"]})

cuda:0 ── actor, reference          cuda:1 ── critic, rm
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from verl.cluster.base import Cluster
from verl.cluster.placement import ROLES, DivisibleHost, Placement, RoleGroups, undivided
from verl.cluster.processes import Processes
from verl.component import BuildContext
from verl.engines.sharding import Sharding
from verl.utils.env_check import num_cores


@dataclass(frozen=True, kw_only=True)
class DeviceMesh(Placement):
    """Devices of this machine, and which roles live on which.

    A role that no sub-mesh names lives on the devices that no sub-mesh names, or on all if each is named. Roles on the
    same devices share their processes; a device may be in several sub-meshes.

    Args:
        devices: `cuda:N`, or `cpu:N` for a process that keeps to the N-th core that this one may use.
        sub_meshes: role (actor, critic, reference, rm) -> some of the devices. On several of them the role is sharded.
    """

    devices: tuple[str, ...]
    sub_meshes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def faults(self) -> Iterator[str]:
        if not self.devices:
            yield "devices is empty: name at least one, such as cuda:0 or cpu:0."
        for name in self.devices:
            if not re.fullmatch(r"(cpu|cuda):\d+", name):
                yield f"devices has {name!r}: expected cuda:N or cpu:N."
        for path, names in {
            "devices": self.devices,
            **{f"sub_meshes.{k}": v for k, v in self.sub_meshes.items()},
        }.items():
            if twice := sorted({name for name in names if names.count(name) > 1}):
                yield f"{path} has {', '.join(twice)} twice: a role has one process on a device."
        for role, names in self.sub_meshes.items():
            if role not in ROLES:
                yield f"sub_meshes has {role!r}: there are the roles {', '.join(ROLES)}."
            if not names:
                yield f"sub_meshes.{role} is empty: name at least one of {', '.join(self.devices)}, or leave it out."
            if unknown := [name for name in names if name not in self.devices]:
                yield f"sub_meshes.{role} has {', '.join(unknown)}: devices has {', '.join(self.devices)}."
            if len({name.split(":")[0] for name in names}) > 1:
                yield f"sub_meshes.{role} is {', '.join(names)}: the devices of a role are of one kind."

    def faults_with(self, shardings: Mapping[str, Sharding], size: int) -> Iterator[str]:
        for kind, there in (("cpu", num_cores()), ("cuda", _num_gpus(self.devices))):
            missing = [name for name in self.devices if name.startswith(kind) and int(name.split(":")[1]) >= there]
            if missing:
                what = "cores" if kind == "cpu" else "GPUs"
                yield f"devices has {', '.join(missing)}: this machine has {there} {what}, numbered from 0."
        if size != 1:
            yield f"devices: the mesh says how many processes there are. Set trainer.n_gpus_per_node=1, not {size}."
        for devices, members in self.groups(shardings).items():
            if len(devices) > 1 and (whole := undivided(shardings, members)):
                yield (
                    f"sub_meshes puts {', '.join(whole)} on {', '.join(devices)}: sharding=none is for one device. "
                    "Set sharding=ddp, or give each role one device."
                )

    def holds_reward(self) -> bool:
        return True

    def sizes(self, roles: Collection[str], size: int) -> dict[str, int]:
        return {role: len(devices) for devices, members in self.groups(roles).items() for role in members}

    def groups(self, roles: Collection[str]) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Devices -> the roles that live on just these."""
        taken = {name for role, names in self.sub_meshes.items() if role in roles for name in names}
        free = tuple(name for name in self.devices if name not in taken) or self.devices
        found: dict[tuple[str, ...], list[str]] = {}
        for role in roles:
            found.setdefault(self.sub_meshes.get(role, free), []).append(role)
        return {devices: tuple(members) for devices, members in found.items()}

    def start(self, host: DivisibleHost, context: BuildContext, size: int, max_threads: int) -> Cluster:
        groups = self.groups(host.worker_types())
        threads = max(1, max_threads // sum(map(len, groups)))
        built: list[tuple[Collection[str], Cluster]] = []
        with ExitStack() as undo:
            for devices, members in groups.items():
                count, part = len(devices), host.only(members, len(devices))
                is_pinned = devices[0].startswith("cpu")
                cluster = Processes(
                    part,
                    context,
                    count,
                    num_threads=1 if is_pinned else threads,
                    devices=devices,
                    name="_".join(members),
                    call_timeout_s=min(sharding.call_timeout_s for sharding in part.shardings().values()),
                )
                undo.callback(cluster.close)
                built.append((members, cluster))
            undo.pop_all()
        return RoleGroups(built)


def _num_gpus(devices: Collection[str]) -> int:
    if not any(name.startswith("cuda") for name in devices):
        return 0
    import torch

    return torch.cuda.device_count()
