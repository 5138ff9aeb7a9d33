"""Train the embedded model by SFT and then PPO, and show that it learned.

Runs the two entry points as anyone would, and writes what came of it to outputs/quickstart/summary.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, directory: Path, *overrides: str) -> dict:
    """Run an entry point into a directory and return its summary."""
    command = [script, f"hydra.run.dir={directory}", *overrides]
    print(f"\n$ python {' '.join(command)}", flush=True)
    status = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
    if status != 0:
        sys.exit(status)
    return json.loads((ROOT / directory / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="replaced if it exists")
    parser.add_argument("overrides", nargs="*", help="overrides for main_ppo.py, such as algorithm=grpo")
    args = parser.parse_args()
    shutil.rmtree(ROOT / args.out, ignore_errors=True)
    sft = run("main_sft.py", args.out / "sft", "trainer.experiment_name=quickstart_sft")
    ppo = run(
        "main_ppo.py",
        args.out / "ppo",
        "trainer.experiment_name=quickstart",
        f"actor.model.path={args.out / 'sft/actor'}",
        *args.overrides,
    )
    evaluations = {int(step): metrics for step, metrics in ppo["evaluations"].items()}
    before, after = evaluations[0], evaluations[max(evaluations)]
    summary = {
        "accuracy_before": before["eval/accuracy"],
        "accuracy_after": after["eval/accuracy"],
        "sft_s": round(sft["wall_s"], 1),
        "ppo_s": round(ppo["wall_s"], 1),
        "samples_per_s": round(ppo["samples"] / ppo["train_s"], 1),
    }
    (ROOT / args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"\nGreedy accuracy on held-out problems: {before['eval/accuracy']:.1%} after SFT ({sft['wall_s']:.0f} s),\n"
        f"{after['eval/accuracy']:.1%} after {ppo['steps']} steps of PPO ({ppo['wall_s']:.0f} s, "
        f"{summary['samples_per_s']} samples/s).\n"
        f"  curves   {args.out / 'ppo/curves.png'}\n"
        f"  actor    {args.out / 'ppo/actor'}\n"
        f"  samples  {args.out / 'ppo/samples'}\n"
        f"  metrics  {args.out / 'ppo/metrics.jsonl'}\n"
        f"  summary  {args.out / 'summary.json'}"
    )


if __name__ == "__main__":
    main()
