"""`verl resume-check --topology 1,2:fsdp,4:tp_fsdp,2:ray,1`: a run that goes on under one layout after another.

leg 1   one process          step 1, saved ──┐
leg 2   two, under fsdp   ┌── loaded ────────┘   saved again at once: the same tensors?   step 2, saved ──┐
leg 3   ...               └─ ...

What a leg loads must be what the leg before it saved, bit by bit, whoever wrote it. What it makes of it is the same to
rounding, until rounding lets a response be another one; with a tolerance, that is compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.cli.legs import Legs
from verl.errors import ConfigError

SHARDINGS = ("none", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp")
LEG_SCRIPT = ("-m", "verl.cli.topology_leg")
ASIDE, ROOT = "VERL_TOPOLOGY_ASIDE", "VERL_TOPOLOGY_ROOT"
OF_EACH_PROCESS = ("rng",)


@dataclass(frozen=True)
class Topology:
    """Processes, how weights are spread over them, and whether they are Ray's."""

    processes: int
    sharding: str
    is_ray: bool

    def __str__(self) -> str:
        return f"{self.processes}:{self.sharding}{':ray' if self.is_ray else ''}"

    @property
    def overrides(self) -> list[str]:
        """Of the main script."""
        layout = [f"sharding={self.sharding}", f"trainer.n_gpus_per_node={self.processes}"]
        return [*layout, "trainer=ray"] if self.is_ray else layout


def topologies(text: str) -> tuple[Topology, ...]:
    """Layouts, separated by commas: a number of processes, then a sharding, `ray`, or both.

    >>> [str(one) for one in topologies("1,2:fsdp,4:tp_fsdp,2:ray,1")]
    ['1:none', '2:fsdp', '4:tp_fsdp', '2:ddp:ray', '1:none']

    Raises:
        ConfigError: it says something else.
    """
    found = [_topology(entry.strip(), text) for entry in text.split(",")]
    if len(found) < 2:
        raise ConfigError(f"--topology is {text!r}: one layout is no chain. Give several, such as 1,2:fsdp,1.")
    return tuple(found)


def _topology(entry: str, text: str) -> Topology:
    number, *words = entry.split(":")
    shardings = [word for word in words if word in SHARDINGS]
    unknown = [word for word in words if word not in (*SHARDINGS, "ray")]
    if not number.isdigit() or int(number) < 1 or unknown or len(shardings) > 1:
        raise ConfigError(
            f"--topology is {text!r}: {entry!r} is no layout. Give a number of processes, then a sharding "
            f"({', '.join(SHARDINGS)}), ray, or both: 2:fsdp, 2:ray, 4:tp_fsdp:ray."
        )
    count = int(number)
    return Topology(count, shardings[0] if shardings else "none" if count == 1 else "ddp", "ray" in words)


@dataclass(frozen=True)
class TopologyCheck:
    """One check.

    Args:
        legs: how its runs are started; as many steps as there are layouts.
        chain: layouts, for one step each.
        tolerance: of the steps and the end of the chain, beside what the first layout alone comes to; None runs that
            not at all.
    """

    legs: Legs
    chain: Sequence[Topology]
    tolerance: float | None

    def differences(self) -> list[str]:
        """Run the chain; tell the first tensor that a leg loaded otherwise than it was saved, none where there is none.

        Raises:
            LegFailed: a run ended early.
        """
        runs = []
        for number, layout in enumerate(self.chain, start=1):
            before = self.legs.last("chain") if number > 1 else None
            stop = [f"trainer.stop_after={number}"] if number < len(self.chain) else []
            resume = [] if before is None else ["resume=latest"]
            runs.append(self._leg(f"leg_{number}", "chain", layout, [*stop, *resume]))
            if before is not None and (lost := self._otherwise(before, f"leg_{number}_loaded")) is not None:
                return [f"leg {number}, {layout}, loaded {before.name} otherwise than it was saved: {lost}"]
        return [] if self.tolerance is None else self._from_straight(runs, self.tolerance)

    def _from_straight(self, runs: Sequence[Path], tolerance: float) -> list[str]:
        """The first metric and the first tensor that are not what the first layout alone comes to."""
        from verl.trainer.comparing import Closeness, first_part_apart, first_step_apart, steps_of

        near = Closeness(tolerance)
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
        return self.legs.run(name, saved_in, settings, LEG_SCRIPT, **{ASIDE: aside, ROOT: self.legs.root})

    def _otherwise(self, saved: Any, loaded_in: str) -> str | None:
        """What is not the same in a checkpoint and in the one that was saved as soon as it was loaded."""
        from verl.checkpoint.read.reader import CheckpointReader
        from verl.trainer.comparing import Closeness, first_tensor_apart

        loaded = self.legs.last(loaded_in)
        digests = [CheckpointReader(one).digest(OF_EACH_PROCESS) for one in (saved, loaded)]
        self.legs.tell(f"  digest {digests[0][:16]} saved, {digests[1][:16]} loaded")
        if digests[0] == digests[1]:
            return None
        return first_tensor_apart(saved, loaded, Closeness(without=OF_EACH_PROCESS)) or "the digests differ"
