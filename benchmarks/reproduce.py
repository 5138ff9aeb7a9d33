"""Runs the recipes over several seeds, TRL with the same work beside those that can, and draws curves.

    python benchmarks/reproduce.py [NAME ...] [--seeds 0 1 2] [--steps N] [--trl] [--overrides KEY=VALUE ...]

NAME is an experiment of conf/experiment/ (`make reproduce NAME=smollm2_json`). Each run is a process; what has finished
below build/reproduce/ is not run again. Writes docs/results/NAME.json, NAME.png and the page docs/results/recipes.md.

The same on both sides: prompts and samples of a step, one optimizer step for each batch, the loss (clipped at 0.2, mean
over the tokens of a response and over responses, no KL term), advantages over the standard deviation of the group,
AdamW without decay, norm clipped at 1, a constant rate, temperature 1, the chat template, the reward, threads, the
dtype of the computation. Different: the order of the prompts and random numbers. TRL comes with
`pip install ".[bench]"`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WORK, OUT = ROOT / "build" / "reproduce", ROOT / "docs" / "results"
RECIPES = (
    "smollm2_json",
    "smollm2_largest",
    "smollm2_length",
    "smollm2_reverse",
    "smollm2_calculator",
    "shapes_vlm_grpo",
)
WITH_TRL = (
    "smollm2_json",
    "smollm2_largest",
    "smollm2_length",
)  # others start from a fine-tuning of ours, or use tools
WARM_UP = 2  # steps that count for no time
MICRO = 16  # rows of a micro-batch of TRL; 64 rows need more than 16 GiB


def run_verl(name: str, seed: int, overrides: list[str], directory: Path) -> None:
    """Train by the recipe; `directory` has the files of the run, the weights removed."""
    command = [
        sys.executable,
        str(ROOT / "main_ppo.py"),
        f"experiment={name}",
        f"trainer.seed={seed}",
        "checkpoint=off",
    ]
    command += [f"hydra.run.dir={directory}", *overrides]
    with (directory.parent / f"{directory.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def read_verl(directory: Path) -> dict[str, Any]:
    """Rewards, seconds and evaluations of a run."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    stages = sorted({key for step in steps for key in step if key.startswith("timing/")})
    return {
        "reward": [step["reward/mean"] for step in steps],
        "length": [step["rollout/response_length_tokens"] for step in steps],
        "seconds": {key[7:-2]: [step.get(key, 0.0) for step in steps] for key in stages},
        "eval": [{key[5:]: value for key, value in line.items() if key.startswith("eval/")} | {"step": line["step"]}
                 for line in lines if any(key.startswith("eval/") for key in line)],
    }  # fmt: skip


def run_trl(name: str, seed: int, overrides: list[str], file: Path) -> None:
    """Train by TRL with the settings of the recipe, in this process; writes `file`."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback

    from verl.compose.compose import compose_root
    from verl.compose.validate import validate

    run = validate(compose_root("ppo", [f"experiment={name}", *overrides]))
    settings, model, lora = run.trainer, run.actor.model, run.actor.lora
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(settings.num_threads, int):
        torch.set_num_threads(settings.num_threads)
    module, _, function = run.reward.path.partition(":")
    score = getattr(importlib.import_module(module), function)
    rewards, lengths, seconds, generation = [], [], [], []

    def reward(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        return score([""] * len(completions), [turn[-1]["content"] for turn in completions], answer)

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                rewards.append(logs["reward"])
                lengths.append(logs.get("completions/mean_length", 0.0))

    narrow = run.actor.autocast == "bfloat16"
    rows = settings.prompts_per_step * settings.group_size
    peft_config = None
    if lora is not None:
        peft_config = LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear")
    trainer = trl.GRPOTrainer(
        model=model.load_causal_lm(device).train(), processing_class=AutoTokenizer.from_pretrained(model.files()),
        train_dataset=Dataset.from_list(run.data.rows("train")), reward_funcs=[reward], callbacks=[Watch()],
        peft_config=peft_config,
        args=trl.GRPOConfig(
            output_dir=str(file.parent / "trl"), use_cpu=device == "cpu", bf16=narrow, seed=seed,
            max_steps=settings.total_steps,
            per_device_train_batch_size=min(rows, MICRO), gradient_accumulation_steps=max(1, rows // MICRO),
            num_generations=settings.group_size,
            max_completion_length=run.rollout.max_new_tokens, temperature=1.0, top_p=1.0, top_k=0, num_iterations=1,
            beta=0.0, epsilon=0.2, loss_type="grpo", scale_rewards="group", learning_rate=run.actor.optimizer.lr,
            lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        ),
    )  # fmt: skip
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = generate(*args, **kwargs)
        generation.append(time.perf_counter() - begin)
        return found

    trainer._generate = timed
    trainer.train()
    rest = [a - b for a, b in zip(seconds, generation, strict=True)]
    timing = {"step": seconds, "gen": generation, "rest": rest}
    file.write_text(json.dumps({"reward": rewards, "length": lengths, "seconds": timing, "eval": []}))


def spread(values: list[float]) -> list[float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return [round(middle, 3), round(low, 3), round(high, 3)]


def machine() -> str:
    """The name of the processor or GPU, and the number of processors."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else "CPU"
    name += " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    name += " with AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""
    return f"{name}, {os.cpu_count()} processors"


