"""`verl plan`: memory, time and disk of a run, before anything is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from verl.cli.console import CONFIG_DIR, FOUND, echo, faults_reported
from verl.compose.schema import RootName
from verl.errors import ConfigError

OVERRIDES = "Overrides as for `verl ppo`: actor=llama8b sharding=fsdp trainer.n_gpus_per_node=8 ..."
MEAN = "Average tokens of a response, for the time; those of --async are exponential. Default: all are the longest."
DEVICES = "a100-40, a100, l4, l40s, rtx4090, h100, h200, b200, mi300x or cpu."


def plan(
    overrides: Annotated[list[str] | None, typer.Argument(help=OVERRIDES)] = None,
    device: Annotated[str | None, typer.Option(help=DEVICES)] = None,
    response_tokens: Annotated[int | None, typer.Option(min=1, help=MEAN)] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    root: Annotated[RootName, typer.Option(help="Plan a run of this root.")] = "ppo",
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Also simulate trainer.mode=async: speed, idle shares, staleness.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a run: memory by phase, batch sizes, seconds per step, disk. Nothing is loaded, written or started.

    Of models only config.json is read. The exit status is 1 if the run does not fit its devices.
    """
    with faults_reported():
        run = _validated(root, overrides or [], config_dir)
        from verl.trainer.plan import run_plan, workload

        directory = Path((run.checkpoint and run.checkpoint.save_dir) or ".").expanduser()
        free = None if "://" in str(directory) else workload.free_disk(directory.absolute())
        rates = workload.device_here(run.trainer.device) if device is None else workload.device_named(device)
        try:
            found = run_plan.plan_run(run, rates, response=response_tokens, free_disk=free)
        except AttributeError as error:  # of a configuration of transformers
            reason = f"{error}; verl plan counts layers, heads and widths of transformers. The run itself may work"
            raise ConfigError(f"actor.model.path: this model cannot be planned: {reason}.") from error
        if asynchronous:
            found = replace(found, asynchronous=_simulated(run, found, response_tokens))
    echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))
    if not found.fits:
        raise typer.Exit(FOUND)


def _validated(root: str, arguments: list[str], config_dir: Path | None) -> Any:
    """Compose and validate the run of these arguments, as the training commands do."""
    from verl.compose.compose import compose_root
    from verl.compose.overrides import command_line, composition_fault
    from verl.compose.validate import validate
    from verl.compose.warm_start import with_architectures

    sys.path.append(str(Path.cwd()))  # user modules are in the working directory
    flags = [] if config_dir is None else [f"--config-dir={config_dir}"]
    words, assigned = command_line(root, [*flags, *arguments])
    words = words[len(flags) :]
    if further := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"{further[0]} is a flag of training: verl plan takes group=option and key=value.")
    try:
        config = compose_root(root, words)
    except Exception as error:
        raise ConfigError([*assigned.faults, composition_fault(root, error)]) from error
    return with_architectures(validate(config, assigned.faults))


def _simulated(run: Any, found: Any, mean: int | None) -> Any:
    """`trainer.mode=async`, with the seconds of the plan."""
    from verl.trainer.plan import async_plan

    if not hasattr(run.trainer, "staleness") or run.rollout.location == "server":
        raise ConfigError("--async: only runs of verl ppo are simulated, and none whose engine is a server.")
    times = async_plan.planned_times(run, found.memory, found.stages, found.device)
    return async_plan.plan_async(run, times, async_plan.length_draws(run, mean))
