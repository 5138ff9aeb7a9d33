"""Seconds of a step as `verl plan --measure` gives them, beside those of the same run here.

    python benchmarks/plan_time.py

Three runs of a few steps: PPO and GRPO on the built-in model, and GRPO on a wider one. Prints one JSON line: the median
of the measured steps with quartiles, the first step left out, and the plan's seconds over that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work

ROOT = Path(__file__).resolve().parents[1]
GRPO = ["algorithm=grpo", "critic=none"]
WIDE = ["actor=tiny_scratch", "actor.model.hidden_size=512", "actor.model.intermediate_size=2048"]
WIDE += ["actor.model.num_layers=8", "rollout.max_new_tokens=24", "rollout.min_new_tokens=24"]
CASES = {  # overrides, tokens of a response
    "PPO, embedded model": ([], 4),
    "GRPO, embedded model": (GRPO, 4),
    "GRPO, 25M parameters": ([*GRPO, *WIDE, "trainer.prompts_per_step=32"], 24),
}
SHORT = ["trainer.eval_before=false", "trainer.eval_interval=0", "trainer.save_final=false", "tracker=[jsonl]"]


def verl(*words: str) -> str:
    """What a command prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    command = [sys.executable, "-m", "verl.cli", *words]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def measure(overrides: list[str], response: int, steps: int) -> dict[str, Any]:
    """The steps of a run, and its plan."""
    with tempfile.TemporaryDirectory() as directory:
        place = [f"hydra.run.dir={directory}/run", f"trainer.total_steps={steps}"]
        verl("ppo", "checkpoint=off", *place, *SHORT, *overrides)
        rows = [json.loads(line) for line in (Path(directory) / "run/metrics.jsonl").read_text().splitlines()]
    found = [row.get("metrics", row).get("timing/step_s") for row in rows]
    plan = json.loads(verl("plan", "--json", "--measure", "--response-tokens", str(response), *overrides))
    median, quartiles = work.spread([seconds for seconds in found if seconds is not None][1:])
    return {"step_s": [median, quartiles], "planned_s": plan["step_seconds"], "ratio": plan["step_seconds"] / median}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="of each run (default 9)")
    options = parser.parse_args()
    found = {name: measure(overrides, tokens, options.steps) for name, (overrides, tokens) in CASES.items()}
    rows = [
        [
            f"seconds of a step by `verl plan --measure`: {name}",
            f"{one['planned_s']:.3f} s, {one['ratio']:.2f}x of the measured step",
            f"measured: {one['step_s'][0]:.3f} {one['step_s'][1]} s; target: within 1.5x",
        ]
        for name, one in found.items()
    ]
    print(json.dumps({"benchmark": "plan_time", **vars(options), "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
