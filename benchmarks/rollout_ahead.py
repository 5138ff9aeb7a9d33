"""`trainer.mode=async` against `sync` with `rollout=vllm`: seconds per step, and how far behind the samples are.

    python benchmarks/rollout_ahead.py               two minutes; --small for a look

Two trainers on the same work take turns step by step: 16 prompts x 8 responses of long-tailed lengths, GRPO, importance
weights on in both. Prints one JSON line: seconds per step, response tokens per second, and the importance weights of
the responses that were trained on, medians with quartiles.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work
import torch
from _progress import Progress
from grpo_step import Side, shared_arguments, take_turns

CASE = {"lengths": "longtail", "prompt_length": 64, "micro": 2048}
SIDES = {"verl_0": "vllm", "verl_1": "ahead"}
WEIGHTS = ("weight_mean", "weight_max", "effective_share", "cut_share")


def summary(side: Side) -> dict[str, Any]:
    """Of the measured steps of one side."""
    seconds, tokens = side.column("step_s"), side.column("tokens")
    found: dict[str, Any] = {key: work.spread(side.column(key)) for key in ("step_s", "generate_s", "update_s")}
    found["tokens_per_s"] = work.spread([t / s for t, s in zip(tokens, seconds, strict=True)], 0)
    found |= {key: work.spread(side.column(f"importance/{key}"), 5) for key in WEIGHTS}
    return found | {"peak_mib": round(side.peak_mib)}


def measure(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Both sides, step by step in turn."""
    with tempfile.TemporaryDirectory() as directory:
        parameters = work.write_model(Path(directory), options.hidden, options.layers)
        shared, sides = shared_arguments(CASE, options), []
        for name, engine in SIDES.items():
            progress.say(f"starting {name}")
            sides.append(Side(name, directory, [*shared, "--engine", engine]))
        take_turns(sides, progress.rounds("steps", options.steps))
    found: dict[str, Any] = {"parameters": parameters, "steps": len(sides[0].steps) - 1}
    found |= {side.name.removeprefix("verl_"): summary(side) for side in sides}
    here, ahead = (side.column("step_s") for side in sides)
    return found | {"times": work.spread([a / b for a, b in zip(here, ahead, strict=True)], 2)}


def table_row(found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    (ahead_s, ahead_spread), (here_s, _) = found["1"]["step_s"], found["0"]["step_s"]
    (rate, _), (times, spread) = found["1"]["tokens_per_s"], found["times"]
    share, other = found["1"]["effective_share"][0], found["0"]["effective_share"][0]
    return [
        f"GRPO step with `trainer.mode=async`, `rollout=vllm`, {options.prompts} prompts x {options.samples}, "
        f"long-tailed lengths, {found['parameters'] / 1e6:.1f}M parameters, {options.threads} threads each",
        f"{ahead_s} {ahead_spread} s, {rate:.0f} tokens/s; effective share of the samples {share:.4f}",
        f"{times}x {spread} as fast as `mode=sync` ({here_s} s; effective share {other:.4f})",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one tiny model, few steps: to see that it works")
    parser.add_argument("--prompts", type=int, default=16, help="different prompts of a step (default 16)")
    parser.add_argument("--samples", type=int, default=8, help="responses to each (default 8)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="its depth (default 4)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each side (default 12)")
    parser.add_argument("--threads", type=int, default=2, help="of trainer and engine, each (default 2)")
    parser.add_argument("--budget-s", type=float, default=360, help="after which steps are left out (default 360)")
    options = parser.parse_args()
    if options.small:
        options.prompts, options.samples, options.hidden, options.layers, options.steps = 2, 4, 128, 2, 3
    settings = dict(vars(options))
    options.response, options.micro_batch_tokens = 64, 0  # of other cases of grpo_step
    torch.set_num_threads(options.threads)
    progress = Progress("rollout_ahead", settings, options.budget_s)
    found = measure(options, progress)
    progress.publish(found, [table_row(found, options)], is_complete=True)


if __name__ == "__main__":
    main()
