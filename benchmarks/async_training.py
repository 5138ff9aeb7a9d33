"""Asynchronous training against the best synchronous setting, and against what `verl plan --async` predicts.

    python benchmarks/async_training.py              GRPO on the built-in model, ten minutes; --small for a look
    python benchmarks/async_training.py --tools      the same with episodes whose tool takes half a second, five minutes

Runs with `rollout=hf`, one after another in each round: synchronous with all threads, and `max_staleness` 0, 1 and 2
with half of the threads for each side. The prediction is made from the metrics of `max_staleness=0`. Prints one JSON
line: responses per second and mean staleness of each setting, medians with quartiles over the rounds, without the steps
in which the queue fills. With --tools: synchronous, and `max_staleness=2` with `weight_update=drain` and `in_flight`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _workload as work
import numpy as np
from _progress import Progress

from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.trainer.plan.async_plan import AsyncTimes, Lengths, plan_async

ROOT = Path(__file__).resolve().parents[1]
GRPO = ["algorithm=grpo", "critic=none"]
SHORT = ["trainer.eval_before=false", "trainer.eval_interval=0", "trainer.save_final=false", "tracker=[jsonl]"]
MEAN, LONGEST = "rollout/response_length_tokens", "rollout/response_length_max_tokens"

BOUNDS = (0, 1, 2)


def setting(bound: int | None, threads: int) -> list[str]:
    """Overrides of a run; None for the synchronous one, which has all threads in each phase."""
    if bound is None:
        return [f"trainer.num_threads={threads}"]
    per_side = max(1, threads // 2)  # S above 0 divides them by itself, where they are all cores
    return ["trainer.mode=async", f"trainer.max_staleness={bound}", f"trainer.num_threads={per_side}"]


def run(directory: Path, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of each step of a run."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    words = ["ppo", "checkpoint=off", f"hydra.run.dir={directory}", *SHORT, *overrides]
    subprocess.run([sys.executable, "-m", "verl.cli", *words], env=environment, check=True, capture_output=True)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [metrics for line in lines if "timing/step_s" in (metrics := line.get("metrics", line))]


def summary(steps: list[dict[str, float]]) -> tuple[float, float]:
    """Responses per second, and the mean staleness in syncs."""
    lags = [sum(lag * step.get(f"async/lag_{lag}_share", 0.0) for lag in range(3)) for step in steps]
    rate = sum(step["perf/samples"] for step in steps) / sum(step["timing/step_s"] for step in steps)
    return rate, statistics.mean(lags)


def one_round(options: argparse.Namespace, overrides: list[str], progress: Progress) -> dict[str, Any]:
    """Each setting once, with what is predicted for it."""
    results: dict[str, Any] = {}
    in_turn: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        for bound in (None, *BOUNDS):
            name = "sync" if bound is None else f"S={bound}"
            progress.say(name)
            steps = run(Path(directory) / name, [*overrides, *setting(bound, options.threads)])
            results[name] = dict(zip(("samples_per_s", "staleness"), summary(steps[4:]), strict=True))
            if bound == 0:
                in_turn = steps
    description = validate(compose_root("ppo", [*overrides, *setting(2, options.threads)]))
    for predicted in plan_async(description, *recorded(in_turn)).settings:
        if predicted.max_staleness in BOUNDS:
            result = results[f"S={predicted.max_staleness}"]
            result["predicted_ratio"] = predicted.samples_per_s / result["samples_per_s"]
            result["predicted_staleness"] = predicted.staleness
    return results


def recorded(steps: list[dict[str, float]]) -> tuple[AsyncTimes, Lengths]:
    """Seconds and lengths of a run with `max_staleness=0`, whose devices are divided equally and sync at once: a batch
    takes a seconds per token of its longest response and b per token of all, by least squares."""
    rows = round(steps[0]["perf/samples"])
    names = (MEAN, LONGEST, "perf/tokens", "timing/gen_s", "timing/sync_s", "timing/step_s")
    mean, longest, tokens, generate_s, sync_s, step_s = (np.array([x[name] for x in steps[1:]]) for name in names)
    by_step, by_token = np.linalg.lstsq(np.stack([longest, tokens], 1), generate_s, rcond=None)[0]
    if by_step < 0 or by_token < 0:  # lengths that hardly vary cannot separate the two
        by_step, by_token = generate_s.sum() / longest.sum(), 0.0
    sync = float(sync_s.mean())

    def lengths(chance: random.Random) -> list[float]:
        """With mean and maximum of a recorded step, as powers of uniform numbers."""
        index = chance.randrange(len(mean))
        average = max(1.0, (mean[index] * rows - longest[index]) / max(1, rows - 1))
        power = max(0.0, longest[index] / average - 1)
        return [longest[index], *(longest[index] * chance.random() ** power for _ in range(rows - 1))]

    times = AsyncTimes(
        token_s=lambda count: by_step + by_token * count,
        slots=rows,
        train_s=float((step_s - generate_s).mean()) - sync,
        sync_s=sync,
    )
    return times, lengths


SLOW_TOOLS = [
    "experiment=calculator_grpo",
    "environment={_target_: _slow_calculator.SlowCalculator, max_tokens: 64, max_concurrent: 512}",
    "trainer.eval_without_tools=false",
    "trainer.prompts_per_step=16",
    "trainer.group_size=4",
]
TOOL_SETTINGS = {
    "sync": [],
    "S=2, drain": ["trainer.mode=async", "trainer.max_staleness=2"],
    "S=2, in flight": ["trainer.mode=async", "trainer.max_staleness=2", "rollout.weight_update=in_flight"],
}


def round_with_tools(options: argparse.Namespace, sizes: list[str], progress: Progress) -> dict[str, Any]:
    """Each setting once, with episodes whose tool takes half a second."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, words in TOOL_SETTINGS.items():
            progress.say(name)
            behaviour = ["algorithm.proximal=behaviour"] if words else [f"trainer.num_threads={options.threads}"]
            steps = run(Path(directory) / name.replace(", ", "_"), [*SLOW_TOOLS, *sizes, *behaviour, *words])
            results[name] = dict(zip(("samples_per_s", "staleness"), summary(steps[4:]), strict=True))
    return results


