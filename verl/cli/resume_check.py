"""`verl resume-check`: does a run that stops and resumes give the same numbers as a run without a stop?

straight     steps 1 ........................ N
interrupted  steps 1 .... k, saved, ended
resumed                     k + 1 ........... N    in a new process, from that checkpoint

Compared (`verl.trainer.state.compare_runs`): the metrics of each step, and everything in the last checkpoints of
`straight` and `resumed`. With `--in-episode` the second run is killed during the episodes of step k + 1.

`--topology 1,2:fsdp,4:tp_fsdp,2:ray,1`: a run that is resumed under one layout after another, one step each. A leg
saves again right after loading, which must give what the leg before it saved; see `resume_worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from verl.cli.console import CONFIG_DIR, echo
from verl.errors import ConfigError
from verl.utils.child_process.process import reap
from verl.utils.external_input import read_text
from verl.utils.progress import STARTER_VARIABLE, Progress, ProgressWatch
from verl.utils.temporary_directory import TemporaryDirectory

if TYPE_CHECKING:
    from verl.checkpoint.core.checkpoint import Checkpoint

TAIL_LINES = 25
LOOK_EVERY_S = 0.5
KILL_LOOK_EVERY_S = 0.005
KILL_AFTER = (0.7, 0.5, 0.3, 0.1)  # share of the answers in a step's journal; the next one if the kill came too late
END_TIMEOUT_S = 20.0  # for a run that received Ctrl-C
TOLERANCE = 1e-3  # for a resume on another number of processes, which changes rounding
SHARDINGS = ("none", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp", "cp", "pp")
LEG_SCRIPT = ("-m", "verl.cli.resume_worker")
LOADED_DIR, ROOT = "VERL_TOPOLOGY_LOADED", "VERL_TOPOLOGY_ROOT"
OF_EACH_PROCESS = ("rng",)


class RunFailed(Exception):
    """A run of the check failed; has the end of its output."""


@dataclass(frozen=True, kw_only=True)
class RunLauncher:
    """Starts the runs of a check, in processes of their own.

    Args:
        root: `ppo` or `sft`.
        steps: number of steps of the whole run.
        directory: parent of the run directories.
        overrides: overrides of all runs.
        timeout_s: a run without progress for this long is killed.
    """

    root: str
    steps: int
    directory: Path
    overrides: Sequence[str] = ()
    timeout_s: float = 1800.0

    def run(
        self,
        name: str,
        saved_in: str,
        overrides: Sequence[str],
        script: Sequence[str] = (),
        kill_when: Callable[[], bool] | None = None,
        **environment: str,
    ) -> Path:
        """Run the training command, or another script with the same overrides.

        Args:
            name: of the run directory.
            saved_in: name of the checkpoint directory.
            overrides: further overrides.
            script: another command.
            kill_when: polled every few milliseconds; the run is killed once it returns True.
            environment: further environment variables.
        Returns:
            The run directory.
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
        command = [sys.executable, *(script or ["-m", "verl.cli", self.root]), *settings]
        with tempfile.TemporaryFile() as output:
            fault = self._fault(command, {**os.environ, **environment}, output, kill_when)
            if fault is not None:
                output.seek(0)
                tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
                raise RunFailed(f"the {name} run {fault}:\n{tail}")
        echo(f"{name}: done in {time.monotonic() - began:.1f} s")
        return run_dir

    def _fault(
        self, command: Sequence[str], env: dict[str, str], output: IO[bytes], kill_when: Callable[[], bool] | None
    ) -> str | None:
        """Run a command to its end; returns the reason of a failure, or None."""
        with contextlib.closing(Progress(num_slots=1)) as progress:
            watch = ProgressWatch(progress, self.timeout_s, look_every_s=2 * LOOK_EVERY_S)
            env = {**env, STARTER_VARIABLE: str(progress.fd)}
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, pass_fds=[progress.fd]
            )
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(timeout=LOOK_EVERY_S if kill_when is None else KILL_LOOK_EVERY_S)
                        return None if code == 0 else f"ended with status {code}"
                    if kill_when is not None and kill_when():
                        return None
                    if watch.is_overdue:
                        return f"{watch.describe(process.pid, '--timeout')}; it was ended"
            except KeyboardInterrupt:  # the child has received it too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=END_TIMEOUT_S)
                raise
            finally:
                process.kill()
                reap(process)

    def last(self, saved_in: str) -> Checkpoint:
        """The newest checkpoint of some runs; a damaged one beside it is refused."""
        from verl.checkpoint.read.discovery import CheckpointDirectory

        return CheckpointDirectory(f"{self.directory / saved_in}_checkpoints").newest(strict=True)


