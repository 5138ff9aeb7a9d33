"""Builds a trainer with its run directory and log, from a composed configuration and user-defined objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl.component import BuildContext
from verl.compose.print_config import print_start, remove_refused, save_config
from verl.compose.validate import refuse_here
from verl.compose.warm_start import resolve_warm_starts
from verl.errors import ConfigError
from verl.tracking.logging_setup import setup_logging

if TYPE_CHECKING:
    from rich.console import Console


def build_trainer(
    run: Any,
    config: DictConfig,
    overrides: Sequence[str],
    console: Console,
    tokenizer: Any = None,
    choices: Mapping[str, str | None] | None = None,
) -> tuple[Any, Path, Any, ExitStack]:
    """Record the configuration, log to the run's directory, and build the run.

    Args:
        run: the validated description, with user-defined objects.
        config: the composed configuration.
        overrides: as given by the user.
        console: for output.
        tokenizer: of the actor; None for the one saved with its model.
        choices: options that the configuration was composed of, to print its differences from the defaults; None prints
            nothing.
    Returns:
        The run, its directory, its trainer, and the exit stack that closes them.
    Raises:
        ConfigError: this machine cannot run this configuration; nothing is left on the disk.
    """
    refuse_here(run)
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    run_dir = Path("outputs").resolve() / run.trainer.project_name / run.trainer.experiment_name / now
    if choices is not None:
        print_start(config, "ppo", choices, run_dir, console)
    save_config(config, list(overrides), run_dir)
    closing = ExitStack()
    closing.callback(setup_logging(run_dir))
    try:
        run = resolve_warm_starts(run, console)
        trainer = run.build(BuildContext(run_dir=run_dir, tokenizer=tokenizer))
    except BaseException as error:
        closing.close()
        if isinstance(error, ConfigError):
            remove_refused(run_dir)
        raise
    closing.callback(trainer.close)
    return run, run_dir, trainer, closing
