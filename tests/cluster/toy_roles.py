"""Roles without a model, for tests of what carries calls to roles."""

import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.component import BuildContext, Description, component
from verl.engines.sharding import DDP, Sharding
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows, by_rows_to_one, on_all
from verl.utils.progress import report


class Toy:
    """A role that answers, fails or dies when it is told to."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    @by_rows
    def double(self, batch: DataProto) -> DataProto:
        """`doubled` [B] and the rank that did it."""
        ranks = torch.full((len(batch),), self.rank)
        return DataProto.from_dict({"doubled": 2 * batch["number"], "by_rank": ranks}, {"text": list(batch["text"])})

    @by_rows_to_one
    def count(self, batch: DataProto) -> dict[str, int]:
        return {"rows": len(batch), "rank": self.rank}

    @on_all
    def where(self) -> dict[str, int]:
        return {"pid": os.getpid(), "rank": self.rank, "threads": torch.get_num_threads()}

    @on_all
    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ZeroDivisionError(f"asked to fail on rank {rank}")
        self.sleep(600)

    @on_all
    def die_on(self, rank: int) -> None:
        """One rank dies, and its siblings fail for it, as in a collective operation; the driver hears of them first."""
        if self.rank != rank:
            raise ConnectionError("a sibling hung up")
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    @on_all
    def sleep(self, seconds: float, sign: str | None = None) -> None:
        """Sleep, once a file is there that tells of it."""
        if sign is not None:
            Path(sign).touch()
        time.sleep(seconds)

    @on_all
    def work(self, seconds: float) -> None:
        """Work for a while, a piece at a time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)
            report()

    @on_all
    def wait_for(self, rank: int, seconds: float) -> None:
        """One rank stops, and its siblings give it up after a while, as in a collective operation."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(seconds)
        raise ConnectionError("a sibling took too long")

    @on_all
    def exchange_without(self, rank: int, seconds: float) -> None:
        """All add a number over gloo, but one rank hangs elsewhere before; the others wait for it for so long."""
        where = os.environ["VERL_RENDEZVOUS"]
        dist.init_process_group("gloo", where, timedelta(seconds=60), self.world_size, self.rank)
        dist.all_reduce(torch.ones(1))
        if self.rank == rank:
            time.sleep(600)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
        dist.all_reduce(torch.ones(1))

    @by_rows
    def back(self, batch: DataProto) -> DataProto:
        """The rows in memory of its own, and which memory they were found in."""
        places = [batch["wide"].data_ptr()] * len(batch)
        return DataProto.from_dict({"wide": batch["wide"].clone()}, {"found_at": places})

    def unspoken(self) -> None:
        """Has no dispatch."""


@dataclass
class ToyPlace:
    """The roles of one process."""

    workers: dict[str, Any] = field(default_factory=dict)

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.workers[role], method)(*args)

    def close(self) -> None:
        self.workers.clear()


@component
class ToyHost(Description):
    """Builds one toy.

    Args:
        fails_on: this rank cannot build it.
        hangs_on: this rank never has it built.
        faulty: the rank that fails finds a fault of the configuration.
    """

    fails_on: int | None = None
    hangs_on: int | None = None
    faulty: bool = False

    def worker_types(self) -> dict[str, type]:
        return {"toy": Toy}

    def shardings(self) -> dict[str, Sharding]:
        return {"toy": DDP()}

    def build(self, context: BuildContext) -> ToyPlace:
        if context.rank == self.fails_on and self.faulty:
            raise ConfigError(["toy.size is 3: set it to 4.", "toy.kind is 'x': set it to 'y'."])
        if context.rank == self.fails_on:
            raise FileNotFoundError("weights are not where they should be")
        if context.rank == self.hangs_on:
            time.sleep(600)
        return ToyPlace({"toy": Toy(context.rank, context.world_size)})