def reproduce(name: str, options: argparse.Namespace) -> None:
    """All runs of a recipe, and its curve."""
    overrides = [*options.overrides, *([f"trainer.total_steps={options.steps}"] if options.steps else [])]
    sides: dict[str, list[dict[str, Any]]] = {"verl": []}
    for seed in options.seeds:
        directory = WORK / name / f"seed_{seed}"
        if not (directory / "summary.json").is_file():
            directory.parent.mkdir(parents=True, exist_ok=True)
            run_verl(name, seed, overrides, directory)
        sides["verl"].append(read_verl(directory))
        print(f"{name} seed {seed}: reward {sides['verl'][-1]['reward'][-1]:.3f}", flush=True)
    if options.trl and name in WITH_TRL:
        sides["TRL"] = []
        for seed in options.seeds:
            file = WORK / name / f"trl_{seed}.json"
            if not file.is_file():
                command = [sys.executable, __file__, "--side", name, str(seed), str(file), "--overrides", *overrides]
                with file.with_suffix(".log").open("w") as log:
                    subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            sides["TRL"].append(json.loads(file.read_text()))
            print(f"{name} seed {seed}, TRL: reward {sides['TRL'][-1]['reward'][-1]:.3f}", flush=True)
    found = {"name": name, "machine": machine(), "seeds": options.seeds, "overrides": overrides, "note": options.note}
    found |= {"is_timed": not options.untimed, "sides": sides}
    OUT.mkdir(parents=True, exist_ok=True)
    found = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4))
    (OUT / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    draw(found)


def draw(found: dict[str, Any]) -> None:
    """Mean and range of the reward over seeds, for each side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), dpi=110)
    for (side, runs), colour in zip(found["sides"].items(), ("tab:blue", "tab:orange"), strict=False):
        columns = [*zip(*(run["reward"] for run in runs), strict=False)]
        steps = range(1, len(columns) + 1)
        axes.plot(steps, [statistics.mean(values) for values in columns], color=colour, label=side)
        axes.fill_between(steps, [min(v) for v in columns], [max(v) for v in columns], color=colour, alpha=0.2, lw=0)
    axes.set(
        xlabel="step", ylabel="reward, sampled", title=f"{found['name']}: mean and range of {len(found['seeds'])} seeds"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(OUT / f"{found['name']}.png")
    pyplot.close(figure)


HEADER = (
    "| | steps | reward, first step | last 3 steps: mean [least, most] of seeds | held-out greedy, before and after |"
)
TIMES = " s a step, median [quartiles] | of it |"


def table() -> str:
    """The page of all recipes that were run."""
    lines = [
        "# Recipes",
        "",
        "On SmolLM2-135M-Instruct, and on pictures. Made by `make reproduce`; see `benchmarks/reproduce.py`.",
        "",
    ]
    for file in sorted(OUT.glob("*.json")):
        found = json.loads(file.read_text())
        changed = f"; {' '.join(found['overrides'])}" if found["overrides"] else ""
        lines += [
            f"## {found['name']}",
            "",
            f"{found['machine']}; seeds {', '.join(map(str, found['seeds']))}{changed}.",
        ]
        lines[-1] += f" {found['note']}" if found["note"] else ""
        is_timed = found.get("is_timed", True)
        head = [HEADER + TIMES * is_timed, "|---|---|---|---|---|" + "---|---|" * is_timed]
        lines += ["", f"![reward against steps]({found['name']}.png)", "", *head]
        lines += [row(side, runs, is_timed) for side, runs in found["sides"].items()]
        if not is_timed:
            lines.append("")
            continue
        middle = {side: spread(step_seconds(runs, "step"))[0] for side, runs in found["sides"].items()}
        if len(middle) == 2:
            lines += ["", f"A step of TRL takes {middle['TRL'] / middle['verl']:.2f} times as long."]
        lines.append("")
    return "\n".join(lines)


def step_seconds(runs: list[dict[str, Any]], stage: str) -> list[float]:
    """Of all runs, without the steps that warm up."""
    return [x for run in runs for x in run["seconds"][stage][WARM_UP:]]


def row(side: str, runs: list[dict[str, Any]], is_timed: bool) -> str:
    """A side's row of the table."""
    count = min(len(run["reward"]) for run in runs)
    first = [run["reward"][0] for run in runs]
    last = [statistics.mean(run["reward"][count - 3 : count]) for run in runs]
    evaluated = [(run["eval"][0], run["eval"][-1]) for run in runs if len(run["eval"]) > 1]
    held = [statistics.mean(x["accuracy"] for x in at) for at in zip(*evaluated, strict=True)]
    named = [stage for stage in ("gen", "update_actor", "rest") if stage in runs[0]["seconds"]]
    times = []
    if is_timed:
        seconds, low, high = spread(step_seconds(runs, "step"))
        parts = ", ".join(f"{stage} {spread(step_seconds(runs, stage))[0]}" for stage in named)
        times = [f"{seconds} [{low}, {high}]", parts]
    return (
        " | ".join(
            [
                f"| {side}",
                f"{count}",
                f"{statistics.mean(first):.3f}",
                f"{statistics.mean(last):.3f} [{min(last):.3f}, {max(last):.3f}]",
                " to ".join(f"{x:.3f}" for x in held) or "-",
                *times,
            ]
        )
        + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--trl", action="store_true", help="run TRL beside it")
    parser.add_argument("--note", default="", help="a sentence about these runs, for the page")
    parser.add_argument("--untimed", action="store_true", help="beside other work: no seconds on the page")
    parser.add_argument("--side", nargs=3, metavar=("NAME", "SEED", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--overrides", nargs="*", default=[])
    options = parser.parse_args()
    if options.side:
        name, seed, file = options.side
        run_trl(name, int(seed), options.overrides, Path(file))
        return
    if unknown := set(options.names) - set(RECIPES):
        sys.exit(f"there is no recipe {', '.join(sorted(unknown))}: choose of {', '.join(RECIPES)}")
    for name in options.names or RECIPES:
        reproduce(name, options)
    (OUT / "recipes.md").write_text(table())


if __name__ == "__main__":
    main()
