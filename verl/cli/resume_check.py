"""`verl resume-check`: is a run that stops and is resumed the run that never stopped?

straight     steps 1 ........................ N
interrupted  steps 1 .... k, saved, ended
resumed                     k + 1 ........... N    in a new process, from that checkpoint

Compared: the metrics of each step, and everything in the last checkpoints of `straight` and `resumed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.cli.legs import LegFailed, Legs
from verl.cli.topology_check import TopologyCheck, topologies
from verl.errors import ConfigError
from verl.utils.temporary_directory import TemporaryDirectory

if TYPE_CHECKING:
    from verl.checkpoint.core.checkpoint import Checkpoint

TOLERANCE = 1e-3  # of a resume on other processes, whose sums are rounded otherwise


@dataclass(frozen=True)
class ResumeCheck:
    """One check.

    Args:
        legs: how its runs are started.
        stop_after: step after which the second run is stopped and resumed.
        resumed_with: further ones of the resumed run alone: another layout.
        plant: a tensor, as `component/name`, of which one bit is flipped between stopping and resuming.
        tolerance: see `verl.trainer.comparing.Closeness`.
    Raises:
        ConfigError: it would compare nothing.
    """

    legs: Legs
    stop_after: int
    resumed_with: Sequence[str] = ()
    plant: str | None = None
    tolerance: float = 0.0

    def __post_init__(self):
        if not 1 <= self.stop_after < self.legs.steps:
            raise ConfigError(f"--at is {self.stop_after}: must lie between 1 and --steps {self.legs.steps}, less one.")

    def differences(self) -> list[str]:
        """Run all three, and tell the first metric and the first part of the checkpoints that differ; none where all
        is equal.

        Raises:
            LegFailed: a run ended early.
        """
        from verl.trainer.comparing import Closeness, first_part_apart, first_step_apart, steps_of

        straight = self.legs.run("straight", "straight", [])
        self.legs.run("interrupted", "stopped", [f"trainer.stop_after={self.stop_after}"])
        resume = [*self.resumed_with, "resume=latest"]
        if self.plant is not None:
            self._plant(self._last("stopped"))
            resume.append("checkpoint.verify=false")
        resumed = self.legs.run("resumed", "stopped", resume)
        exact, near = Closeness(), Closeness(self.tolerance)
        if found := first_step_apart(steps_of(straight), steps_of(self.legs.directory / "interrupted"), exact):
            return [f"before the resume already, so this run does not repeat itself: {found}"]
        apart = first_step_apart(steps_of(straight), steps_of(resumed), near)
        last = self._last("straight"), self._last("stopped")
        return [found for found in (apart, first_part_apart(*last, near)) if found is not None]

    def compared(self) -> str:
        """What was found equal, once nothing differs."""
        from verl.trainer.comparing import Closeness, num_compared

        near = Closeness(self.tolerance)
        tensors = num_compared(self._last("straight"), near)
        how = (
            f"agree to within {self.tolerance:g} (another layout rounds otherwise)"
            if near.tolerance
            else ("are equal bit by bit")
        )
        return f"steps {self.stop_after + 1} to {self.legs.steps} and {tensors} tensors of the last checkpoint {how}"

    def _last(self, saved_in: str) -> Checkpoint:
        return self.legs.last(saved_in, strict=self.plant is None)

    def _plant(self, checkpoint: Checkpoint) -> None:
        """Flip one bit of the largest element of a tensor, on the disk, as no hash would let it pass."""
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


def resume_check(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Of all runs, as the main script takes them: experiment=..., KEY=VALUE.")
    ] = None,
    root: Annotated[str, typer.Option(help="ppo or sft.")] = "ppo",
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")] = 4,
    at: Annotated[
        int | None, typer.Option(help="Stop and resume after this step; half of the steps by default.")
    ] = None,
    to_sharding: Annotated[str | None, typer.Option(help="Resume under another sharding, such as ddp.")] = None,
    processes: Annotated[int | None, typer.Option(help="Resume on so many processes.")] = None,
    topology: Annotated[
        str | None,
        typer.Option(help="Instead: a chain of layouts, a step each: 1,2:fsdp,4:tp_fsdp,2:ray,1."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help=f"0 is bit by bit, the default; {TOLERANCE:g} if the layout changes. With --topology: also with "
            "the first layout alone."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds of a run without progress, after which it is ended.", min=0.001)
    ] = 1800.0,
    keep: Annotated[Path | None, typer.Option(help="Run in this new directory, and leave it.")] = None,
    plant: Annotated[str | None, typer.Option(hidden=True, help="Flip a bit of this tensor, COMPONENT/NAME.")] = None,
) -> None:
    """Run N steps straight, and k, stop, resume, N - k; compare bit by bit, and name the first thing that differs.

    With --topology, a chain of layouts: what each of them loads must be what the one before it saved, bit by bit.
    """
    layout = [] if to_sharding is None else [f"sharding={to_sharding}"]
    layout += [] if processes is None else [f"trainer.n_gpus_per_node={processes}"]
    try:
        with _directory(keep) as directory:
            check: ResumeCheck | TopologyCheck
            if topology is not None:
                chain = topologies(topology)
                legs = Legs(
                    root=root,
                    steps=len(chain),
                    directory=directory,
                    overrides=overrides or (),
                    timeout_s=timeout,
                    tell=typer.echo,
                )
                check = TopologyCheck(legs, chain, tolerance)
            else:
                legs = Legs(
                    root=root,
                    steps=steps,
                    directory=directory,
                    overrides=overrides or (),
                    timeout_s=timeout,
                    tell=typer.echo,
                )
                check = ResumeCheck(
                    legs=legs,
                    stop_after=steps // 2 if at is None else at,
                    resumed_with=layout,
                    plant=plant,
                    tolerance=(TOLERANCE if layout else 0.0) if tolerance is None else tolerance,
                )
            found = check.differences()
            typer.echo("\n".join(f"DIFFERS: {line}" for line in found) if found else f"OK: {check.compared()}")
    except (ConfigError, LegFailed) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(1 if found else 0)


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Where the runs write: the directory that is asked for, or one that is removed afterwards."""
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
