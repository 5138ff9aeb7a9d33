"""Train the built-in model through the classical pipeline, and print the accuracy of each stage.

    python scripts/rlhf.py --out outputs/rlhf

SFT on 1,000 sums; a reward model, from a model that was fine-tuned on all sums that are not held out, on right against
nearly right sums; PPO against its scores; DPO from the same pairs beside it.
Each policy is then evaluated by exact answers to held-out sums, which no stage has seen. Minutes on two cores, offline.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

RUNS = ("sft", "rater_sft", "reward_model", "ppo", "dpo", "summary.json")
VERL = [sys.executable, "-m", "verl.cli"]
ALL = ["data.train_size=null", "trainer.total_epochs=5"]
PPO = ["trainer.total_steps=80", "actor.optimizer.lr=4e-4", "algorithm.kl.coef=0.05", "rollout.max_new_tokens=6"]


def verl(*words: str) -> float:
    """Run a command of `verl`; returns its seconds."""
    print(f"\n$ verl {' '.join(words)}", flush=True)
    began = time.monotonic()
    subprocess.run([*VERL, *words], check=True)
    return time.monotonic() - began


def accuracy(policy: Path) -> float:
    """Share of the held-out sums that greedy decoding gets right."""
    words = [*VERL, "eval", str(policy), "trainer.eval_samples=0", "--json"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["metrics"]["eval/accuracy"]


def pairs(run: Path) -> float:
    """Accuracy of pairs of the held-out sums after the last step."""
    evaluations = json.loads((run / "summary.json").read_text())["evaluations"]
    return evaluations[max(evaluations, key=int)]["eval/rewards/accuracies"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/rlhf"), help="directory of the runs; emptied first")
    parser.add_argument("--smoke", action="store_true", help="two steps of each run, to check that they start")
    given = parser.parse_args()
    out: Path = given.out
    if out.exists() and any(path.name not in RUNS for path in out.iterdir()):
        parser.error(f"--out is {out}: it has files that are not from this script. Give another directory.")
    shutil.rmtree(out, ignore_errors=True)
    more = ["checkpoint=off", *(["debug=smoke"] if given.smoke else [])]
    actor, rater = f"actor.model.path={out}/sft/actor", f"actor.model.path={out}/rater_sft/actor"
    reward = f"reward.model.path={out}/reward_model/reward_model"

    def run(root: str, name: str, *words: str) -> float:
        return verl(root, *words, f"hydra.run.dir={out / name}", f"trainer.experiment_name=rlhf_{name}", *more)

    seconds = {
        "sft": run("sft", "sft", "experiment=arithmetic_sft"),
        "rater_sft": run("sft", "rater_sft", "experiment=arithmetic_sft", *ALL),
        "reward_model": run("reward-model", "reward_model", "experiment=arithmetic_reward_model", rater),
        "ppo": run("ppo", "ppo", "actor=tiny", actor, "reward=model", reward, *PPO),
        "dpo": run("dpo", "dpo", "experiment=arithmetic_dpo", actor),
    }
    of_pairs = {name: pairs(out / name) for name in ("reward_model", "dpo")}
    rows = {
        name: {"accuracy": None if name == "reward_model" else accuracy(out / name / "actor"),
               "accuracy_of_pairs": of_pairs.get(name), "seconds": round(took, 1)}
        for name, took in seconds.items()
    }  # fmt: skip
    (out / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(f"\n{'stage':<14}{'sums right':>12}{'pairs right':>13}{'seconds':>9}")
    for name, row in rows.items():
        shares = ["-" if row[key] is None else f"{row[key]:.1%}" for key in ("accuracy", "accuracy_of_pairs")]
        print(f"{name:<14}{shares[0]:>12}{shares[1]:>13}{row['seconds']:>9.0f}")
    print("\nsums right: greedy answers to 500 held-out sums; pairs right: the right sum is preferred to a wrong one")


if __name__ == "__main__":
    main()
