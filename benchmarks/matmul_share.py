"""Fraction of the machine's matrix throughput that a GRPO step reaches, in decoding and update, and the other costs.

    python benchmarks/matmul_share.py

The rate that counts is that of the operations a step needs (2 per weight and token forward, 6 with backward), over the
rate of products of the sizes at hand by the faster of MKL and oneDNN, measured in turns with the step. `--products`
prints the rates of both for products of several sizes alone. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work
import grpo_step
import torch
from torch.profiler import profile

from verl.ops.cpu_matmul import active_library, use_library

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm"),
    "attention": ("_scaled_dot_product",),
    "copies and casts": (
        "copy_",
        "cat",
        "index_select",
        "index",
        "fill_",
        "zero_",
        "clone",
        "masked_scatter",
        "gather",
    ),
    "elementwise": (
        "mul",
        "add",
        "silu",
        "pow",
        "rsqrt",
        "neg",
        "div",
        "sub",
        "exp",
        "sum",
        "mean",
        "cos",
        "sin",
        "log",
    ),
}


def matmul_rates(rows: int, inner: int, columns: int, dtype: torch.dtype) -> dict[str, float]:
    """Operations per second of [rows, inner] x [inner, columns] by each library."""
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    linear, packed = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    ways: dict[str, Callable[[], Any]] = {
        "pytorch": lambda: torch.mm(x, weight.t()),
        "onednn": lambda: linear(x, weight, None, "none", [], ""),
        "onednn_packed": lambda: linear(x, packed, None, "none", [], ""),
    }
    best = dict.fromkeys(ways, 0.0)
    before = active_library()
    use_library("mkl")  # PyTorch as it comes
    for _ in range(5):  # in turns, on a machine whose speed changes
        for name, run in ways.items():
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < 0.02:
                run()
                count += 1
            best[name] = max(best[name], count * 2 * rows * inner * columns / (time.perf_counter() - start))
    use_library(before)
    return best


def matmul_rate(rows: int, width: int, dtype: torch.dtype) -> float:
    """Operations per second of [rows, width] x [width, 4 width] by the fastest way."""
    return max(matmul_rates(rows, width, 4 * width, dtype).values())


class OneStep:
    """Stands in for the conversation of `grpo_step`: warms up, measures steps and peaks in turns, profiles one step."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.step = options, 0
        self.steps: list[dict[str, float]] = []
        self.peaks: list[tuple[float, float]] = []
        self.dtype = torch.bfloat16 if options.bf16 else torch.float32
        self.profile: Any = None

    def tell(self, **facts: float) -> None:
        if "step_s" in facts and 1 < self.step <= self.options.steps + 1:
            self.steps.append(facts)
            rows = self.options.prompts * self.options.samples
            sizes = (rows, self.options.micro_batch_tokens)
            self.peaks.append(tuple(matmul_rate(size, self.options.hidden, self.dtype) for size in sizes))

    def wait(self) -> bool:
        self.step += 1
        if self.step == self.options.steps + 2:
            self.profile = profile()
            self.profile.__enter__()
        if self.step == self.options.steps + 3:
            self.profile.__exit__(None, None, None)
        return self.step < self.options.steps + 3


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Shares of the matrix rate, and of the time of a whole step by kind of operation."""
    with tempfile.TemporaryDirectory() as directory:
        weights = work.write_model(Path(directory), options.hidden, options.layers)
        run = OneStep(options)
        grpo_step.verl_side(argparse.Namespace(**{**vars(options), "model": directory, "engine": "hf"}), run)  # type: ignore[arg-type]
    drawn = options.prompts * options.samples * options.response
    packed = options.prompts * options.prompt_length + options.prompts * options.samples * (options.response - 1)
    decode, update = [], []
    for step, (narrow, wide) in zip(run.steps, run.peaks, strict=True):
        decode.append(2 * weights * (drawn + options.prompts * options.prompt_length) / step["generate_s"] / narrow)
        update.append(6 * weights * packed / step["update_s"] / wide)
    times: Counter[str] = Counter()
    for event in run.profile.key_averages():
        name = event.key.removeprefix("aten::")
        kind = next((kind for kind, names in KINDS.items() if name.startswith(names)), "other")
        times[kind] += event.self_cpu_time_total
    return {
        "parameters": weights,
        "matmul_gflops": [round(sum(side) / len(side) / 1e9) for side in zip(*run.peaks, strict=True)],
        "decode_share": work.spread(decode, 2),
        "update_share": work.spread(update, 2),
        "profile": {kind: round(t / sum(times.values()), 3) for kind, t in times.most_common()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="different prompts of a step (default 16)")
    parser.add_argument("--prompt-length", type=int, default=16, help="tokens of each (default 16)")
    parser.add_argument("--samples", type=int, default=8, help="responses to each (default 8)")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response (default 64)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="its depth (default 4)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--micro-batch-tokens", type=int, default=1280, help="tokens of a micro-batch (default 1280)")
    parser.add_argument("--products", action="store_true", help="rates of products alone, by both libraries")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.products:
        rates = {
            f"{rows}x{inner}x{columns}": {
                name: round(rate / 1e9) for name, rate in matmul_rates(rows, inner, columns, torch.float32).items()
            }
            for inner, columns in ((256, 256), (256, 1024), (1024, 256), (896, 4864), (2048, 2048))
            for rows in (1, 4, 16, 64, 256, 2048)
        }
        print(json.dumps({"benchmark": "matmul_products", "threads": options.threads, "gflops": rates}))
        return
    found = {}
    for name, bf16 in (("float32", False), ("bfloat16", True)):
        found[name] = measure(argparse.Namespace(**vars(options), lengths="fixed", bf16=bf16))
    rows = []
    for name, case in found.items():
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in case["profile"].items())
        rows.append(
            [
                f"share of the matrix rate in {name}: update, decode",
                f"{case['update_share'][0]:.0%} {case['update_share'][1]}, {case['decode_share'][0]:.0%} "
                f"{case['decode_share'][1]}",
                f"of {case['matmul_gflops'][1]} and {case['matmul_gflops'][0]} GFLOP/s; time of a step: {shares}",
            ]
        )
    print(json.dumps({"benchmark": "matmul_share", **vars(options), "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
