"""`verl resume-check`: does a run that stops and resumes give the same numbers as a run without a stop?

straight     steps 1 ........................ N
interrupted  steps 1 .... k, saved, ended
resumed                     k + 1 ........... N    in a new process, from that checkpoint

Compared: the metrics of each step, and everything in the last checkpoints of `straight` and `resumed`. With
`--in-episode` the second run is not stopped after step k, but killed in the midst of the episodes of step k + 1.

`--topology 1,2:fsdp,4:tp_fsdp,2:ray,1`: a run that is resumed under one layout after another.

leg 1   one process          step 1, saved ──┐
leg 2   two, under fsdp   ┌── loaded ────────┘   saved again at once: the same tensors?   step 2, saved ──┐
leg 3   ...               └─ ...

Each leg must load exactly what the leg before it saved. Its results are equal up to rounding, until rounding changes a
sampled response; with a tolerance they are compared too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

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
KILL_LOOK_EVERY_S = 0.002
KILL_AFTER = (0.7, 0.5, 0.3, 0.1)  # share of the answers in a step's journal; the next one if the kill came too late
END_TIMEOUT_S = 20.0  # for an interrupted run


class RunFailed(Exception):
    """A run of the check failed; has the end of its output."""


@dataclass(frozen=True, kw_only=True)
class RunLauncher:
    """Starts the runs of a check.

    Args:
        root: `ppo` or `sft`.
        steps: number of steps of the whole run.
        directory: parent of the run directories.
        overrides: overrides of all runs.
        timeout_s: a run without progress for this long is killed.
        tell: called with each line of progress.
    """

    root: str
    steps: int
    directory: Path
    overrides: Sequence[str] = ()
    timeout_s: float = 1800.0
    tell: Callable[[str], None] = field(default=lambda line: None)

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
            fault = self._fault(command, environment, output, kill_when)
            if fault is not None:
                output.seek(0)
                tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
                raise RunFailed(f"the {name} run {fault}:\n{tail}")
        self.tell(f"{name}: done in {time.monotonic() - began:.1f} s")
        return run_dir

    def _fault(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        kill_when: Callable[[], bool] | None,
    ) -> str | None:
        """Run a command to its end; returns the reason of a failure, or None."""
        with contextlib.closing(Progress(num_slots=1)) as progress:
            watch = ProgressWatch(progress, self.timeout_s, look_every_s=2 * LOOK_EVERY_S)
            env = {**os.environ, **environment, STARTER_VARIABLE: str(progress.fd)}
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

    def last(self, saved_in: str, strict: bool = True) -> Checkpoint:
        """The newest checkpoint of some runs."""
        from verl.checkpoint.read.discovery import CheckpointDirectory

        return CheckpointDirectory(f"{self.directory / saved_in}_checkpoints").newest(strict)


def laid_over(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Merge overrides; a later one replaces earlier ones of the same key or below the same component."""
    keys = {text.partition("=")[0] for text in later}
    kept = [text for text in overrides if not keys & {text.partition("=")[0], text.partition(".")[0]}]
    return [*kept, *later]


