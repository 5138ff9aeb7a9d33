"""`verl resume-check`: does a run that stops and resumes give the same numbers as a run without a stop?

straight     steps 1 ........................ N
interrupted  steps 1 .... k, saved, ended
resumed                     k + 1 ........... N    in a new process, from that checkpoint

replayed     steps 1 ........................ N    with rollout.weight_update=in_flight: the schedule of the last two

Compared (`verl.trainer.state.compare_runs`): the metrics of each step, and everything in the last checkpoints of
`straight`, or `replayed`, and `resumed`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl.cli.console import CONFIG_DIR, echo, faults_reported
from verl.compose.schema import ROOTS, RootName
from verl.errors import ConfigError, VerlError
from verl.utils.child_process.process import reap
from verl.utils.directories import TemporaryDirectory
from verl.utils.progress import STARTER_VARIABLE, Progress, ProgressWatch
from verl.utils.signals import Terminated

if TYPE_CHECKING:
    from verl.checkpoint.core.checkpoint import Checkpoint

TAIL_LINES = 25
POLL_INTERVAL_S = 0.5
END_TIMEOUT_S = 20.0  # for a run that received Ctrl-C
TOLERANCE = 1e-3  # for a resume on another number of processes, which changes rounding
SCHEDULE = "schedule.jsonl"
COMMAND = (sys.executable, "-m", "verl.cli")


class RunFailed(VerlError):
    """A run of the check failed; has the end of its output."""


@dataclass(frozen=True, kw_only=True)
class RunLauncher:
    """Starts the runs of a check, `directory / NAME`, in processes of their own; one without progress for `timeout_s`
    is killed."""

    root: str
    steps: int
    directory: Path
    overrides: Sequence[str] = ()
    timeout_s: float = 1800.0

    def run(self, name: str, saved_in: str, overrides: Sequence[str]) -> Path:
        """Run the training command with checkpoints in `SAVED_IN_checkpoints`, and return the run directory.

        Raises:
            RunFailed: it failed, or made no progress.
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
        with tempfile.TemporaryFile() as output, contextlib.closing(Progress(num_slots=1)) as progress:
            process = subprocess.Popen(
                [*COMMAND, ROOTS[self.root].command, *settings], stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, STARTER_VARIABLE: str(progress.fd)}, pass_fds=[progress.fd],
            )  # fmt: skip
            if (fault := self._fault(process, progress)) is not None:
                output.seek(0)
                tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
                raise RunFailed(f"the {name} run {fault}:\n{tail}")
        echo(f"{name}: done in {time.monotonic() - began:.1f} s")
        return run_dir

    def _fault(self, process: subprocess.Popen[bytes], progress: Progress) -> str | None:
        """Wait for the end of a run; returns the reason of a failure, or None."""
        watch = ProgressWatch(progress, self.timeout_s, poll_interval_s=2 * POLL_INTERVAL_S)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=POLL_INTERVAL_S)
                    return None if code == 0 else f"ended with status {code}"
                if watch.is_overdue:
                    return f"{watch.describe(process.pid, '--timeout')}; it was ended"
        except KeyboardInterrupt as error:  # Ctrl-C has reached the child too
            if isinstance(error, Terminated):
                process.send_signal(error.number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_TIMEOUT_S)
            raise
        finally:
            process.kill()
            reap(process)

    def last(self, saved_in: str) -> Checkpoint:
        """The newest checkpoint of some runs; raises BadCheckpoint if any is damaged."""
        from verl.checkpoint.read.discovery import CheckpointDirectory

        directory = CheckpointDirectory(f"{self.directory / saved_in}_checkpoints")
        for damaged in directory.survey()[1]:
            raise damaged
        return directory.newest()


