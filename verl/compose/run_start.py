"""RunStart: what happens to a checked run before it is built, from a command line and from a script alike.

checks of this machine -> lock of the run directory -> differences from the defaults, config.yaml, run.log
    -> missing warm starts are trained -> data, weights, processes
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl.component import BuildContext
from verl.compose.print_config import lock_run_directory, print_start, remove_refused, save_config
from verl.compose.validate import refuse_here
from verl.compose.warm_start import resolve_warm_starts
from verl.errors import ConfigError
from verl.tracking.console import print_line, shown_path
from verl.tracking.logging_setup import setup_logging

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class RunStart:
    """The start of one run.

    Attributes:
        config: the composed root.
        root: `ppo` or `sft`.
        choices: the option of every group, to print the differences from the defaults; None prints nothing.
        run_dir: directory of the run.
        console: standard output.
        name: name of the job in a sweep, or empty.
        overrides: as the user gave them.
        faults: found on the command line, to be reported by the validation.
        swept: overrides in which this job differs from others of its sweep.
        closing: exit stack that is closed with the run.
    """

    config: DictConfig
    root: str
    choices: Mapping[str, str | None] | None
    run_dir: Path
    console: Console
    name: str = ""
    overrides: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    swept: tuple[str, ...] = ()
    closing: ExitStack = field(default_factory=ExitStack)
    is_recorded: bool = False
    is_new: bool = False

    @property
    def context(self) -> BuildContext:
        """The build context of the trainer."""
        return BuildContext(run_dir=self.run_dir, job=self.name, swept=self.swept)

    def build(self, run: Any, tokenizer: Any = None) -> Any:
        """Check, record and build a run.

        Args:
            run: the validated description.
            tokenizer: of the actor; None for the one saved with its model.
        Returns:
            The trainer; the caller closes it, and `closing` after it.
        Raises:
            ConfigError: this machine cannot run it, or another run writes into the run directory.
        """
        refuse_here(run, self.context)
        self.record(run)
        return resolve_warm_starts(run, self.console).build(replace(self.context, tokenizer=tokenizer))

    def record(self, run: Any = None) -> None:
        """Print the differences from the defaults and the run directory, save the redacted configuration there, and
        start run.log. If the run is refused later, `withdraw` removes these files.

        Args:
            run: the validated run; the differences that it never reads are told.
        Raises:
            ConfigError: another run writes into the run directory, or it cannot be written.
        """
        is_new = not self.run_dir.exists() or not any(self.run_dir.iterdir())
        if (lock := lock_run_directory(self.run_dir)) is not None:
            self.closing.callback(lock.release)
        self.is_new = is_new
        if self.choices is not None:
            changed = print_start(self.config, self.root, self.choices, self.run_dir, self.console)
            if run is not None and (line := run.unused_settings(changed)) is not None:
                print_line(self.console, line)
        self.is_recorded = True
        try:
            save_config(self.config, self.overrides, self.run_dir)
            self.closing.callback(setup_logging(self.run_dir))
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir is {shown_path(self.run_dir)}: {error.filename or 'it'} cannot be written "
                f"({error.strerror}). Give this run a directory that can be written: hydra.run.dir=DIR."
            ) from error

    def withdraw(self) -> None:
        """Remove the files of `record` and of a refused build, if the directory has no others."""
        if self.is_new:
            remove_refused(self.run_dir)