SHARDINGS = ("none", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp", "cp", "pp")
LEG_SCRIPT = ("-m", "verl.cli.resume_worker")
ASIDE, ROOT = "VERL_TOPOLOGY_ASIDE", "VERL_TOPOLOGY_ROOT"
OF_EACH_PROCESS = ("rng",)


@dataclass(frozen=True)
class Topology:
    """A layout: number of processes, sharding, and whether they are started by Ray."""

    processes: int
    sharding: str
    is_ray: bool

    def __str__(self) -> str:
        return f"{self.processes}:{self.sharding}{':ray' if self.is_ray else ''}"

    @property
    def overrides(self) -> list[str]:
        """Overrides for the training command."""
        layout = [f"sharding={self.sharding}", f"trainer.n_gpus_per_node={self.processes}"]
        return [*layout, "trainer=ray"] if self.is_ray else layout


def topologies(text: str) -> tuple[Topology, ...]:
    """Parse comma-separated layouts: a number of processes, then a sharding, `ray`, or both.

    >>> [str(one) for one in topologies("1,2:fsdp,4:tp_fsdp,2:ray,1")]
    ['1:none', '2:fsdp', '4:tp_fsdp', '2:ddp:ray', '1:none']

    Raises:
        ConfigError: the text cannot be parsed.
    """
    found = [_topology(entry.strip(), text) for entry in text.split(",")]
    if len(found) < 2:
        raise ConfigError(f"--topology is {text!r}: one layout is not a chain. Give several, such as 1,2:fsdp,1.")
    return tuple(found)


def _topology(entry: str, text: str) -> Topology:
    number, *words = entry.split(":")
    shardings = [word for word in words if word in SHARDINGS]
    unknown = [word for word in words if word not in (*SHARDINGS, "ray")]
    if not number.isdigit() or int(number) < 1 or unknown or len(shardings) > 1:
        raise ConfigError(
            f"--topology is {text!r}: {entry!r} is not a layout. Give a number of processes, then a sharding "
            f"({', '.join(SHARDINGS)}), ray, or both: 2:fsdp, 2:ray, 4:tp_fsdp:ray."
        )
    count = int(number)
    return Topology(count, shardings[0] if shardings else "none" if count == 1 else "ddp", "ray" in words)


@dataclass(frozen=True)
class TopologyCheck:
    """One check.

    Args:
        legs: starts the runs; it has as many steps as there are layouts.
        chain: the layouts, one step each.
        tolerance: for comparing metrics and the last checkpoint with a run under the first layout only; None skips that
            run.
    """

    legs: RunLauncher
    chain: Sequence[Topology]
    tolerance: float | None

    def differences(self) -> list[str]:
        """Run the chain; returns the first tensor that a leg loaded differently from how it was saved, if any.

        Raises:
            RunFailed: a run ended early.
        """
        runs = []
        for number, layout in enumerate(self.chain, start=1):
            before = self.legs.last("chain") if number > 1 else None
            stop = [f"trainer.stop_after={number}"] if number < len(self.chain) else []
            resume = [] if before is None else ["resume=latest"]
            runs.append(self._leg(f"leg_{number}", "chain", layout, [*stop, *resume]))
            if before is not None and (lost := self._otherwise(before, f"leg_{number}_loaded")) is not None:
                return [f"leg {number}, {layout}, did not load {before.name} as it was saved: {lost}"]
        return [] if self.tolerance is None else self._from_straight(runs, self.tolerance)

    def _from_straight(self, runs: Sequence[Path], tolerance: float) -> list[str]:
        """The first metric and the first tensor that differ from a run under the first layout only."""
        from verl.trainer.state.compare_runs import Tolerance, first_part_apart, first_step_apart, steps_of

        near = Tolerance(tolerance)
        metrics = steps_of(self._leg("straight", "straight", self.chain[0], []))
        apart = (first_step_apart(metrics, steps_of(run), near) for run in runs)
        end = first_part_apart(self.legs.last("straight"), self.legs.last("chain"), near)
        return [found for found in (next(filter(None, apart), None), end) if found is not None]

    def compared(self) -> str:
        """What was found equal, once nothing differs."""
        tensors = sum(x.component not in OF_EACH_PROCESS for x in self.legs.last("chain").manifest.tensors)
        chain = " -> ".join(map(str, self.chain))
        loaded = f"{chain}: each layout loaded {tensors} tensors as the one before it saved them, bit by bit"
        if self.tolerance is None:
            return loaded
        return f"{loaded}, and the steps and the end agree with {self.chain[0]} alone to within {self.tolerance:g}"

    def _leg(self, name: str, saved_in: str, layout: Topology, overrides: Sequence[str]) -> Path:
        settings = [*layout.overrides, "checkpoint.keep_last_n=null", *overrides]
        aside = str(self.legs.directory / f"{name}_loaded_checkpoints")
        return self.legs.run(name, saved_in, settings, LEG_SCRIPT, None, **{ASIDE: aside, ROOT: self.legs.root})

    def _otherwise(self, saved: Any, loaded_in: str) -> str | None:
        """The difference between a checkpoint and the one that was saved right after loading it; None if they are
        equal.
        """
        from verl.checkpoint.read.reader import CheckpointReader
        from verl.trainer.state.compare_runs import Tolerance, first_tensor_apart

        loaded = self.legs.last(loaded_in)
        digests = [CheckpointReader(one).digest(OF_EACH_PROCESS) for one in (saved, loaded)]
        self.legs.tell(f"  digest {digests[0][:16]} saved, {digests[1][:16]} loaded")
        if digests[0] == digests[1]:
            return None
        return first_tensor_apart(saved, loaded, Tolerance(without=OF_EACH_PROCESS)) or "the digests differ"


TOLERANCE = 1e-3  # for a resume on another number of processes, which changes rounding


@dataclass(frozen=True)
class ResumeCheck:
    """One check.

    Args:
        legs: starts the runs.
        stop_after: step after which the second run is stopped and resumed.
        resumed_with: further overrides of the resumed run, e.g. another layout.
        plant: fault injection: a tensor, as `component/name`, of which one bit is flipped before resuming.
        tolerance: see `verl.trainer.state.compare_runs.Tolerance`.
        in_episode: kill the second run in the midst of the episodes of the step after that, instead of stopping it.
    Raises:
        ConfigError: there would be nothing to compare.
    """

    legs: RunLauncher
    stop_after: int
    resumed_with: Sequence[str] = ()
    plant: str | None = None
    tolerance: float = 0.0
    in_episode: bool = False

    def __post_init__(self):
        if self.in_episode and self.legs.root != "ppo":
            raise ConfigError(f"--in-episode with --root {self.legs.root}: there are no episodes in it. Leave one out.")
        if not 1 <= self.stop_after < self.legs.steps:
            raise ConfigError(f"--at is {self.stop_after}: must lie between 1 and --steps {self.legs.steps}, less one.")

    def differences(self) -> list[str]:
        """Run all three; returns the first metric and the first part of the checkpoints that differ, if any.

        Raises:
            RunFailed: a run ended early.
        """
        from verl.trainer.state.compare_runs import Tolerance, first_part_apart, first_step_apart, steps_of

        straight = self.legs.run("straight", "straight", [])
        if self.in_episode:
            self._kill_in_episode()
        else:
            self.legs.run("interrupted", "stopped", [f"trainer.stop_after={self.stop_after}"])
        resume = [*self.resumed_with, "resume=latest"]
        if self.plant is not None:
            self._plant(self._last("stopped"))
            resume.append("checkpoint.verify=false")
        resumed = self.legs.run("resumed", "stopped", resume)
        if self.in_episode:
            self._tell_journal(resumed)
        exact, near = Tolerance(), Tolerance(self.tolerance)
        if found := first_step_apart(steps_of(straight), steps_of(self.legs.directory / "interrupted"), exact):
            return [f"before the resume, so the training itself is not reproducible: {found}"]
        apart = first_step_apart(steps_of(straight), steps_of(resumed), near)
        last = self._last("straight"), self._last("stopped")
        return [found for found in (apart, first_part_apart(*last, near)) if found is not None]

    def _kill_in_episode(self) -> None:
        """Run to a checkpoint after step k, and kill in the midst of the episodes of the next one.

        Raises:
            ConfigError: the episodes leave no journal.
            RunFailed: no kill came before they were over.
        """
        step = self.stop_after + 1
        answers = self._answers("straight", step)
        if not answers:
            raise ConfigError(
                f"--in-episode: the run keeps no journal of the episodes of step {step}. It needs an environment that "
                "has one (not none, nor agent_program), and environment.journal=true."
            )
        for share in KILL_AFTER:
            for left in ("interrupted", "stopped_checkpoints"):
                shutil.rmtree(self.legs.directory / left, ignore_errors=True)
            watch = _JournalWatch(self.legs.directory / "stopped_checkpoints", step, max(1, int(share * answers)))
            saves = [f"checkpoint.save_interval={self.stop_after}", f"trainer.stop_after={step}"]
            self.legs.run("interrupted", "stopped", saves, kill_when=watch)
            found = self._answers("stopped", step)
            if 0 < found < answers:  # so not all episodes had ended
                if self._last("stopped").step != self.stop_after:
                    raise RunFailed(f"the interrupted run was killed before step {self.stop_after} was saved.")
                self.legs.tell(f"  killed in the episodes of step {step}, after {found} of {answers} answers")
                return
        raise RunFailed(f"the episodes of step {step} were over before a kill came, {len(KILL_AFTER)} times.")

    def _answers(self, saved_in: str, step: int) -> int:
        """Answers of environments that the journal has of a step of training."""
        from verl.environments.journal import journal_records
        from verl.ops.counter_rng import TRAINING

        records = journal_records(self.legs.directory / f"{saved_in}_checkpoints/episode_journal", step)
        ids = [record["record"][0] for record in records if "answer" in record]
        return sum(name.startswith(f"{TRAINING}.{step}.") for name in ids)

    def _tell_journal(self, resumed: Path) -> None:
        """What became of the episodes that were interrupted.

        Raises:
            RunFailed: they were begun anew, so the runs need not be equal.
        """
        names = ("reused", "replayed", "restarted")
        lines = [json.loads(text) for text in read_text(resumed / "metrics.jsonl").splitlines()]
        counts = {name: sum(int(line.get(f"episode/journal_{name}", 0)) for line in lines) for name in names}
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        self.legs.tell(f"  answers of the journal: {told}")
        if counts["restarted"]:
            raise RunFailed(
                "episodes were begun anew: recovery of their environment is restart, which promises no equal runs. If "
                "its answers depend on the action alone, or on seed and actions, let it say stateless or deterministic."
            )
        if not counts["reused"] + counts["replayed"]:
            raise RunFailed("nothing of the interrupted episodes was found in the journal: they were drawn otherwise.")

    def compared(self) -> str:
        """What was found equal, once nothing differs."""
        from verl.trainer.state.compare_runs import Tolerance, num_compared

        near = Tolerance(self.tolerance)
        tensors = num_compared(self._last("straight"), near)
        how = (
            f"agree to within {self.tolerance:g} (another layout changes rounding)"
            if near.tolerance
            else ("are equal bit by bit")
        )
        return f"steps {self.stop_after + 1} to {self.legs.steps} and {tensors} tensors of the last checkpoint {how}"

    def _last(self, saved_in: str) -> Checkpoint:
        return self.legs.last(saved_in, strict=self.plant is None)

    def _plant(self, checkpoint: Checkpoint) -> None:
        """Flip one bit of the largest element of a tensor on the disk; its hash is not updated."""
        from verl.checkpoint.read.lazy_tensors import as_tensor
        from verl.checkpoint.read.reader import CheckpointReader

        found = [tensor for tensor in checkpoint.manifest.tensors if tensor.full_name == self.plant]
        if not found:
            names = ", ".join(tensor.full_name for tensor in checkpoint.manifest.tensors[:6])
            raise ConfigError(f"--plant is {self.plant}: the checkpoint has no such tensor; it has {names}, ...")
        (tensor,) = found
        values = as_tensor(CheckpointReader(checkpoint).tensor(tensor.component, tensor.name), tensor).flatten()
        place, part = int(values.double().abs().argmax()), tensor.slices[0]
        bit = _visible_bit(values.dtype)
        at = part.offset + place * values.element_size() + bit // 8
        file = checkpoint.path(part.file)
        file.chmod(0o644)
        with file.open("r+b") as data:
            data.seek(at)
            byte = data.read(1)[0]
            data.seek(at)
            data.write(bytes([byte ^ 1 << bit % 8]))


class _JournalWatch:
    """Whether the journal of a step has so many answers.

    Args:
        saved_in: the directory of checkpoints that it lies in.
    """

    ANSWER = b'{"answer":'

    def __init__(self, saved_in: Path, step: int, wanted: int):
        self.directory, self.pattern, self.wanted = saved_in / "episode_journal", f"step-{step:08d}.*", wanted
        self._read: dict[Path, tuple[int, int]] = {}  # bytes and answers

    def __call__(self) -> bool:
        for path in self.directory.glob(self.pattern):
            size, found = self._read.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(size)
                lines = file.read().rpartition(b"\n")
            written = len(lines[0]) + len(lines[1])
            self._read[path] = size + written, found + lines[0].count(self.ANSWER)
        return sum(found for _, found in self._read.values()) >= self.wanted


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
        bool,
        typer.Option(help="Kill the run in the midst of its episodes of the next step, instead of stopping it."),
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
    plant: Annotated[str | None, typer.Option(hidden=True, help="Flip a bit of this tensor, COMPONENT/NAME.")] = None,
) -> None:
    """Compare N uninterrupted steps with k steps, a stop, a resume and N - k steps, and print the first difference.

    With --in-episode the second run is killed during the episodes of step k + 1, and resumed from their journal.

    With --topology a run is resumed under a chain of layouts: each must load exactly what the one before it saved.
    """
    given = [*([] if config_dir is None else [f"--config-dir={config_dir}"]), *(overrides or ())]
    layout = [] if to_sharding is None else [f"sharding={to_sharding}"]
    layout += [] if processes is None else [f"trainer.n_gpus_per_node={processes}"]
    if root not in ("ppo", "sft"):
        raise typer.BadParameter(f"{root!r}: expected ppo or sft.", param_hint="--root")
    try:
        with _directory(keep) as directory:
            check: ResumeCheck | TopologyCheck
            if topology is not None and in_episode:
                raise ConfigError("--in-episode with --topology: legs end after a step. Leave one of them out.")
            if topology is not None:
                chain = topologies(topology)
                legs = RunLauncher(
                    root=root,
                    steps=len(chain),
                    directory=directory,
                    overrides=given,
                    timeout_s=timeout,
                    tell=typer.echo,
                )
                check = TopologyCheck(legs, chain, tolerance)
            else:
                legs = RunLauncher(
                    root=root,
                    steps=steps,
                    directory=directory,
                    overrides=given,
                    timeout_s=timeout,
                    tell=typer.echo,
                )
                check = ResumeCheck(
                    legs=legs,
                    stop_after=steps // 2 if at is None else at,
                    resumed_with=layout,
                    plant=plant,
                    tolerance=(TOLERANCE if layout else 0.0) if tolerance is None else tolerance,
                    in_episode=in_episode,
                )
            found = check.differences()
            echo("\n".join(f"DIFFERS: {line}" for line in found) if found else f"OK: {check.compared()}")
    except (ConfigError, RunFailed) as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(1 if found else 0)


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


def _visible_bit(dtype: Any) -> int:
    """The bit of a number, counted from its last, that changes a floating-point one by about a quarter."""
    import torch

    return -round(math.log2(torch.finfo(dtype).eps)) - 2 if dtype.is_floating_point else 0
