"""Whether roles that pass batches to each other live on the same processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """The processes of a role.

    Attributes:
        ranks: their numbers among all processes, in order.
        backend: of their collective operations, or `none` for a process alone.
    """

    ranks: tuple[int, ...] = (0,)
    backend: str = "none"

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        size = len(self.ranks)
        return f"{size} process{'es' if size > 1 else ''} [{listed}] over {self.backend}"


def check_process_groups(roles: Mapping[str, Any] | None = None, **named: Any) -> Group:
    """Compare the processes of roles; a batch divided over one set of processes cannot be joined over another.

        check_process_groups(actor=actor, critic=critic)

    Args:
        roles, named: by name, a group of torch.distributed, anything that has one as `process_group`, or None for a
            role that lives in one process.
    Returns:
        The group that all of them share.
    Raises:
        ConfigError: size, ranks or backend differ, or this process is not in a role's group.
    """
    given = {**(roles or {}), **named}
    if not given:
        raise ConfigError("roles is empty: give at least one role by its name, such as actor=actor.")
    groups = {name: group_of(name, role) for name, role in given.items()}
    first, wanted = next(iter(groups.items()))
    others = {name: group for name, group in groups.items() if group != wanted}
    if others:
        raise ConfigError(
            [
                f"{name} has {group}, {first} has {wanted}, so rows that one divides the other cannot join: other "
                f"{_difference(group, wanted)}. Make both in the same group."
                for name, group in others.items()
            ]
        )
    return wanted


def group_of(name: str, role: Any) -> Group:
    """The processes of a role; see `check_process_groups`."""
    import torch.distributed as dist

    group = getattr(role, "process_group", role) if not isinstance(role, dist.ProcessGroup) else role
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"{name}: this process, rank {dist.get_rank()}, is not in its group. Ask those that are.")
    if isinstance(group, Group):
        return group
    if not isinstance(group, dist.ProcessGroup):
        return Group()
    return Group(tuple(dist.get_process_group_ranks(group)), dist.get_backend(group))


def _difference(one: Group, other: Group) -> str:
    found = [
        name
        for name, differs in (
            ("size", len(one.ranks) != len(other.ranks)),
            ("ranks", one.ranks != other.ranks),
            ("backend", one.backend != other.backend),
        )
        if differs
    ]
    return " and ".join(found)
