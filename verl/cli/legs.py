"""The runs that a check of resuming consists of: each the main script in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from verl.errors import ConfigError
from verl.utils.child_process import kill
from verl.utils.progress import STARTER_VARIABLE, Progress, ProgressWatch

if TYPE_CHECKING:
    from verl.checkpoint.core.checkpoint import Checkpoint

TAIL_LINES = 25
LOOK_EVERY_S = 0.5
END_TIMEOUT_S = 20.0  # of a run that was interrupted


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
        timeout_s: of a run without progress, after which it is ended.
        tell: takes a line of progress.
    """

    root: str
    steps: int
    directory: Path
    overrides: Sequence[str] = ()
    timeout_s: float = 1800.0
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
            LegFailed: it ended early, or stood still.
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
        with tempfile.TemporaryFile() as output:
            fault = self._fault(command, environment, output)
            if fault is not None:
                output.seek(0)
                tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
                raise LegFailed(f"the {name} run {fault}:\n{tail}")
        self.tell(f"{name}: done in {time.monotonic() - began:.1f} s")
        return run_dir

    def _fault(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> str | None:
        """Run a command to its end; what was wrong with that."""
        with contextlib.closing(Progress(num_slots=1)) as progress:
            watch = ProgressWatch(progress, self.timeout_s, look_every_s=2 * LOOK_EVERY_S)
            env = {**os.environ, **environment, STARTER_VARIABLE: str(progress.fd)}
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, pass_fds=[progress.fd]
            )
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(timeout=LOOK_EVERY_S)
                        return None if code == 0 else f"ended with status {code}"
                    if watch.is_overdue:
                        return f"{watch.describe(process.pid, '--timeout')}; it was ended"
            except KeyboardInterrupt:  # it has come there, too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=END_TIMEOUT_S)
                raise
            finally:
                kill(process)

    def last(self, saved_in: str, strict: bool = True) -> Checkpoint:
        """The newest checkpoint of some runs."""
        from verl.checkpoint.read.discovery import CheckpointDirectory

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
    from verl.compose.schema import conf_dir

    script = conf_dir().parent / f"main_{root}.py"
    if not script.is_file():
        raise ConfigError(f"--root is {root}: there is no {script}. Run this in a checkout, with --root ppo or sft.")
    return script
