"""The plan of a run: memory, batch arithmetic, time, disk, and the cheapest changes that make it fit.

run ── workload.py ──> rows and tokens ── memory.py ──> bytes by phase ──┐
                                       ── step_time.py ──> seconds ──────┼──> RunPlan ── too large? ──> changes
                                       ── batch, disk ───────────────────┘

Changes are settings that make a run fit its devices, each planned again.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from verl.component import BuildContext
from verl.engines.sharding import FSDP
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.model_stats import has_shipped_shapes
from verl.trainer.plan.activations import num_experts
from verl.trainer.plan.async_plan import AsyncPlan
from verl.trainer.plan.memory import GIB, MemoryEstimate, MemoryPlan, estimate_memory, memory_plan
from verl.trainer.plan.step_time import RANGES, StageTime, share_lines, stage_times
from verl.trainer.plan.workload import (
    DeviceRates,
    device_named,
    free_disk,
    free_main_memory,
    free_memory,
    gpu_here,
    workload,
)
from verl.utils.external_input import write_text

MOST_CHANGES = 3  # that are named
GPUS = (2, 4, 8)  # that a machine of a data centre may give to a run
_log = logging.getLogger(__name__)
_NO_CHANGE = "No setting alone, and no two, make it fit: take a smaller model or more devices."


WIDTH = 80
UNBROKEN: Any = {"break_long_words": False, "break_on_hyphens": False}


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


def changes_that_fit(
    run: Any, device: DeviceRates, memory: MemoryPlan, step_s: float, response: int | None
) -> list[FittingChange]:
    """Single settings that make a run fit; pairs if no single one does."""

    def planned(*names: str) -> FittingChange | None:
        try:
            changed_run = run
            for name in names:
                changed_run = dict(changes(changed_run, memory.estimate))[name]()
            changed = memory_plan(changed_run, device, limit=memory.limit)
            seconds = sum(stage.seconds for stage in stage_times(changed_run, changed, device, response))
        except (ConfigError, KeyError, ValueError):  # it does not go with the rest
            return None
        return (
            FittingChange(names, changed.peak.total, seconds / step_s)
            if changed.peak.total < memory.peak.total
            else None
        )

    names = [name for name, _ in changes(run, memory.estimate)]
    tried = [change for name in names if (change := planned(name)) is not None]
    fitting = _one_of_each([change for change in tried if change.peak <= memory.limit])
    if not fitting:
        helpful = sorted(_one_of_each(tried, by_peak=True), key=lambda change: change.peak)[:4]
        firsts = [change.settings[0] for change in helpful]
        keys = {name: name.partition("=")[0] for name in names}
        both = {frozenset(pair): pair for pair in product(firsts, names) if keys[pair[0]] != keys[pair[1]]}
        pairs = [change for pair in both.values() if (change := planned(*pair)) is not None]
        fitting = [change for change in pairs if change.peak <= memory.limit]
    return sorted(fitting, key=lambda change: (round(change.slower, 2), change.peak))[:MOST_CHANGES]


def _one_of_each(changes: list[FittingChange], *, by_peak: bool = False) -> list[FittingChange]:
    """Cheapest change of each key, or with `by_peak` the one that saves most."""
    best: dict[str, FittingChange] = {}
    for change in changes:
        key = change.settings[0].partition("=")[0]
        if key not in best or (by_peak and change.peak < best[key].peak):
            best[key] = change
    return list(best.values())


def changes(run: Any, budget: MemoryEstimate) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Settings that may reduce the memory of a run, each with the resulting run."""

    def of(role: str, **fields: Any) -> Callable[[], Any]:
        return lambda: replace(run, **{role: replace(getattr(run, role), **fields)})

    for role in ("actor", "critic", "reference"):
        described = getattr(run, role, None)
        if described is None:
            continue
        for part in (4, 16, 64):  # it may be more than a step has
            if (tokens := described.micro_batch_tokens // part) >= 1:
                yield f"{role}.micro_batch_tokens={tokens}", of(role, micro_batch_tokens=tokens)
        if getattr(described, "gradient_checkpointing", True) is False:
            yield f"{role}.gradient_checkpointing=true", of(role, gradient_checkpointing=True)
        if getattr(described, "lora", described) is None:
            yield f"{role}.lora={{_target_:verl.models.lora.LoRA,rank:8}}", of(role, lora=LoRA(rank=8))
    rollout = getattr(run, "rollout", None)
    for name in ("kv_cache_gib", "max_rows"):
        if (value := getattr(rollout, name, None)) is not None:
            half = max(1, value // 2) if isinstance(value, int) else value / 2
            yield f"rollout.{name}={half:g}", of("rollout", **{name: half})
    if budget.on_host and budget.copied:
        yield "checkpoint=sync", of("checkpoint", save_async=False)
    if budget.on_host:
        return
    smaller = list(run.sharding.smaller())
    for setting, sharding in smaller:
        yield setting, lambda sharding=sharding: replace(run, sharding=sharding)
    has_place = run.trainer.placement is not None
    for count in GPUS if not smaller and not has_place else ():
        if count > max(1, run.trainer.n_gpus_per_node):
            sharded = {"sharding": FSDP(), "trainer": replace(run.trainer, n_gpus_per_node=count)}
            yield (
                f"sharding=fsdp trainer.n_gpus_per_node={count}",
                lambda sharded=sharded: replace(run, **sharded),
            )


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run on devices of one kind.

    Attributes:
        batch: sentences about rows, micro-batches and optimizer steps.
        faults_of_batch: divisions with a remainder.
        disk: sentences about checkpoints.
        changes: that make it fit, the cheapest first; empty if it fits.
        shipped: hub names of models whose config.json was not read, since their shapes are shipped with the package.
        asynchronous: what `verl plan --async` adds.
    """

    device: DeviceRates
    memory: MemoryPlan
    stages: tuple[StageTime, ...]
    batch: tuple[str, ...]
    disk: tuple[str, ...]
    changes: tuple[FittingChange, ...]
    response: int | None = None
    shipped: tuple[str, ...] = ()
    asynchronous: AsyncPlan | None = None

    @property
    def step_s(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def range_s(self) -> tuple[float, float]:
        """Seconds of a step at best and at worst, by published steps; the same where rates are of this machine."""
        low, high = (
            (1.0, 1.0) if not self.device.is_gpu else RANGES[bool(num_experts(self.memory.roles[0].memory.config))]
        )
        return low * self.step_s, high * self.step_s

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def summary(self) -> str:
        """One line."""
        peak = self.memory.peak
        first = self.memory.roles[0].memory
        dtype, stored = (str(x).removeprefix("torch.") for x in (first.dtype, first.stored))
        count = first.sizes.parameters
        return (
            f"{first.name} computes in {dtype}, its {count / 1e6:.4g}M weights are {stored} "
            f"({count * first.stored.itemsize / 1e6:.0f} MB); "
            f"{peak.name} needs most, {peak.total / GIB:.2f} of {self.memory.limit / GIB:.1f} GiB in each process; "
            f"about {_duration(self.step_s)} a step on {self.device.name}"
        )

    def lines(self) -> Iterator[str]:
        """The whole plan in plain text, in lines of at most `WIDTH` characters, except for long words."""
        for line in self._sentences():
            indent = " " * (len(line) - len(line.lstrip()) + 4)
            yield from textwrap.wrap(line, WIDTH, subsequent_indent=indent, **UNBROKEN) or [""]

    def _sentences(self) -> Iterator[str]:
        estimate = self.memory.estimate
        machines = f" on each of {estimate.machines} machines" if estimate.machines > 1 else ""
        yield f"{estimate.processes} process{'es' * (estimate.processes > 1)}{machines}, device {self.device.name}"
        if self.shipped:
            yield f"Shapes of {', '.join(self.shipped)} are those shipped with verl: no config.json is here."
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
        if self.range_s[0] < self.range_s[1]:
            low, high = map(_duration, self.range_s)
            yield f"between {low} and {high}, by the error of such plans for published steps."
        yield from (f"  {line}" for line in share_lines(self.stages))
        yield ""
        yield from self.disk
        if self.asynchronous is not None:
            yield ""
            yield from self.asynchronous.lines()

    def warnings(self, disk: int | None, host: int | None) -> Iterator[str]:
        """Warnings about insufficient memory or disk space.

        Args:
            disk: free bytes for checkpoints; None if unknown.
            host: free bytes of main memory on this machine.
        """
        peak, limit, estimate = self.memory.peak, self.memory.limit, self.memory.estimate
        if not self.fits:
            helps = "; ".join(change.words() for change in self.changes)
            yield (
                f"Memory may not suffice: {peak.name} needs about {peak.total / GIB:.1f} GiB in each process, and "
                f"{limit / GIB:.1f} GiB are free for it. " + (f"What would help: {helps}." if helps else _NO_CHANGE)
            )
        if host is not None and estimate.host > host:
            offloads = any(role.is_offloaded for role in estimate.roles)
            settings = ["checkpoint=sync"] * (estimate.copied > 0) + ["sharding.cpu_offload=false"] * offloads
            yield (
                f"Main memory may not suffice: what is saved and offloaded needs about {estimate.host / GIB:.1f} GiB "
                f"on this machine, and {host / GIB:.1f} GiB are free. Set {' or '.join(settings)}."
            )
        twice = self.memory.unbalanced_peak
        if self.fits and twice is not None and twice.total > limit:
            yield (
                f"Memory may not suffice where the experts of a process get twice their share of the tokens: "
                f"{twice.name} then needs about {twice.total / GIB:.1f} GiB, and {limit / GIB:.1f} are free. Lower "
                f"{twice.name.split()[-1]}.micro_batch_tokens."
            )
        if disk is not None and estimate.saving * estimate.num_checkpoints > disk:
            yield (
                f"Disk may not suffice: {estimate.num_checkpoints} checkpoints of {estimate.saving / GIB:.1f} GiB, and "
                f"{disk / GIB:.1f} GiB are free. "
                + ("Lower checkpoint.keep_last_n, or set" if estimate.num_checkpoints > 2 else "Set")
                + " checkpoint.save_dir to a larger disk."
            )

    def to_json(self) -> dict[str, Any]:
        """All of it as numbers: bytes and seconds."""
        asynchronous = {} if self.asynchronous is None else {"async": self.asynchronous.to_json()}
        return asynchronous | {
            "device": self.device.name,
            "shipped_shapes": list(self.shipped),
            "fits": self.fits,
            "limit_bytes": self.memory.limit,
            "peak": {"phase": self.memory.peak.name, "bytes": self.memory.peak.total},
            "phases": [
                {"name": phase.name, "roles": list(phase.roles), "bytes": phase.total, "parts": phase.parts}
                for phase in self.memory.phases
            ],
            "unbalanced_phases": [{"name": phase.name, "bytes": phase.total} for phase in self.memory.unbalanced],
            "host_bytes": self.memory.host,
            "batch": list(self.batch),
            "step_seconds": self.step_s,
            "step_seconds_range": list(self.range_s),
            "stages": [
                {"name": s.name, "seconds": s.seconds, "bound": s.bound, "sent_bytes": s.sent} for s in self.stages
            ],
            "checkpoint_bytes": self.memory.estimate.saving,
            "checkpoints_kept": self.memory.estimate.num_checkpoints,
            "changes": [
                {"settings": list(c.settings), "peak_bytes": c.peak, "relative_time": c.slower} for c in self.changes
            ],
        }

    def _short(self) -> str:
        peak, limit = self.memory.peak, self.memory.limit
        verdict = f"It does not fit: {peak.name} needs {peak.total / GIB:.1f} GiB, and a process has {limit / GIB:.1f}."
        if not self.changes:
            return f"{verdict} {_NO_CHANGE}"
        return f"{verdict} What makes it fit:"


def plan_run(
    run: Any,
    device: DeviceRates,
    *,
    exact: bool = False,
    response: int | None = None,
    free_disk: int | None = None,
    upload_rate: float | None = None,
    limit: int | None = None,
    counted_below: int = 0,
) -> RunPlan:
    """Plan a run from its configuration; no weight is loaded and no process started.

    Args:
        exact: trace the activations of all layers.
        counted_below: bytes: smaller activations are counted, not traced.
        response: average tokens of a response, for the time; None: the maximum.
        free_disk: free bytes for checkpoints.
        upload_rate: bytes per second to the object storage.
        limit: bytes available to a process; None: its share of the device.
    """
    memory = memory_plan(run, device, exact, limit, counted_below)
    stages = tuple(stage_times(run, memory, device, response))
    step_s = sum(stage.seconds for stage in stages)
    changes = () if memory.fits else tuple(changes_that_fit(run, device, memory, step_s, response))
    disk = tuple(_disk(run, memory, step_s, free_disk, upload_rate))
    batch = tuple(workload(run).lines(run))
    sources = [getattr(getattr(run, role.name), "model", None) or run.actor.model for role in memory.roles]
    shipped = tuple(dict.fromkeys(source.base_path() for source in sources if has_shipped_shapes(source)))
    return RunPlan(device, memory, stages, batch, disk, changes, response, shipped)


SMALL_SHARE = 16  # of the memory: what takes less than one part is not traced at the start of a run


def log_plan(run: Any, context: BuildContext, checkpoints: Path) -> RunPlan | None:
    """Plan a run that starts now, with the free memory: writes `plan.txt` and `plan.json`, and logs warnings.

    Args:
        checkpoints: where they go.
    Returns:
        The plan; None where it cannot be made, which stops no run.
    Raises:
        ConfigError: an engine that never sleeps does not fit beside the trainer.
    """
    try:
        device = gpu_here() if context.device.startswith("cuda") else device_named("cpu")
        processes = estimate_memory(run, device.is_gpu).processes
        disk = free_disk(checkpoints)
        limit = free_memory(context.device, processes)
        plan = plan_run(run, device, free_disk=disk, limit=limit, counted_below=(limit or 0) // SMALL_SHARE)
    except Exception as error:  # noqa: BLE001 - whatever is odd about a configuration, a plan stops no run
        _log.warning("The plan of this run could not be made: %s: %s", type(error).__name__, error)
        return None
    assert context.run_dir is not None
    write_text(context.run_dir / "plan.txt", "\n".join(plan.lines()) + "\n")
    write_text(context.run_dir / "plan.json", json.dumps(plan.to_json(), indent=2) + "\n")
    for warning in plan.warnings(disk, free_main_memory()):
        _log.warning("%s", warning)
    if not plan.fits and plan.memory.estimate.stays_awake:
        raise ConfigError(_awake_fault(run, plan.memory))
    return plan


def _awake_fault(run: Any, memory: MemoryPlan) -> str:
    """Fault if an engine that never sleeps does not fit on the GPU together with the trainer."""
    peak = memory.peak
    if run.trainer.staleness:
        setting, remedy = (f"trainer.{text}" for text in run.trainer.async_setting)
        why = f"{setting}: the engine draws while the trainer works"
    else:
        why, remedy = "rollout.sleep is false: the engine keeps its GPU memory", "rollout.sleep=true"
    engine = sum(size for part, size in peak.parts.items() if part == "keys and values" or part.startswith("engine"))
    return (
        f"{why}, so {peak.name} needs about {peak.total / GIB:.1f} GiB of each GPU, of which the engine has "
        f"{engine / GIB:.1f}, and {memory.limit / GIB:.1f} GiB are free. Set {remedy}, or an engine on other devices."
    )


def _disk(run: Any, memory: MemoryPlan, step_s: float, free: int | None, upload_rate: float | None) -> Iterator[str]:
    saves, size = run.checkpoint, memory.estimate.saving
    if saves is None or not size:
        yield "Nothing is saved."
        return
    every = saves.save_interval
    often = "" if every is None else f", one every {every} steps (about {_duration(every * step_s)})"
    if saves.keep_last_n is not None:
        count = saves.keep_last_n + 1
        yield f"A checkpoint takes {size / GIB:.2f} GiB{often}; {saves.keep_last_n} stay: {count * size / GIB:.2f} GiB."
        if free is not None and count * size > free:
            soon = f", in about {_duration((free // size + 1) * every * step_s)}" if every is not None else ""
            yield (
                f"{free / GIB:.2f} GiB are free there, full with checkpoint {free // size + 1}{soon}: lower "
                "checkpoint.keep_last_n or set checkpoint.save_dir."
            )
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
