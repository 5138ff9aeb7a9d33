"""Builds a trainer with its run directory and log, from a composed configuration and user-defined objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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


@dataclass
class BuiltTrainer:
    """A built run.

    Attributes:
        closing: exit stack that closes the run.
    """

    run: Any
    run_dir: Path
    trainer: Any
    closing: ExitStack


def build_trainer(
    run: Any,
    config: DictConfig,
    overrides: Sequence[str],
    console: Console,
    tokenizer: Any = None,
    choices: Mapping[str, str | None] | None = None,
) -> BuiltTrainer:
    """Record the configuration, log to the run's directory, and build the run.

    Args:
        run: the validated description, with user-defined objects.
        config: the composed configuration.
        overrides: as given by the user.
        console: for output.
        tokenizer: of the actor; None for the one saved with its model.
        choices: options that the configuration was composed of, to print its differences from the defaults; None prints
            nothing.
    Raises:
        ConfigError: this machine cannot run this configuration; nothing is left on the disk.
    """
    refuse_here(run)
    run_dir = _run_dir(run)
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
    return BuiltTrainer(run, run_dir, trainer, closing)


def without_data_files(short: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Remove the training files of a short configuration in favour of a data set that was passed; with a note."""
    data = short.get("data")
    if not isinstance(data, Mapping) or "train_files" not in data:
        return short, []
    kept = {key: value for key, value in data.items() if key != "train_files"}
    return {**short, "data": kept}, ["data.train_files is ignored: train_dataset is given."]


def _run_dir(run: Any) -> Path:
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    return Path("outputs").resolve() / run.trainer.project_name / run.trainer.experiment_name / now
