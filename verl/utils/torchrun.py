"""The environment variables that torchrun sets for each of its processes."""

from __future__ import annotations

import os

STARTED_BY_IT = "TORCHELASTIC_RUN_ID"
_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
_MEETING = ("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def number() -> int:
    """Rank of this process among those that torchrun has started; 0 without it."""
    return int(os.environ["RANK"]) if STARTED_BY_IT in os.environ else 0


def counts() -> tuple[int, int]:
    """Processes that torchrun has started, and those of them on this machine; 1 and 1 without it."""
    if STARTED_BY_IT not in os.environ:
        return 1, 1
    return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])


def num_machines() -> int:
    """Machines on which torchrun has started processes, at least 2 where some are elsewhere; 1 without it."""
    if STARTED_BY_IT not in os.environ:
        return 1
    count, here = counts()
    return max(int(os.environ.get("GROUP_WORLD_SIZE", "1")), 2 if count > here else 1)


def forget() -> None:
    """Let neither this process nor those that it starts take themselves for one of torchrun's."""
    if STARTED_BY_IT in os.environ:
        for name in (STARTED_BY_IT, *_RANKS, *_MEETING):
            os.environ.pop(name, None)