def rows_with_tools(results: dict[str, Any]) -> list[list[str]]:
    best = results["sync"]["samples_per_s"][0]
    return [
        [
            f"GRPO of episodes whose tool takes 0.5 s, 16 x 4 episodes a step, {name}, `rollout=hf`, embedded model",
            f"{result['samples_per_s'][0]} {result['samples_per_s'][1]} episodes/s",
            f"{result['samples_per_s'][0] / best:.2f}x the synchronous run; target: 2x",
        ]
        for name, result in results.items()
        if name != "sync"
    ]


def table_rows(results: dict[str, Any]) -> list[list[str]]:
    best = results["sync"]["samples_per_s"][0]
    rows = []
    for name, result in results.items():
        if name == "sync":
            continue
        (rate, spread), (ratio, _), (lag, _) = (
            result[key] for key in ("samples_per_s", "predicted_ratio", "staleness")
        )
        rows.append(
            [
                f"GRPO, `trainer.mode=async`, {name}, `rollout=hf`, embedded model, half of the threads for each side",
                f"{rate} {spread} responses/s, {rate / best:.2f}x the synchronous run ({best}); mean age {lag} syncs",
                f"`verl plan --async`: {ratio:.2f}x, age {result['predicted_staleness'][0]}; target: within 15%, 0.2",
            ]
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short runs of small batches: to see that it works")
    parser.add_argument("--steps", type=int, default=24, help="of each run (default 24)")
    parser.add_argument("--rounds", type=int, default=3, help="of all settings (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2, help="of a run (default: all cores)")
    parser.add_argument("--tokens", type=int, default=16, help="longest response (default 16)")
    parser.add_argument("--budget-s", type=float, default=1500, help="after which rounds are left out (default 1500)")
    parser.add_argument("--tools", action="store_true", help="episodes whose tool takes half a second")
    options = parser.parse_args()
    sizes = [f"trainer.total_steps={options.steps}", f"rollout.max_new_tokens={options.tokens}"]
    if options.small:
        options.steps, options.rounds = 8, 1
        sizes = ["actor=tiny_scratch", "trainer.total_steps=8", "trainer.prompts_per_step=4"]
        sizes += ["rollout.max_new_tokens=8"]
    if options.tools:
        progress = Progress("async_tools", dict(vars(options)), options.budget_s)
        sizes = [f"trainer.total_steps={options.steps}"]
        rounds = [round_with_tools(options, sizes, progress) for _ in progress.rounds("rounds", options.rounds)]
        results = {
            name: {key: work.spread([each[name][key] for each in rounds], 3) for key in rounds[0][name]}
            for name in rounds[0]
        }
        progress.publish(results, rows_with_tools(results), is_complete=True)
        return
    overrides = [*GRPO, "rollout=hf", "algorithm.proximal=behaviour", *sizes]
    progress = Progress("async_training", dict(vars(options)), options.budget_s)
    rounds = [one_round(options, overrides, progress) for _ in progress.rounds("rounds", options.rounds)]
    rounds = rounds if options.small else rounds[1:]
    results = {
        name: {key: work.spread([each[name][key] for each in rounds], 3) for key in rounds[0][name]}
        for name in rounds[0]
    }
    progress.publish(results, table_rows(results), is_complete=True)


if __name__ == "__main__":
    main()
