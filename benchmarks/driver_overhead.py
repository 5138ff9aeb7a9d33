"""Cost of a call with a 64 MB batch in the driver: splitting, sending and joining, in multiples of one copy.

python benchmarks/driver_overhead.py [--small]

Two sibling processes, and two workers in Ray, answer with the rows that they were given. A copy is what copying the
same fields takes, from memory to memory that are both in use already. The sides take turns. A batch is divided for the
first call of a step, and the others ask about the same rows: so dividing stands by itself. The first rounds are left
out, in which memory is touched for the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch

from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import PendingCall, role_handles
from verl.component import BuildContext, Description, component
from verl.engines.sharding import DDP, Sharding
from verl.ops.batching import BatchPartition
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows

WORKERS = 2
PROMPT, RESPONSE = 512, 1024  # tokens
WARM_UP = 4  # rounds


class Echo:
    """Answers with what it was given, or with one number per row."""

    @by_rows
    def back(self, batch: DataProto) -> DataProto:
        return batch

    @by_rows
    def swallow(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"first": batch["responses"][:, 0].clone()})


@component
class EchoHost(Description):
    """A process with an echo."""

    def worker_types(self) -> dict[str, type]:
        return {"echo": Echo}

    def shardings(self) -> dict[str, Sharding]:
        return {"echo": DDP()}

    def build(self, context: BuildContext) -> EchoHost:
        return self

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(Echo(), method)(*args)

    def close(self) -> None:
        """Nothing to let go of."""


def experience(mib: int) -> DataProto:
    """What an actor is sent for its update: about so many MiB."""
    both = PROMPT + RESPONSE
    rows = mib * 2**20 // (3 * 8 * both + 8 * RESPONSE + RESPONSE + 4 * 4 * RESPONSE)
    lengths = torch.randint(both // 4, both + 1, (rows, 1))
    mask = (torch.arange(both) < lengths).long()
    tokens = torch.randint(0, 50_000, (rows, both))
    numbers = {
        name: torch.randn(rows, RESPONSE) for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "returns")
    }
    fields = {"input_ids": tokens, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    fields |= {"responses": tokens[:, PROMPT:].contiguous(), "response_mask": mask[:, PROMPT:].bool()}
    return DataProto.from_dict(fields | numbers)


def in_ray(mib: int) -> Any:
    """Two workers in Ray."""
    from verl.cluster.ray.ray_init import RaySession, RaySettings
    from verl.cluster.ray.ray_worker_group import RayRoleGroup, RayWorkerGroup

    group = RayRoleGroup("main", WORKERS, 1.0, 0, 1, "PACK", 600.0)
    session = RaySession(RaySettings(None, WORKERS, 0, max(80, 16 * mib), 120.0))
    return RayWorkerGroup(session, group, EchoHost(), BuildContext())


def in_processes(mib: int) -> Any:
    """Two sibling processes."""
    return LocalWorkerGroup(EchoHost(), BuildContext(), WORKERS, 1)


class Joining:
    """Notes how long answers take to be joined, while it is entered."""

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> Joining:
        self._before = before = PendingCall.result

        def timed(call: PendingCall, *args: Any) -> Any:
            start = time.perf_counter()
            result = before(call, *args)
            self.seconds = time.perf_counter() - start
            return result

        PendingCall.result = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        PendingCall.result = self._before  # type: ignore[method-assign]


def one_round(echo: Any, batch: DataProto, joining: Joining) -> dict[str, float]:
    """Seconds of the driver's own work for rows that go out and come back, and of the calls as a whole."""
    batch, faults = batch[:], resource.getrusage(resource.RUSAGE_SELF).ru_minflt  # the same rows, as of a new step
    start = time.perf_counter()
    BatchPartition(batch, WORKERS)
    dividing_s = time.perf_counter() - start
    start = time.perf_counter()
    echo.swallow(batch).result()
    out_s = time.perf_counter() - start
    start = time.perf_counter()
    future = echo.back(batch)
    sent_s = time.perf_counter() - start
    future.result()
    took_s = time.perf_counter() - start
    seconds = {"driver": sent_s + joining.seconds, "sent": sent_s, "joined": joining.seconds, "dividing": dividing_s}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return seconds | {"out": out_s, "out_and_back": took_s, "page_faults": faults}


def copying(batch: DataProto) -> Callable[[], float]:
    """A function that copies every field into memory in use, and says how long it took."""
    places = {name: tensor.clone() for name, tensor in batch.batch.items()}

    def copy() -> float:
        start = time.perf_counter()
        for name, tensor in batch.batch.items():
            places[name].copy_(tensor)
        return time.perf_counter() - start

    return copy


def spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {"median": median(values), "q1": low, "q3": high}


def measured(mib: int, rounds: int) -> tuple[list[float], dict[str, list[dict[str, float]]]]:
    """Seconds of a copy, and of a round of each side, by turns."""
    batch, copies, found = experience(mib), [], {"processes": [], "ray": []}
    copy = copying(batch)
    clusters = {}
    try:
        for name, start in (("processes", in_processes), ("ray", in_ray)):
            clusters[name] = start(mib)
        echoes = {name: role_handles(cluster, EchoHost())["echo"] for name, cluster in clusters.items()}
        with Joining() as joining:
            for _ in range(rounds + WARM_UP):
                copies.append(copy())
                for name, echo in echoes.items():
                    found[name].append(one_round(echo, batch, joining))
    finally:
        for cluster in clusters.values():
            cluster.close()
    return copies[WARM_UP:], {name: rounds[WARM_UP:] for name, rounds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="4 MB, to see that it works")
    small = parser.parse_args().small
    mib, rounds = (4, 3) if small else (64, 15)
    copies, found = measured(mib, rounds)
    copy_s = median(copies)
    result: dict[str, Any] = {"batch_mb": mib, "workers": WORKERS, "copy_s": spread(copies), "rows": []}
    for name, target, what in (("processes", 2, "sibling processes"), ("ray", 3, "Ray")):
        counts = [one.pop("page_faults") for one in found[name]]
        took = {key: spread([one[key] / copy_s for one in found[name]]) for key in found[name][0]}
        result[f"{name}_copies"], result[f"{name}_page_faults"] = took, spread(counts)
        result["rows"].append(
            [
                f"call of two workers ({what}) with {mib} MB of rows that come back: sending and joining in the "
                "driver, in copies at memory bandwidth",
                f"{took['driver']['median']:.1f}, and {took['dividing']['median']:.1f} once a step to divide the rows "
                f"(until sent and read {took['out']['median']:.1f}, until answered and joined "
                f"{took['out_and_back']['median']:.1f})",
                f"target: at most {target}",
            ]
        )
    print(json.dumps(result))


if __name__ == "__main__":
    from benchmarks.driver_overhead import main as imported_main  # so that the workers know its classes by name

    imported_main()
