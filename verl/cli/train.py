"""The commands that train: one for each root of the configuration, and `verl quickstart`.

`main_ppo.py` of a checkout is `verl ppo`, and so on: the commands take Hydra overrides of the packaged configuration,
without the checkout. `verl quickstart` runs SFT and then PPO on the built-in model.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from verl.cli.console import CONFIG_DIR, echo, fail
from verl.compose.launch import entry_point
from verl.compose.run_start import RunStart
from verl.compose.schema import Root
from verl.compose.validate import validate
from verl.utils.child_process.interpreter import rare_garbage_collection


def train(job: RunStart) -> None:
    """Validate a composed run, build its trainer, and train."""
    with rare_garbage_collection():
        run = validate(job.config, job.faults)  # all faults at once, before weights are loaded
        trainer = job.build(run)
    try:
        trainer.fit()
    finally:
        trainer.close()


def training_command(root: str) -> Callable[[], None]:
    """The command that trains with a root, a name of `ROOTS`; it reads `sys.argv`."""
    return entry_point(root)(train)


class HydraCommand(typer.core.TyperCommand):
    """A command that passes all arguments to Hydra unchanged, including `--help` and single-dash flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args


def command_of(root: Root) -> Callable[[typer.Context], None]:
    """The command of `verl` that trains with a root."""

    def command(context: typer.Context) -> None:
        sys.argv = [f"verl {root.command}", *context.args]
        training_command(root.name)()

    return command


def help_of(root: Root) -> str:
    """The help of a command, in the list of commands."""
    return f"{root.purpose} `verl {root.command} --help` lists groups and options."


QUICKSTART = ["trainer.total_steps=200", "actor.optimizer.lr=8e-4"]  # as accurate as the default 300 steps at 5e-4


def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides for `verl ppo`, such as algorithm=grpo.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of both runs; replaced if it exists.")] = Path(
        "outputs/quickstart"
    ),
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Two steps of each run, to check the installation.")] = False,
) -> None:
    """Train the built-in model by SFT and then PPO, and print its accuracy. Needs no GPU and no network."""
    _make_way(out)
    short = ["debug=smoke"] if smoke else []
    short += [] if config_dir is None else [f"--config-dir={config_dir}"]
    fine_tuning = _run("sft", out / "sft", ["trainer.experiment_name=quickstart_sft", *short])
    start = ["trainer.experiment_name=quickstart", f"actor.model.path={out / 'sft/actor'}"]
    chooses = any("." not in word.partition("=")[0] for word in overrides or ())  # another run, with its own defaults
    start += [] if smoke or chooses else QUICKSTART
    training = _run("ppo", out / "ppo", [*start, *short, *(overrides or [])])
    evaluations = {int(step): metrics for step, metrics in training["evaluations"].items()}
    before, after = evaluations[0]["eval/accuracy"], evaluations[max(evaluations)]["eval/accuracy"]
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "sft_s": round(fine_tuning["wall_s"], 1),
        "ppo_s": round(training["wall_s"], 1),
        "samples_per_s": round(training["samples"] / training["train_s"], 1),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    written = {"report": "ppo/report.html", "actor": "ppo/actor", "samples": "ppo/samples"}
    written |= {"metrics": "ppo/metrics.jsonl", "summary": "summary.json"}
    lines = [f"  {name:<8} {out / file}" for name, file in written.items() if (out / file).exists()]
    echo(
        f"\nGreedy accuracy on held-out problems: {before:.1%} after SFT ({fine_tuning['wall_s']:.0f} s),\n"
        f"{after:.1%} after {training['steps']} steps of PPO ({training['wall_s']:.0f} s, "
        f"{summary['samples_per_s']} samples/s).\n" + "\n".join(lines)
    )


def _make_way(out: Path) -> None:
    """Remove the output of an earlier quickstart, and nothing else."""
    there = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if others := [name for name in there if name not in ("sft", "ppo", "summary.json")]:
        fail(f"--out is {out}: it has {others[0]}, which is not from a quickstart. Give another directory.")
    if out.exists() and not out.is_dir():
        fail(f"--out is {out}: it is a file. Give a directory.")
    for name in ("sft", "ppo"):
        if (out / name).is_dir() and not (out / name / "config.yaml").is_file():
            fail(f"--out is {out}: {name} in it is not from a quickstart. Give another directory.")
    shutil.rmtree(out, ignore_errors=True)


def _run(root: str, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run `verl ppo` or `verl sft` into a directory and return its summary.

    In this process, which gets the signals: a run in another one would be ended with this one, or get them twice.
    """
    words = [root, f"hydra.run.dir={directory}", *overrides]
    if not any(override.startswith("checkpoint") for override in overrides):
        words.append(f"checkpoint.save_dir={directory / 'checkpoints'}")  # of this quickstart alone
    echo(f"\n$ verl {' '.join(words)}")
    sys.stdout.flush()
    sys.argv = [f"verl {root}", *words[1:]]
    training_command(root)()
    return json.loads((directory / "summary.json").read_text("utf-8"))