def laid_over(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Merge overrides; a later one replaces earlier ones of the same key or below the same component."""
    keys = {text.partition("=")[0] for text in later}
    return [
        *(text for text in overrides if not keys & {text.partition("=")[0], text.partition(".")[0]}),
        *later,
    ]


def check_resume(
    launcher: RunLauncher, stop_after: int, resumed_with: Sequence[str], tolerance: float, in_episode: bool
) -> tuple[list[str], str]:
    """Run straight, interrupted and resumed.

    Args:
        stop_after: step after which the second run is stopped and resumed.
        resumed_with: further overrides of the resumed run, such as another layout.
        tolerance: see `verl.trainer.state.compare_runs.Tolerance`.
        in_episode: kill the second run during the episodes of the step after that, instead of stopping it.
    Returns:
        The first metric and the first part of the checkpoints that differ, if any; and what was compared.
    Raises:
        ConfigError: there would be nothing to compare.
        RunFailed: a run ended early.
    """
    from verl.trainer.state.compare_runs import Tolerance, first_part_apart, first_step_apart, num_compared, steps_of

    if in_episode and launcher.root != "ppo":
        raise ConfigError(f"--in-episode with --root {launcher.root}: there are no episodes in it. Leave one out.")
    if not 1 <= stop_after < launcher.steps:
        raise ConfigError(f"--at is {stop_after}: must lie between 1 and --steps {launcher.steps}, less one.")
    straight = steps_of(launcher.run("straight", "straight", []))
    if in_episode:
        _kill_in_episode(launcher, stop_after)
    else:
        launcher.run("interrupted", "stopped", [f"trainer.stop_after={stop_after}"])
    resumed = launcher.run("resumed", "stopped", [*resumed_with, "resume=latest"])
    if in_episode:
        _check_journal_use(resumed)
    interrupted = steps_of(launcher.directory / "interrupted")
    if found := first_step_apart(straight, interrupted, Tolerance()):
        return [f"before the resume, so the training itself is not reproducible: {found}"], ""
    near, last = Tolerance(tolerance), launcher.last("straight")
    apart = first_step_apart(straight, steps_of(resumed), near), first_part_apart(last, launcher.last("stopped"), near)
    how = f"agree to within {tolerance:g} (another layout changes rounding)" if tolerance else "are equal bit by bit"
    compared = f"{num_compared(last, near)} tensors of the last checkpoint {how}"
    return [x for x in apart if x is not None], f"steps {stop_after + 1} to {launcher.steps} and {compared}"


def _kill_in_episode(launcher: RunLauncher, stop_after: int) -> None:
    """Run to a checkpoint after step k, and kill during the episodes of the next one, by the answers in its journal."""
    step = stop_after + 1
    answers = _num_answers(launcher, "straight", step)
    if not answers:
        raise ConfigError(
            f"--in-episode: the run keeps no journal of the episodes of step {step}. It needs an environment that "
            "has one (not none, nor agent_program), and environment.journal=true."
        )
    saves = [f"checkpoint.save_interval={stop_after}", f"trainer.stop_after={step}"]
    for share in KILL_AFTER:
        for name in ("interrupted", "stopped_checkpoints"):
            shutil.rmtree(launcher.directory / name, ignore_errors=True)
        enough = max(1, int(share * answers))
        launcher.run("interrupted", "stopped", saves, (), lambda n=enough: _num_answers(launcher, "stopped", step) >= n)
        count = _num_answers(launcher, "stopped", step)
        if 0 < count < answers:  # so not all episodes had ended
            if launcher.last("stopped").step != stop_after:
                raise RunFailed(f"the interrupted run was killed before step {stop_after} was saved.")
            return echo(f"  killed in the episodes of step {step}, after {count} of {answers} answers")
    raise RunFailed(f"the episodes of step {step} were over before a kill came, {len(KILL_AFTER)} times.")


def _num_answers(launcher: RunLauncher, saved_in: str, step: int) -> int:
    """Answers of environments that the journal has of a step of training."""
    from verl.environments.journal import journal_records
    from verl.ops.counter_rng import TRAINING

    records = journal_records(launcher.directory / f"{saved_in}_checkpoints/episode_journal", step)
    return sum("answer" in x and x["record"][0].startswith(f"{TRAINING}.{step}.") for x in records)


def _check_journal_use(resumed: Path) -> None:
    """Print what became of the interrupted episodes, and refuse those that were begun anew: they need not be equal."""
    lines = [json.loads(text) for text in read_text(resumed / "metrics.jsonl").splitlines()]
    names = ("reused", "replayed", "restarted")
    counts = {name: sum(int(line.get(f"episode/journal_{name}", 0)) for line in lines) for name in names}
    echo(f"  answers of the journal: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    if counts["restarted"]:
        raise RunFailed(
            "episodes were begun anew: recovery of their environment is restart, which promises no equal runs. If "
            "its answers depend on the action alone, or on seed and actions, let it say stateless or deterministic."
        )
    if not counts["reused"] + counts["replayed"]:
        raise RunFailed("nothing of the interrupted episodes was found in the journal: they were drawn otherwise.")


def topologies(text: str) -> dict[int, tuple[str, list[str]]]:
    """Parse comma-separated layouts: a number of processes, then a sharding, `ray`, or both.

    >>> [name for name, _ in topologies("1,2:fsdp,2:ray").values()]
    ['1:none', '2:fsdp', '2:ddp:ray']

    Returns:
        By number of the leg, from 1: the full name of the layout, and its overrides.
    Raises:
        ConfigError: the text cannot be parsed.
    """
    chain: dict[int, tuple[str, list[str]]] = {}
    for leg, entry in enumerate(text.split(","), start=1):
        parsed = re.fullmatch(rf"([1-9]\d*)(?::({'|'.join(SHARDINGS)}))?(:ray)?", entry.strip())
        if parsed is None:
            raise ConfigError(
                f"--topology is {text!r}: {entry.strip()!r} is not a layout. Give a number of processes, then a "
                f"sharding ({', '.join(SHARDINGS)}), ray, or both: 2:fsdp, 2:ray, 4:tp_fsdp:ray."
            )
        count, sharding, ray = parsed[1], parsed[2] or ("none" if parsed[1] == "1" else "ddp"), parsed[3] or ""
        layout = [f"sharding={sharding}", f"trainer.n_gpus_per_node={count}"]
        chain[leg] = f"{count}:{sharding}{ray}", [*layout, *(["trainer=ray"] if ray else [])]
    if len(chain) < 2:
        raise ConfigError(f"--topology is {text!r}: one layout is not a chain. Give several, such as 1,2:fsdp,1.")
    return chain


def check_topologies(
    launcher: RunLauncher, chain: dict[int, tuple[str, list[str]]], tolerance: float | None
) -> tuple[list[str], str]:
    """Run the chain, one step under each layout.

    Args:
        tolerance: for comparing metrics and the last checkpoint with a run under the first layout only; None skips that
            run.
    Returns:
        The first tensor that a leg loaded differently from how it was saved, if any, or what differs from a run under
        the first layout; and what was compared.
    Raises:
        RunFailed: a run ended early.
    """
    from verl.checkpoint.read.reader import CheckpointReader
    from verl.trainer.state.compare_runs import (
        Tolerance,
        first_part_apart,
        first_step_apart,
        first_tensor_apart,
        num_compared,
        steps_of,
    )

    def run(name: str, saved_in: str, *overrides: str) -> Path:
        loaded = str(launcher.directory / f"{name}_loaded_checkpoints")
        settings, environment = ["checkpoint.keep_last_n=null", *overrides], {LOADED_DIR: loaded, ROOT: launcher.root}
        return launcher.run(name, saved_in, settings, LEG_SCRIPT, None, **environment)

    runs, exact = [], Tolerance(without=OF_EACH_PROCESS)
    for leg, (layout, overrides) in chain.items():
        stop = [f"trainer.stop_after={leg}"] if leg < len(chain) else []
        if leg == 1:
            runs.append(run("leg_1", "chain", *overrides, *stop))
            continue
        saved = launcher.last("chain")
        runs.append(run(f"leg_{leg}", "chain", *overrides, *stop, "resume=latest"))
        loaded = launcher.last(f"leg_{leg}_loaded")
        digests = [CheckpointReader(x).digest(OF_EACH_PROCESS) for x in (saved, loaded)]
        echo(f"  digest {digests[0][:16]} saved, {digests[1][:16]} loaded")
        if digests[0] != digests[1]:
            lost = first_tensor_apart(saved, loaded, exact) or "the digests differ"
            return [f"leg {leg}, {layout}, did not load {saved.name} as it was saved: {lost}"], ""
    names, last = [name for name, _ in chain.values()], launcher.last("chain")
    compared = f"each layout loaded {num_compared(last, exact)} tensors as the one before it saved them, bit by bit"
    compared = f"{' -> '.join(names)}: {compared}"
    if tolerance is None:
        return [], compared
    near, straight = Tolerance(tolerance), steps_of(run("straight", "straight", *chain[1][1]))
    apart = next(filter(None, (first_step_apart(straight, steps_of(x), near) for x in runs)), None)
    differences = [x for x in (apart, first_part_apart(launcher.last("straight"), last, near)) if x is not None]
    return differences, f"{compared}, and the steps and the end agree with {names[0]} alone to within {tolerance:g}"


def resume_check(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of all runs: experiment=..., KEY=VALUE.")
    ] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    root: Annotated[str, typer.Option(help="ppo or sft.")] = "ppo",
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")] = 4,
    at: Annotated[
        int | None, typer.Option(help="Stop and resume after this step; half of the steps by default.")
    ] = None,
    to_sharding: Annotated[str | None, typer.Option(help="Resume under another sharding, such as ddp.")] = None,
    processes: Annotated[int | None, typer.Option(help="Resume on this many processes.")] = None,
    topology: Annotated[
        str | None,
        typer.Option(help="A chain of layouts instead, one step each: 1,2:fsdp,4:tp_fsdp,2:ray,1."),
    ] = None,
    in_episode: Annotated[
        bool, typer.Option(help="Kill the run during its episodes of the next step, instead of stopping it.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help=f"Default: 0, bit by bit; {TOLERANCE:g} if the layout changes. With --topology: also compare with a "
            "run under the first layout only."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Kill a run after this many seconds without progress.", min=0.001)
    ] = 1800.0,
    keep: Annotated[Path | None, typer.Option(help="Run in this new directory, and keep it.")] = None,
) -> None:
    """Compare N uninterrupted steps with k steps, a stop, a resume and N - k steps, and print the first difference.

    With --in-episode the second run is killed during the episodes of step k + 1, and resumed from their journal.

    With --topology a run is resumed under a chain of layouts: each must load exactly what the one before it saved.
    """
    overrides = [*([] if config_dir is None else [f"--config-dir={config_dir}"]), *(overrides or ())]
    layout = [] if to_sharding is None else [f"sharding={to_sharding}"]
    layout += [] if processes is None else [f"trainer.n_gpus_per_node={processes}"]
    if root not in ("ppo", "sft"):
        raise typer.BadParameter(f"{root!r}: expected ppo or sft.", param_hint="--root")
    try:
        if topology is not None and in_episode:
            raise ConfigError("--in-episode with --topology: legs end after a step. Leave one of them out.")
        chain = {} if topology is None else topologies(topology)
        with _directory(keep) as directory:
            launcher = RunLauncher(
                root=root, steps=len(chain) or steps, directory=directory, overrides=overrides, timeout_s=timeout
            )
            if chain:
                differences, compared = check_topologies(launcher, chain, tolerance)
            else:
                near = (TOLERANCE if layout else 0.0) if tolerance is None else tolerance
                differences, compared = check_resume(
                    launcher, steps // 2 if at is None else at, layout, near, in_episode
                )
            echo("\n".join(f"DIFFERS: {line}" for line in differences) if differences else f"OK: {compared}")
    except (ConfigError, RunFailed) as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from error
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
