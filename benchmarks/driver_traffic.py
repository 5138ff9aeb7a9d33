"""Traffic of a GRPO step through the driver, counted.

python benchmarks/driver_traffic.py [--small]

Of one step of the built-in example with a reference, in one process and in two: calls to roles, bytes that leave the
driver and come back, bytes that it copies (rows taken out of a batch, batches joined), unions, and their checks. The
counts are the same on every machine, with --small too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from verl.component import BuildContext
from verl.protocol import DataProto, data_proto


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the same")
    parser.parse_args()
    counted = [counted_step(processes) for processes in (1, 2)]
    result: dict[str, Any] = {"counted": counted, "rows": []}
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
    print(json.dumps(result))


if __name__ == "__main__":
    from benchmarks.driver_traffic import main as imported_main  # so that the workers know its classes by name

    imported_main()