def laid_over(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Merge overrides; a later one replaces earlier ones of the same key or below the same component."""
    keys = {text.partition("=")[0] for text in later}
    return [*(text for text in overrides if not keys & {text.partition("=")[0], text.partition(".")[0]}), *later]


def check_resume(
    launcher: RunLauncher, stop_after: int, resumed_with: Sequence[str], tolerance: float
) -> tuple[list[str], str]:
    """Run straight, interrupted after step `stop_after`, and resumed.

    Returns:
        The first metric and the first part of the checkpoints that differ, if any; and what was compared.
    Raises:
        ConfigError: there would be nothing to compare.
        RunFailed: a run ended early.
    """
    from verl.trainer.state.compare_runs import Tolerance, first_part_apart, first_step_apart, num_compared, steps_of

    if not 1 <= stop_after < launcher.steps:
        raise ConfigError(f"--at is {stop_after}: must lie between 1 and --steps {launcher.steps}, less one.")
    straight = steps_of(launcher.run("straight", "straight", []))
    launcher.run("interrupted", "stopped", [f"trainer.stop_after={stop_after}"])
    resumed = launcher.run("resumed", "stopped", [*resumed_with, "resume=latest"])
    interrupted, expected = steps_of(launcher.directory / "interrupted"), "straight"
    if (resumed / SCHEDULE).is_file():  # weights in flight: a run without a stop is equal at the same engine steps
        expected = "replayed"
        straight = steps_of(launcher.run(expected, expected, [f"trainer.replay_schedule={resumed}"]))
    if difference := first_step_apart(straight, interrupted, Tolerance(0.0)):
        return [f"before the resume, so the training itself is not reproducible: {difference}"], ""
    near, last = Tolerance(tolerance), launcher.last(expected)
    apart = first_step_apart(straight, steps_of(resumed), near), first_part_apart(last, launcher.last("stopped"), near)
    how = f"agree to within {tolerance:g} (rounding may differ)" if tolerance else "are equal bit by bit"
    compared = f"{num_compared(last, near)} tensors of the last checkpoint {how}"
    return [x for x in apart if x is not None], f"steps {stop_after + 1} to {launcher.steps} and {compared}"


def resume_check(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of all runs: experiment=..., KEY=VALUE.")
    ] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    root: Annotated[RootName, typer.Option(help="What is trained.")] = "ppo",
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")] = 4,
    at: Annotated[
        int | None, typer.Option(help="Stop and resume after this step; half of the steps by default.")
    ] = None,
    to_sharding: Annotated[str | None, typer.Option(help="Resume under another sharding, such as ddp.")] = None,
    processes: Annotated[int | None, typer.Option(help="Resume on this many processes.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help=f"Default: 0, bit by bit; {TOLERANCE:g} if the layout changes.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Kill a run after this many seconds without progress.", min=0.001)
    ] = 1800.0,
    keep: Annotated[Path | None, typer.Option(help="Run in this new directory, and keep it.")] = None,
) -> None:
    """Compare N uninterrupted steps with k steps, a stop, a resume and N - k steps, and print the first difference."""
    overrides = [*([] if config_dir is None else [f"--config-dir={config_dir}"]), *(overrides or ())]
    layout = [] if to_sharding is None else [f"sharding={to_sharding}"]
    layout += [] if processes is None else [f"trainer.n_gpus_per_node={processes}"]
    with faults_reported(), _directory(keep) as directory:
        launcher = RunLauncher(root=root, steps=steps, directory=directory, overrides=overrides, timeout_s=timeout)
        near = (TOLERANCE if layout else 0.0) if tolerance is None else tolerance
        stop_after = steps // 2 if at is None else at
        differences, compared = check_resume(launcher, stop_after, layout, near)
        echo("\n".join(f"DIFFERS: {line}" for line in differences) if differences else f"OK: {compared}")
    raise typer.Exit(1 if differences else 0)


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """The directory `keep`, or a temporary one."""
    if keep is None:
        with TemporaryDirectory("verl-resume-check-") as directory:
            yield Path(directory)
        return
    if keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"--keep is {keep}: it is not empty. Give a new directory.")
    yield keep.absolute()
