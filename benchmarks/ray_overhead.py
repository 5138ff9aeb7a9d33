"""Driver overhead per call for a 64 MB batch: dividing, sending and joining, in copies of the batch.

python benchmarks/ray_overhead.py [--small]

Two workers in Ray actors, and two sibling processes, answer with the rows that they were given; a copy is what
`tensor.clone()` takes for the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch

from verl.cluster.base import role_handles
from verl.cluster.processes import Processes
from verl.description import BuildContext, Description
from verl.dispatch import by_rows
from verl.protocol import DataProto

WORKERS = 2


class Echo:
    """Answers with what it was given, or with one number per row."""

    @by_rows
    def back(self, batch: DataProto) -> DataProto:
        return batch

    @by_rows
    def swallow(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"first": batch["rows"][:, 0].clone()})


@dataclass(frozen=True, kw_only=True)
class EchoHost(Description):
    """A process with an echo."""

    def worker_types(self) -> dict[str, type]:
        return {"echo": Echo}

    def build(self, context: BuildContext) -> EchoHost:
        return self

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(Echo(), method)(*args)

    def close(self) -> None:
        """Nothing to let go of."""


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median of a few, after a first one."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)


def in_ray(mib: int) -> Any:
    from verl.cluster.ray import RayActors
    from verl.cluster.ray_crew import Group
    from verl.cluster.ray_session import Session, Wanted

    group = Group("main", WORKERS, 1.0, 0, 1, "PACK", 600.0, tuple(range(WORKERS)))
    session = Session(Wanted(None, WORKERS, 0, max(80, 16 * mib), 120.0))
    return RayActors(session, group, EchoHost(), BuildContext())


def in_processes(mib: int) -> Any:
    return Processes(EchoHost(), BuildContext(), WORKERS, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="1 MB, to see that it works")
    small = parser.parse_args().small
    mib, repeats = (1, 2) if small else (64, 9)
    batch = DataProto.from_dict({"rows": torch.randn(1024, mib * 256)})
    copy_s = seconds(lambda: batch["rows"].clone(), repeats)
    result: dict[str, Any] = {"batch_mb": mib, "workers": WORKERS, "copy_s": copy_s}
    for name, start in (("ray", in_ray), ("processes", in_processes)):
        cluster = start(mib)
        try:
            echo = role_handles(cluster, EchoHost())["echo"]
            out_s = seconds(lambda echo=echo: echo.swallow(batch).result(), repeats)
            both_s = seconds(lambda echo=echo: echo.back(batch).result(), repeats)
        finally:
            cluster.close()
        result[f"{name}_out_s"], result[f"{name}_out_and_back_s"] = out_s, both_s
        result[f"{name}_out_copies"] = out_s / copy_s
        result[f"{name}_out_and_back_copies"] = both_s / copy_s
    target = {"ray": 3, "processes": 2}
    result["rows"] = [
        [
            f"call of two workers with {mib} MB of rows, {name}: dividing and sending, in copies of the rows",
            f"{result[f'{name}_out_copies']:.1f} (with the rows sent back and joined "
            f"{result[f'{name}_out_and_back_copies']:.1f})",
            f"target: at most {target[name]}",
        ]
        for name in ("ray", "processes")
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    from benchmarks.ray_overhead import main as imported_main  # so that the workers know its classes by name

    imported_main()
