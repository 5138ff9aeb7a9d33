"""The plan of a run: memory, batch arithmetic, time, disk, and the cheapest changes that make it fit.

run ── memory.py ──> bytes by phase ──┐
    ── step_time.py ──> seconds ──────┼──> RunPlan ── too large? ──> changes, each planned again
    ── batch, disk ───────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from verl.errors import ConfigError
from verl.trainer.config import PPOSettings
from verl.trainer.plan.devices import DeviceRates
from verl.trainer.plan.memory import MemoryPlan, memory_plan
from verl.trainer.plan.memory_estimate import GIB, changes
from verl.trainer.plan.step_time import StageTime, share_lines, stage_times

MOST_CHANGES = 3  # that are named
GPUS = (2, 4, 8)  # that a machine of a data centre may give to a run


@dataclass(frozen=True)
class FittingChange:
    """Settings that make a run fit.

    Attributes:
        peak: bytes then.
        slower: seconds of a step then, relative to before.
    """

    settings: tuple[str, ...]
    peak: int
    slower: float

    def words(self) -> str:
        return f"{' '.join(self.settings)} -> {self.peak / GIB:.1f} GiB, {self.slower - 1:+.0%} time"


@dataclass(frozen=True)
class RunPlan:
    """What a run takes on devices of a kind.

    Attributes:
        batch: sentences about rows, micro-batches and optimizer steps.
        faults_of_batch: divisions that leave a remainder.
        disk: sentences about checkpoints.
        changes: that make it fit, the cheapest first; empty where it fits.
    """

    device: DeviceRates
    memory: MemoryPlan
    stages: tuple[StageTime, ...]
    batch: tuple[str, ...]
    disk: tuple[str, ...]
    changes: tuple[FittingChange, ...]
    response: int | None = None

    @property
    def step_s(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def summary(self) -> str:
        """One line."""
        peak = self.memory.peak
        return (
            f"{peak.name} needs most, {peak.total / GIB:.2f} of {self.memory.limit / GIB:.1f} GiB in each process; "
            f"about {_duration(self.step_s)} a step on {self.device.name}"
        )

    def lines(self) -> Iterator[str]:
        """The whole plan in plain text."""
        estimate = self.memory.estimate
        machines = f" on each of {estimate.machines} machines" if estimate.machines > 1 else ""
        yield f"{estimate.processes} process{'es' * (estimate.processes > 1)}{machines}, device {self.device.name}"
        yield ""
        yield from self.memory.lines()
        if self.memory.host:
            yield f"main memory     {self.memory.host / GIB:.2f} GiB on each machine"
        yield "It fits." if self.fits else self._short()
        for change in self.changes:
            yield f"  {change.words()}"
        yield ""
        yield from self.batch
        yield ""
        source = "measured here" if self.device.is_measured else "from a table of devices: no step was run"
        drawn = "as long as they may be" if self.response is None else f"of {self.response} tokens"
        yield f"A step takes about {_duration(self.step_s)}, with responses {drawn} (rates {source}):"
        yield from (f"  {line}" for line in share_lines(self.stages))
        yield ""
        yield from self.disk

    def to_json(self) -> dict[str, Any]:
        """All of it as numbers: bytes and seconds."""
        return {
            "device": self.device.name,
            "fits": self.fits,
            "limit_bytes": self.memory.limit,
            "peak": {"phase": self.memory.peak.name, "bytes": self.memory.peak.total},
            "phases": [
                {"name": phase.name, "roles": list(phase.roles), "bytes": phase.total, "parts": phase.parts}
                for phase in self.memory.phases
            ],
            "host_bytes": self.memory.host,
            "batch": list(self.batch),
            "step_seconds": self.step_s,
            "stages": [{"name": s.name, "seconds": s.seconds, "bound": s.bound} for s in self.stages],
            "checkpoint_bytes": self.memory.estimate.saving,
            "checkpoints_kept": self.memory.estimate.kept,
            "changes": [
                {"settings": list(c.settings), "peak_bytes": c.peak, "relative_time": c.slower} for c in self.changes
            ],
        }

    def _short(self) -> str:
        peak, limit = self.memory.peak, self.memory.limit
        told = f"It does not fit: {peak.name} needs {peak.total / GIB:.1f} GiB, and a process has {limit / GIB:.1f}."
        if not self.changes:
            return f"{told} No setting alone, and no two, make it fit: take a smaller model or more devices."
        return f"{told} What makes it fit:"


def plan_run(
    run: Any,
    device: DeviceRates,
    *,
    exact: bool = False,
    response: int | None = None,
    free_disk: int | None = None,
    upload_rate: float | None = None,
    looks_for_changes: bool = True,
) -> RunPlan:
    """Plan a run from its configuration; no weight is loaded and no process started.

    Args:
        exact: trace the activations of all layers.
        response: tokens of a response on average, for the time; None for the longest.
        free_disk: bytes where checkpoints go.
        upload_rate: bytes per second to the object storage.
        looks_for_changes: that make it fit where it does not.
    """
    memory = memory_plan(run, device, exact)
    stages = tuple(stage_times(run, memory, device, response))
    step_s = sum(stage.seconds for stage in stages)
    searches = looks_for_changes and not memory.fits
    found = () if not searches else tuple(_changes_that_fit(run, device, memory, step_s, response))
    disk = tuple(_disk(run, memory, step_s, free_disk, upload_rate))
    return RunPlan(device, memory, stages, tuple(_batch(run)), disk, found, response)


def _changes_that_fit(
    run: Any, device: DeviceRates, memory: MemoryPlan, step_s: float, response: int | None
) -> list[FittingChange]:
    """Single settings that make a run fit; pairs where none does."""

    def planned(*names: str) -> FittingChange | None:
        try:
            changed_run = run
            for name in names:
                changed_run = dict(changes(changed_run, memory.estimate, GPUS))[name]()
            changed = memory_plan(changed_run, device)
            seconds = sum(stage.seconds for stage in stage_times(changed_run, changed, device, response))
        except (ConfigError, KeyError, ValueError):  # it does not go with the rest
            return None
        return (
            FittingChange(names, changed.peak.total, seconds / step_s)
            if changed.peak.total < memory.peak.total
            else None
        )

    names = [name for name, _ in changes(run, memory.estimate, GPUS)]
    tried = [found for name in names if (found := planned(name)) is not None]
    fitting = _one_of_each([change for change in tried if change.peak <= memory.limit])
    if not fitting:
        helpful = sorted(_one_of_each(tried, by_peak=True), key=lambda change: change.peak)[:4]
        pairs = [planned(first.settings[0], second.settings[0]) for first, second in combinations(helpful, 2)]
        fitting = [found for found in pairs if found is not None and found.peak <= memory.limit]
    return sorted(fitting, key=lambda change: (round(change.slower, 2), change.peak))[:MOST_CHANGES]


def _one_of_each(found: list[FittingChange], *, by_peak: bool = False) -> list[FittingChange]:
    """Of changes to the same key the one that costs least, or with `by_peak` the one that saves most."""
    best: dict[str, FittingChange] = {}
    for change in found:
        key = change.settings[0].partition("=")[0]
        if key not in best or (by_peak and change.peak < best[key].peak):
            best[key] = change
    return list(best.values())


def _batch(run: Any) -> Iterator[str]:
    settings = run.trainer
    world = settings.n_gpus_per_node * settings.nnodes
    if not isinstance(settings, PPOSettings):
        yield f"A step trains on {settings.batch_size} sequences in one optimizer step."
        yield from _remainder(settings.batch_size, world, "sequences", "processes")
        return
    prompts, group, algorithm = settings.prompts_per_step, settings.group_size, run.algorithm
    rows = prompts * group
    updates = algorithm.epochs * algorithm.mini_batches
    yield f"A step draws {prompts} prompts x {group} samples = {rows} rows."
    yield (
        f"They are trained on in {algorithm.mini_batches} mini-batch{'es' * (algorithm.mini_batches > 1)} of "
        f"{-(-rows // algorithm.mini_batches)} rows, {algorithm.epochs} time{'s' * (algorithm.epochs > 1)}: "
        f"{updates} optimizer step{'s' * (updates > 1)}."
    )
    yield from _remainder(rows, algorithm.mini_batches, "rows", "mini-batches")
    width = getattr(run.data, "max_prompt_length", 0) + run.rollout.max_new_tokens
    for role in ("actor", "critic"):
        described = getattr(run, role, None)
        if described is None or role not in run.roles:
            continue
        sharding = run.shardings()[role]
        shares = sharding.row_shares(world) if world > 1 else 1
        together = sharding.token_shares(world) // shares if world > 1 else 1
        own, limit = -(-rows // (algorithm.mini_batches * shares)), described.micro_batch_tokens * together
        per = max(1, limit // width)
        where = "each process" if together == 1 else f"{together} processes that share their tokens"
        yield (
            f"{role}: {own} rows of a mini-batch in {where}, at most {width} tokens each, in "
            f"{-(-own // per)} micro-batch{'es' * (own > per)} of {limit} tokens."
        )
        yield from _remainder(rows // algorithm.mini_batches, shares, "rows of a mini-batch", "processes")


def _remainder(count: int, parts: int, what: str, where: str) -> Iterator[str]:
    if parts > 1 and count % parts:
        yield f"{count} {what} over {parts} {where} leave a remainder of {count % parts}: some have one more."


def _disk(run: Any, memory: MemoryPlan, step_s: float, free: int | None, upload_rate: float | None) -> Iterator[str]:
    saves, size = run.checkpoint, memory.estimate.saving
    if saves is None or not size:
        yield "Nothing is saved."
        return
    every = saves.save_interval
    often = "" if every is None else f", one every {every} steps (about {_duration(every * step_s)})"
    if saves.keep_last_n is not None:
        kept = saves.keep_last_n + 1
        yield f"A checkpoint takes {size / GIB:.2f} GiB{often}; {saves.keep_last_n} stay: {kept * size / GIB:.2f} GiB."
        if free is not None and kept * size > free:
            yield f"{free / GIB:.2f} GiB are free there: lower checkpoint.keep_last_n or set checkpoint.save_dir."
    else:
        yield f"A checkpoint takes {size / GIB:.2f} GiB{often}; all are kept."
        if free is not None and every is not None:
            yield f"The disk is full after {free // size} of them, in about {_duration(free // size * every * step_s)}."
    if upload_rate is not None and run.storage is not None:
        yield f"Uploading one takes about {_duration(size / upload_rate)}."


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
