"""The environment variables that torchrun sets for each of its processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

STARTED_BY_IT = "TORCHELASTIC_RUN_ID"
_PLACES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
_MEETING = ("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@dataclass(frozen=True)
class TorchrunPlace:
    """One of the processes that torchrun has started on several hosts.

    Attributes:
        rank, world_size: its number among all of them, and how many they are.
        local_rank, local_size: likewise on its host.
        num_hosts: on which they are.
        store_host, store_port: of the key-value store of torchrun.
        hosts_store: torchrun itself serves the store; else the process of rank 0 has to.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    num_hosts: int
    store_host: str
    store_port: int
    hosts_store: bool = True


_joined: TorchrunPlace | None = None


def number() -> int:
    """Of this process among those that torchrun has started; 0 without it."""
    return int(os.environ["RANK"]) if STARTED_BY_IT in os.environ else 0


def counts() -> tuple[int, int]:
    """Processes that torchrun has started, and those of them on this machine; 1 and 1 without it."""
    if STARTED_BY_IT not in os.environ:
        return 1, 1
    return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])


def place() -> TorchrunPlace | None:
    """Of this process, where torchrun has started processes on several hosts; None otherwise."""
    count, here = counts()
    if count == here:
        return None
    return TorchrunPlace(
        rank=int(os.environ["RANK"]),
        world_size=count,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=here,
        num_hosts=int(os.environ["GROUP_WORLD_SIZE"]),
        store_host=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
        hosts_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True",
    )


def join_hosts(own: TorchrunPlace | None) -> None:
    """From now on the workers of this process, the driver, are on several hosts; None: on its own."""
    global _joined
    _joined = own


def joined_hosts() -> TorchrunPlace | None:
    """The place of this process, the driver, among those that torchrun has started on several hosts, if it has."""
    return _joined


def forget() -> None:
    """Let neither this process nor those that it starts take themselves for one of torchrun's."""
    if STARTED_BY_IT in os.environ:
        for name in (STARTED_BY_IT, *_PLACES, *_MEETING):
            os.environ.pop(name, None)
