"""Cost of DataProto's checks: a union of ten fields always checked, the strict check of a whole batch, equal columns.

    python benchmarks/dataproto.py

Prints one JSON line. Times are medians with the quartiles as spread. The costs of a union, and the same union without
any check, are measured in turns within one run. The share of a step is measured in real PPO steps on the built-in model
with strict checks on: the time spent in them, over the time of the step. Targets: union below 50 us, strict below 2%.
A union of two batches that both have a column of 10^6 equal rows, none of the same object, is measured in turns with
`numpy.array_equal` of the two columns, which knows nothing of types, NaN or arrays in rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from verl.protocol import DataProto

TEN = [
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "log_probs",
    "entropies",
    "values",
    "token_level_scores",
    "token_level_rewards",
    "returns",
    "advantages",
]


def rollout(b: int, p: int, t: int) -> DataProto:
    """A rollout as an engine returns it, with prompts and responses of every length."""
    generator = torch.Generator().manual_seed(0)
    prompt_mask = torch.arange(p) >= torch.randint(0, p, (b, 1), generator=generator)
    response_mask = torch.arange(t) < torch.randint(1, t + 1, (b, 1), generator=generator)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    input_ids = torch.randint(1, 50, (b, p + t), generator=generator) * attention_mask
    tensors = {
        "prompts": input_ids[:, :p].contiguous(),
        "prompt_mask": prompt_mask,
        "prompt_ids": torch.arange(b) // 8,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "responses": input_ids[:, p:].contiguous(),
        "response_mask": response_mask,
        "group_ids": torch.arange(b) // 8,
        "sample_ids": torch.arange(b) % 8,
    }
    return DataProto.from_dict(tensors)


def ten_fields(mask: torch.Tensor) -> DataProto:
    """The ten per-token float fields, zero off the mask."""
    generator = torch.Generator().manual_seed(1)
    return DataProto.from_dict({name: torch.randn(mask.shape, generator=generator) * mask for name in TEN})


def measure(calls: dict[str, Callable[[], object]], rounds: int, inner: int) -> dict[str, list[float]]:
    """Microseconds per call, `rounds` samples each of `inner` calls, all calls taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(inner):
                call()
            samples[name].append((time.perf_counter() - start) / inner * 1e6)
    return samples


ROWS = {
    "texts": lambda row: f"row number {row}",
    "numbers": lambda row: row / 3,
    "messages": lambda row: {"role": "user", "content": f"row number {row}"},
}


def equal_columns(rows: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a union with an equal column of so many rows, and of NumPy's comparison, medians."""
    found = {}
    for name, row in ROWS.items():
        columns = [np.fromiter(map(row, range(rows)), dtype=object, count=rows) for _ in range(2)]
        left, right = (DataProto.from_dict(non_tensors={"column": column}) for column in columns)
        calls = {"union": partial(left.union, right), "numpy": partial(np.array_equal, *columns)}
        samples = measure(calls, rounds, 1)
        union, numpy = (statistics.median(samples[call]) / 1e3 for call in ("union", "numpy"))
        found[name] = union, numpy
    return found


def strict_shares(steps: int) -> list[float]:
    """The share of each of some PPO steps (384 responses, actor and critic) that goes into strict checks."""
    from verl.component import BuildContext
    from verl.compose.compose import compose_root
    from verl.compose.validate import validate
    from verl.protocol import data_proto

    spent = 0.0
    unwatched = data_proto.check_content

    def watched(*args: Any, **options: Any) -> None:
        nonlocal spent
        start = time.perf_counter()
        unwatched(*args, **options)
        spent += time.perf_counter() - start

    overrides = ["actor=tiny_scratch", "tracker=none", "++trainer.strict_data_check=true"]
    shares = []
    with tempfile.TemporaryDirectory() as directory:
        run = validate(compose_root("ppo", overrides))
        with run.build(BuildContext(run_dir=Path(directory))) as trainer:
            trainer.tracker.start("benchmark", {}, Path(directory), steps)
            data_proto.check_content = watched
            for step in range(1, steps + 3):
                batch = trainer.train_data.collate(trainer.sampler.next_batch())
                spent, start = 0.0, time.perf_counter()
                trainer.step(batch, step)
                shares.append(spent / (time.perf_counter() - start))
            data_proto.check_content = unwatched
    return shares[2:]  # the first steps warm up


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="samples of each cost (default 100)")
    parser.add_argument("--inner", type=int, default=20, help="calls per sample (default 20)")
    parser.add_argument("--steps", type=int, default=7, help="PPO steps for the share of strict checks (default 7)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    base = rollout(384, 16, 8)
    ten = ten_fields(base["response_mask"])
    whole = base.union(ten)
    left, right = dict(base.batch), dict(ten.batch)
    calls = {
        "union": lambda: base.union(ten),
        "union_unchecked": lambda: {**left, **right},
        "check": whole.check,
        "strict": lambda: whole.check(strict=True),
    }
    measure(calls, 5, options.inner)
    result: dict[str, object] = {
        "benchmark": "dataproto",
        "batch_rows": 384,
        "prompt": 16,
        "response": 8,
        "fields": len(whole.batch),
    }
    for name, samples in measure(calls, options.rounds, options.inner).items():
        low, median, high = statistics.quantiles(samples, n=4)
        result |= {f"{name}_us": round(median, 2), f"{name}_spread_us": [round(low, 2), round(high, 2)]}
    result["union_target_us"] = 50
    low, share, high = statistics.quantiles(strict_shares(options.steps), n=4)
    result |= {"strict_share_of_step": round(share, 5), "strict_share_spread": [round(low, 5), round(high, 5)]}
    columns = equal_columns(10**6, 7)
    result["equal_columns_ms"] = {name: [round(x, 1) for x in pair] for name, pair in columns.items()}
    union, spread = result["union_us"], result["union_spread_us"]
    result["rows"] = [
        ["checked union of ten fields, 384 rows", f"{union} us {spread}", "target: below 50 us"],
        ["strict data checks in a PPO step", f"{share:.2%} [{low:.2%}, {high:.2%}] of the step", "target: below 2%"],
        *(
            [f"union with 10^6 equal {name}", f"{union:.0f} ms", f"numpy.array_equal: {numpy:.0f} ms"]
            for name, (union, numpy) in columns.items()
        ),
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
