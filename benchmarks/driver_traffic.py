"""Traffic of a GRPO step through the driver, counted, and the time that rows kept on the workers would save.

python benchmarks/driver_traffic.py [--small] [--count-only]

Counted, of one step of the built-in example with a reference, in one process and in two: calls to roles, bytes that
leave the driver and come back, bytes that it copies (rows taken out of a batch, batches joined), unions, and what those
check. The counts are the same on every machine.

Timed, at 1, 2 and 4 processes, with rows of 64 MB: the sends of a step as they are (sequences for old log-probs, again
for the reference, all fields of the rows of each mini-batch), against the sends if rows stayed where they were scored
(sequences once, then the new columns of each mini-batch). Workers answer with a number per row; the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.protocol import DataProto, data_proto

SEQUENCES = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
MINI_BATCHES = 4
WARM_UP = 3  # rounds


def num_bytes(batch: DataProto) -> int:
    return sum(tensor.nbytes for tensor in batch.batch.values())


class Traffic:
    """Counts while it is entered, in this process.

    Attributes:
        counts: by what is counted.
        calls: by role and method.
        types: of the roles' workers.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.types: dict[str, type] = {}

    @contextmanager
    def counting(self, cluster: Any = None) -> Iterator[Traffic]:
        kept = [(DataProto, "_take"), (DataProto, "concat"), (DataProto, "union")]
        kept += [(data_proto, "check_tensor"), (data_proto, "check_content")]
        before = [(owner, name, vars(owner)[name]) for owner, name in kept]
        self._wrap(DataProto, "_take", lambda args, out: {"copied_bytes": num_bytes(out)})
        self._wrap(DataProto, "union", lambda args, out: {"unions": 1})
        self._wrap(data_proto, "check_tensor", lambda args, out: {"fields_checked": 1})
        self._wrap(data_proto, "check_content", lambda args, out: {"content_checks": 1})
        joined = DataProto.concat

        def concat(parts: Any, *args: Any, **kwargs: Any) -> DataProto:
            parts = list(parts)
            whole = joined(parts, *args, **kwargs)
            self.counts["copied_bytes"] += num_bytes(whole) if sum(map(bool, map(len, parts))) > 1 else 0
            return whole

        DataProto.concat = staticmethod(concat)  # type: ignore[method-assign]
        submit = None if cluster is None else cluster.submit
        if cluster is not None:
            cluster.submit = lambda role, method, args: self._submitted(submit, cluster, role, method, args)
        try:
            yield self
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            if cluster is not None:
                del cluster.submit

    def _wrap(self, owner: Any, name: str, told: Callable[[tuple, Any], dict[str, int]]) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            self.counts.update(told(args, out))
            return out

        setattr(owner, name, counted)

    def _submitted(self, submit: Any, cluster: Any, role: str, method: str, args: tuple[Any, ...]) -> Any:
        from verl.protocol.dispatch import dispatch_of

        self.calls[f"{role}.{method}"] += 1
        self.counts["calls"] += 1
        batches = [arg for arg in args if isinstance(arg, DataProto)]
        divides = dispatch_of(self.types[role], method).splits_rows if role in self.types else True
        times = 1 if divides else cluster.world_size
        if not cluster.shares_memory:
            self.counts["sent_bytes"] += times * sum(map(num_bytes, batches))
            self.counts["copied_bytes"] += times * sum(map(num_bytes, batches))
        future = submit(role, method, args)
        if not cluster.shares_memory:
            future.add_done_callback(self._answered)
        return future

    def _answered(self, future: Any) -> None:
        if future.exception() is None and isinstance(answer := future.result(), DataProto):
            self.counts["returned_bytes"] += num_bytes(answer)


