"""The runs that a check of resuming consists of: each the main script in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.checkpoint.published import Published

TAIL_LINES = 25


class LegFailed(Exception):
    """A run of the check did not end as it should; carries the end of what it printed."""


@dataclass(frozen=True, kw_only=True)
class Legs:
    """How the runs of a check are started.

    Args:
        root: `ppo` or `sft`.
        steps: of the whole run.
        directory: where the runs write.
        overrides: of all runs, as on the command line of the main script.
        tell: takes a line of progress.
    """

    root: str
    steps: int
    directory: Path
    overrides: Sequence[str] = ()
    tell: Callable[[str], None] = field(default=lambda line: None)

    def run(
        self, name: str, saved_in: str, overrides: Sequence[str], script: Sequence[str] = (), **environment: str
    ) -> Path:
        """Run the main script, or another one that takes its overrides.

        Args:
            saved_in: name of the directory of checkpoints.
        Returns:
            The directory of the run.
        Raises:
            LegFailed: it ended early.
        """
        run_dir, began = self.directory / name, time.monotonic()
        mode = [] if any(text.startswith("checkpoint=") for text in self.overrides) else ["checkpoint=sync"]
        settings = [
            f"hydra.run.dir={run_dir}",
            f"checkpoint.save_dir={self.directory / saved_in}_checkpoints",
            "checkpoint.save_interval=null",
            f"trainer.total_steps={self.steps}",
            "trainer.save_final=false",
            "tracker=none",
            "tracker.jsonl={_target_:verl.tracking.jsonl.JsonLines}",
        ]
        settings = laid_over(laid_over([*mode, *self.overrides], settings), overrides)
        command = [sys.executable, *(script or [str(main_script(self.root))]), *settings]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, **environment},
        )
        if done.returncode != 0:
            tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
            raise LegFailed(f"the {name} run ended with status {done.returncode}:\n{tail}")
        self.tell(f"{name}: done in {time.monotonic() - began:.1f} s")
        return run_dir

    def last(self, saved_in: str, strict: bool = True) -> Published:
        """The newest checkpoint of some runs."""
        from verl.checkpoint.discovery import CheckpointDirectory

        return CheckpointDirectory(f"{self.directory / saved_in}_checkpoints").newest(strict)


def laid_over(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Overrides, where a later one of the same key, or of a component above it, takes the place of an earlier one."""
    keys = {text.partition("=")[0] for text in later}
    kept = [text for text in overrides if not keys & {text.partition("=")[0], text.partition(".")[0]}]
    return [*kept, *later]


def main_script(root: str) -> Path:
    """The script that trains.

    Raises:
        ConfigError: there is none, as where only the package is installed.
    """
    from verl.compose.paths import conf_dir

    script = conf_dir().parent / f"main_{root}.py"
    if not script.is_file():
        raise ConfigError(f"--root is {root}: there is no {script}. Run this in a checkout, with --root ppo or sft.")
    return script