def counted_step(processes: int) -> dict[str, Any]:
    """The second step of a run of GRPO with two updates a step and a reference."""
    from verl.compose.compose import compose_root
    from verl.compose.validate import validate

    options = ["actor=tiny_scratch", "algorithm=grpo", "tracker=none", "checkpoint=off", "++algorithm.mini_batches=2"]
    options += ["++trainer.prompts_per_step=16", "++trainer.group_size=4", "++trainer.total_steps=3"]
    options += ["++trainer.device=cpu", "++trainer.num_threads=1", "++trainer.strict_data_check=true"]
    options += ["sharding=ddp", f"++trainer.n_gpus_per_node={processes}"] if processes > 1 else []
    run, traffic = validate(compose_root("ppo", options)), Traffic()
    with tempfile.TemporaryDirectory() as directory, run.build(BuildContext(run_dir=Path(directory))) as trainer:
        trainer.tracker.start("benchmark", {}, Path(directory), 3)
        trainer.step(trainer.train_data.collate(trainer.sampler.next_batch()), 1)
        traffic.types = {role: handle._type for role, handle in vars(trainer).items() if hasattr(handle, "_type")}
        rewards = Counter[str]()
        score = trainer.reward.score_tokens

        def rewarded(*args: Any) -> DataProto:
            rewards["rewarded"] += 1
            return score(*args)

        object.__setattr__(trainer.reward, "score_tokens", rewarded)
        with traffic.counting(trainer.cluster):
            batch = trainer.train_data.collate(trainer.sampler.next_batch())
            trainer.step(batch, 2)
    return {"processes": processes, **traffic.counts, **rewards, "calls_by_method": dict(traffic.calls)}


def timed(mib: int, processes: int, rounds: int) -> dict[str, float]:
    """Seconds of the sends of a step, as they are and with rows that stay; medians, and bytes of both."""
    from benchmarks.driver_overhead import EchoHost, experience

    whole = experience(mib)
    whole = whole.union(DataProto.from_dict({"advantages": torch.randn(whole["responses"].shape)}))
    sequences = whole.select(SEQUENCES, [])
    new = whole.select(["advantages", "returns"], [])
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    cluster = LocalWorkerGroup(EchoHost(), BuildContext(), processes, 1)
    try:
        echo = role_handles(cluster, EchoHost())["echo"]

        def sends(columns: DataProto, scoring: int) -> float:
            start = time.perf_counter()
            for _ in range(scoring):
                echo.swallow(sequences).result()
            for rows in order.tensor_split(MINI_BATCHES):
                echo.swallow(columns[rows]).result()
            return time.perf_counter() - start

        new = new.union(sequences.select(["responses"], []))  # what `swallow` reads; left out of the bytes below
        found: dict[str, list[float]] = {"now": [], "resident": []}
        for _ in range(rounds + WARM_UP):
            found["now"].append(sends(whole, scoring=2))
            found["resident"].append(sends(new, scoring=1))
    finally:
        cluster.close()
    now, resident = (median(found[name][WARM_UP:]) for name in ("now", "resident"))
    once, columns = num_bytes(sequences), num_bytes(whole.select(["advantages", "returns"], []))
    return {
        "processes": processes,
        "now_s": now,
        "resident_s": resident,
        "now_mb": (2 * once + num_bytes(whole)) / 1e6,
        "resident_mb": (once + columns) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="4 MB and few rounds, to see that it works")
    parser.add_argument("--count-only", action="store_true", help="leave the timing out")
    options = parser.parse_args()
    mib, rounds = (4, 3) if options.small else (64, 15)
    counted = [counted_step(processes) for processes in (1, 2)]
    result: dict[str, Any] = {"batch_mb": mib, "counted": counted, "rows": []}
    for one in counted:
        sent, back, copied = (one.get(f"{name}_bytes", 0) / 1e3 for name in ("sent", "returned", "copied"))
        result["rows"].append(
            [
                f"GRPO step of 64 rows, {one['processes']} process(es): calls; kB sent, returned, copied by the driver",
                f"{one['calls']}; {sent:.1f}, {back:.1f}, {copied:.1f}; {one['unions']} unions with "
                f"{one['content_checks']} content checks; rewards asked {one['rewarded']} time(s)",
                "counts",
            ]
        )
    if not options.count_only:
        result["timed"] = [timed(mib, processes, rounds) for processes in (1, 2, 4)]
        for one in result["timed"]:
            saved = one["now_s"] - one["resident_s"]
            result["rows"].append(
                [
                    f"{mib} MB of rows resident on {one['processes']} process(es) from score to update: sends",
                    f"{1e3 * one['now_s']:.0f} ms ({one['now_mb']:.0f} MB) now, {1e3 * one['resident_s']:.0f} ms "
                    f"({one['resident_mb']:.0f} MB) resident: {1e3 * saved:.0f} ms a step less",
                    "measured, not built",
                ]
            )
    print(json.dumps(result))


if __name__ == "__main__":
    from benchmarks.driver_traffic import main as imported_main  # so that the workers know its classes by name

    imported_main()
